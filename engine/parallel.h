// Running independent branches of one graph at the same time: on the calling thread and on threads of a oneTBB arena.
//
// Everything that can be seen from outside is as on the stock engine. A step with side effects (AccumulateGrad, hooks,
// Python and custom functions) runs on the calling thread, in the stock engine's order, and only once every step before
// it has succeeded; so an error leaves behind what it would have left there. Only libtorch's own functions without
// hooks run ahead of their turn. Gradients that meet are kept apart until the step that takes them runs, and are then
// added in the stock engine's order, so results are the same bit for bit.
//
// Only for calls that no user code can watch from inside a node: without inputs=, create_graph, saved-tensor hooks,
// accelerator streams.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/walk.h"

namespace retrograd {

class Schedule;
struct ScheduleRun;

// What such runs of one schedule share. Immutable.
class Joints {
 public:
  explicit Joints(const GraphShape& shape);

  // The edges that lead to `step`, as places in GraphShape::edges, in the order in which the stock engine follows them.
  std::span<const uint32_t> edges_into(uint32_t step) const {
    return {edges_.data() + first_[step], first_[step + 1] - first_[step]};
  }
  uint32_t waits_for(uint32_t step) const { return first_[step + 1] - first_[step]; }

 private:
  std::vector<uint32_t> first_;  // by step, into edges_; one more at the end
  std::vector<uint32_t> edges_;
};

// Which of the two ways is faster for a graph, found by trying: a few calls each way, then the better one, with a look
// at the other now and then. Graphs that take less than 200 us are never split: waking a thread takes a large part of
// that. Any number of threads; measurements may get lost.
class Pace {
 public:
  using Nanoseconds = std::chrono::nanoseconds;

  bool choose_parallel() noexcept;
  void note(bool parallel, Nanoseconds time) noexcept;

 private:
  static constexpr int64_t kWorthwhile = 200'000;  // ns
  static constexpr uint32_t kTrials = 3;           // each way
  static constexpr uint32_t kLookEvery = 64;       // calls

  struct Side {
    std::atomic<int64_t> time{0};  // ns, moving average
    std::atomic<uint32_t> runs{0};
  };
  std::array<Side, 2> sides_;  // serial, parallel
  std::atomic<uint32_t> calls_{0};
};

// Whether RETROGRAD_PARALLEL=always is in the environment: no trials, for tests and for measuring.
bool always_parallel();

// Runs all steps. Throws what a node or hook throws, with the effects that the stock engine would have had before.
void run_parallel(const Schedule& schedule, const Joints& joints, const ScheduleRun& call);

}  // namespace retrograd
