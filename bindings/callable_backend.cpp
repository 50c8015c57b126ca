#include "bindings/callable_backend.h"

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <pthread.h>
#include <vector>

#include <pybind11/eval.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/python_variable.h>

#include "bindings/capture.h"
#include "bindings/compilers.h"
#include "bindings/functional_op.h"
#include "cache/perturb.h"
#include "engine/callable.h"
#include "engine/collect.h"
#include "engine/gated_hooks.h"
#include "engine/plan_cache.h"
#include "engine/retained.h"
#include "engine/stats.h"

namespace retrograd::bindings {
namespace {

namespace py = pybind11;
using torch::dynamo::autograd::SizeInput;

// After this many failed attempts at one graph its compiler function is not asked again.
constexpr int kMaxAttempts = 3;

// --- What the cache keeps ---

// One captured graph, compiled. Immutable.
struct Compiled {
  std::vector<SizeInput> sizes;  // a STATIC one must have this value
  PyRef run;                     // run(inputs, sizes, scalars, hooks, packed) -> outputs

  bool fits(const std::vector<SizeInput>& actual) const {
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i].dyn_type == SizeInput::STATIC && sizes[i].value != actual[i].value) return false;
    }
    return true;
  }
};

// A leaf's plan: the latest compiled graph, and which of its sizes were seen to change. A size that does is symbolic in
// the next graph, and the next graph takes the place of this one.
class Family final : public Kept {
 public:
  void let_go() noexcept override {
    std::shared_ptr<const Compiled> compiled;  // goes after the lock
    PyRef error;
    const std::lock_guard lock(mutex_);
    compiled_.swap(compiled);
    std::swap(last_error_, error);
  }

  std::shared_ptr<const Compiled> find(const std::vector<SizeInput>& sizes) const {
    const std::lock_guard lock(mutex_);
    return compiled_ != nullptr && compiled_->fits(sizes) ? compiled_ : nullptr;
  }

  // A thread's exclusive right to capture this graph, from its making until it goes.
  class Flight {
   public:
    Flight(const Family& family, const std::vector<SizeInput>& sizes) : family_(family) {
      cache::perturb("family.missed");
      const std::lock_guard lock(family.mutex_);
      if (family.compiled_ != nullptr && family.compiled_->fits(sizes)) {
        found_ = family.compiled_;  // landed meanwhile
        return;
      }
      if (family.in_flight_) return;
      if (family.attempts_ >= kMaxAttempts) {
        exhausted_ = true;
        return;
      }
      auto& seen = family.seen_;
      if (seen.empty()) seen = sizes;
      TORCH_INTERNAL_ASSERT(seen.size() == sizes.size());
      size_t symbolic = 0;
      for (size_t i = 0; i < seen.size(); ++i) {
        const bool was_symbolic = seen[i].dyn_type == SizeInput::DYNAMIC;
        if (seen[i].value != sizes[i].value) {
          if (!was_symbolic) changed_.push_back(symbolic);
          seen[i] = SizeInput(SizeInput::DYNAMIC, sizes[i].value);
        }
        if (seen[i].dyn_type == SizeInput::DYNAMIC) ++symbolic;
      }
      sizes_ = seen;
      flying_ = family.in_flight_ = true;
    }
    ~Flight() {
      if (!flying_) return;
      cache::perturb("family.landed");
      const std::lock_guard lock(family_.mutex_);
      family_.in_flight_ = false;
    }
    Flight(const Flight&) = delete;
    Flight& operator=(const Flight&) = delete;

    bool flying() const { return flying_; }
    bool exhausted() const { return exhausted_; }
    std::shared_ptr<const Compiled> found() const { return found_; }
    const std::vector<SizeInput>& sizes() const { return sizes_; }
    const std::vector<size_t>& changed() const { return changed_; }  // sizes newly symbolic, among the symbolic ones
    std::vector<std::string>& reasons() const { return family_.reasons_; }

    void land(std::shared_ptr<const Compiled> compiled) {
      cache::perturb("family.landing");
      const std::lock_guard lock(family_.mutex_);
      family_.compiled_.swap(compiled);  // the former one goes after the lock
      family_.attempts_ = 0;
    }
    // Under the GIL: `error` is the exception.
    void fail(PyRef error) {  // the former one goes after the lock
      const std::lock_guard lock(family_.mutex_);
      ++family_.attempts_;
      std::swap(family_.last_error_, error);
    }

   private:
    const Family& family_;
    bool flying_ = false;
    bool exhausted_ = false;
    std::shared_ptr<const Compiled> found_;
    std::vector<SizeInput> sizes_;
    std::vector<size_t> changed_;
  };

  // Under the GIL. The caller must not hold a Flight that is flying.
  [[noreturn]] void throw_last_error() const {
    PyRef cause;
    {
      const std::lock_guard lock(mutex_);  // what follows runs Python code
      cause = PyRef::borrow(last_error_.get());
    }
    const auto message = c10::str("the compiler function failed ", kMaxAttempts,
                                  " times for this graph, so it is not asked again (the last error is this error's "
                                  "cause); retrograd.cache_clear() makes it try again.");
    PyErr_SetString(PyExc_RuntimeError, message.c_str());
    PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (cause) {
      Py_INCREF(cause.get());
      PyException_SetCause(value, cause.get());
    }
    PyErr_Restore(type, value, traceback);
    throw py::error_already_set();
  }

 private:
  // Plans are const to the cache. Nothing of Python and nothing slow happens under the lock.
  mutable std::mutex mutex_;
  mutable std::vector<SizeInput> seen_;
  mutable std::shared_ptr<const Compiled> compiled_;
  mutable bool in_flight_ = false;
  mutable int attempts_ = 0;
  mutable PyRef last_error_;
  mutable std::vector<std::string> reasons_;  // used by the thread in flight only
};

// --- Verbose logging ---

std::vector<PyRef>& loggers() {  // by number - 1; under the GIL; never destroyed
  static auto* const instance = std::make_unique<std::vector<PyRef>>().release();
  return *instance;
}

void log_debug(uint32_t logger, const std::string& message) {
  py::handle(loggers().at(logger - 1).get()).attr("debug")(message);
}

// Why `path` is not in the cache, in torch's words; empty if it is.
std::string describe_node_miss(const cache::Path& path, std::span<Node* const> nodes) {
  auto miss = plan_trie().first_miss(path);
  if (miss.depth == path.size()) return {};
  if (miss.depth == 0) miss = {.depth = 1, .siblings = {}};  // the first key is no node's
  constexpr size_t kTypeBytes = sizeof(uintptr_t);           // every node's key begins with its type
  const cache::KeyView key = path[miss.depth];
  const size_t k = miss.depth - 1;
  if (k == nodes.size()) return "Cache miss due to custom functions that saved other leaves";
  std::string sizes;
  for (const auto& sibling : miss.siblings) {
    if (sibling.size() < kTypeBytes || std::memcmp(sibling.data(), key.data(), kTypeBytes) != 0) continue;
    sizes += (sizes.empty() ? "" : ",") + std::to_string(sibling.size() - kTypeBytes);
  }
  return c10::str("Cache miss due to new autograd node: ", nodes[k]->name(), " (NodeCall ", k, ") with key size ",
                  key.size() - kTypeBytes, ", previous key sizes=[", sizes, "]");
}

std::string describe_shape_miss(const Family::Flight& flight) {
  if (flight.changed().empty()) return {};
  const auto symbolic = std::ranges::count(flight.sizes(), SizeInput::DYNAMIC, &SizeInput::dyn_type);
  std::string list;
  for (const size_t i : flight.changed()) list += c10::str(list.empty() ? "" : ", ", "sizes[", i, "]");
  return c10::str("Cache miss due to ", flight.changed().size(), " changed tensor shapes (total of ", symbolic,
                  "): ", list);
}

// --- One call ---

// What captured graphs call back for while they run.
struct RuntimeState {
  std::vector<std::function<at::TensorBase(const at::TensorBase&)>> cpp_tensor_pre_hooks;
};

// The front end's flags as code inside a region sees them; and frame.backend_state for C++ hooks.
class InRegion {
 public:
  InRegion(CallFrame& frame, RuntimeState& state) : frame_(frame) {
    frame_.backend_state = &state;
    FrontEndFlags& flags = thread_context().flags;
    flags.in_region = flags.active_disable = true;
  }
  ~InRegion() {
    frame_.backend_state = nullptr;
    thread_context().flags = outer_;
  }
  InRegion(const InRegion&) = delete;
  InRegion& operator=(const InRegion&) = delete;

 private:
  CallFrame& frame_;
  const FrontEndFlags outer_ = thread_context().flags;
};

class Capturing {
 public:
  explicit Capturing(CallFrame& frame) : frame_(frame) { frame_.capturing = true; }
  ~Capturing() { frame_.capturing = false; }
  Capturing(const Capturing&) = delete;
  Capturing& operator=(const Capturing&) = delete;

 private:
  CallFrame& frame_;
};

py::tuple to_tuple(std::vector<c10::SafePyObject>& objects) {
  py::tuple tuple(objects.size());
  for (size_t i = 0; i < objects.size(); ++i) {
    PyTuple_SET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(i), objects[i].release());
  }
  return tuple;
}

// The stand-in as a Python object of the variable's kind.
py::object wrap_stand_in(const at::Tensor& variable, const at::Tensor& stand_in) {
  static PyTypeObject* const parameter_type =
      reinterpret_cast<PyTypeObject*>(py::object(py::module_::import("torch.nn").attr("Parameter")).release().ptr());
  const auto original = py::reinterpret_steal<py::object>(THPVariable_Wrap(variable));
  PyObject* const object = Py_TYPE(original.ptr()) == parameter_type
                               ? THPVariable_Wrap(static_cast<const at::TensorBase&>(stand_in), parameter_type)
                               : THPVariable_Wrap(stand_in);
  if (object == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

// An exception to keep in the place of `error`, which has the frames of all that it went through, and other exceptions:
// one of the same type and text; of another type, where the text needs more than plain arguments.
py::object without_frames(const py::object& error) {
  const py::object type = py::type::of(error);
  std::string text = type.attr("__name__").cast<std::string>();
  try {
    const py::str message(error);
    text += ": " + message.cast<std::string>();
    const py::tuple args = error.attr("args");
    const bool plain = std::ranges::all_of(args, [](py::handle argument) {
      return PyUnicode_CheckExact(argument.ptr()) || PyLong_CheckExact(argument.ptr()) || argument.is_none();
    });
    const py::object made =
        plain ? type.attr("__new__")(type, *args) : type.attr("__new__")(type, message);  // __init__ may do anything
    if (py::str(made).equal(message)) return made;
  } catch (const py::error_already_set&) {  // a __str__ or __new__ of its own
  }
  return py::module_::import("builtins").attr("RuntimeError")(text);
}

// An unpack hook whose result requires a gradient; not where Dynamo traces it, in whose graphs no backward can be
// nested. Compiled from a string because Dynamo passes over this package's files.
py::object requiring_grad(const py::object& hook) {
  static PyObject* make = nullptr;  // under the GIL; other threads may come here while the code below runs
  if (make == nullptr) {
    py::dict scope;
    scope["torch"] = py::module_::import("torch");
    py::exec(R"(
def requiring_grad(hook):
    def unpack(packed):
        tensor = hook(packed)
        if torch.compiler.is_compiling() or not isinstance(tensor, torch.Tensor) or tensor.requires_grad:
            return tensor
        if not tensor.is_floating_point() and not tensor.is_complex():
            return tensor
        return tensor.detach().requires_grad_()
    unpack.__qualname__ = getattr(hook, "__qualname__", type(hook).__name__)
    return unpack
)",
             scope);
    make = py::object(scope["requiring_grad"]).release().ptr();
  }
  return py::handle(make)(hook);
}

// The call as it goes through its stations.
class CallableCall {
 public:
  CallableCall(PreparedCall& call, CallFrame& frame, c10::function_ref<void()> describe_task,
               std::shared_ptr<Compiler> compiler)
      : call_(call), frame_(frame), describe_task_(describe_task), compiler_(std::move(compiler)) {
    const auto order = call.schedule->capture_order();
    if (call.single_root) root_ = c10::make_intrusive<torch::autograd::GraphRoot>(call.roots, call.gradients);
    const size_t count = order.size() + (root_ ? 1 : 0);
    nodes_.reserve(count);
    needed_ = std::make_unique<bool[]>(count);
    if (root_) {
      needed_[0] = true;
      nodes_.push_back(root_.get());
    }
    for (const uint32_t k : order) {
      needed_[nodes_.size()] = call.schedule->shape().steps[k].needed;
      nodes_.push_back(call.nodes[k]);
    }
  }

  std::optional<ScheduleReason> run() {
    ThreadStats& stats = thread_stats();
    Stopwatch watch;
    // Under inputs=, nodes ask the task which of their outputs are needed.
    if (!call_.outputs.empty()) describe_task_();
    if (const auto reason = collect()) return reason;
    cache::perturb("callable.collected");
    if (runs_users_code()) describe_task_();
    watch.lap(stats.walk_ns);
    const std::shared_ptr<const Family> family = find_family();
    compiled_ = family->find(collected_->call.all_size_inputs);
    const bool hit = compiled_ != nullptr;
    watch.lap(stats.lookup_ns);
    if (!hit) {
      if (const auto reason = make_compiled(*family)) return reason;
    }
    stats.count_lookup(hit);
    stats.callable_calls.add(1);
    execute();
    return std::nullopt;
  }

 private:
  // A reason when it cannot be done now.
  std::optional<ScheduleReason> collect() {
    check_nans_ = torch::autograd::AnomalyMode::is_enabled() && torch::autograd::AnomalyMode::should_check_nan();
    logger_ = thread_context().flags.verbose_logger;
    const auto type = call_.setting.options.dynamic() ? SizeInput::DYNAMIC : SizeInput::STATIC;
    for (;;) {
      collected_ = collect_for_capture(nodes_, {needed_.get(), nodes_.size()}, call_.outputs, type,
                                       /*track_origins=*/logger_ != 0, /*hand_over=*/!check_nans_, handed_, head_key());
      if (!collected_->capturable) return ScheduleReason::kNotCapturable;
      if (collected_->ungated.empty()) return std::nullopt;
      // Nobody else may be using these variables, as when they are captured.
      const CaptureLock lock;
      const CaptureRight right(call_.keep_graph, frame_);
      if (!right.granted()) return ScheduleReason::kGraphInUse;
      const py::gil_scoped_acquire gil;
      for (const auto* variable : collected_->ungated) {
        gate_hooks_of(const_cast<torch::autograd::SavedVariable&>(*variable));
      }
    }
  }

  // The first key of the path: all that a graph depends on beside the nodes, among it how many gradients are asked for:
  // nodes that are not reached say nothing of that. Paths of schedules are in the same trie; their keys are longer.
  std::array<uint32_t, 3> head_key() const {
    const uint32_t mode =
        (call_.setting.options.dynamic() ? 1U : 0U) | (call_.accumulate ? 2U : 0U) | (check_nans_ ? 4U : 0U);
    return {compiler_->number(), mode, static_cast<uint32_t>(call_.outputs.size())};
  }

  // Whether the graph calls back into hooks and functions of the user's, which may ask the graph task about the graph.
  bool runs_users_code() const {
    const auto& args = collected_->call;
    return !args.hooks.empty() || !args.cpp_tensor_pre_hooks.empty();
  }

  std::shared_ptr<const Family> find_family() {
    // This thread's, as in find_plan(): it remembers the paths that it took last.
    thread_local cache::Memo memo;
    if (logger_ != 0) node_miss_ = describe_node_miss(collected_->path, nodes_);
    leaf_ = plan_trie().find_or_insert(collected_->path, &memo).leaf;
    const void* plan = leaf_->find({});
    if (plan == nullptr) {
      plan = leaf_->get_or_build({}, cache::Wait::kYes, [this]() -> std::shared_ptr<const void> {
        auto family = std::make_shared<Family>();
        compiler_->keep(family);
        return family;
      });
    }
    return {leaf_, static_cast<const Family*>(plan)};
  }

  // A reason when it cannot be done now.
  std::optional<ScheduleReason> make_compiled(const Family& family) {
    Family::Flight flight(family, collected_->call.all_size_inputs);
    compiled_ = flight.found();
    if (compiled_ != nullptr) return std::nullopt;
    if (flight.exhausted()) {
      const py::gil_scoped_acquire gil;
      family.throw_last_error();
    }
    if (!flight.flying()) return ScheduleReason::kCaptureInProgress;

    std::string reason;
    if (logger_ != 0) {  // before the lock: a logger may do anything
      const py::gil_scoped_acquire gil;
      reason = log_miss(flight);
    }
    Captured captured;  // Python objects: filled, used and let go of under the GIL
    try {
      {
        const CaptureLock lock;
        const CaptureRight right(call_.keep_graph, frame_);
        if (!right.granted()) return ScheduleReason::kGraphInUse;
        const py::gil_scoped_acquire gil;
        const Capturing capturing(frame_);
        thread_stats().captures.add(1);
        captured = capture({.compiler = *compiler_,
                            .nodes = nodes_,
                            .collected = *collected_,
                            .handed = handed_,
                            .sizes = flight.sizes(),
                            .num_outputs = call_.outputs.size(),
                            .accumulate = call_.accumulate,
                            .check_nans = check_nans_,
                            .compile_reasons = &flight.reasons(),
                            .compile_reason = std::move(reason)});
      }
      const py::gil_scoped_acquire gil;
      drop_deferred();
      Captured made = std::move(captured);
      py::object compiled = made.compiler_fn ? made.compiler_fn(made.graph) : made.graph;
      TORCH_CHECK(PyCallable_Check(compiled.ptr()) != 0, "the compiler function returned ",
                  py::str(py::type::of(compiled).attr("__name__")).cast<std::string>(),
                  " object, not something callable: it must return what runs the graph.");
      auto result = std::make_shared<Compiled>();
      result->sizes = flight.sizes();
      const auto make_runner = py::module_::import("retrograd._runtime").attr("make_runner");
      result->run = PyRef::borrow(make_runner(made.runtime_wrapper, compiled).ptr());
      compiled_ = result;
      flight.land(std::move(result));
    } catch (py::error_already_set& error) {
      const py::gil_scoped_acquire gil;
      captured = {};
      if (error.matches(PyExc_Exception)) flight.fail(PyRef::borrow(without_frames(error.value()).ptr()));
      throw;
    } catch (...) {
      const py::gil_scoped_acquire gil;
      captured = {};
      flight.fail(PyRef());
      throw;
    }
    return std::nullopt;
  }

  // Under the GIL. Logs why there was a miss, and returns it.
  std::string log_miss(const Family::Flight& flight) const {
    std::string reason = !node_miss_.empty() ? node_miss_ : describe_shape_miss(flight);
    if (reason.empty()) reason = "Cache miss: the graph that was kept is gone";
    log_debug(logger_, reason);
    return reason;
  }

  void execute() {
    std::vector<at::Tensor> stand_ins(handed_.size());
    std::vector<c10::intrusive_ptr<Node>> leaves;  // the graph may lose them while user code runs
    for (const HandedLeaf& leaf : handed_) leaves.push_back(leaf.node->getptr());
    try {
      const py::gil_scoped_acquire gil;
      RuntimeState state{std::move(collected_->call.cpp_tensor_pre_hooks)};
      py::object result = call_compiled(stand_ins, state);
      take_results(std::move(result));
    } catch (...) {
      hand_over_all(stand_ins, leaves);  // what was accumulated before the error stays, as with any engine
      throw;
    }
    hand_over_all(stand_ins, leaves);
  }

  py::object call_compiled(std::vector<at::Tensor>& stand_ins, RuntimeState& state) {
    auto& args = collected_->call;
    py::list inputs = to_python_list(args.tensor_args.inputs);
    for (size_t i = 0; i < handed_.size(); ++i) {
      const at::Tensor& variable = handed_[i].node->variable;
      stand_ins[i] = make_stand_in(variable);
      py::object object = wrap_stand_in(variable, stand_ins[i]);
      PyList_SetItem(inputs.ptr(), static_cast<Py_ssize_t>(handed_[i].input), object.release().ptr());
    }
    py::tuple sizes = symbolic_sizes(compiled_->sizes, args.all_size_inputs);
    py::list scalars = scalars_of(args);
    py::tuple hooks = to_tuple(args.hooks);
    for (const size_t i : collected_->unpack_requiring_grad) hooks[i] = requiring_grad(hooks[i]);
    py::tuple packed = to_tuple(args.packed_inputs);

    // From here on the inputs belong to the compiled function, which may free each after its last use.
    collected_.reset();
    if (!call_.keep_graph) {
      for (Node* node : nodes_) node->release_variables();
    }
    root_.reset();
    nodes_.clear();

    const InRegion in_region(frame_, state);
    PyObject* const arguments[] = {inputs.release().ptr(), sizes.ptr(), scalars.ptr(), hooks.ptr(), packed.ptr()};
    PyObject* const result = PyObject_Vectorcall(compiled_->run.get(), arguments, std::size(arguments), nullptr);
    Py_DECREF(arguments[0]);
    if (result == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(result);
  }

  void take_results(py::object result) {
    if (call_.outputs.empty() && (result.is_none() || py::len(result) == 0)) return;
    const bool is_sequence = py::isinstance<py::list>(result) || py::isinstance<py::tuple>(result);
    TORCH_CHECK(is_sequence, "the compiled function returned ",
                py::str(py::type::of(result).attr("__name__")).cast<std::string>(),
                " object: it must return a list or tuple of ", call_.outputs.size(), " gradients, as its graph does.");
    variable_list outputs = to_variable_list(result);
    TORCH_CHECK(outputs.size() == call_.outputs.size(), "the compiled function returned ", outputs.size(),
                " gradients, but ", call_.outputs.size(), " were asked for: it must return what its graph returns.");
    if (!call_.accumulate) call_.captured = std::move(outputs);
  }

  // Hands the gradients on the stand-ins to the real leaves. Without the GIL: their locks may be held by threads that
  // wait for it.
  static void hand_over_all(std::vector<at::Tensor>& stand_ins, std::vector<c10::intrusive_ptr<Node>>& leaves) {
    if (stand_ins.empty()) return;
    variable_list left;  // has Python objects: let go of together, under one take of the GIL
    left.reserve(stand_ins.size());
    for (size_t i = 0; i < stand_ins.size(); ++i) {
      if (!stand_ins[i].defined() || !stand_ins[i].mutable_grad().defined()) continue;
      left.push_back(std::move(stand_ins[i].mutable_grad()));
      hand_over(static_cast<torch::autograd::AccumulateGrad&>(*leaves[i]), left.back());
    }
    const py::gil_scoped_acquire gil;
    left.clear();
    stand_ins.clear();
    leaves.clear();
  }

  PreparedCall& call_;
  CallFrame& frame_;
  const c10::function_ref<void()> describe_task_;
  const std::shared_ptr<Compiler> compiler_;

  c10::intrusive_ptr<Node> root_;  // made here for a call with one root; torch's captures always begin with a GraphRoot
  std::vector<Node*> nodes_;       // in capture order
  std::unique_ptr<bool[]> needed_;
  bool check_nans_ = false;
  uint32_t logger_ = 0;

  std::unique_ptr<Collected> collected_;
  std::vector<HandedLeaf> handed_;
  std::string node_miss_;
  std::shared_ptr<cache::Leaf> leaf_;
  std::shared_ptr<const Compiled> compiled_;
};

// A compiled function that calls backward may come to itself again. Python's own limit does not end that: it counts for
// each thread, and the stock engine moves nested calls to new ones.
void check_recursion(const CallFrame& frame) {
  int inside = 0;
  for (const CallFrame* outer = frame.parent; outer != nullptr; outer = outer->parent) {
    inside += outer->backend_state != nullptr ? 1 : 0;
  }
  if (inside < 60) return;  // the stock engine's limit, for one thread
  const py::gil_scoped_acquire gil;
  if (inside <= Py_GetRecursionLimit()) return;
  PyErr_Format(PyExc_RecursionError,
               "maximum recursion depth exceeded: %d compiled backward calls, each made inside another", inside);
  throw py::error_already_set();
}

class Backend final : public CallableBackend {
 public:
  std::optional<ScheduleReason> run(PreparedCall& call, CallFrame& frame,
                                    c10::function_ref<void()> describe_task) override {
    for (const CallFrame* outer = &frame; outer != nullptr; outer = outer->parent) {
      if (outer->capturing) return ScheduleReason::kInsideCapture;
    }
    check_recursion(frame);
    auto compiler = find_compiler(call.setting.options.compiler());
    if (compiler == nullptr) return ScheduleReason::kNoCompiler;
    return CallableCall(call, frame, describe_task, std::move(compiler)).run();
  }
};

}  // namespace

void set_up_callable_backend() {
  static Backend backend;
  set_callable_backend(&backend);
  pthread_atfork(
      [] {
        compilers_before_fork();
        deferred_before_fork();
      },
      [] {
        deferred_after_fork();
        compilers_after_fork();
      },
      [] {
        deferred_after_fork();
        compilers_after_fork();
        capture_after_fork_in_child();
      });
}

at::Tensor call_cpp_tensor_pre_hook(size_t index, const at::Tensor& gradient) {
  const CallFrame* const frame = thread_context().frame;
  const auto* const state = frame != nullptr ? static_cast<const RuntimeState*>(frame->backend_state) : nullptr;
  TORCH_CHECK(state != nullptr, "call_cpp_tensor_pre_hooks was called outside of a compiled backward call.");
  TORCH_CHECK_INDEX(index < state->cpp_tensor_pre_hooks.size(), "there is no C++ tensor hook ", index, ".");
  return at::Tensor(state->cpp_tensor_pre_hooks[index](gradient));
}

uint32_t logger_number(const py::object& logger) {
  if (logger.is_none()) return 0;
  auto& all = loggers();
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].get() == logger.ptr()) return static_cast<uint32_t>(i + 1);
  }
  all.push_back(PyRef::borrow(logger.ptr()));
  return static_cast<uint32_t>(all.size());
}

}  // namespace retrograd::bindings
