// Where gradients wait between the step that makes them and the step that takes them.
//
// Two kinds with one interface, chosen once a call: HostBuffers for graphs without accelerator streams, StreamBuffers
// for the others. Both belong to one run of one schedule.
#pragma once

#include <optional>
#include <vector>

#include <ATen/DeviceAccelerator.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/input_buffer.h>

#include "engine/schedule.h"

namespace retrograd {

class HostBuffers {
 public:
  HostBuffers(const GraphShape& shape, const ScheduleRun& call) : shape_(shape), buffers_(shape.steps.size()) {
    if (call.root_gradients != nullptr) {
      room(0)[shape.root_input] = call.root_gradients->front();
    }
  }

  struct Placement {
    void mark_leaf() const {}
  };
  static Placement enter(size_t, Node&) { return {}; }

  // The step's inputs, undefined where no gradient came.
  variable_list take(size_t step) {
    // A GraphRoot has metadata for inputs that it does not take.
    room(step);
    return std::move(buffers_[step]);
  }

  // What waits at a slot now; undefined if nothing does.
  const at::Tensor& peek(size_t step, uint32_t input_nr) { return room(step)[input_nr]; }

  void add(const EdgeShape& edge, at::Tensor&& gradient, const Placement&, Node& target) {
    accumulate(room(edge.step), edge.input_nr, std::move(gradient), target);
  }

  // Into `buffer`, the inputs of `target`.
  static void accumulate(variable_list& buffer, uint32_t input_nr, at::Tensor&& gradient, Node& target) {
    at::Tensor& waiting = buffer[input_nr];
    if (!waiting.defined()) {
      waiting = std::move(gradient);
      return;
    }
    // libtorch's own accumulation, so that its rules (in place only into a tensor nobody else can see, sparse plus
    // dense, subclasses, grad mode) are followed to the letter.
    torch::autograd::InputBuffer stock(std::move(buffer));
    stock.add(input_nr, std::move(gradient), std::nullopt, std::nullopt, &target);
    buffer = std::move(stock.buffer);
  }

 private:
  variable_list& room(size_t step) {
    variable_list& buffer = buffers_[step];
    if (buffer.empty()) buffer.resize(shape_.steps[step].num_inputs);
    return buffer;
  }

  const GraphShape& shape_;
  std::vector<variable_list> buffers_;  // by step
};

// The stock engine's stream contract: a node runs on its own stream, which waits for each input's producer; an
// accumulation runs on the consumer's stream; the streams of leaves are given to the graph task, which makes the
// caller's streams wait for them at the end.
class StreamBuffers {
 public:
  StreamBuffers(const GraphShape& shape, const ScheduleRun& call)
      : shape_(shape), task_(call.task), buffers_(shape.steps.size()) {
    std::optional<c10::Stream> first;
    for (Node* node : call.nodes) {
      const auto stream = node->stream();
      if (!stream) continue;
      if (first && *first != *stream) several_streams_ = true;
      first = stream;
    }
    if (call.root_gradients != nullptr) {
      Node& root = *call.nodes[0];
      at::Tensor gradient = call.root_gradients->front();
      const auto producer = callers_stream(gradient);
      room(0).add(shape.root_input, std::move(gradient), producer, root.stream(), &root);
    } else {
      graph_root_ = call.nodes[0];
    }
  }

  class Placement {
   public:
    Placement(torch::autograd::GraphTask& task, std::optional<c10::Stream> stream, bool is_graph_root)
        : task_(task), stream_(stream), is_graph_root_(is_graph_root), guard_(stream) {}
    void mark_leaf() const {
      if (stream_) task_.leaf_streams.emplace(*stream_);
    }
    const std::optional<c10::Stream>& stream() const { return stream_; }
    bool is_graph_root() const { return is_graph_root_; }

   private:
    torch::autograd::GraphTask& task_;
    std::optional<c10::Stream> stream_;
    bool is_graph_root_;
    c10::OptionalStreamGuard guard_;
  };

  Placement enter(size_t step, Node& fn) {
    torch::autograd::InputBuffer& buffer = room(step);
    const auto stream = buffer.opt_overridden_consumer_stream ? buffer.opt_overridden_consumer_stream : fn.stream();
    for (size_t i = 0; i < buffer.ready_events.size(); ++i) {
      if (!buffer.buffer[i].defined() || !at::accelerator::isAccelerator(buffer.buffer[i].device().type())) continue;
      TORCH_INTERNAL_ASSERT(stream && buffer.ready_streams[i]);
      if (*stream != *buffer.ready_streams[i]) stream->wait(*buffer.ready_events[i]);
    }
    return {task_, stream, &fn == graph_root_};
  }

  variable_list take(size_t step) {
    variable_list inputs = std::move(room(step).buffer);
    buffers_[step].reset();
    return inputs;
  }

  void add(const EdgeShape& edge, at::Tensor&& gradient, const Placement& placement, Node& target) {
    torch::autograd::InputBuffer& buffer = room(edge.step);
    // The stock rule accumulates in place into a tensor that only the buffer refers to. The host may have dropped
    // the other references while a kernel on another stream still reads the memory. A reference held here makes
    // the addition go out of place.
    const at::Tensor held_waiting = several_streams_ ? buffer.buffer[edge.input_nr] : at::Tensor();
    const at::Tensor held_new = held_waiting.defined() ? gradient : at::Tensor();
    // A GraphRoot has one stream, the caller's on one device; its gradients may be on several.
    const auto producer = placement.is_graph_root() ? callers_stream(gradient) : placement.stream();
    buffer.add(edge.input_nr, std::move(gradient), producer, target.stream(), &target);
  }

 private:
  // Where the caller made a gradient that it gave. Not the thread's current stream: the region of a deeply nested call
  // runs on another thread.
  std::optional<c10::Stream> callers_stream(const at::Tensor& gradient) const {
    if (!at::accelerator::isAccelerator(gradient.device().type())) return std::nullopt;
    return task_.caller_current_streams_[static_cast<size_t>(gradient.device().index())];
  }

  torch::autograd::InputBuffer& room(size_t step) {
    auto& buffer = buffers_[step];
    if (!buffer) buffer.emplace(shape_.steps[step].num_inputs);
    return *buffer;
  }

  const GraphShape& shape_;
  torch::autograd::GraphTask& task_;
  std::vector<std::optional<torch::autograd::InputBuffer>> buffers_;  // by step
  bool several_streams_ = false;
  const Node* graph_root_ = nullptr;  // null for a call with one root
};

}  // namespace retrograd
