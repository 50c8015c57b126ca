// One step of a call: what the stock engine's evaluate_function does for a node, without its bookkeeping.
#pragma once

#include <algorithm>

#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/engine.h>

#include "engine/buffers.h"
#include "engine/gated_hooks.h"
#include "engine/schedule.h"

namespace retrograd {

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
inline variable_list call_tensor_pre_hooks(Node& fn, variable_list inputs) {
  auto& hooks = fn.tensor_pre_hooks();
  for (size_t i = 0; i < hooks.size(); ++i) inputs = (*hooks[i])(inputs);
  for (const auto& [output_nr, hook] : fn.retains_grad_hooks()) inputs = (*hook)(inputs);
  return inputs;
}

inline bool runs_user_code(Node& fn, NodeKind kind) {
  return kind == NodeKind::kUser || !fn.pre_hooks().empty() || !fn.post_hooks().empty() ||
         !fn.tensor_pre_hooks().empty() || !fn.retains_grad_hooks().empty() ||
         (kind == NodeKind::kAccumulate && fn.tensor_post_acc_grad_hooks() != nullptr);
}

inline void validate(Node& fn, variable_list& outputs) {
  torch::autograd::validate_outputs(fn.next_edges(), outputs, [&fn](const std::string& message) {
    return "Function " + fn.name() + " returned an " + message;
  });
}

// A node that has no hooks. (It may get post-hooks while it runs, from a saved-tensor hook; they see no inputs.)
inline variable_list call_bare_node(Node& fn, variable_list inputs, bool keep_graph) {
  if (!keep_graph) fn.will_release_variables();
  variable_list outputs = fn(std::move(inputs));
  validate(fn, outputs);
  auto& post_hooks = fn.post_hooks();
  for (size_t i = 0; i < post_hooks.size(); ++i) outputs = (*post_hooks[i])(outputs, {});
  return outputs;
}

// The node with its hooks: what the stock engine's call_function does.
inline variable_list call_node(Node& fn, variable_list inputs, bool keep_graph) {
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

// Runs single steps of one call, in whatever order its owner chooses: each with all that the stock engine does around
// a node.
template <class Buffers>
class StepRunner {
 public:
  StepRunner(const Schedule& schedule, const ScheduleRun& call, Buffers& buffers)
      : schedule_(schedule), shape_(schedule.shape()), call_(call), buffers_(buffers), baseline_(call.task) {
    if (call.describe_at_start) describe();
  }

  // Returns along how many of the step's edges something was sent: all, or fewer if a post-hook returned fewer
  // gradients; none if the node itself did not run. `followed` is called with that number before the first gradient
  // is handed on.
  template <class Followed>
  void run(uint32_t k, const Followed& followed) {
    const StepShape& step = shape_.steps[k];
    Node& fn = *call_.nodes[k];
    call_.frame.current_node = &fn;
    RECORD_FUNCTION(c10::str("autograd::engine::evaluate_function: ", fn.name()), c10::ArrayRef<const c10::IValue>());
    const auto placement = buffers_.enter(k, fn);
    const NodeKind kind = schedule_.kind(k);
    const bool user_code = runs_user_code(fn, kind);
    if (user_code) describe();
    variable_list inputs = buffers_.take(k);

    if (C10_UNLIKELY(shape_.pruned)) {
      // Tensor hooks run wherever the engine passes; for a node that will run they come later, with its other hooks.
      if (!step.needed) inputs = call_tensor_pre_hooks(fn, std::move(inputs));
      for (const CaptureShape& capture : shape_.captures_of(step)) {
        call_.captured[capture.output] = inputs[capture.input_nr];
        placement.mark_leaf();
      }
      if (!step.needed) {
        followed(size_t{0});
        if (user_code) baseline_.restore();
        return;
      }
    }

    variable_list outputs = user_code ? call_node(fn, std::move(inputs), call_.keep_graph)
                                      : call_bare_node(fn, std::move(inputs), call_.keep_graph);
    if (!call_.keep_graph) fn.release_variables();

    const auto edges = shape_.edges_of(step);
    if (outputs.empty()) placement.mark_leaf();
    const size_t count = std::min(outputs.size(), edges.size());
    followed(count);
    for (size_t i = 0; i < count; ++i) {
      if (edges[i].step == kNoStep || !outputs[i].defined()) continue;
      buffers_.add(edges[i], std::move(outputs[i]), placement, *call_.nodes[edges[i].step]);
    }
    if (user_code) {
      baseline_.restore();
    } else {
      baseline_.restore_if_changed();
    }
  }

  // Makes the graph task describe the real graph, at most once.
  void describe() {
    if (C10_LIKELY(described_)) return;
    call_.describe_task();
    described_ = true;
  }
  void restore_if_changed() { baseline_.restore_if_changed(); }

 private:
  const Schedule& schedule_;
  const GraphShape& shape_;
  const ScheduleRun& call_;
  Buffers& buffers_;
  Baseline baseline_;
  bool described_ = false;
};

}  // namespace retrograd
