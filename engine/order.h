// Which step of a schedule runs next.
//
// As long as a call runs alone, its steps run as the schedule has them. A nested call changes that: in the stock engine
// it shares the ready heap with the calls around it. Its nodes all come before theirs, but a binary heap with more
// elements breaks ties among equal sequence numbers (several AccumulateGrad nodes that are ready at once) in another
// way, for the nested call and afterwards for the outer one. No gradient depends on it; the order of hooks does.
//
// So when a nested call begins, the calls around it go over from the schedule's order to a live heap, which they and
// the nested call then share as in the stock engine. A nested call that finds the heap empty keeps to its schedule.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <c10/macros/Macros.h>

#include "engine/starved.h"
#include "engine/walk.h"

namespace retrograd {

// The stock engine's ready heap for a chain of nested calls. Lives in the outermost call's frame. Only one call of a
// chain runs at a time, on whichever thread, so no lock is needed.
class ReadyHeap {
 public:
  struct Task {
    uint64_t depth;  // of the call; deeper calls' tasks come first
    uint64_t sequence_nr;
    uint64_t call;  // whose step it is
    uint32_t step;
  };

  ReadyHeap() = default;
  ReadyHeap(const ReadyHeap&) = delete;
  ReadyHeap& operator=(const ReadyHeap&) = delete;

  bool empty() const { return tasks_.empty(); }
  void push(const Task& task);
  Task pop();
  uint64_t new_call() { return ++calls_; }

 private:
  std::vector<Task> tasks_;
  uint64_t calls_ = 0;
};

// One call's progress through its steps. Owned by the call; the nested call's region goes live through it.
class Order {
 public:
  // `heap` is the chain's; `depth` the call's own. Starts live if the heap is not empty.
  Order(const GraphShape& shape, std::span<Node* const> nodes, uint64_t depth, ReadyHeap& heap);
  Order(const Order&) = delete;
  Order& operator=(const Order&) = delete;

  // The step to run next, or kNoStep when all that can run have run. A step that a post-hook left without one of its
  // gradients never comes.
  uint32_t next() {
    if (C10_LIKELY(!live_ && !starved_.any())) return current_ = done_ < shape_.steps.size() ? done_++ : kNoStep;
    return current_ = next_in_rare_cases();
  }

  // The step that next() gave last has sent something along its first `count` edges (all, or fewer if a post-hook
  // returned fewer gradients; none if the node itself did not run).
  void followed(size_t count) {
    if (C10_LIKELY(!live_ && count == shape_.steps[current_].num_edges)) return;
    followed_in_rare_cases(count);
  }

  // Goes over to the heap. Called while the step that next() gave last is running; may be called again.
  void go_live();

  // After the last step: throws the stock engine's error if a step that never came had been sent something.
  void check_end() const { starved_.check_end(); }

 private:
  uint32_t next_in_rare_cases();
  void followed_in_rare_cases(size_t count);
  void make_ready(uint32_t step);
  void follow(std::span<const EdgeShape> edges);  // on the heap
  uint32_t next_on_heap();

  const GraphShape& shape_;
  const std::span<Node* const> nodes_;
  const uint64_t depth_;
  ReadyHeap& heap_;
  uint64_t call_ = 0;  // on the heap

  uint32_t current_ = kNoStep;
  uint32_t done_ = 0;  // in schedule order: steps before this one were given or are starved
  bool live_ = false;

  StarvedSteps starved_;

  // Live only.
  std::vector<uint32_t> waiting_for_;  // by step: edges that have yet to be followed
  size_t ready_ = 0;                   // this call's tasks on the heap
};

}  // namespace retrograd
