// The plan store for Python: _C.PlanStore and what it returns.
#pragma once

#include <torch/extension.h>

namespace retrograd::bindings {

void add_plan_store(pybind11::module_& m);

}  // namespace retrograd::bindings
