// Makes plans for groups: records them here, and has the Python package (retrograd/_fused.py) trace and compile them.
#pragma once

#include <torch/extension.h>

namespace retrograd::bindings {

// Puts it into its place in the engine, and what the Python half needs into the module. Once.
void add_group_compiler(pybind11::module_& m);

}  // namespace retrograd::bindings
