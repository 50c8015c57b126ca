#include "engine/stats.h"

#include <mutex>
#include <unordered_set>

#include "cache/perturb.h"
#include "engine/fork.h"
#include "engine/plan_cache.h"

namespace retrograd {
namespace {

constexpr double kNanosecond = 1e-9;

void accumulate(Stats& total, const ThreadStats& t) {
  total.schedule_calls += t.schedule_calls.get();
  total.callable_calls += t.callable_calls.get();
  total.fused_calls += t.fused_calls.get();
  total.fused_groups += t.fused_groups.get();
  total.unfused_groups += t.unfused_groups.get();
  total.recordings += t.recordings.get();
  total.plans += t.plans.get();
  total.plans_from_store += t.plans_from_store.get();
  total.captures += t.captures.get();
  for (size_t i = 0; i < total.previous_calls.size(); ++i) total.previous_calls[i] += t.previous_calls[i].get();
  for (size_t i = 0; i < total.schedule_reasons.size(); ++i) {
    total.schedule_reasons[i] += t.schedule_reasons[i].get();
  }
  total.hits += t.hits.get();
  total.misses += t.misses.get();
  total.nested_calls += t.nested_calls.get();
  total.parallel_calls += t.parallel_calls.get();
  total.helped_steps += t.helped_steps.get();
  total.max_depth = std::max(total.max_depth, t.max_depth.get());
  total.walk_seconds += static_cast<double>(t.walk_ns.get()) * kNanosecond;
  total.lookup_seconds += static_cast<double>(t.lookup_ns.get()) * kNanosecond;
  total.run_seconds += static_cast<double>(t.run_ns.get()) * kNanosecond;
}

void subtract(Stats& total, const Stats& base) {
  total.schedule_calls -= base.schedule_calls;
  total.callable_calls -= base.callable_calls;
  total.fused_calls -= base.fused_calls;
  total.fused_groups -= base.fused_groups;
  total.unfused_groups -= base.unfused_groups;
  total.recordings -= base.recordings;
  total.plans -= base.plans;
  total.plans_from_store -= base.plans_from_store;
  total.captures -= base.captures;
  for (size_t i = 0; i < total.previous_calls.size(); ++i) total.previous_calls[i] -= base.previous_calls[i];
  for (size_t i = 0; i < total.schedule_reasons.size(); ++i) {
    total.schedule_reasons[i] -= base.schedule_reasons[i];
  }
  total.hits -= base.hits;
  total.misses -= base.misses;
  total.nested_calls -= base.nested_calls;
  total.parallel_calls -= base.parallel_calls;
  total.helped_steps -= base.helped_steps;
  total.walk_seconds -= base.walk_seconds;
  total.lookup_seconds -= base.lookup_seconds;
  total.run_seconds -= base.run_seconds;
}

// All threads' counters. Never destroyed: threads may exit after static destructors ran.
struct Registry {
  std::mutex mutex;
  std::unordered_set<ThreadStats*> live;  // guarded by mutex
  Stats exited;                           // guarded by mutex: totals of threads that are gone
  Stats baseline;                         // guarded by mutex: what reset_stats() saw; subtracted on reading

  Stats sum_locked() const {
    Stats total = exited;
    for (const ThreadStats* t : live) accumulate(total, *t);
    return total;
  }
};

Registry& registry() {
  static auto* const instance = std::make_unique<Registry>().release();
  return *instance;
}

}  // namespace

ThreadStats::ThreadStats() {
  std::lock_guard lock(registry().mutex);
  registry().live.insert(this);
}

ThreadStats::~ThreadStats() {
  std::lock_guard lock(registry().mutex);
  registry().live.erase(this);
  cache::perturb("stats.thread_ending");
  accumulate(registry().exited, *this);
}

ThreadStats& thread_stats() {
  thread_local ThreadStats stats;
  return stats;
}

void for_each_thread(c10::function_ref<void(const ThreadStats&)> visit) {
  const std::lock_guard lock(registry().mutex);
  for (const ThreadStats* t : registry().live) visit(*t);
}

Stats stats() {
  Stats total;
  {
    std::lock_guard lock(registry().mutex);
    total = registry().sum_locked();
    subtract(total, registry().baseline);
  }
  const cache::Trie::Stats trie = plan_trie().stats();
  total.cache_leaves = trie.leaves;
  total.cache_nodes = trie.nodes;
  total.cache_evictions = trie.evictions;
  return total;
}

void reset_stats() noexcept {
  std::lock_guard lock(registry().mutex);
  registry().baseline = registry().sum_locked();
  cache::perturb("stats.resetting");
  // The deepest call is a maximum, not a sum, so it cannot be subtracted. A thread that raises its own at this
  // moment may keep the old value; its next deeper call corrects it.
  registry().exited.max_depth = 0;
  for (ThreadStats* t : registry().live) t->max_depth.set(0);
}

namespace fork_part {

void stats_before() {
  thread_stats();  // made now: making it takes the mutex
  registry().mutex.lock();
}
void stats_after_in_parent() { registry().mutex.unlock(); }
void stats_after_in_child() {
  ThreadStats* const mine = &thread_stats();
  for (ThreadStats* t : registry().live) {
    if (t != mine) accumulate(registry().exited, *t);  // its thread is gone, its memory is not
  }
  registry().live = {mine};
  registry().mutex.unlock();
}

}  // namespace fork_part

std::string_view name(PreviousReason reason) noexcept {
  switch (reason) {
    case PreviousReason::kNotEnabled:
      return "not_enabled";
    case PreviousReason::kAnomalyMode:
      return "anomaly_mode";
    case PreviousReason::kDispatchMode:
      return "dispatch_mode";
    case PreviousReason::kFunctorch:
      return "functorch";
    case PreviousReason::kCompiledAutograd:
      return "compiled_autograd";
    case PreviousReason::kIrregularCall:
      return "irregular_call";
    case PreviousReason::kCount:
      break;
  }
  return "unknown";
}

std::string_view name(ScheduleReason reason) noexcept {
  switch (reason) {
    case ScheduleReason::kCreateGraph:
      return "create_graph";
    case ScheduleReason::kCaptureInProgress:
      return "capture_in_progress";
    case ScheduleReason::kGraphInUse:
      return "graph_in_use";
    case ScheduleReason::kInsideCapture:
      return "inside_capture";
    case ScheduleReason::kNoCompiler:
      return "no_compiler";
    case ScheduleReason::kNotCapturable:
      return "not_capturable";
    case ScheduleReason::kWarmingUp:
      return "warming_up";
    case ScheduleReason::kCompiling:
      return "compiling";
    case ScheduleReason::kNotFusable:
      return "not_fusable";
    case ScheduleReason::kTooManyKeys:
      return "too_many_keys";
    case ScheduleReason::kStreams:
      return "streams";
    case ScheduleReason::kCount:
      break;
  }
  return "unknown";
}

}  // namespace retrograd
