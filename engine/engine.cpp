#include "engine/engine.h"

#include <algorithm>
#include <mutex>
#include <optional>

#include <ATen/DeviceAccelerator.h>
#include <ATen/LegacyVmapMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

#include "engine/context.h"
#include "engine/find_plan.h"
#include "engine/fork.h"
#include "engine/gated_hooks.h"
#include "engine/region.h"
#include "engine/retained.h"
#include "engine/schedule.h"
#include "engine/walk.h"

namespace retrograd {
namespace {

using torch::autograd::GraphRoot;

std::atomic<bool> stock_compiled_autograd_active{false};

std::mutex install_mutex;  // serializes install() and uninstall(); never held while backward runs

// The rare states in which a call must reach the previous engine as it is. A graph that a compiler function gets has
// its own checks for anomaly mode; calls that it does not answer go to the previous engine later.
PreviousReason special_state(bool has_compiler) {
  if (!has_compiler && torch::autograd::AnomalyMode::is_enabled()) return PreviousReason::kAnomalyMode;
  if (c10::impl::TorchDispatchModeTLS::stack_len() != 0) return PreviousReason::kDispatchMode;
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
      at::impl::VmapMode::current_vmap_level() != 0) {
    return PreviousReason::kFunctorch;
  }
  if (stock_compiled_autograd_active.load(std::memory_order_relaxed)) return PreviousReason::kCompiledAutograd;
  return PreviousReason::kCount;
}

// Calls that the previous engine refuses, or takes apart in ways of its own.
bool is_irregular(const edge_list& roots, const variable_list& gradients, bool accumulate, const edge_list& outputs) {
  if (roots.empty() || roots.size() != gradients.size()) return true;
  if (!accumulate && outputs.empty()) return true;
  for (size_t i = 0; i < roots.size(); ++i) {
    if (!roots[i].is_valid() || roots[i].input_nr >= roots[i].function->num_inputs()) return true;
    if (!gradients[i].defined()) return true;
  }
  return std::any_of(outputs.begin(), outputs.end(), [](const Edge& output) { return !output.is_valid(); });
}

// Finds out about accelerator streams: only in a process that has an accelerator, and only if some node uses one.
void find_streams(PreparedCall& call) {
  const auto accelerator = at::getAccelerator();
  if (!accelerator) return;
  for (Node* node : call.nodes) {
    if (node->stream()) call.use_streams = true;
  }
  if (!call.use_streams) return;
  const c10::impl::VirtualGuardImpl guard(*accelerator);
  const auto& hooks = at::globalContext().getAcceleratorHooksInterface(*accelerator);
  call.caller_streams.resize(static_cast<size_t>(guard.deviceCount()));
  for (size_t i = 0; i < call.caller_streams.size(); ++i) {
    const auto index = static_cast<c10::DeviceIndex>(i);
    if (hooks.hasPrimaryContext(index)) call.caller_streams[i] = guard.getStream({*accelerator, index});
  }
  call.other_streams = std::ranges::any_of(call.nodes, [&](Node* node) {
    const auto stream = node->stream();
    return stream && stream != call.caller_streams[static_cast<size_t>(stream->device_index())];
  });
}

}  // namespace

ReentrantEngine& ReentrantEngine::get() {
  static auto* const engine = std::unique_ptr<ReentrantEngine>(new ReentrantEngine()).release();
  return *engine;
}

PreviousReason ReentrantEngine::reason_for_previous() const {
  if (!is_installed()) return PreviousReason::kNotEnabled;
  const detail::Setting setting = thread_context().in_force();
  if (setting.mode != detail::Setting::Mode::kEnabled) return PreviousReason::kNotEnabled;
  return special_state(setting.options.compiler() != 0);
}

variable_list ReentrantEngine::execute(const edge_list& roots, const variable_list& gradients, bool keep_graph,
                                       bool create_graph, bool accumulate_grad, const edge_list& outputs) {
  const RetainedCall retained(keep_graph || create_graph);
  PreviousReason reason = reason_for_previous();
  if (reason == PreviousReason::kCount && is_irregular(roots, gradients, accumulate_grad, outputs)) {
    reason = PreviousReason::kIrregularCall;
  }
  if (reason != PreviousReason::kCount) {
    thread_stats().count_previous(reason);
    const SettingCarrier carrier;
    return previous().execute(roots, gradients, keep_graph, create_graph, accumulate_grad, outputs);
  }
  return run(roots, gradients, keep_graph, create_graph, accumulate_grad, outputs);
}

variable_list ReentrantEngine::run(const edge_list& roots, const variable_list& gradients, bool keep_graph,
                                   bool create_graph, bool accumulate_grad, const edge_list& outputs) {
  ThreadStats& stats = thread_stats();
  try {
    // The stock engine checks, reduces and casts the caller's gradients in place too.
    torch::autograd::validate_outputs(roots, const_cast<variable_list&>(gradients),
                                      [](const std::string& message) { return message; });
  } catch (...) {
    stats.count_previous(PreviousReason::kIrregularCall);
    throw;
  }

  ThreadContext& context = thread_context();
  PreparedCall call{.roots = roots,
                    .gradients = gradients,
                    .keep_graph = keep_graph,
                    .create_graph = create_graph,
                    .accumulate = accumulate_grad,
                    .outputs = outputs,
                    .setting = context.in_force(),
                    .flags = context.flags,
                    .entered_on = &stats,
                    .parent = context.frame,
                    .nested = torch::autograd::get_current_graph_task_id() >= 0};
  // Inside a compiled function the flags say so, but a call made there is a call of its own.
  if (call.flags.in_region) call.flags.in_region = call.flags.active_disable = false;
  c10::intrusive_ptr<Node> root = roots[0].function;
  if (roots.size() > 1) {
    root = c10::make_intrusive<GraphRoot>(roots, gradients);
    call.single_root = false;
  }

  const FoundPlan found = find_plan(*root, call, stats);
  if (found.schedule == nullptr) {
    stats.count_previous(PreviousReason::kIrregularCall);
    const SettingCarrier carrier;
    return previous().execute(roots, gradients, keep_graph, create_graph, accumulate_grad, outputs);
  }
  call.schedule = found.schedule;
  call.leaf = found.leaf.get();
  call.found = found.hit;
  find_streams(call);

  if (call.parent != nullptr) stats.nested_calls.add(1);
  stats.max_depth.raise_to(call.parent != nullptr ? call.parent->depth + 1 : 1);
  struct TimeRun {  // also when the run throws
    Counter& counter;
    Stopwatch watch;
    ~TimeRun() { watch.lap(counter); }
  } time_run{stats.run_ns, {}};
  // The region takes the setting along itself; final callbacks, which run after it, may find themselves on another
  // thread if this call is nested.
  std::optional<SettingCarrier> carrier;
  if (call.nested) carrier.emplace();
  run_in_region(previous(), call);
  if (call.to_previous) {
    stats.count_previous(PreviousReason::kAnomalyMode);
    if (!carrier) carrier.emplace();
    return previous().execute(roots, gradients, keep_graph, create_graph, accumulate_grad, outputs);
  }
  return std::move(call.captured);
}

c10::intrusive_ptr<at::ivalue::Future> ReentrantEngine::execute_with_graph_task(
    const std::shared_ptr<torch::autograd::GraphTask>& graph_task, c10::intrusive_ptr<Node> root,
    torch::autograd::InputBuffer&& inputs) {
  return previous().execute_with_graph_task(graph_task, std::move(root), std::move(inputs));
}

std::unique_ptr<torch::autograd::AnomalyMetadata> ReentrantEngine::make_anomaly_metadata() {
  return previous().make_anomaly_metadata();
}

std::unique_ptr<torch::autograd::SavedVariableHooks> ReentrantEngine::get_default_saved_variable_hooks() {
  return gate_hooks(previous().get_default_saved_variable_hooks());
}

void fork_part::install_before() { install_mutex.lock(); }
void fork_part::install_after() { install_mutex.unlock(); }

void ReentrantEngine::install() {
  register_fork_handlers();
  std::lock_guard lock(install_mutex);
  Engine& current = Engine::get_default_engine();
  if (&current != this) {
    // Only the first engine found is ever delegated to: were a second one stacked on ours and then installed over,
    // the two would call each other in a circle.
    Engine* none = nullptr;
    previous_.compare_exchange_strong(none, &current, std::memory_order_acq_rel);
    torch::autograd::set_default_engine_stub([]() -> Engine& { return ReentrantEngine::get(); });
  }
  installed_.store(true, std::memory_order_release);
}

void ReentrantEngine::uninstall() {
  std::lock_guard lock(install_mutex);
  installed_.store(false, std::memory_order_release);
  // An engine that someone put over ours stays; it may call ours, which now only passes on.
  if (previous_.load(std::memory_order_acquire) != nullptr && &Engine::get_default_engine() == this) {
    torch::autograd::set_default_engine_stub([]() -> Engine& { return ReentrantEngine::get().previous(); });
  }
}

void set_stock_compiled_autograd_active(bool active) noexcept {
  stock_compiled_autograd_active.store(active, std::memory_order_relaxed);
}

void install() { ReentrantEngine::get().install(); }
void uninstall() { ReentrantEngine::get().uninstall(); }
bool is_installed() noexcept { return ReentrantEngine::get().is_installed(); }

}  // namespace retrograd
