// The backend that runs calls by compiler functions: looks up what one made of a graph, has it made where there is
// none, and calls it.
#pragma once

#include <torch/extension.h>

namespace retrograd::bindings {

// Puts it into its place in the engine. Once.
void set_up_callable_backend();

// Hook `index` of the C++ tensor hooks that the call in progress brought, applied to `gradient`; what captured graphs
// call. Throws std::runtime_error outside of one.
at::Tensor call_cpp_tensor_pre_hook(size_t index, const at::Tensor& gradient);

// The number under which settings know a logger of cache misses (0 for None). It is kept for ever.
uint32_t logger_number(const pybind11::object& logger);

}  // namespace retrograd::bindings
