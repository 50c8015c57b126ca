#include "engine/group_key.h"

#include <algorithm>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include "engine/collect.h"
#include "engine/gated_hooks.h"
#include "engine/node_kind.h"

namespace retrograd {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::CopySlices;
using torch::autograd::InputMetadata;
using torch::dynamo::autograd::CompiledNodeArgs;
using torch::dynamo::autograd::NodeCall;

// Wider nodes (a cat of hundreds of tensors) have keys and graphs out of proportion to what fusing them saves.
constexpr size_t kMaxEdges = 64;

void put_type(cache::Path& path, const std::type_info& type, KeyForm form) {
  if (form == KeyForm::kFast) {
    path.put(reinterpret_cast<uintptr_t>(&type));
    return;
  }
  const std::string_view name(type.name());
  path.put(static_cast<uint32_t>(name.size()));
  path.put_bytes(std::as_bytes(std::span(name)));
}

// How the members hang together. A fast key needs none of it: the place in the cache says it.
void put_structure(cache::Path& path, const Group& group) {
  path.put(static_cast<uint32_t>(group.steps.size()));
  for (const uint32_t first : group.first_edge) path.put(first);
  for (const GroupEdge& edge : group.edges) {
    path.put(static_cast<uint8_t>(edge.to));
    path.put(edge.index);
    path.put(edge.input_nr);
  }
  for (const GroupInput& input : group.inputs) {
    path.put(input.member);
    path.put(input.input_nr);
  }
  path.put(static_cast<uint32_t>(group.outputs.size()));
}

void put_options(cache::Path& path, const c10::TensorOptions& options) {
  path.put(static_cast<int8_t>(c10::typeMetaToScalarType(options.dtype())));
  path.put(static_cast<int8_t>(options.device().type()));
  path.put(options.device().index());
  path.put(static_cast<int8_t>(options.layout()));
}

// What outputs are validated against. False for what no plan can serve.
bool put_metadata(GroupKey& key, const InputMetadata& metadata) {
  cache::Path& path = key.fixed;
  path.put(static_cast<uint8_t>(metadata.was_default_constructed()));
  if (metadata.was_default_constructed()) return true;  // an input that takes anything
  if (metadata.is_nested_tensor() || metadata.is_tensor_subclass()) return false;
  put_options(path, metadata.options());
  const auto grad_dtype = metadata.grad_dtype();
  path.put(static_cast<int8_t>(grad_dtype ? static_cast<int8_t>(*grad_dtype) : -1));
  const auto& shape = metadata.shape_as_dim_vector();
  path.put(static_cast<uint32_t>(shape.size()));
  for (const c10::SymInt& size : shape) {
    const auto number = size.maybe_as_int();
    if (!number) return false;
    key.numbers.push_back(*number);
  }
  return true;
}

bool put_tensor(GroupKey& key, const at::Tensor& tensor) {
  cache::Path& path = key.fixed;
  path.put(static_cast<uint8_t>(tensor.defined()));
  if (!tensor.defined()) return true;
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const c10::DispatchKeySet keys = impl.key_set();
  constexpr c10::DispatchKeySet kNever(
      {c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper,
       c10::DispatchKey::Functionalize, c10::DispatchKey::Batched, c10::DispatchKey::Conjugate,
       c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor, c10::DispatchKey::NestedTensor});
  if (impl.layout() != c10::kStrided || keys.has_any(kNever) || at::isQIntType(tensor.scalar_type()) ||
      impl.has_symbolic_sizes_strides() || !impl.has_storage()) {
    return false;
  }
  path.put(keys.raw_repr());
  path.put(static_cast<int8_t>(tensor.scalar_type()));
  path.put(static_cast<uint8_t>(tensor.requires_grad()));  // some nodes look (LinalgSolveExBackward)
  path.put(tensor.device().index());
  const auto sizes = impl.sizes();
  const auto strides = impl.strides();
  path.put(static_cast<uint32_t>(sizes.size()));
  key.numbers.insert(key.numbers.end(), sizes.begin(), sizes.end());
  key.numbers.insert(key.numbers.end(), strides.begin(), strides.end());
  return true;
}

bool put_scalar(cache::Path& path, const c10::IValue& value) {
  if (value.isInt()) {
    path.put(uint8_t{1});
    path.put(value.toInt());
  } else if (value.isDouble()) {
    path.put(uint8_t{2});
    path.put(value.toDouble());
  } else {
    return false;  // symbolic
  }
  return true;
}

// Whether a gradient that is not strided comes in or goes out. No plan takes one. Nor may such a node leave its place
// in the stock engine's order even where its group runs by its nodes: a sparse gradient shares memory with the dense
// one that it is made from without holding a reference to it, so AccumulateGrad, if it came later, would take the dense
// one over.
bool handles_sparse(Node& node) {
  if (makes_sparse_gradients(node)) return true;
  const auto is_sparse = [](const InputMetadata& metadata) {
    return !metadata.was_default_constructed() && metadata.layout() != c10::kStrided;
  };
  for (uint32_t i = 0; i < node.num_inputs(); ++i) {
    if (is_sparse(node.input_metadata(i))) return true;
  }
  return std::ranges::any_of(node.next_edges(), [&](const torch::autograd::Edge& edge) {
    return edge.is_valid() && edge.input_nr < edge.function->num_inputs() &&
           is_sparse(edge.function->input_metadata(edge.input_nr));
  });
}

}  // namespace

bool may_be_fused(Node& node) {
  if (node.num_outputs() > kMaxEdges || node.num_inputs() > kMaxEdges || handles_sparse(node)) return false;
  if (typeid(node) == typeid(CopySlices)) {
    const auto& slices = static_cast<CopySlices&>(node);
    if (slices.view_fn || !slices.fn) return false;
    Node& inner = *slices.fn;
    return typeid(inner) != typeid(CopySlices) && is_generated(typeid(inner));
  }
  return is_generated(typeid(node));
}

bool must_run_alone(Node& node) {
  torch::dynamo::autograd::AutogradCompilerCall call{torch::dynamo::autograd::SizeInput::STATIC};
  NodeCall node_call(0, node.getptr());
  CompiledNodeArgs args(call, node_call);
  const PythonGateLock lock(ungated_hooks_exist());
  try {
    node.compiled_args(args);
  } catch (const c10::NotImplementedError&) {
    return true;
  } catch (...) {
    return false;  // to be reported by its own run
  }
  return !call.hooks.empty() || !call.packed_inputs.empty();
}

bool append_environment(cache::Path& path) {
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  auto& context = at::globalContext();
  path.put(static_cast<int32_t>(at::get_num_threads()));
  path.put(static_cast<int8_t>(c10::typeMetaToScalarType(c10::get_default_dtype())));
  path.put(static_cast<uint8_t>(context.deterministicAlgorithms()));
  path.put(static_cast<uint8_t>(context.deterministicFillUninitializedMemory()));
  path.put(static_cast<uint8_t>(context.userEnabledMkldnn()));
  path.put(static_cast<int32_t>(context.float32MatmulPrecision()));
  return keys.included_ == c10::default_included_set && keys.excluded_ == c10::default_excluded_set;
}

Collecting collect_group(const Group& group, std::span<Node* const> nodes, std::span<Node* const> targets,
                         GroupInputs& inputs, GroupKey& key, KeyForm form, NumberPlaces* places) {
  cache::Path& path = key.fixed;
  path.clear();
  key.numbers.clear();
  const auto here = [&key] { return static_cast<uint32_t>(key.numbers.size()); };
  path.begin_key();
  bool plain = append_environment(path);
  if (form == KeyForm::kPortable) put_structure(path, group);
  auto& call = inputs.call;
  const PythonGateLock lock(ungated_hooks_exist());
  const auto mark_member = [&] {
    if (places == nullptr) return;
    places->member_numbers.push_back(here());
    places->member_keys.push_back(static_cast<uint32_t>(path.bytes_put()));
  };
  for (uint32_t m = 0; m < nodes.size(); ++m) {
    Node& node = *nodes[m];
    mark_member();
    put_type(path, typeid(node), form);
    if (typeid(node) == typeid(CopySlices)) {
      const auto& slices = static_cast<CopySlices&>(node);
      // Another node may be in the place of the one that was there when the graph was cut.
      if (!may_be_fused(node)) return {GroupObstacle::kError, m};
      const Node& inner = *slices.fn;
      put_type(path, typeid(inner), form);
    }
    NodeCall node_call(m, node.getptr());
    CompiledNodeArgs args(call, node_call);
    try {
      node.compiled_args(args);
    } catch (const c10::NotImplementedError&) {
      return {GroupObstacle::kUntraceable, m};
    } catch (...) {
      return {GroupObstacle::kError, m};
    }
    if (!call.hooks.empty() || !call.packed_inputs.empty()) return {GroupObstacle::kSavedTensorHooks, m};
    const KeyBytes bytes = key_bytes(args);
    path.put(static_cast<uint32_t>(bytes.size()));
    path.put_bytes(std::as_bytes(bytes));
    if (places != nullptr) places->member_inputs.emplace_back();
    for (uint32_t i = 0; i < node.num_inputs(); ++i) {
      if (places != nullptr) places->member_inputs.back().push_back(here());
      plain &= put_metadata(key, node.input_metadata(i));
    }
  }
  mark_member();
  for (size_t k = 0; k < targets.size(); ++k) {
    Node& target = *targets[k];
    const uint32_t input_nr = group.outputs[k].input_nr;
    if (places != nullptr) places->targets.push_back(here());
    plain &= put_metadata(key, target.input_metadata(input_nr));
    // The layout in which the leaf can take the gradient over without a copy.
    const bool is_leaf = typeid(target) == typeid(AccumulateGrad);
    path.put(static_cast<uint8_t>(is_leaf));
    if (places != nullptr) places->leaves.push_back(here());
    if (is_leaf) plain &= put_tensor(key, static_cast<const AccumulateGrad&>(target).variable);
  }
  std::optional<c10::Device> device;  // a plan is for one
  const auto put_input = [&](const at::Tensor& tensor) {
    if (places != nullptr) places->inputs.push_back(here());
    plain &= put_tensor(key, tensor);
    if (!tensor.defined() || (tensor.dim() == 0 && tensor.is_cpu())) return;  // a number may be on the host
    if (!device) device = tensor.device();
    plain &= tensor.device() == *device;
  };
  for (const at::Tensor& gradient : inputs.gradients) put_input(gradient);
  path.put(static_cast<uint32_t>(inputs.tensors().size()));
  for (const at::Tensor& tensor : inputs.tensors()) put_input(tensor);
  path.put(static_cast<uint32_t>(call.all_size_inputs.size()));
  if (places != nullptr) places->sizes = here();
  for (const auto& size : call.all_size_inputs) key.numbers.push_back(size.value);
  path.put(static_cast<uint32_t>(call.lifted_ivalue_args.args.size()));
  for (const auto& argument : call.lifted_ivalue_args.args) plain &= put_scalar(path, *argument.actual_ptr);
  path.end_key();
  return {plain ? GroupObstacle::kNone : GroupObstacle::kTensorKind, 0};
}

}  // namespace retrograd
