// Counters that are always on. Each thread writes only its own, with plain relaxed stores (no read-modify-write, no
// shared cache line); stats() sums them. A thread that exits leaves its totals behind.
#pragma once

#include <atomic>
#include <chrono>

#include <c10/util/FunctionRef.h>

#include "retrograd/retrograd.h"

namespace retrograd {

// A counter with one writer, its thread, and any number of readers.
class Counter {
 public:
  void add(uint64_t n) noexcept { value_.store(value_.load(std::memory_order_relaxed) + n, std::memory_order_relaxed); }
  void raise_to(uint64_t n) noexcept {
    if (value_.load(std::memory_order_relaxed) < n) value_.store(n, std::memory_order_relaxed);
  }
  void set(uint64_t n) noexcept { value_.store(n, std::memory_order_relaxed); }
  uint64_t get() const noexcept { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

struct ThreadStats {
  ThreadStats();   // registers
  ~ThreadStats();  // folds into the totals of exited threads
  ThreadStats(const ThreadStats&) = delete;
  ThreadStats& operator=(const ThreadStats&) = delete;

  Counter schedule_calls, callable_calls, fused_calls, fused_groups, unfused_groups, recordings, plans,
      plans_from_store, parallel_calls, helped_steps, captures, hits, misses, nested_calls, max_depth, walk_ns,
      lookup_ns, run_ns;
  std::array<Counter, static_cast<size_t>(PreviousReason::kCount)> previous_calls;
  std::array<Counter, static_cast<size_t>(ScheduleReason::kCount)> schedule_reasons;

  std::atomic<uint32_t> retained_calls{0};  // calls in progress that keep their graph (engine/retained.h)

  void count_previous(PreviousReason reason) noexcept { previous_calls[static_cast<size_t>(reason)].add(1); }
  void count_fallback(ScheduleReason reason) noexcept { schedule_reasons[static_cast<size_t>(reason)].add(1); }
  void count_lookup(bool hit) noexcept { (hit ? hits : misses).add(1); }
};

ThreadStats& thread_stats();

// Calls `visit` for every living thread's counters, while none can come or go.
void for_each_thread(c10::function_ref<void(const ThreadStats&)> visit);

// Adds the time since its construction, or since the last lap(), to counters.
class Stopwatch {
 public:
  void lap(Counter& counter) noexcept {
    const auto now = Clock::now();
    counter.add(static_cast<uint64_t>(std::chrono::nanoseconds(now - start_).count()));
    start_ = now;
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

}  // namespace retrograd
