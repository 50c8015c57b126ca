#include "engine/collect.h"

#include <algorithm>
#include <mutex>
#include <string_view>
#include <thread>

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

void append_key(const Node& node, const CompiledNodeArgs& args, cache::Path& path) {
  path.begin_key();
  path.put(reinterpret_cast<uintptr_t>(&typeid(node)));
  path.put_bytes(std::as_bytes(key_bytes(args)));
  path.end_key();
}

// What AccumulateGrad::compiled_args() says of a leaf that has no .grad and no hooks.
void collect_handed(const AccumulateGrad& leaf, CompiledNodeArgs& args) {
  if (args.cond(leaf.variable.defined() && leaf.variable.requires_grad())) {
    args.collect(leaf.variable);
    args.collect(at::Tensor());
  }
  args.collect(c10::GradMode::is_enabled());
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
  for (Node* node : nodes) {
    NodeCall& call = calls.lookup(node->getptr());
    CompiledNodeArgs args(collected->call, call);
    args.collect(call);
    if (typeid(*node) != typeid(AccumulateGrad)) node->compiled_args(args);
    args.collect(node->next_edges());

    append_key(*node, args, collected->path);
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
  for (size_t k = 0; k < nodes.size(); ++k) {
    Node& node = *nodes[k];
    NodeCall& node_call = call.node_calls.lookup(node.getptr());
    node_call.needed = needed[k];
    if (track_origins) call.set_active_node_call_idx(k);
    CompiledNodeArgs args(call, node_call);
    args.collect(node_call);
    if (args.cond(node_call.needed)) {
      if (typeid(node) != typeid(AccumulateGrad)) {
        node.compiled_args(args);
      } else if (auto& leaf = static_cast<AccumulateGrad&>(node); !hand_over || may_look_at_grad(leaf)) {
        // Not waited for: its holder may be in a post-accumulate-grad hook that waits for the GIL, which is held here.
        const std::unique_lock grad_lock(node_mutex(node), std::try_to_lock);
        if (!grad_lock.owns_lock()) return nullptr;
        node.compiled_args(args);
      } else {
        collect_handed(leaf, args);
        if (leaf.variable.defined() && leaf.variable.requires_grad()) {
          handed.push_back({&leaf, call.tensor_args.lookup(leaf.variable).index()});
        }
      }
      args.collect(node.next_edges());
    }
    append_key(node, args, collected->path);
  }
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
