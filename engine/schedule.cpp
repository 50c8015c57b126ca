#include "engine/schedule.h"

#include <algorithm>
#include <numeric>

#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/input_buffer.h>

#include "engine/buffers.h"
#include "engine/gated_hooks.h"
#include "engine/order.h"

namespace retrograd {
namespace {

// The thread-local state that the stock engine gives every node afresh. Saving and restoring all of it costs more
// than many a node, so it is restored only after steps that ran user code: hooks, users' functions, and libtorch's own
// nodes when they unpacked a tensor that was saved with hooks. After other steps a glance at the most important parts
// has to do (a gradient of a tensor subclass may have run anything).
class Baseline {
 public:
  explicit Baseline(const torch::autograd::GraphTask& task)
      : state_(task.thread_locals_),
        autograd_(c10::AutogradState::get_tls_state()),
        keys_(c10::impl::tls_local_dispatch_key_set()),
        context_(thread_context()),
        unpack_hooks_(context_.unpack_hooks),
        ungated_hooks_(ungated_hooks_exist()) {}

  void restore() { at::ThreadLocalState::setThreadLocalState(state_); }
  void restore_if_changed() {
    if (C10_UNLIKELY(context_.unpack_hooks != unpack_hooks_ || ungated_hooks_)) {
      unpack_hooks_ = context_.unpack_hooks;
      restore();
      return;
    }
    const auto& now = c10::AutogradState::get_tls_state();
    const auto keys = c10::impl::tls_local_dispatch_key_set();
    if (C10_LIKELY(now.get_grad_mode() == autograd_.get_grad_mode() &&
                   now.get_inference_mode() == autograd_.get_inference_mode() &&
                   now.get_fw_grad_mode() == autograd_.get_fw_grad_mode() &&
                   now.get_multithreading_enabled() == autograd_.get_multithreading_enabled() &&
                   now.get_view_replay_enabled() == autograd_.get_view_replay_enabled() &&
                   keys.included_ == keys_.included_ && keys.excluded_ == keys_.excluded_)) {
      return;
    }
    restore();
  }

 private:
  const at::ThreadLocalState& state_;
  c10::AutogradState autograd_;
  c10::impl::LocalDispatchKeySet keys_;
  const ThreadContext& context_;
  uint64_t unpack_hooks_;
  const bool ungated_hooks_;  // such hooks are not counted
};

// Hook lists may grow while they are run (a hook may add a hook to its own node), so they are read by index.
variable_list call_tensor_pre_hooks(Node& fn, variable_list inputs) {
  auto& hooks = fn.tensor_pre_hooks();
  for (size_t i = 0; i < hooks.size(); ++i) inputs = (*hooks[i])(inputs);
  for (const auto& [output_nr, hook] : fn.retains_grad_hooks()) inputs = (*hook)(inputs);
  return inputs;
}

bool runs_user_code(Node& fn, NodeKind kind) {
  return kind == NodeKind::kUser || !fn.pre_hooks().empty() || !fn.post_hooks().empty() ||
         !fn.tensor_pre_hooks().empty() || !fn.retains_grad_hooks().empty() ||
         (kind == NodeKind::kAccumulate && fn.tensor_post_acc_grad_hooks() != nullptr);
}

void validate(Node& fn, variable_list& outputs) {
  torch::autograd::validate_outputs(fn.next_edges(), outputs, [&fn](const std::string& message) {
    return "Function " + fn.name() + " returned an " + message;
  });
}

// A node that has no hooks. (It may get post-hooks while it runs, from a saved-tensor hook; they see no inputs.)
variable_list call_bare_node(Node& fn, variable_list inputs, bool keep_graph) {
  if (!keep_graph) fn.will_release_variables();
  variable_list outputs = fn(std::move(inputs));
  validate(fn, outputs);
  auto& post_hooks = fn.post_hooks();
  for (size_t i = 0; i < post_hooks.size(); ++i) outputs = (*post_hooks[i])(outputs, {});
  return outputs;
}

// The node with its hooks: what the stock engine's call_function does.
variable_list call_node(Node& fn, variable_list inputs, bool keep_graph) {
  inputs = call_tensor_pre_hooks(fn, std::move(inputs));
  auto& pre_hooks = fn.pre_hooks();
  for (size_t i = 0; i < pre_hooks.size(); ++i) inputs = (*pre_hooks[i])(inputs);
  if (!keep_graph) fn.will_release_variables();

  variable_list outputs;
  auto& post_hooks = fn.post_hooks();
  const bool had_post_hooks = !post_hooks.empty();
  if (had_post_hooks) {
    // Post-hooks see the inputs. AccumulateGrad counts on exactly this one extra reference when it decides whether
    // it may take a gradient over instead of copying it.
    outputs = fn(variable_list(inputs));
  } else {
    outputs = fn(std::move(inputs));
    inputs.clear();
  }
  validate(fn, outputs);
  // A hook that the node itself just added gets no inputs, as in the stock engine.
  for (size_t i = 0; i < post_hooks.size(); ++i) outputs = (*post_hooks[i])(outputs, inputs);
  return outputs;
}

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
    std::vector<uint32_t> stack{0}, order;
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

void Schedule::run(const ScheduleRun& call) const {
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
  Baseline baseline(call.task);
  bool described = call.describe_at_start;
  if (described) call.describe_task();
  Order order(shape_, call.nodes, call.frame.depth, *call.frame.heap);
  const StepsRunning running(call.frame, order);
  for (uint32_t k = order.next(); k != kNoStep; k = order.next()) {
    const StepShape& step = shape_.steps[k];
    Node& fn = *call.nodes[k];
    call.frame.current_node = &fn;
    RECORD_FUNCTION(c10::str("autograd::engine::evaluate_function: ", fn.name()), c10::ArrayRef<const c10::IValue>());
    const auto placement = buffers.enter(k, fn);
    const bool user_code = runs_user_code(fn, kinds_[k]);
    if (user_code && !described) {
      call.describe_task();
      described = true;
    }
    variable_list inputs = buffers.take(k);

    if (C10_UNLIKELY(shape_.pruned)) {
      // Tensor hooks run wherever the engine passes; for a node that will run they come later, with its other hooks.
      if (!step.needed) inputs = call_tensor_pre_hooks(fn, std::move(inputs));
      for (const CaptureShape& capture : shape_.captures_of(step)) {
        call.captured[capture.output] = inputs[capture.input_nr];
        placement.mark_leaf();
      }
      if (!step.needed) {
        order.followed(0);
        if (user_code) baseline.restore();
        continue;
      }
    }

    variable_list outputs = user_code ? call_node(fn, std::move(inputs), call.keep_graph)
                                      : call_bare_node(fn, std::move(inputs), call.keep_graph);
    if (!call.keep_graph) fn.release_variables();

    const auto edges = shape_.edges_of(step);
    if (outputs.empty()) placement.mark_leaf();
    const size_t count = std::min(outputs.size(), edges.size());
    order.followed(count);
    for (size_t i = 0; i < count; ++i) {
      if (edges[i].step == kNoStep || !outputs[i].defined()) continue;
      buffers.add(edges[i], std::move(outputs[i]), placement, *call.nodes[edges[i].step]);
    }
    if (user_code) {
      baseline.restore();
    } else {
      baseline.restore_if_changed();
    }
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
