#include "engine/collect.h"

#include <algorithm>
#include <mutex>
#include <string_view>
#include <thread>
#include <unordered_set>

#include <torch/csrc/autograd/functions/tensor.h>

#include "engine/gated_hooks.h"
#include "engine/node_kind.h"

namespace retrograd {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::CopySlices;
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

// Whether the node runs a function of the user's. What AOTAutograd made of one is not.
bool is_users_function(const Node& node) {
  const Node& function = typeid(node) == typeid(CopySlices) ? *static_cast<const CopySlices&>(node).fn : node;
  return node_kind(typeid(function)) == NodeKind::kUser && !function.is_aot_backward();
}

// One node: lets libtorch collect it, and makes its key. A graph depends on more than libtorch puts into its keys; the
// rest is added here, at the end of the key for nodes that have it, and for saved-tensor hooks in their place.
class NodeCollector {
 public:
  explicit NodeCollector(Collected& collected)
      : collected_(collected), watch_([this] {
          if (args_ == nullptr) return;
          args_->collect_size(uint64_t{kHookedVariable});
          ++hooked_;
        }) {}

  // `visit` makes the node known to `args`.
  template <class Visit>
  void operator()(Node& node, NodeCall& node_call, const Visit& visit) {
    auto& call = collected_.call;
    CompiledNodeArgs args(call, node_call);
    args_ = &args;
    hooked_ = 0;
    const size_t first_packed = call.packed_inputs.size();
    const size_t first_scalar = call.lifted_ivalue_args.args.size();
    visit(args);
    args_ = nullptr;
    if (call.packed_inputs.size() != first_packed) look_at_hooked(node, first_packed);

    cache::Path& path = collected_.path;
    path.begin_key();
    path.put(reinterpret_cast<uintptr_t>(&typeid(node)));
    path.put_bytes(std::as_bytes(key_bytes(args)));
    for (const auto& [hook, index] : node_call.cpp_tensor_pre_hooks) put(path, 'h', static_cast<uint32_t>(index));
    for (size_t i = first_scalar; i < call.lifted_ivalue_args.args.size(); ++i) {
      const c10::IValue& scalar = *call.lifted_ivalue_args.args[i].actual_ptr;
      put(path, 's', scalar.isInt() || scalar.isSymInt() ? 1U : 0U);
    }
    const auto& edges = node.next_edges();
    for (size_t i = 0; i < edges.size(); ++i) {
      if (!edges[i].is_valid()) continue;
      const auto& metadata = edges[i].function->input_metadata(edges[i].input_nr);
      if (metadata.was_default_constructed()) continue;
      const auto dtype = metadata.grad_dtype();
      if (dtype && *dtype == metadata.dtype().toScalarType()) continue;
      put(path, 'd', static_cast<uint32_t>(i) << 8U | (dtype ? static_cast<uint8_t>(*dtype) : kAnyDtype));
    }
    path.end_key();
  }

 private:
  static constexpr uint64_t kHookedVariable = UINT64_MAX;  // no tensor has this number
  static constexpr uint8_t kAnyDtype = 0xFF;

  static void put(cache::Path& path, char what, uint32_t value) {
    path.put(what);
    path.put(value);
  }

  // The node's variables with hooks are those packed from `first_packed` on.
  void look_at_hooked(const Node& node, size_t first_packed) {
    const bool all_gated = collected_.call.packed_inputs.size() == first_packed + hooked_;
    const bool users = is_users_function(node);
    if (all_gated && !users) return;
    for (const auto& [variable, ids] : collected_.call.sv_to_hooks) {
      if (ids.second < first_packed) continue;
      if (!has_gated_hooks(*variable)) collected_.ungated.push_back(variable);
      if (users && packed_requires_grad(*variable)) collected_.unpack_requiring_grad.push_back(ids.first);
    }
  }

  Collected& collected_;
  CompiledNodeArgs* args_ = nullptr;
  size_t hooked_ = 0;  // variables of this node that have gated hooks
  GatedHooksWatch watch_;
};

// What AccumulateGrad::compiled_args() says of a leaf that has no .grad and no hooks.
void collect_handed(const AccumulateGrad& leaf, CompiledNodeArgs& args) {
  if (args.cond(leaf.variable.defined() && leaf.variable.requires_grad())) {
    args.collect(leaf.variable);
    args.collect(at::Tensor());
  }
  args.collect(c10::GradMode::is_enabled());
}

// Whether the gradient of a leaf has the leaf's dtype; true for other nodes. torch's graphs assign no other one.
bool has_own_grad_dtype(const Node& node) {
  if (typeid(node) != typeid(AccumulateGrad)) return true;
  const auto& metadata = node.input_metadata(0);
  return metadata.grad_dtype() == metadata.dtype().toScalarType();
}

// The leaves that a function of the user's saved.
void add_users_leaves(Node& node, std::unordered_set<const c10::TensorImpl*>& leaves) {
  if (!is_users_function(node)) return;
  // Apart from the call, where a tensor that an earlier node brought would not be seen.
  torch::dynamo::autograd::AutogradCompilerCall call(Collected::DynType::STATIC);
  NodeCall node_call(0, node.getptr());
  CompiledNodeArgs args(call, node_call);
  node.compiled_args(args);
  for (const at::Tensor& tensor : call.tensor_args.inputs) {
    if (tensor.is_leaf() && tensor.requires_grad()) leaves.insert(tensor.unsafeGetTensorImpl());
  }
}

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

KeyBytes key_bytes(const CompiledNodeArgs& args) { return {args.key().key, key_size(args)}; }

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
  NodeCollector collect_node(*collected);
  for (Node* node : nodes) {
    NodeCall& call = calls.lookup(node->getptr());
    collect_node(*node, call, [&](CompiledNodeArgs& args) {
      args.collect(call);
      if (typeid(*node) != typeid(AccumulateGrad)) node->compiled_args(args);
      args.collect(node->next_edges());
    });
  }
  return collected;
}

namespace {

// Null when another thread holds the lock of a leaf's .grad at this moment.
std::unique_ptr<Collected> try_collect_for_capture(std::span<Node* const> nodes, std::span<const bool> needed,
                                                   const edge_list& outputs, Collected::DynType default_type,
                                                   bool track_origins, bool hand_over, std::vector<HandedLeaf>& handed,
                                                   std::span<const uint32_t> head) {
  handed.clear();
  auto collected = std::make_unique<Collected>(default_type);
  auto& call = collected->call;
  collected->path.append(std::as_bytes(head));
  for (size_t i = 0; i < outputs.size(); ++i) {
    call.node_calls.lookup(outputs[i].function).mark_output(static_cast<int>(outputs[i].input_nr), static_cast<int>(i));
  }
  const PythonGateLock lock(reaches_python(nodes));
  NodeCollector collect_node(*collected);
  std::vector<size_t> origins;  // of `handed`
  std::unordered_set<const c10::TensorImpl*> users;
  for (size_t k = 0; k < nodes.size(); ++k) {
    Node& node = *nodes[k];
    NodeCall& node_call = call.node_calls.lookup(node.getptr());
    node_call.needed = needed[k];
    if (track_origins) call.set_active_node_call_idx(k);
    bool busy = false;
    collect_node(node, node_call, [&](CompiledNodeArgs& args) {
      args.collect(node_call);
      if (!args.cond(node_call.needed)) return;
      if (typeid(node) != typeid(AccumulateGrad)) {
        node.compiled_args(args);
      } else if (auto& leaf = static_cast<AccumulateGrad&>(node); !hand_over || may_look_at_grad(leaf)) {
        // Not waited for: its holder may wait for the GIL, which is held here, to add up tensors of a Python subclass
        // or to let go of one with a Python wrapper. (libtorch runs post-accumulate-grad hooks after it let go of the
        // lock.)
        const std::unique_lock grad_lock(node_mutex(node), std::try_to_lock);
        busy = !grad_lock.owns_lock();
        if (busy) return;
        node.compiled_args(args);
      } else {
        collect_handed(leaf, args);
        if (leaf.variable.defined() && leaf.variable.requires_grad()) {
          handed.push_back({&leaf, call.tensor_args.lookup(leaf.variable).index()});
          origins.push_back(k);
        }
      }
      args.collect(node.next_edges());
    });
    if (busy) return nullptr;
    if (node_call.needed && !has_own_grad_dtype(node)) collected->capturable = false;
    if (hand_over && node_call.needed) add_users_leaves(node, users);
  }

  // torch's front end looks at the first input. There is none where several roots reach nothing of inputs=.
  if (call.tensor_args.inputs.empty()) collected->capturable = false;

  std::vector<uint32_t> with_own_input;
  for (size_t i = 0; i < handed.size() && !users.empty(); ++i) {
    const at::Tensor& variable = handed[i].node->variable;
    if (!users.contains(variable.unsafeGetTensorImpl())) continue;
    if (track_origins) call.set_active_node_call_idx(origins[i]);
    handed[i].input = call.tensor_args.add(make_stand_in(variable)).index();
    with_own_input.push_back(static_cast<uint32_t>(i));
  }
  if (!with_own_input.empty()) collected->path.append(std::as_bytes(std::span(with_own_input)));
  return collected;
}

}  // namespace

std::unique_ptr<Collected> collect_for_capture(std::span<Node* const> nodes, std::span<const bool> needed,
                                               const edge_list& outputs, Collected::DynType default_type,
                                               bool track_origins, bool hand_over, std::vector<HandedLeaf>& handed,
                                               std::span<const uint32_t> head) {
  for (;;) {
    if (auto collected =
            try_collect_for_capture(nodes, needed, outputs, default_type, track_origins, hand_over, handed, head)) {
      return collected;
    }
    std::this_thread::yield();  // holding nothing
  }
}

}  // namespace retrograd
