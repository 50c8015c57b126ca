#include "engine/collect.h"

#include <algorithm>
#include <string_view>

#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include "engine/gated_hooks.h"
#include "engine/node_kind.h"

namespace retrograd {
namespace {

using torch::autograd::AccumulateGrad;
using torch::dynamo::autograd::CompiledNodeArgs;
using torch::dynamo::autograd::NodeCall;

// CompiledNodeArgs::key() cuts its length to 16 bits: a cat of 3,000 tensors reports 2,984 bytes of 68,520, and two
// different nodes get one key. The true length is private, but access does not apply to explicit instantiations.
template <auto kSize>
struct KeySizeAccess {
  friend size_t key_size(const CompiledNodeArgs& args) { return args.*kSize; }
};
size_t key_size(const CompiledNodeArgs& args);
template struct KeySizeAccess<&CompiledNodeArgs::_specialization_key_size>;

template <class Hooks>
bool any_python_hook(const Hooks& hooks) {
  return std::any_of(hooks.begin(), hooks.end(), [](const auto& hook) {
    if (hook == nullptr) return false;
    const auto& object = *hook;
    return std::string_view(typeid(object).name()).find("PyFunction") != std::string_view::npos;
  });
}

bool has_python(Node& node) {
  if (is_python_node(typeid(node)) || any_python_hook(node.tensor_pre_hooks()) || any_python_hook(node.pre_hooks()) ||
      any_python_hook(node.post_hooks())) {
    return true;
  }
  const auto& post_accumulate = node.tensor_post_acc_grad_hooks();
  return post_accumulate != nullptr && any_python_hook(std::span(&post_accumulate, 1));
}

}  // namespace

bool reaches_python(std::span<Node* const> nodes) {
  return ungated_hooks_exist() || std::any_of(nodes.begin(), nodes.end(), [](Node* node) { return has_python(*node); });
}

std::unique_ptr<Collected> collect(std::span<Node* const> nodes, bool accumulate, const edge_list& outputs) {
  auto collected = std::make_unique<Collected>();
  auto& calls = collected->call.node_calls;
  if (!accumulate) {
    for (size_t i = 0; i < outputs.size(); ++i) {
      calls.lookup(outputs[i].function).mark_output(static_cast<int>(outputs[i].input_nr), static_cast<int>(i));
    }
  }
  const PythonGateLock lock(reaches_python(nodes));
  for (Node* node : nodes) {
    NodeCall& call = calls.lookup(node->getptr());
    CompiledNodeArgs args(collected->call, call);
    args.collect(call);
    if (typeid(*node) != typeid(AccumulateGrad)) node->compiled_args(args);
    args.collect(node->next_edges());

    cache::Path& path = collected->path;
    path.begin_key();
    path.put(reinterpret_cast<uintptr_t>(&typeid(*node)));
    path.put_bytes(std::as_bytes(std::span(args.key().key, key_size(args))));
    path.end_key();
  }
  return collected;
}

}  // namespace retrograd
