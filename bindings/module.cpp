// The extension module retrograd._C. The Python package in bindings/retrograd gives it its user's form.
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/extension.h>

#include "bindings/python_engine.h"
#include "engine/context.h"
#include "engine/engine.h"
#include "engine/gated_hooks.h"
#include "retrograd/retrograd.h"

namespace py = pybind11;

namespace {

using retrograd::detail::Setting;

const retrograd::PythonGate kGate{
    .acquire = [] { return static_cast<void*>(std::make_unique<py::gil_scoped_acquire>().release()); },
    .release =
        [](void* state) { std::unique_ptr<py::gil_scoped_acquire>(static_cast<py::gil_scoped_acquire*>(state)); },
};

// What this thread's open enable() and disable() blocks have to put back. Kept here, not in the Python objects, so that
// one object may be used by several threads.
std::vector<Setting>& entered_settings() {
  thread_local std::vector<Setting> settings;
  return settings;
}

// A setting as Python names it: (mode, backend).
Setting unpack(std::pair<int, int> p) {
  return {static_cast<Setting::Mode>(p.first), retrograd::Options().backend(static_cast<retrograd::Backend>(p.second))};
}

py::dict stats() {
  const retrograd::Stats s = retrograd::stats();
  py::dict reasons;
  for (size_t i = 0; i < s.previous_calls.size(); ++i) {
    reasons[py::str(std::string(retrograd::name(static_cast<retrograd::PreviousReason>(i))))] = s.previous_calls[i];
  }
  using namespace py::literals;
  return py::dict(
      "calls"_a = py::dict("schedule"_a = s.schedule_calls, "previous"_a = s.previous_total()),
      "previous_reasons"_a = reasons, "hits"_a = s.hits, "misses"_a = s.misses, "nested_calls"_a = s.nested_calls,
      "max_depth"_a = s.max_depth,
      "seconds"_a = py::dict("walk"_a = s.walk_seconds, "lookup"_a = s.lookup_seconds, "run"_a = s.run_seconds),
      "cache"_a = py::dict("leaves"_a = s.cache_leaves, "nodes"_a = s.cache_nodes, "evictions"_a = s.cache_evictions));
}

py::object current_autograd_node() {
  auto node = retrograd::current_node();
  if (!node) return py::none();
  return py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(std::move(node)));
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  retrograd::set_python_gate(&kGate);
  retrograd::bindings::add_engine_type(m.ptr());

  m.def("install", &retrograd::install, py::call_guard<py::gil_scoped_release>());
  m.def("uninstall", &retrograd::uninstall, py::call_guard<py::gil_scoped_release>());
  m.def("is_installed", &retrograd::is_installed);
  m.def("enter_setting", [](std::pair<int, int> setting) {
    auto& current = retrograd::thread_context().setting;
    entered_settings().push_back(current);
    current = unpack(setting);
  });
  m.def("leave_setting", [] {
    auto& outer = entered_settings();
    if (outer.empty()) {
      throw std::runtime_error(
          "a retrograd.enable() or disable() block was left on a thread that did not enter it; enter and leave it on "
          "the same thread.");
    }
    retrograd::thread_context().setting = outer.back();
    outer.pop_back();
  });
  m.def("set_default", [](std::optional<int> backend) {
    retrograd::set_default(backend
                               ? std::optional(retrograd::Options().backend(static_cast<retrograd::Backend>(*backend)))
                               : std::nullopt);
  });
  m.def("stats", &stats);
  m.def("reset_stats", &retrograd::reset_stats, py::call_guard<py::gil_scoped_release>());
  m.def("cache_clear", &retrograd::cache_clear, py::call_guard<py::gil_scoped_release>());
  m.def("current_autograd_node", &current_autograd_node);
  m.def("note_ungated_hooks", &retrograd::note_ungated_hooks);
  m.def("set_stock_compiled_autograd_active", &retrograd::set_stock_compiled_autograd_active);

  m.attr("MODE_DISABLED") = static_cast<int>(Setting::Mode::kDisabled);
  m.attr("MODE_ENABLED") = static_cast<int>(Setting::Mode::kEnabled);
  m.attr("BACKEND_SCHEDULE") = static_cast<int>(retrograd::Backend::kSchedule);
}
