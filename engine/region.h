// The region: a node that the stock engine runs as a one-node graph, and whose apply() is a whole backward call.
//
// Run this way, a call keeps everything that the stock engine owns: the graph-task id, final callbacks, reentrant
// depth and the hand-off to another thread past 60 levels, exceptions with their type, thread-local state around the
// call, delayed warnings. Nothing process-wide is touched, so calls of other threads and nested calls are
// independent. The region makes its graph task describe the real graph, for whoever asks the task about it.
#pragma once

#include <exception>
#include <optional>
#include <vector>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/node.h>

#include "cache/leaf.h"
#include "engine/context.h"
#include "engine/schedule.h"

namespace retrograd {

// Everything about one call that was found before its region starts. Lives on the stack of the calling thread, which
// waits for the region; the region may run on another thread.
struct PreparedCall {
  const edge_list& roots;
  const variable_list& gradients;
  bool keep_graph;
  bool create_graph;
  bool accumulate;           // backward(): true; grad(): false
  const edge_list& outputs;  // what inputs= named; empty: all leaves

  bool single_root = true;     // step 0 is roots[0]'s own node, not a GraphRoot
  std::vector<Node*> nodes{};  // by step
  std::vector<Node*> not_running{};
  const Schedule* schedule = nullptr;
  cache::Leaf* leaf = nullptr;  // the graph's place in the cache
  bool found = false;           // the schedule was in the cache

  // Accelerator streams current on the calling thread, by device; empty when no node has a stream.
  bool use_streams = false;
  std::vector<std::optional<c10::Stream>> caller_streams{};
  // Some node runs on another stream than its device's current one.
  bool other_streams = false;

  detail::Setting setting;
  FrontEndFlags flags{};
  const ThreadStats* entered_on = nullptr;  // the thread of the entry
  CallFrame* parent = nullptr;
  bool nested = false;  // in a backward call, be it this engine's or another's

  bool to_previous = false;    // nothing was done: the previous engine must answer, outside the region
  variable_list captured{};    // results, for grad()
  std::exception_ptr error{};  // what the region must not throw through the stock engine (anomaly mode)
};

// Runs the call inside a region executed by `engine` (the previous engine). Results are left in call.captured.
void run_in_region(torch::autograd::Engine& engine, PreparedCall& call);

// What a run of the call's schedule needs, in the task that the call runs in. `describe_task` and `frame` must outlive
// it.
ScheduleRun schedule_run(PreparedCall& call, torch::autograd::GraphTask& task, c10::function_ref<void()> describe_task,
                         CallFrame& frame);

// A frame for the call, or for a part of it, on this thread.
CallFrame frame_of(const PreparedCall& call);

// The only output that the previous engine is told of: empty without inputs=, else an edge to a node that never runs. A
// graph task counts as "imperative" (and lets reentrant checkpoint run) exactly while it has no output. All that is to
// run must lead there, and take its edges to it away before the engine follows them.
edge_list make_output(const PreparedCall& call);

// Has the previous engine run the graph under `root`, which is the call; `output` is from make_output().
void execute(torch::autograd::Engine& engine, PreparedCall& call, c10::intrusive_ptr<Node> root,
             const at::Tensor& gradient, const edge_list& output);

// Makes the call's graph task describe the real graph. Nodes may ask the task which nodes it will run and which
// gradients it needs (multi-grad hooks, needs_input_grad).
void describe(PreparedCall& call, torch::autograd::GraphTask& task);

bool is_region(const Node* node);

}  // namespace retrograd
