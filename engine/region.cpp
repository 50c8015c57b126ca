#include "engine/region.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>

#include "engine/callable.h"
#include "engine/fused.h"
#include "engine/gated_hooks.h"
#include "engine/graph_task.h"
#include "engine/lanes.h"
#include "engine/stats.h"

namespace retrograd {
namespace {

using torch::autograd::GraphTask;

// Why a compiler function is not even asked. None: it may be.
std::optional<ScheduleReason> reason_against_compiler(const PreparedCall& call) {
  if (call.create_graph) return ScheduleReason::kCreateGraph;
  if (call.other_streams) return ScheduleReason::kStreams;  // a captured graph runs on the caller's
  return std::nullopt;
}

// Whether the call is one for run_in_lanes().
bool is_for_lanes(const PreparedCall& call) {
  // After an error a call in lanes waits for those of its steps that run on other devices. Its own thread may be a
  // device's, if it is nested; then its steps must not need that device's thread, as they would for lanes of their own.
  if (call.parent != nullptr && call.parent->nested) return false;
  if (call.setting.options.compiler() != 0) {
    if (torch::autograd::AnomalyMode::is_enabled() || !reason_against_compiler(call)) return false;
    for (const CallFrame* outer = call.parent; outer != nullptr; outer = outer->parent) {
      if (outer->capturing) return false;  // holds the capture lock: must not wait for devices' threads
    }
  }
  return is_on_several_devices(call);
}

class CaptureSlot final : public Node {
 public:
  CaptureSlot() : Node(/*sequence_nr=*/0) { add_input_metadata(Node::undefined_input()); }
  std::string name() const override { return "CaptureSlot"; }

 private:
  variable_list apply(variable_list&&) override { return {}; }
};

class BackwardRegion final : public Node {
 public:
  // An explicit sequence number: taking one from the thread's counter would shift those of the user's nodes.
  BackwardRegion(PreparedCall& call, const at::Tensor& token) : Node(/*sequence_nr=*/UINT64_MAX), call_(call) {
    add_input_metadata(token);
  }
  std::string name() const override { return "BackwardRegion"; }

 private:
  variable_list apply(variable_list&&) override {
    GraphTask& task = current_graph_task();
    if (call_.use_streams) task.caller_current_streams_ = call_.caller_streams;
    CallFrame frame = frame_of(call_);
    ContextScope scope(call_.setting, call_.flags, frame);
    // The calls further out went live when the parent began.
    if (call_.parent != nullptr && call_.parent->order != nullptr) call_.parent->order->go_live();
    if (torch::autograd::AnomalyMode::is_enabled()) {
      // The stock engine would say where the node that failed was made: the region, which nobody knows.
      try {
        run(task, frame);
      } catch (...) {
        call_.error = std::current_exception();
        task.final_callbacks_.clear();  // as on any error
      }
    } else {
      run(task, frame);
    }
    next_edges().clear();  // results go back in call_.captured
    return {};
  }

  void run(GraphTask& task, CallFrame& frame) {
    if (run_callable(task, frame)) return;
    if (torch::autograd::AnomalyMode::is_enabled()) {  // the schedule does not look for NaN
      call_.to_previous = true;
      return;
    }
    const auto describe_task = [&] { describe(task); };
    const ScheduleRun run = schedule_run(call_, task, describe_task, frame);
    if (call_.setting.options.compiler() == 0 && call_.setting.options.backend() == Backend::kInductor) {
      const auto reason = run_fused(call_, run);
      if (!reason) return;
      thread_stats().count_fallback(*reason);
    }
    thread_stats().schedule_calls.add(1);
    thread_stats().count_lookup(call_.found);
    call_.schedule->run(run);
  }

  // What the thread's compiler function made, if it asked for one; false: the schedule must answer.
  bool run_callable(GraphTask& task, CallFrame& frame) {
    if (call_.setting.options.compiler() == 0) return false;
    std::optional<ScheduleReason> reason = reason_against_compiler(call_);
    if (!reason) {
      CallableBackend* backend = callable_backend();
      reason = backend != nullptr ? backend->run(call_, frame, [&] { describe(task); }) : ScheduleReason::kNoCompiler;
    }
    if (reason && !torch::autograd::AnomalyMode::is_enabled()) thread_stats().count_fallback(*reason);
    return !reason;
  }

  void describe(GraphTask& task) {
    if (described_) return;
    described_ = true;
    retrograd::describe(call_, task);
  }

  PreparedCall& call_;
  bool described_ = false;
};

}  // namespace

ScheduleRun schedule_run(PreparedCall& call, GraphTask& task, c10::function_ref<void()> describe_task,
                         CallFrame& frame) {
  return {.nodes = call.nodes,
          .root_gradients = call.single_root ? &call.gradients : nullptr,
          .keep_graph = call.keep_graph,
          .use_streams = call.use_streams,
          .parallel = call.setting.options.parallel() && !call.use_streams && !call.create_graph &&
                      call.outputs.empty() && !saved_tensor_hooks_exist(),
          .task = task,
          .describe_task = describe_task,
          .describe_at_start = !call.outputs.empty() || saved_tensor_hooks_exist(),
          .frame = frame,
          .captured = call.captured};
}

CallFrame frame_of(const PreparedCall& call) {
  return {.parent = call.parent,
          .depth = call.parent != nullptr ? call.parent->depth + 1 : 1,
          .nested = call.nested,
          .retained_on = call.keep_graph || call.create_graph ? call.entered_on : nullptr};
}

edge_list make_output(const PreparedCall& call) {
  if (call.outputs.empty()) return {};
  return {Edge(c10::make_intrusive<CaptureSlot>(), 0)};
}

void execute(torch::autograd::Engine& engine, PreparedCall& call, c10::intrusive_ptr<Node> root,
             const at::Tensor& gradient, const edge_list& output) {
  if (!call.accumulate) call.captured.resize(call.outputs.size());
  engine.execute({Edge(std::move(root), 0)}, {gradient}, call.keep_graph, call.create_graph,
                 output.empty() || call.accumulate, output);
}

void describe(PreparedCall& call, GraphTask& task) {
  const Schedule& schedule = *call.schedule;
  auto& in_graph = task.nodes_in_graph_;
  in_graph.reserve(call.nodes.size() + call.not_running.size() + 1);
  // The stock engine counts a node as part of the graph when an edge leads to it; none leads to step 0.
  in_graph.insert(call.nodes.begin() + 1, call.nodes.end());
  in_graph.insert(call.not_running.begin(), call.not_running.end());

  // Counts of edges, from which the task works out its execution order when asked.
  for (const EdgeShape& edge : schedule.shape().edges) {
    if (edge.step != kNoStep) ++task.dependencies_[call.nodes[edge.step]];
  }
  task.graph_roots_.clear();
  for (const Edge& root : call.roots) task.graph_roots_.push_back(root.function.get());

  if (call.outputs.empty()) return;
  for (size_t k = 0; k < call.nodes.size(); ++k) {
    task.exec_info_[call.nodes[k]].needed_ = schedule.shape().steps[k].needed;
  }
  for (size_t i = 0; i < call.outputs.size(); ++i) {
    auto& info = task.exec_info_[call.outputs[i].function.get()];
    if (call.accumulate) {
      info.needed_ = true;
    } else {
      if (!info.captures_) info.captures_ = std::make_unique<std::vector<GraphTask::ExecInfo::Capture>>();
      info.captures_->emplace_back(static_cast<int>(call.outputs[i].input_nr), static_cast<int>(i));
    }
  }
}

bool is_region(const Node* node) {
  return node != nullptr && (typeid(*node) == typeid(BackwardRegion) || is_lane(node));
}

void run_in_region(torch::autograd::Engine& engine, PreparedCall& call) {
  if (is_for_lanes(call)) {
    ThreadStats& stats = thread_stats();
    if (call.setting.options.compiler() != 0 || call.setting.options.backend() == Backend::kInductor) {
      stats.count_fallback(call.create_graph ? ScheduleReason::kCreateGraph : ScheduleReason::kStreams);
    }
    stats.schedule_calls.add(1);
    stats.count_lookup(call.found);
    run_in_lanes(engine, call);
    return;
  }
  // What the region is given as its gradient; nobody reads it. One per thread, so that threads do not share its
  // reference count.
  thread_local const at::Tensor token = at::empty({0});
  auto region = c10::make_intrusive<BackwardRegion>(call, token);
  const edge_list output = make_output(call);
  for (const Edge& edge : output) region->add_next_edge(edge);
  execute(engine, call, std::move(region), token, output);
  if (call.error) std::rethrow_exception(call.error);
}

}  // namespace retrograd
