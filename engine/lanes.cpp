#include "engine/lanes.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/engine.h>

#include "engine/buffers.h"
#include "engine/graph_task.h"
#include "engine/starved.h"
#include "engine/stats.h"
#include "engine/step_runner.h"

namespace retrograd {
namespace {

using torch::autograd::GraphTask;

c10::Device device_of(Node& node) {
  const auto stream = node.stream();
  return stream ? stream->device() : c10::Device(c10::kCPU);
}

struct Segment {
  c10::Device device;
  std::vector<uint32_t> steps;
  std::vector<uint32_t> next;  // segments that wait for this one
};

// Every dependency leads from the last step of a segment to the first one of a later segment, so there are no circles.
std::vector<Segment> cut_into_segments(const GraphShape& shape, std::span<Node* const> nodes) {
  std::vector<c10::Device> devices;
  for (Node* node : nodes) devices.push_back(device_of(*node));
  std::vector<bool> ends(nodes.size(), false);
  std::vector<bool> begins(nodes.size(), false);
  const auto for_each_crossing = [&](const auto& visit) {
    for (uint32_t k = 0; k < nodes.size(); ++k) {
      for (const EdgeShape& edge : shape.edges_of(shape.steps[k])) {
        if (edge.step != kNoStep && devices[edge.step] != devices[k]) visit(k, edge.step);
      }
    }
  };
  for_each_crossing([&](uint32_t from, uint32_t to) { ends[from] = begins[to] = true; });

  std::vector<Segment> segments;
  std::vector<uint32_t> segment_of(nodes.size());
  std::map<c10::Device, uint32_t, decltype([](c10::Device a, c10::Device b) {
             return std::pair(a.type(), a.index()) < std::pair(b.type(), b.index());
           })>
      last;  // by device: its segment that is being filled, or was last
  for (uint32_t k = 0; k < nodes.size(); ++k) {
    const auto found = last.find(devices[k]);
    const bool is_new = found == last.end() || begins[k] || ends[segments[found->second].steps.back()];
    if (is_new) {
      const auto made = static_cast<uint32_t>(segments.size());
      if (found != last.end()) segments[found->second].next.push_back(made);
      segments.push_back({devices[k], {}, {}});
      last.insert_or_assign(devices[k], made);
    }
    segment_of[k] = last.at(devices[k]);
    segments[segment_of[k]].steps.push_back(k);
  }
  std::set<std::pair<uint32_t, uint32_t>> known;
  for_each_crossing([&](uint32_t from, uint32_t to) {
    if (known.emplace(segment_of[from], segment_of[to]).second) {
      segments[segment_of[from]].next.push_back(segment_of[to]);
    }
  });
  return segments;
}

// What the segments of one call share. The stock engine runs them on several threads, and after an error it neither
// waits for a segment that is running on another device nor forgets those that it has queued: so their nodes own this,
// and close() comes before what it refers to goes.
class LaneCall {
 public:
  explicit LaneCall(PreparedCall& call)
      : call_(call),
        shape_(call.schedule->shape()),
        segments_(cut_into_segments(shape_, call.nodes)),
        starved_(shape_) {
    left_.store(segments_.size(), std::memory_order_relaxed);
    for (const Segment& segment : segments_) {
      const auto same =
          std::ranges::find(tokens_, segment.device, [](const at::Tensor& token) { return token.device(); });
      tokens_.push_back(same != tokens_.end() ? *same : at::empty({0}, at::TensorOptions().device(segment.device)));
    }
  }

  std::span<const Segment> segments() const { return segments_; }

  // The engine runs a node on the thread of the device that its gradients are on, so each segment gets a tensor without
  // elements there: the first one of a device from the caller, the others from the one before. From one device to
  // another goes nothing, which is counted all the same: something would make the caller's streams wait for each other.
  const at::Tensor& token(uint32_t segment) const { return tokens_[segment]; }

  // Whether the segment may run; then leave() must follow.
  bool enter() {
    const std::lock_guard lock(running_mutex_);
    if (closed_) return false;
    ++running_;
    return true;
  }
  void leave() {
    const std::lock_guard lock(running_mutex_);
    if (--running_ == 0) none_runs_.notify_all();
  }

  // From now on none begins. Waits for those that run, which end with the step that they are at.
  void close() {
    std::unique_lock lock(running_mutex_);
    closed_ = true;
    none_runs_.wait(lock, [this] { return running_ == 0; });
    buffers_.reset();
  }

  // Before any segment runs.
  void begin() {
    GraphTask& task = current_graph_task();
    task.caller_current_streams_ = call_.caller_streams;
    // Under inputs= the engine asks the task before each segment which nodes are needed, without its lock.
    if (!call_.outputs.empty()) describe_once(task);
  }

  void run(const Segment& segment) {
    GraphTask& task = current_graph_task();
    CallFrame frame = frame_of(call_);
    frame.heap = &frame.own_heap;  // calls nested in different segments may run at the same time
    const ContextScope scope(call_.setting, call_.flags, frame);
    const auto describe_task = [&] { describe_once(task); };
    const ScheduleRun run = schedule_run(call_, task, describe_task, frame);
    std::call_once(begun_, [&] { buffers_.emplace(shape_, run); });
    Buffers buffers(*this, task);
    StepRunner<Buffers> steps(*call_.schedule, run, buffers);
    for (const uint32_t k : segment.steps) {
      if (task.has_error_.load()) return;  // in another segment
      {
        const std::lock_guard lock(mutex_);
        if (starved_.contains(k)) {
          starved_.pass_on(k);
          continue;
        }
      }
      steps.run(k, [&](size_t count) {
        const std::lock_guard lock(mutex_);
        starved_.cut(k, count);
      });
    }
    frame.current_node = nullptr;
    if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) starved_.check_end();
  }

 private:
  void describe_once(GraphTask& task) {
    std::call_once(described_, [&] {
      const std::lock_guard lock(task.mutex_);  // the engine counts down the segments' dependencies meanwhile
      describe(call_, task);
    });
  }

  // The call's buffers, for one segment. Two devices may send a gradient to one step at the same time, as under the
  // stock engine; the order in which such gradients are added is then a matter of timing, as there.
  class Buffers {
   public:
    Buffers(LaneCall& lanes, GraphTask& task) : lanes_(lanes), task_(task) {}

    struct Placement {
      StreamBuffers::Placement inner;
      std::mutex& task_mutex;
      void mark_leaf() const {
        const std::lock_guard lock(task_mutex);
        inner.mark_leaf();
      }
    };
    Placement enter(uint32_t step, Node& fn) {
      const std::lock_guard lock(lanes_.mutex_);
      return {lanes_.buffers_->enter(step, fn), task_.mutex_};
    }
    variable_list take(uint32_t step) {
      const std::lock_guard lock(lanes_.mutex_);
      return lanes_.buffers_->take(step);
    }
    void add(const EdgeShape& edge, at::Tensor&& gradient, const Placement& placement, Node& target) {
      const std::lock_guard lock(lanes_.mutex_);
      lanes_.buffers_->add(edge, std::move(gradient), placement.inner, target);
    }

   private:
    LaneCall& lanes_;
    GraphTask& task_;
  };

  PreparedCall& call_;
  const GraphShape& shape_;
  const std::vector<Segment> segments_;
  std::vector<at::Tensor> tokens_;  // by segment
  std::once_flag begun_, described_;
  std::atomic<size_t> left_{0};

  std::mutex mutex_;  // what follows; never held while a node or hook runs
  std::optional<StreamBuffers> buffers_;
  StarvedSteps starved_;

  std::mutex running_mutex_;  // what follows
  std::condition_variable none_runs_;
  size_t running_ = 0;  // segments
  bool closed_ = false;
};

class LaneNode final : public Node {
 public:
  LaneNode(std::shared_ptr<LaneCall> lanes, uint32_t segment)
      : Node(/*sequence_nr=*/UINT64_MAX - segment), lanes_(std::move(lanes)), segment_(lanes_->segments()[segment]) {}
  std::string name() const override { return "BackwardRegion"; }

 private:
  variable_list apply(variable_list&&) override {
    if (!lanes_->enter()) return variable_list(num_outputs());  // the call has failed
    {
      struct Leaving {
        LaneCall& lanes;
        ~Leaving() { lanes.leave(); }
      } const leaving{*lanes_};
      lanes_->run(segment_);
    }
    if (segment_.next.empty()) next_edges().clear();  // to the output
    variable_list sent;
    const auto segments = lanes_->segments();
    for (const uint32_t next : segment_.next) {
      sent.push_back(segments[next].device == segment_.device ? lanes_->token(next) : at::Tensor());
    }
    return sent;
  }

  const std::shared_ptr<LaneCall> lanes_;
  const Segment& segment_;
};

// The call's root, on the calling thread. A GraphRoot over all first segments would have a stream, for which those on
// other devices would wait.
class LaneRoot final : public Node {
 public:
  explicit LaneRoot(std::shared_ptr<LaneCall> lanes) : Node(/*sequence_nr=*/UINT64_MAX), lanes_(std::move(lanes)) {}
  std::string name() const override { return "BackwardRegion"; }

  void begin_with(uint32_t segment, Edge edge) {
    add_next_edge(std::move(edge));
    first_.push_back(segment);
  }

 private:
  variable_list apply(variable_list&&) override {
    lanes_->begin();
    variable_list sent;
    for (const uint32_t segment : first_) sent.push_back(lanes_->token(segment));
    return sent;
  }

  const std::shared_ptr<LaneCall> lanes_;
  std::vector<uint32_t> first_;
};

}  // namespace

bool is_lane(const Node* node) { return node != nullptr && typeid(*node) == typeid(LaneNode); }

bool is_on_several_devices(const PreparedCall& call) {
  if (!call.use_streams) return false;
  std::optional<c10::Device> first;
  for (Node* node : call.nodes) {
    const auto stream = node->stream();
    if (!stream) continue;
    if (first && *first != stream->device()) return true;
    first = stream->device();
  }
  return false;
}

void run_in_lanes(torch::autograd::Engine& engine, PreparedCall& call) {
  if (call.parent != nullptr && call.parent->order != nullptr) call.parent->order->go_live();
  const auto lanes = std::make_shared<LaneCall>(call);
  const auto segments = lanes->segments();
  std::vector<c10::intrusive_ptr<LaneNode>> nodes;
  for (uint32_t i = 0; i < segments.size(); ++i) nodes.push_back(c10::make_intrusive<LaneNode>(lanes, i));
  std::vector<bool> is_first(segments.size(), true);  // of its device
  const edge_list output = make_output(call);
  // From the end, as a node that has edges leading to it must get none of its own.
  for (auto i = static_cast<uint32_t>(segments.size()); i-- > 0;) {
    if (segments[i].next.empty()) {
      for (const Edge& edge : output) nodes[i]->add_next_edge(edge);
    }
    for (const uint32_t next : segments[i].next) {
      nodes[i]->add_next_edge(Edge(nodes[next], nodes[next]->add_input_metadata(lanes->token(next))));
      if (segments[next].device == segments[i].device) is_first[next] = false;
    }
  }
  const at::Tensor begin = at::empty({0});
  auto root = c10::make_intrusive<LaneRoot>(lanes);
  root->add_input_metadata(begin);
  for (uint32_t i = 0; i < segments.size(); ++i) {
    if (is_first[i]) root->begin_with(i, Edge(nodes[i], nodes[i]->add_input_metadata(lanes->token(i))));
  }
  struct Closing {
    LaneCall& lanes;
    ~Closing() { lanes.close(); }
  } const closing{*lanes};
  execute(engine, call, std::move(root), begin, output);
}

}  // namespace retrograd
