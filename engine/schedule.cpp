#include "engine/schedule.h"

#include <algorithm>
#include <numeric>

#include "engine/buffers.h"
#include "engine/order.h"
#include "engine/stats.h"
#include "engine/step_runner.h"

namespace retrograd {
namespace {

// Lets nested calls see the call's order, exactly as long as there is one: when a step throws, gradients that waited
// are dropped after it is gone, and a finalizer of theirs may call backward.
class StepsRunning {
 public:
  StepsRunning(CallFrame& frame, Order& order) : frame_(frame) { frame.order = &order; }
  ~StepsRunning() {
    frame_.order = nullptr;
    frame_.current_node = nullptr;
  }
  StepsRunning(const StepsRunning&) = delete;
  StepsRunning& operator=(const StepsRunning&) = delete;

 private:
  CallFrame& frame_;
};

}  // namespace

Schedule::Schedule(GraphShape shape) : shape_(std::move(shape)) {
  kinds_.reserve(shape_.steps.size());
  for (const StepShape& step : shape_.steps) kinds_.push_back(node_kind(*step.type));
}

std::unique_ptr<const Schedule> make_schedule(GraphShape shape, std::span<Node* const> nodes) {
  auto schedule = std::make_unique<Schedule>(std::move(shape));
  auto& order = schedule->by_sequence_;
  order.resize(nodes.size());
  std::iota(order.begin(), order.end(), 0U);
  std::sort(order.begin(), order.end(),
            [&](uint32_t a, uint32_t b) { return nodes[a]->sequence_nr() < nodes[b]->sequence_nr(); });
  schedule->equal_to_previous_.resize(nodes.size(), false);
  for (size_t i = 1; i < order.size(); ++i) {
    schedule->equal_to_previous_[i] = nodes[order[i]]->sequence_nr() == nodes[order[i - 1]]->sequence_nr();
  }
  return schedule;
}

std::span<const uint32_t> Schedule::capture_order() const {
  std::call_once(capture_order_once_, [this] {
    std::vector<uint32_t> waits_for(shape_.steps.size(), 0);
    for (const EdgeShape& edge : shape_.edges) {
      if (edge.step != kNoStep) ++waits_for[edge.step];
    }
    std::vector<uint32_t> stack{0};
    std::vector<uint32_t> order;
    order.reserve(shape_.steps.size());
    while (!stack.empty()) {
      const uint32_t k = stack.back();
      stack.pop_back();
      order.push_back(k);
      for (const EdgeShape& edge : shape_.edges_of(shape_.steps[k])) {
        if (edge.step != kNoStep && --waits_for[edge.step] == 0) stack.push_back(edge.step);
      }
    }
    capture_order_ = std::move(order);
  });
  return capture_order_;
}

bool Schedule::bind(Node& root, std::vector<Node*>& nodes) const {
  if (shape_.pruned) return false;
  nodes.assign(shape_.steps.size(), nullptr);
  nodes[0] = &root;
  for (size_t k = 0; k < shape_.steps.size(); ++k) {
    const StepShape& step = shape_.steps[k];
    Node& node = *nodes[k];
    const edge_list& edges = node.next_edges();
    if (&typeid(node) != step.type || node.num_inputs() != step.num_inputs || edges.size() != step.num_edges) {
      return false;
    }
    const EdgeShape* expected = shape_.edges.data() + step.first_edge;
    for (const Edge& edge : edges) {
      const EdgeShape& e = *expected++;
      Node* target = edge.function.get();
      if (e.step == kNoStep) {
        if (target != nullptr) return false;
        continue;
      }
      if (target == nullptr || edge.input_nr != e.input_nr) return false;
      Node*& bound = nodes[e.step];
      if (bound == nullptr) {
        bound = target;
      } else if (bound != target) {
        return false;
      }
    }
  }
  // Two steps must not be one node, which the structure alone does not show. Steps of different sequence numbers are
  // different nodes; those of equal numbers are looked at one by one.
  thread_local NodeTable tied;
  for (size_t i = 1; i < by_sequence_.size(); ++i) {
    const Node* before = nodes[by_sequence_[i - 1]];
    const Node* now = nodes[by_sequence_[i]];
    if (!equal_to_previous_[i]) {
      if (before->sequence_nr() >= now->sequence_nr()) return false;
      continue;
    }
    if (before->sequence_nr() != now->sequence_nr()) return false;
    if (!equal_to_previous_[i - 1]) {  // the first pair of a group
      tied.reset(by_sequence_.size() - i);
      tied.insert(before, 0);
    }
    if (!tied.insert(now, 0).second) return false;
  }
  return true;
}

const Joints& Schedule::joints() const {
  std::call_once(joints_once_, [this] { joints_ = std::make_unique<const Joints>(shape_); });
  return *joints_;
}

void Schedule::run(const ScheduleRun& call) const {
  if (C10_LIKELY(!call.parallel)) {
    run_one_by_one(call);
    return;
  }
  const bool parallel = always_parallel() || pace_.choose_parallel();
  const auto start = std::chrono::steady_clock::now();
  if (parallel) {
    thread_stats().parallel_calls.add(1);
    run_parallel(*this, joints(), call);
  } else {
    run_one_by_one(call);
  }
  pace_.note(parallel, std::chrono::steady_clock::now() - start);
}

void Schedule::run_one_by_one(const ScheduleRun& call) const {
  if (C10_UNLIKELY(call.use_streams)) {
    StreamBuffers buffers(shape_, call);
    run_steps(call, buffers);
  } else {
    HostBuffers buffers(shape_, call);
    run_steps(call, buffers);
  }
}

template <class Buffers>
void Schedule::run_steps(const ScheduleRun& call, Buffers& buffers) const {
  StepRunner<Buffers> steps(*this, call, buffers);
  Order order(shape_, call.nodes, call.frame.depth, *call.frame.heap);
  const StepsRunning running(call.frame, order);
  for (uint32_t k = order.next(); k != kNoStep; k = order.next()) {
    steps.run(k, [&](size_t count) { order.followed(count); });
  }
  order.check_end();
}

void append_keys(const GraphShape& shape, cache::Path& path) {
  // The call's own shape goes into the first key: how its gradient enters, and whether it prunes.
  for (size_t k = 0; k < shape.steps.size(); ++k) {
    const StepShape& step = shape.steps[k];
    path.begin_key();
    path.put(reinterpret_cast<uintptr_t>(step.type));
    path.put(step.num_inputs);
    path.put(step.num_edges);
    path.put(step.num_captures);
    path.put(static_cast<uint8_t>(step.needed));
    if (k == 0) {
      path.put(static_cast<uint8_t>(shape.pruned));
      path.put(shape.root_input);
    }
    for (const EdgeShape& edge : shape.edges_of(step)) {
      // Relative, so that a path's tail does not depend on how much comes before it.
      path.put(edge.step == kNoStep ? kNoStep : edge.step - static_cast<uint32_t>(k));
      path.put(edge.input_nr);
    }
    for (const CaptureShape& capture : shape.captures_of(step)) {
      path.put(capture.input_nr);
      path.put(capture.output);
    }
    path.end_key();
  }
}

}  // namespace retrograd
