// The extension module retrograd._C. The Python package in bindings/retrograd gives it its user's form.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/extension.h>

#include "bindings/callable_backend.h"
#include "bindings/capture.h"
#include "bindings/compilers.h"
#include "bindings/group_compiler.h"
#include "bindings/plan_store_module.h"
#include "bindings/py_ref.h"
#include "bindings/python_engine.h"
#include "cache/perturb.h"
#include "engine/context.h"
#include "engine/engine.h"
#include "engine/explain.h"
#include "engine/gated_hooks.h"
#include "engine/plan_cache.h"
#include "retrograd/retrograd.h"

namespace py = pybind11;

namespace {

using retrograd::bindings::Compiler;
using retrograd::detail::Setting;

const retrograd::PythonGate kGate{
    .acquire = [] { return static_cast<void*>(std::make_unique<py::gil_scoped_acquire>().release()); },
    .release =
        [](void* state) { std::unique_ptr<py::gil_scoped_acquire>(static_cast<py::gil_scoped_acquire*>(state)); },
};

// A setting with what it names kept alive.
struct HeldSetting {
  Setting setting;
  std::shared_ptr<Compiler> compiler;
};

// What this thread's setting names, and what its open enable() and disable() blocks have to put back. Kept here, not in
// the Python objects, so that one object may be used by several threads. A block that a backward call's code entered
// and never left ended with the call, which counted it out (ThreadContext::blocks); what it has to put back is dropped
// at the thread's next block.
struct ThreadSettings {
  std::shared_ptr<Compiler> compiler;
  std::vector<HeldSetting> outer;

  void drop_ended() {
    uint32_t& open = retrograd::thread_context().blocks;
    std::vector<HeldSetting> ended;  // goes last: that may run any code
    if (open < outer.size()) {
      compiler.swap(outer[open].compiler);
      const auto first = outer.begin() + open;
      ended.assign(std::move_iterator(first), std::move_iterator(outer.end()));
      outer.erase(first, outer.end());
    }
    open = static_cast<uint32_t>(outer.size());  // less where the call's code left a block that it did not enter
  }
};
ThreadSettings& thread_settings() {
  thread_local ThreadSettings settings;
  return settings;
}

// A choice as Python names it: backend, compiler or None, dynamic, when to compile, parallel. A setting: the mode
// before it.
using PythonChoice = std::tuple<int, std::shared_ptr<Compiler>, bool, int, bool>;
using PythonSetting = std::tuple<int, int, std::shared_ptr<Compiler>, bool, int, bool>;

retrograd::Options options_of(const PythonChoice& choice) {
  const auto& [backend, compiler, dynamic, mode, parallel] = choice;
  return retrograd::Options()
      .backend(static_cast<retrograd::Backend>(backend))
      .mode(static_cast<retrograd::Mode>(mode))
      .parallel(parallel)
      .compiler(compiler != nullptr ? compiler->number() : 0, dynamic);
}

void set_setting(PythonSetting s) {
  auto& [mode, backend, compiler, dynamic, when, parallel] = s;
  retrograd::thread_context().setting = {static_cast<Setting::Mode>(mode),
                                         options_of({backend, compiler, dynamic, when, parallel})};
  thread_settings().compiler.swap(compiler);
}

PythonSetting as_python(const Setting& setting) {
  const auto& options = setting.options;
  return {static_cast<int>(setting.mode),
          static_cast<int>(options.backend()),
          retrograd::bindings::find_compiler(options.compiler()),
          options.dynamic(),
          static_cast<int>(options.mode()),
          options.parallel()};
}

void enter_setting(PythonSetting setting) {
  ThreadSettings& mine = thread_settings();
  mine.drop_ended();
  mine.outer.push_back({retrograd::thread_context().setting, mine.compiler});
  ++retrograd::thread_context().blocks;
  set_setting(std::move(setting));
}

void leave_setting() {
  ThreadSettings& mine = thread_settings();
  mine.drop_ended();
  if (mine.outer.empty()) {
    throw std::runtime_error(
        "a retrograd.enable() or disable() block was left on a thread that did not enter it; enter and leave it on "
        "the same thread.");
  }
  HeldSetting outer = std::move(mine.outer.back());
  mine.outer.pop_back();
  --retrograd::thread_context().blocks;
  retrograd::thread_context().setting = outer.setting;
  mine.compiler.swap(outer.compiler);
}

void set_default(std::optional<PythonChoice> choice) {
  // Under the GIL. Never destroyed: threads may run backward while static destructors run.
  static auto* const held = std::make_unique<std::shared_ptr<Compiler>>().release();
  if (!choice) {
    retrograd::set_default(std::nullopt);
    held->reset();
    return;
  }
  retrograd::set_default(options_of(*choice));
  held->swap(std::get<1>(*choice));  // the former one goes after no thread takes it any more
}

// The front end's flags of this thread, by name.
template <auto kFlag>
void def_flag(py::module_& m, const char* name) {
  using Value = std::remove_reference_t<decltype(retrograd::thread_context().flags.*kFlag)>;
  m.def((std::string("get_") + name).c_str(), [] { return retrograd::thread_context().flags.*kFlag; });
  m.def((std::string("set_") + name).c_str(), [](Value value) { retrograd::thread_context().flags.*kFlag = value; });
}

// Counts of reasons, by the reasons' names.
template <class Reason, size_t kCount>
py::dict by_name(const std::array<uint64_t, kCount>& counts) {
  py::dict named;
  for (size_t i = 0; i < kCount; ++i) named[py::str(std::string(name(static_cast<Reason>(i))))] = counts[i];
  return named;
}

py::dict stats() {
  const retrograd::Stats s = retrograd::stats();
  using namespace py::literals;
  return py::dict(
      "calls"_a = py::dict("schedule"_a = s.schedule_calls, "fused"_a = s.fused_calls, "callable"_a = s.callable_calls,
                           "previous"_a = s.previous_total()),
      "groups"_a = py::dict("compiled"_a = s.fused_groups, "by_node"_a = s.unfused_groups),
      "recordings"_a = s.recordings, "plans"_a = py::dict("compiled"_a = s.plans, "from_store"_a = s.plans_from_store),
      "previous_reasons"_a = by_name<retrograd::PreviousReason>(s.previous_calls),
      "schedule_reasons"_a = by_name<retrograd::ScheduleReason>(s.schedule_reasons), "captures"_a = s.captures,
      "parallel_calls"_a = s.parallel_calls, "helped_steps"_a = s.helped_steps, "hits"_a = s.hits,
      "misses"_a = s.misses, "nested_calls"_a = s.nested_calls, "max_depth"_a = s.max_depth,
      "seconds"_a = py::dict("walk"_a = s.walk_seconds, "lookup"_a = s.lookup_seconds, "run"_a = s.run_seconds),
      "cache"_a = py::dict("leaves"_a = s.cache_leaves, "nodes"_a = s.cache_nodes, "evictions"_a = s.cache_evictions));
}

// explain(tensors, inputs), as a dict that retrograd/_explain.py makes readable.
py::dict explain(const torch::autograd::variable_list& tensors, const torch::autograd::variable_list& inputs) {
  using namespace py::literals;
  torch::autograd::edge_list edges;
  for (const at::Tensor& input : inputs) edges.push_back(torch::autograd::impl::gradient_edge(input));
  const retrograd::Explanation found = [&] {
    const py::gil_scoped_release no_gil;
    return retrograd::explain(tensors, edges);
  }();
  py::list nodes, groups;
  for (const auto& step : found.steps) {
    const py::object group = step.group == retrograd::kNoGroup ? py::object(py::none()) : py::int_(step.group);
    nodes.append(py::make_tuple(step.node, group, std::string(name(step.fusable))));
  }
  for (const auto& group : found.groups) {
    groups.append(py::dict("ready"_a = group.ready, "ready_open"_a = group.ready_open, "making"_a = group.making,
                           "cold"_a = group.cold, "refused"_a = group.refused));
  }
  const bool previous = found.previous != retrograd::PreviousReason::kCount;
  return py::dict("previous_reason"_a = previous ? py::object(py::str(std::string(name(found.previous)))) : py::none(),
                  "backend"_a = static_cast<int>(found.setting.options.backend()),
                  "has_compiler"_a = found.setting.options.compiler() != 0, "known"_a = found.known, "nodes"_a = nodes,
                  "groups"_a = groups);
}

// call_cpp_tensor_pre_hooks(index, gradient), as a plain function that says it is torch's module's: captured graphs
// name it, and Dynamo judges functions by their module. A gradient that nothing was sent for is None; the hook gets it
// too, as in the stock engine.
void add_call_cpp_tensor_pre_hooks(py::module_& m) {
  static PyMethodDef definition{
      "call_cpp_tensor_pre_hooks",
      [](PyObject*, PyObject* args) -> PyObject* {
        HANDLE_TH_ERRORS
        Py_ssize_t index = -1;
        PyObject* gradient = nullptr;
        if (!PyArg_ParseTuple(args, "nO", &index, &gradient)) return nullptr;
        TORCH_CHECK_INDEX(index >= 0, "there is no C++ tensor hook ", index, ".");
        TORCH_CHECK_TYPE(Py_IsNone(gradient) || THPVariable_Check(gradient),
                         "a C++ tensor hook takes a tensor or None.");
        return THPVariable_Wrap(retrograd::bindings::call_cpp_tensor_pre_hook(
            static_cast<size_t>(index), Py_IsNone(gradient) ? at::Tensor() : THPVariable_Unpack(gradient)));
        END_HANDLE_TH_ERRORS
      },
      METH_VARARGS, "call_cpp_tensor_pre_hooks(index, gradient) -> gradient"};
  const py::str module("torch._C._dynamo.autograd_compiler");
  m.attr("call_cpp_tensor_pre_hooks") =
      py::reinterpret_steal<py::object>(PyCFunction_NewEx(&definition, nullptr, module.ptr()));
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
  py::class_<Compiler, std::shared_ptr<Compiler>>(m, "Compiler")
      .def_property_readonly("number", &Compiler::number)
      .def_property_readonly("factory",
                             [](const Compiler& c) { return py::reinterpret_borrow<py::object>(c.factory()); });
  m.def("intern_compiler", &retrograd::bindings::intern_compiler);
  m.def("find_compiler", &retrograd::bindings::use_compiler);

  m.def("enter_setting", &enter_setting);
  m.def("leave_setting", &leave_setting);
  m.def("set_setting", &set_setting);
  m.def("setting_in_force", [] { return as_python(retrograd::thread_context().in_force()); });
  m.def("own_setting", [] { return as_python(retrograd::thread_context().setting); });
  m.def("set_default", &set_default);
  using retrograd::FrontEndFlags;
  def_flag<&FrontEndFlags::depth>(m, "depth");
  def_flag<&FrontEndFlags::in_region>(m, "in_region");
  def_flag<&FrontEndFlags::active_disable>(m, "active_disable");
  def_flag<&FrontEndFlags::force_eager>(m, "force_eager");
  def_flag<&FrontEndFlags::verbose_logger>(m, "verbose_logger");
  m.def("logger_number", &retrograd::bindings::logger_number);
  m.def("explain", &explain);
  m.def("cache_is_empty", [] { return retrograd::plan_trie().is_empty(); }, py::call_guard<py::gil_scoped_release>());
  m.def("restore_validate_outputs", [] {
    py::gil_scoped_release no_gil;
    const retrograd::bindings::CaptureLock lock;
    const py::gil_scoped_acquire gil;
    retrograd::bindings::restore_validate_outputs();
  });
  add_call_cpp_tensor_pre_hooks(m);
  retrograd::bindings::set_up_callable_backend();
  retrograd::bindings::add_group_compiler(m);
  retrograd::bindings::add_plan_store(m);

  m.def("stats", &stats);
  m.def("reset_stats", &retrograd::reset_stats, py::call_guard<py::gil_scoped_release>());
  m.def("cache_clear", [] {
    {
      const py::gil_scoped_release no_gil;
      retrograd::cache_clear();
    }
    retrograd::bindings::forget_recent_compilers();
    retrograd::bindings::drop_deferred();
  });
  m.def("current_autograd_node", &current_autograd_node);
  // For tests of threads and forks (cache/perturb.h).
  m.def("perturb_with", &retrograd::cache::perturb_with);
  m.def("perturbations", &retrograd::cache::perturbations);
  m.def("drop_without_gil", [](const py::object& object) {
    auto reference = retrograd::bindings::PyRef::borrow(object.ptr());
    const py::gil_scoped_release no_gil;
    reference = {};
  });
  m.def("note_ungated_hooks", &retrograd::note_ungated_hooks);
  m.def("set_stock_compiled_autograd_active", &retrograd::set_stock_compiled_autograd_active);

  m.attr("MODE_DISABLED") = static_cast<int>(Setting::Mode::kDisabled);
  m.attr("MODE_ENABLED") = static_cast<int>(Setting::Mode::kEnabled);
  m.attr("BACKEND_SCHEDULE") = static_cast<int>(retrograd::Backend::kSchedule);
  m.attr("BACKEND_INDUCTOR") = static_cast<int>(retrograd::Backend::kInductor);
  m.attr("COMPILE_BACKGROUND") = static_cast<int>(retrograd::Mode::kBackground);
  m.attr("COMPILE_BLOCKING") = static_cast<int>(retrograd::Mode::kBlocking);
}
