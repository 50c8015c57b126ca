#include "engine/node_kind.h"

#include <string_view>

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/generated/Functions.h>

namespace retrograd {

bool is_generated(const std::type_info& type) {
  // Mangled names of everything derivatives.yaml makes.
  return std::string_view(type.name()).starts_with("N5torch8autograd9generated");
}

NodeKind node_kind(const std::type_info& type) {
  using namespace torch::autograd;
  if (type == typeid(AccumulateGrad)) return NodeKind::kAccumulate;
  if (is_generated(type)) return NodeKind::kPlain;
  // CopySlices is not here: it runs another node, which may be a user's.
  if (type == typeid(GraphRoot) || type == typeid(CopyBackwards) || type == typeid(Identity) ||
      type == typeid(UndefinedGrad) || type == typeid(UndefinedGradBackward)) {
    return NodeKind::kPlain;
  }
  return NodeKind::kUser;
}

bool is_custom_function(const std::type_info& type) {
  return is_python_node(type) || std::string_view(type.name()).starts_with("N5torch8autograd7CppNodeI");
}

bool is_python_node(const std::type_info& type) { return std::string_view(type.name()) == "N5torch8autograd6PyNodeE"; }

bool makes_sparse_gradients(const torch::autograd::Node& node) {
  using namespace torch::autograd::generated;
  const std::type_info& type = typeid(node);
  if (type == typeid(EmbeddingBackward0)) return static_cast<const EmbeddingBackward0&>(node).sparse;
  if (type == typeid(EmbeddingBagBackward0)) return static_cast<const EmbeddingBagBackward0&>(node).sparse;
  if (type == typeid(GatherBackward0)) return static_cast<const GatherBackward0&>(node).sparse_grad;
  return false;
}

}  // namespace retrograd
