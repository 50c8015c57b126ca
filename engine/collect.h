// Collecting: what a plan needs to know of nodes beyond their place in the graph. For the nodes it is asked for, the
// constants that a compiled plan would bake in (as one key each), and the tensors, sizes, scalars and hooks that it
// would take as inputs, by libtorch's own visitor (compiled_args).
//
// The schedule never collects: it would keep saved tensors alive longer than the stock engine does, for nothing.
#pragma once

#include <memory>
#include <span>

#include <torch/csrc/dynamo/compiled_autograd.h>

#include "cache/path.h"
#include "engine/walk.h"

namespace retrograd {

struct Collected {
  // Inputs, in libtorch's own form: tensor_args.inputs, all_size_inputs, lifted_ivalue_args, hooks, ...
  torch::dynamo::autograd::AutogradCompilerCall call{torch::dynamo::autograd::SizeInput::STATIC};
  cache::Path path;  // one key for each collected node, in the order given
};

// Collects `nodes`. `outputs` are the edges that inputs= named (their captures become part of the keys). AccumulateGrad
// nodes give their type and hooks only: reading their .grad would race with other threads, and whether there is one
// yet makes no different plan.
//
// Takes the GIL while it collects if Python objects can be reached from these nodes, and only then; the caller must not
// hold it. Throws what compiled_args throws: c10::NotImplementedError for a node that has none, the stock engine's own
// errors for freed or overwritten saved tensors. The graph is never changed.
std::unique_ptr<Collected> collect(std::span<Node* const> nodes, bool accumulate, const edge_list& outputs);

// Whether Python objects can be reached from these nodes: Python functions, Python hooks, or saved-tensor hooks that
// were put on past the engine.
bool reaches_python(std::span<Node* const> nodes);

}  // namespace retrograd
