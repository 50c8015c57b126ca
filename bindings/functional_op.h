// Functions of libtorch's autograd nodes as Python callables, for captured graphs to call.
//
// A captured graph calls the backward of each C++ node as op(gradients, *arguments) -> gradients: a list of tensors,
// None where one is undefined; then what the node saved, in the form of a schema. torch converts each argument through
// its general machinery for TorchScript; here the usual forms are converted directly, and only the rest goes that way.
#pragma once

#include <string>
#include <vector>

#include <torch/csrc/autograd/node.h>
#include <torch/extension.h>

namespace retrograd::bindings {

// A callable for `function`, whose arguments after the gradients have the types of `schema`. Under the GIL.
pybind11::object make_functional_op(torch::autograd::functional_apply_t function, std::vector<at::TypePtr> schema);

// The callable validate_outputs(gradients, metadata) -> gradients: checks and, where the engine would, reduces and
// casts a node's outputs for the nodes that they go to. `metadata` has one tuple (or None) for each output.
pybind11::object make_validate_outputs_op();

// None and tensors to tensors, and back. Under the GIL. Throws a Python TypeError for anything else.
torch::autograd::variable_list to_variable_list(pybind11::handle sequence);
pybind11::list to_python_list(const torch::autograd::variable_list& variables);

}  // namespace retrograd::bindings
