#include "engine/retained.h"

#include <atomic>

#include "cache/perturb.h"
#include "engine/fork.h"
#include "engine/stats.h"

namespace retrograd {
namespace {

// A retained graph is being captured. Callers set their own counter before they read this, the capturing thread sets
// this before it reads the counters, all in one order: at least one of the two sees the other.
std::atomic<bool> capturing_retained{false};

}  // namespace

RetainedCall::RetainedCall(bool keep_graph, c10::function_ref<void(Wait)> outside) : counted_(keep_graph) {
  if (!counted_) return;
  auto& mine = thread_stats().retained_calls;
  for (;;) {
    const uint32_t before = mine.load(std::memory_order_relaxed);
    mine.store(before + 1, std::memory_order_seq_cst);
    cache::perturb("retained.counted");
    // A call nested in one that is counted must go on: the capturing thread has seen that one and given up.
    if (before > 0 || !capturing_retained.load(std::memory_order_seq_cst)) return;
    mine.store(before, std::memory_order_seq_cst);
    outside([] { capturing_retained.wait(true, std::memory_order_seq_cst); });
  }
}

RetainedCall::~RetainedCall() {
  if (!counted_) return;
  auto& mine = thread_stats().retained_calls;
  mine.store(mine.load(std::memory_order_relaxed) - 1, std::memory_order_release);
}

CaptureRight::CaptureRight(bool keep_graph, const CallFrame& frame) : retained_(keep_graph) {
  if (!retained_) return;
  capturing_retained.store(true, std::memory_order_seq_cst);
  cache::perturb("capture.announced");
  // Calls of this chain wait for this one; they may have come in on other threads.
  const auto in_chain = [&frame](const ThreadStats& thread) {
    uint32_t calls = 0;
    for (const CallFrame* f = &frame; f != nullptr; f = f->parent) calls += f->retained_on == &thread ? 1 : 0;
    return calls;
  };
  const ThreadStats* const mine = &thread_stats();
  for_each_thread([&](const ThreadStats& thread) {
    if (&thread == mine) return;  // whatever it is in, it is waiting for this
    if (thread.retained_calls.load(std::memory_order_seq_cst) > in_chain(thread)) granted_ = false;
  });
}

CaptureRight::~CaptureRight() {
  if (!retained_) return;
  cache::perturb("capture.ending");
  capturing_retained.store(false, std::memory_order_seq_cst);
  capturing_retained.notify_all();
}

// The thread that was capturing is not in the child.
void fork_part::retained_after_in_child() { capturing_retained.store(false, std::memory_order_seq_cst); }

}  // namespace retrograd
