// retrograd._C.Engine: the Python entry, a type that takes the place of torch.autograd.Variable._execution_engine.
#pragma once

#include <torch/csrc/python_headers.h>

namespace retrograd::bindings {

// Creates the type, a subclass of torch._C._ImperativeEngine (Dynamo accepts nothing else), and adds it to `module`
// as "Engine". Throws pybind11::error_already_set.
void add_engine_type(PyObject* module);

}  // namespace retrograd::bindings
