// Capture: from a live backward graph to an FX graph, through torch's own Python front end (AutogradCompilerInstance).
//
// The second of two passes. The first, collect_for_capture(), found the keys and inputs and changes nothing. This one
// runs every node once with its saved tensors, sizes and scalars swapped for symbolic ones, so that what the node does
// is recorded instead of done, and then puts the real ones back.
#pragma once

#include <span>
#include <vector>

#include <torch/extension.h>

#include "bindings/compiler_interface.h"
#include "bindings/compilers.h"
#include "engine/collect.h"

namespace retrograd::bindings {

struct CaptureRequest {
  const Compiler& compiler;
  std::span<Node* const> nodes;  // in capture order
  Collected& collected;
  std::span<const HandedLeaf> handed;
  std::span<const torch::dynamo::autograd::SizeInput> sizes;  // which are symbolic, with their present values
  size_t num_outputs;
  bool accumulate;
  bool check_nans;
  std::vector<std::string>* compile_reasons;  // with verbose logging: earlier reasons, to which this one is added
  std::string compile_reason;                 // empty: none
};

// What a captured graph takes beside tensors, hooks and packed objects. Under the GIL.
pybind11::list scalars_of(const torch::dynamo::autograd::AutogradCompilerCall& call);
// The values of those sizes that are symbolic in `which`.
pybind11::tuple symbolic_sizes(std::span<const torch::dynamo::autograd::SizeInput> which,
                               std::span<const torch::dynamo::autograd::SizeInput> values);

// What the front end made, before the compiler function saw it.
struct Captured {
  pybind11::object
      runtime_wrapper;           // as torch calls it: runtime_wrapper(compiled, inputs, sizes, scalars, hooks, packed)
  pybind11::object graph;        // the GraphModule; the compiled function itself where compiler_fn is null
  pybind11::object compiler_fn;  // to be called with `graph`; null for a front end that is not torch's own
};

// Under the GIL and the capture lock. However it ends, the live graph is as before, and the front end is closed. Throws
// what the front end, a node or libtorch throws; NotImplementedError for what cannot be captured.
Captured capture(const CaptureRequest& request);

// Captured graphs call validate_outputs by our function, also where torch has put its own into its name space before.
// This puts torch's back, or none, as torch expects it when it captures after uninstall(). Under the GIL and the
// capture lock.
void restore_validate_outputs();

}  // namespace retrograd::bindings
