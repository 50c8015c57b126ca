// What kind of node a node is, told from its type, or little more.
#pragma once

#include <typeinfo>

#include <torch/csrc/autograd/function.h>

namespace retrograd {

enum class NodeKind : unsigned char {
  kPlain,       // libtorch's own C++ function: leaves thread-local state as it found it
  kAccumulate,  // AccumulateGrad: plain, but may have post-accumulate-grad hooks
  kUser,        // anything else: Python functions, C++ custom functions, other libraries' nodes
};

NodeKind node_kind(const std::type_info& type);

// Whether libtorch's code generator made the type from a formula in derivatives.yaml.
bool is_generated(const std::type_info& type);

// A custom function of a C++ program, or of Python.
bool is_custom_function(const std::type_info& type);

// A Python autograd.Function's node. Told by name: libtorch_python does not export the type, and the engine must
// not link to it.
bool is_python_node(const std::type_info& type);

// A lookup with sparse=True or sparse_grad=True: its gradient for the table is a sparse tensor.
bool makes_sparse_gradients(const torch::autograd::Node& node);

}  // namespace retrograd
