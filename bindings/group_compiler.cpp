#include "bindings/group_compiler.h"

#include <chrono>
#include <optional>

#include <torch/csrc/autograd/python_cpp_function.h>

#include "bindings/compiler_interface.h"
#include "bindings/functional_op.h"
#include "bindings/py_ref.h"
#include "bindings/recording.h"
#include "engine/context.h"
#include "engine/retained.h"
#include "engine/stats.h"
#include "engine/stored_plans.h"

namespace retrograd::bindings {
namespace {

namespace py = pybind11;
using namespace std::chrono_literals;

// How long a call that waits for its plan anyway waits for its turn to record; others do not wait at all.
constexpr auto kPatience = 10s;

// Python's hold on an entry that it has to settle. One that is dropped unsettled goes back to cold, to be tried again.
class Claim {
 public:
  explicit Claim(std::shared_ptr<const GroupEntry> entry) : entry_(std::move(entry)) {}
  ~Claim() { give_back(); }
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;

  void settle(std::shared_ptr<const GroupPlan> plan) {
    if (std::exchange(settled_, true)) return;
    entry_->settle(std::move(plan));
  }
  void refuse(int32_t member) {
    if (std::exchange(settled_, true)) return;
    entry_->refuse(member);
  }
  void give_back() {
    if (std::exchange(settled_, true)) return;
    entry_->give_back();
  }

 private:
  std::shared_ptr<const GroupEntry> entry_;
  bool settled_ = false;
};

// A traced graph as Python runs it, operator by operator. The function takes a list of the inputs and empties it.
class PythonPlan final : public GroupPlan {
 public:
  PythonPlan(const py::object& graph, Io io) : GroupPlan(std::move(io)), graph_(PyRef::borrow(graph.ptr())) {}

  variable_list run(variable_list&& inputs) const override {
    const py::gil_scoped_acquire gil;
    py::list given = to_python_list(inputs);
    inputs.clear();
    return to_variable_list(py::handle(graph_.get())(given));
  }

 private:
  PyRef graph_;
};

struct Plan {
  std::shared_ptr<const GroupPlan> plan;
  bool from_store = false;
};

StoredQuery query_of(const Recording& recording) {
  return {recording.key(), recording.inputs(), recording.num_outputs()};
}

class PythonGroupCompiler final : public GroupCompiler {
 public:
  bool make(const GroupRequest& request, const PreparedCall& call, CallFrame& frame) override {
    std::shared_ptr<Claim> claim;
    try {
      claim = std::make_shared<Claim>(request.entry);
    } catch (...) {  // out of memory: nobody else would give it back
      request.entry->give_back();
      throw;
    }
    for (const CallFrame* outer = &frame; outer != nullptr; outer = outer->parent) {
      if (outer->capturing) return false;
    }
    std::shared_ptr<Recording> recording;
    {
      const CaptureLock lock(request.wait ? std::chrono::milliseconds(kPatience) : 0ms);
      if (!lock.owns()) return false;
      const CaptureRight right(call.keep_graph, frame);
      if (!right.granted()) return false;
      thread_stats().recordings.add(1);
      int32_t failed = -1;
      recording = Recording::make(request, failed);
      if (recording == nullptr) {
        claim->refuse(failed);
        return true;
      }
    }
    const py::gil_scoped_acquire gil;
    py::module_::import("retrograd._fused").attr("make")(std::move(recording), std::move(claim), request.wait);
    return true;
  }

  void report_change(torch::autograd::Node* node, bool sizes) noexcept override {
    const py::gil_scoped_acquire gil;
    try {
      const auto wrapped = node == nullptr
                               ? py::object(py::none())
                               : py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(node->getptr()));
      py::module_::import("retrograd._fused").attr("report_change")(wrapped, sizes);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("retrograd");
    } catch (...) {  // a warning less
    }
  }

  void look_up_from_waiting() override {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
};

py::list as_list(const variable_list& tensors) { return to_python_list(tensors); }

}  // namespace

void add_group_compiler(py::module_& m) {
  py::class_<Claim, std::shared_ptr<Claim>>(m, "Claim")
      .def("settle",
           [](Claim& claim, const Plan& plan) {
             (plan.from_store ? thread_stats().plans_from_store : thread_stats().plans).add(1);
             claim.settle(plan.plan);
           })
      .def("refuse", &Claim::refuse)
      .def("give_back", &Claim::give_back);
  py::class_<ShapeGuards>(m, "ShapeGuards")
      .def(py::init<std::vector<uint32_t>, std::vector<ShapeGuards::Program>, std::vector<uint32_t>>());
  py::class_<Plan>(m, "Plan")
      // Puts the library into the plan store, if there is one, and loads it.
      .def(py::init([](const std::string& library, std::vector<uint32_t> inputs, std::vector<int32_t> outputs,
                       ShapeGuards guards, const Recording& recording) {
             return Plan{store_and_load(query_of(recording), recording.open(), library,
                                        {std::move(inputs), std::move(outputs), std::move(guards)}, recording.name())};
           }),
           py::call_guard<py::gil_scoped_release>())
      .def(py::init([](const py::function& graph, std::vector<uint32_t> inputs, std::vector<int32_t> outputs,
                       ShapeGuards guards) {
        return Plan{std::make_shared<const PythonPlan>(
            graph, GroupPlan::Io{std::move(inputs), std::move(outputs), std::move(guards)})};
      }));
  py::class_<Recording, std::shared_ptr<Recording>>(m, "Recording")
      .def_property_readonly("inputs", [](const Recording& r) { return as_list(r.inputs()); })
      .def_property_readonly("threads", &Recording::threads)
      .def_property_readonly("content", [](const Recording& r) { return py::bytes(r.content()); })
      .def_property_readonly("name", &Recording::name)
      .def_property_readonly("numbers", &Recording::numbers)
      .def_property_readonly("open", [](const Recording& r) { return r.open(); })
      .def_property_readonly("input_places", &Recording::input_places)
      // trace(fakes, symbols) -> (outputs, None), or (the exception, the member that raised it or -1)
      .def("trace", [](const Recording& r, const py::object& fakes, const Recording::Symbols& symbols) -> py::tuple {
        int32_t failed = -1;
        try {
          return py::make_tuple(to_python_list(r.trace(to_variable_list(fakes), symbols, failed)), py::none());
        } catch (py::error_already_set& error) {
          return py::make_tuple(error.value(), failed);
        } catch (python_error& error) {
          error.persist();  // libtorch throws these with Python's error indicator set
          return py::make_tuple(py::str(error.what()), failed);
        } catch (const std::exception& error) {
          return py::make_tuple(py::str(error.what()), failed);
        }
      });
  // None where there is no store.
  m.def(
      "reserve_plan", [](const Recording& r) { return reserve_stored(query_of(r), r.open()); },
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "find_plan",
      [](const Recording& r) -> std::optional<Plan> {
        auto stored = find_stored(query_of(r), &r.open());
        if (!stored) return std::nullopt;
        return Plan{std::move(stored->plan), /*from_store=*/true};
      },
      py::call_guard<py::gil_scoped_release>());
  m.def("forward_bound_functions", &forward_bound_functions);
  m.def("this_thread_makes_plans", [] { retrograd::thread_context().makes_plans = true; });
  static PythonGroupCompiler compiler;
  set_group_compiler(&compiler);
}

}  // namespace retrograd::bindings
