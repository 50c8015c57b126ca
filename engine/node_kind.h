// What kind of code a node type runs, told from its type alone.
#pragma once

#include <typeinfo>

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

}  // namespace retrograd
