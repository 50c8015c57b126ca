#include "engine/order.h"

#include <algorithm>

#include <c10/util/Exception.h>

namespace retrograd {
namespace {

// The stock engine's comparison of tasks: the one that is "less" comes later.
bool comes_later(const ReadyHeap::Task& a, const ReadyHeap::Task& b) {
  return a.depth == b.depth ? a.sequence_nr < b.sequence_nr : a.depth < b.depth;
}

}  // namespace

void ReadyHeap::push(const Task& task) {
  tasks_.push_back(task);
  std::push_heap(tasks_.begin(), tasks_.end(), comes_later);
}

ReadyHeap::Task ReadyHeap::pop() {
  std::pop_heap(tasks_.begin(), tasks_.end(), comes_later);
  const Task task = tasks_.back();
  tasks_.pop_back();
  return task;
}

Order::Order(const GraphShape& shape, std::span<Node* const> nodes, uint64_t depth, ReadyHeap& heap)
    : shape_(shape), nodes_(nodes), depth_(depth), heap_(heap), starved_(shape) {
  if (!heap.empty()) go_live();
}

uint32_t Order::next_in_rare_cases() {
  if (live_) return next_on_heap();
  while (done_ < shape_.steps.size() && starved_.contains(done_)) starved_.pass_on(done_++);
  return done_ < shape_.steps.size() ? done_++ : kNoStep;
}

void Order::followed_in_rare_cases(size_t count) {
  starved_.cut(current_, count);
  if (live_) follow(starved_.followed_edges(current_));
}

void Order::go_live() {
  if (live_) return;
  live_ = true;
  call_ = heap_.new_call();
  waiting_for_.assign(shape_.steps.size(), 0);
  for (const StepShape& step : shape_.steps) {
    if (!step.needed) continue;
    for (const EdgeShape& edge : shape_.edges_of(step)) {
      if (edge.step != kNoStep) ++waiting_for_[edge.step];
    }
  }
  // Does on the heap what was done so far without it. The steps come off it in the order in which they ran: that is
  // how the schedule's order was found.
  make_ready(0);
  if (current_ == kNoStep) return;
  for (uint32_t step = next_on_heap(); step != current_; step = next_on_heap()) {
    TORCH_INTERNAL_ASSERT(step != kNoStep, "retrograd: a schedule's order is not its heap's order");
    follow(starved_.followed_edges(step));
  }
}

void Order::make_ready(uint32_t step) {
  heap_.push({depth_, nodes_[step]->sequence_nr(), call_, step});
  ++ready_;
}

void Order::follow(std::span<const EdgeShape> edges) {
  for (const EdgeShape& edge : edges) {
    if (edge.step != kNoStep && --waiting_for_[edge.step] == 0) make_ready(edge.step);
  }
}

uint32_t Order::next_on_heap() {
  while (ready_ > 0) {
    const ReadyHeap::Task task = heap_.pop();
    // Tasks of deeper calls that ended in an error stay on the heap; the stock engine skips them in the same way.
    if (task.call != call_) continue;
    --ready_;
    return task.step;
  }
  return kNoStep;
}

}  // namespace retrograd
