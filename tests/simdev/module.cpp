// The extension module _simdev: the device's registration and the controls of the runtime. simdev.py gives it its form.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/utils/pybind.h>

#include "simdev/backend.h"

namespace py = pybind11;
using simdev::Runtime;

namespace {

// Returns fewer gradients than its node has edges, as only hooks in C++ can: what the edges lead to never comes.
class SendsNothing final : public torch::autograd::FunctionPostHook {
  torch::autograd::variable_list operator()(const torch::autograd::variable_list&,
                                            const torch::autograd::variable_list&) override {
    return {};
  }
};

}  // namespace

PYBIND11_MODULE(_simdev, m) {
  simdev::register_device();
  // Stream threads may need the GIL to let go of a tensor.
  const py::call_guard<py::gil_scoped_release> no_gil;

  m.attr("DEVICES") = simdev::kDevices;

  m.def("current_device", [] { return Runtime::current_device(); });
  m.def("set_device", [](int device) { Runtime::set_current_device(device); });
  m.def("synchronize", [] { Runtime::get().synchronize_all(); }, no_gil);

  m.def("set_delay", [](int64_t microseconds, int device, int64_t stream) {
    Runtime::get().stream(device, stream).delay_us = microseconds;
  });
  m.def("set_delay", [](int64_t microseconds, int device) {
    for (simdev::Stream* stream : Runtime::get().streams_of(device)) stream->delay_us = microseconds;
  });
  m.def("set_synchronous", [](bool on) { Runtime::get().synchronous = on; });
  m.def("drop_wait", [](int64_t n) { Runtime::get().drop_wait(n); }, no_gil);
  m.def("send_nothing",
        [](const at::Tensor& made) { made.grad_fn()->add_post_hook(std::make_unique<SendsNothing>()); });
  m.def("reset", [] { Runtime::get().reset(); }, no_gil);

  py::class_<simdev::Kernel>(m, "Kernel")
      .def_readonly("name", &simdev::Kernel::name)
      .def_readonly("device", &simdev::Kernel::device)
      .def_readonly("stream", &simdev::Kernel::stream)
      .def_readonly("begin_ns", &simdev::Kernel::begin_ns)
      .def_readonly("end_ns", &simdev::Kernel::end_ns);
  py::class_<Runtime::Seen>(m, "Seen")
      .def_readonly("reports", &Runtime::Seen::reports)
      .def_readonly("waits", &Runtime::Seen::waits)
      .def_readonly("kernels", &Runtime::Seen::kernels)
      .def_readonly("host_syncs", &Runtime::Seen::host_syncs);
  m.def("seen", [] { return Runtime::get().seen(); }, no_gil);
}
