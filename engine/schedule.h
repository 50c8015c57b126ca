// The schedule plan: a graph's own nodes, run one after the other in an order found beforehand.
//
// Each step does for its node what the stock engine's evaluate_function does: hooks, the node itself, validation of
// its outputs, release of saved variables, distribution of gradients with the stock engine's accumulation rules,
// captures, streams, profiler ranges. What it does not need is counting dependencies, the ready queue, its lock, and
// a full save and restore of thread-local state around every node.
//
// Hooks are looked at when their step runs, not when the plan is made: a hook may add or remove hooks of nodes that
// have yet to run. They are therefore no part of the plan or of its key.
#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include <c10/util/FunctionRef.h>
#include <torch/csrc/autograd/graph_task.h>

#include "cache/path.h"
#include "engine/context.h"
#include "engine/node_kind.h"
#include "engine/parallel.h"
#include "engine/walk.h"

namespace retrograd {

// What one run needs besides the plan. Owned by the call's stack frame; nothing here is shared between calls.
struct ScheduleRun {
  std::span<Node* const> nodes;         // the live nodes, by step
  const variable_list* root_gradients;  // null when step 0 is a GraphRoot, which holds them
  bool keep_graph;                      // false: saved variables are released as steps finish
  bool use_streams;                     // some node has an accelerator stream
  bool parallel;                        // independent branches may run at the same time
  torch::autograd::GraphTask& task;     // the stock engine's task that the region runs in
  // Makes the task describe the real graph. Called once, before the first step that runs user code: only user code
  // can ask the task, and a set of all nodes costs as much as many a node. Steps that unpack saved tensors with hooks
  // count too, so it is called at the start when such hooks may exist.
  c10::function_ref<void()> describe_task;
  bool describe_at_start;
  CallFrame& frame;
  variable_list& captured;  // results by CaptureShape::output; sized by the caller
};

// Immutable, and so shared by any number of runs at a time.
class Schedule {
 public:
  explicit Schedule(GraphShape shape);

  const GraphShape& shape() const { return shape_; }
  NodeKind kind(uint32_t step) const { return kinds_[step]; }

  // The steps in the order in which torch's compiled autograd captures them: last in, first out, from step 0. Found at
  // the first call, by any thread.
  std::span<const uint32_t> capture_order() const;

  // Finds the nodes of the live graph under `root` without a walk: true, with `nodes` filled in step order, if that
  // graph has this schedule's structure and the stock engine would run it in this order. False proves nothing (the
  // caller walks). Never true for a pruned schedule. Runs no user code.
  bool bind(Node& root, std::vector<Node*>& nodes) const;

  // Runs all steps. Throws what a node or hook throws, at the point where the stock engine would, with the same effects
  // done before.
  void run(const ScheduleRun& call) const;

 private:
  const Joints& joints() const;
  void run_one_by_one(const ScheduleRun& call) const;
  template <class Buffers>
  void run_steps(const ScheduleRun& call, Buffers& buffers) const;

  GraphShape shape_;
  std::vector<NodeKind> kinds_;  // by step
  // Steps by ascending sequence number, and whether each has the same number as the one before it. Equal structure
  // and equal comparisons give the stock engine's heap the same history, hence the same order.
  std::vector<uint32_t> by_sequence_;
  std::vector<bool> equal_to_previous_;

  mutable std::once_flag capture_order_once_;
  mutable std::vector<uint32_t> capture_order_;  // written under capture_order_once_

  // Only for calls that ask for it.
  mutable std::once_flag joints_once_;
  mutable std::unique_ptr<const Joints> joints_;  // written under joints_once_
  mutable Pace pace_;

  friend std::unique_ptr<const Schedule> make_schedule(GraphShape shape, std::span<Node* const> nodes);
};

// A schedule for the walked graph.
std::unique_ptr<const Schedule> make_schedule(GraphShape shape, std::span<Node* const> nodes);

// The keys of a shape, one for each step: node type, edges, captures. Positions in it are engine order, so two
// graphs have equal paths exactly when they have equal structure and equal order.
void append_keys(const GraphShape& shape, cache::Path& path);

}  // namespace retrograd
