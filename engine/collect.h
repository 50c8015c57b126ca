// Collecting: what a plan needs to know of nodes beyond their place in the graph. For the nodes it is asked for, the
// constants that a compiled plan would bake in (as one key each), and the tensors, sizes, scalars and hooks that it
// would take as inputs, by libtorch's own visitor (compiled_args).
//
// The schedule never collects: it would keep saved tensors alive longer than the stock engine does, for nothing.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include <torch/csrc/dynamo/compiled_autograd.h>

#include "cache/path.h"
#include "engine/handed_leaf.h"
#include "engine/walk.h"

namespace retrograd {

struct Collected {
  using DynType = torch::dynamo::autograd::SizeInput::DynType;
  explicit Collected(DynType default_type = DynType::STATIC) : call(default_type) {}

  // Inputs, in libtorch's own form: tensor_args.inputs, all_size_inputs, lifted_ivalue_args, hooks, ...
  torch::dynamo::autograd::AutogradCompilerCall call;
  cache::Path path;        // one key for each collected node, in the order given
  bool capturable = true;  // false: torch's captures would give other gradients than the engine, or fail
  // Unpack hooks of functions of the user's, among call.hooks, for tensors that required a gradient: the engine makes
  // what they return require one, torch's graphs do not, and the function may ask, as reentrant checkpoint does.
  std::vector<size_t> unpack_requiring_grad;
  // Saved variables with hooks that came past the engine: keys do not tell which of a node's variables have such hooks.
  // After gate_hooks_of(), they do.
  std::vector<const torch::autograd::SavedVariable*> ungated;
};

// Collects `nodes`. `outputs` are the edges that inputs= named (their captures become part of the keys). AccumulateGrad
// nodes give their type and hooks only: reading their .grad would race with other threads, and whether there is one
// yet makes no different plan.
//
// Takes the GIL while it collects if Python objects can be reached from these nodes, and only then; the caller must not
// hold it. Throws what compiled_args throws: c10::NotImplementedError for a node that has none, the stock engine's own
// errors for freed or overwritten saved tensors. The graph is never changed.
std::unique_ptr<Collected> collect(std::span<Node* const> nodes, bool accumulate, const edge_list& outputs);

// For a capture by torch's own front end: all of `nodes`, AccumulateGrad included, in the order given, with the keys,
// (`head` before them, as one more), inputs and numbers that torch's compiled autograd gives them. `needed[i]` is false
// for a node that does not run itself, only its tensor hooks and captures. With `track_origins`, every input remembers
// the node that brought it.
//
// With `hand_over`, AccumulateGrad nodes without hooks of their own that could look at .grad are left in `handed`; the
// others give their .grad as an input, as in torch. Thread-local state must be that of the call (grad mode is part of
// the keys). GIL and exceptions as above.
std::unique_ptr<Collected> collect_for_capture(std::span<Node* const> nodes, std::span<const bool> needed,
                                               const edge_list& outputs,
                                               torch::dynamo::autograd::SizeInput::DynType default_type,
                                               bool track_origins, bool hand_over, std::vector<HandedLeaf>& handed,
                                               std::span<const uint32_t> head = {});

// What a node's compiled_args put into its key: the whole of it, where CompiledNodeArgs::key() has at most 65,535
// bytes.
using KeyBytes = std::span<const uint8_t>;
KeyBytes key_bytes(const torch::dynamo::autograd::CompiledNodeArgs& args);

// Whether Python objects can be reached from these nodes: Python functions, Python hooks, or saved-tensor hooks that
// were put on past the engine.
bool reaches_python(std::span<Node* const> nodes);

}  // namespace retrograd
