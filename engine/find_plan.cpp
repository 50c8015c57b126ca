#include "engine/find_plan.h"

#include <array>
#include <atomic>

#include "cache/perturb.h"
#include "engine/fork.h"
#include "engine/plan_cache.h"

namespace retrograd {
namespace {

// Graphs with more steps than this are walked at every call. A thread keeps nothing of them between calls: finding
// the plan is a small part of running it, and the memory would be large.
constexpr size_t kLargeGraph = size_t{1} << 16U;

// The plans that this thread used last, most recent first. A training step visits few graphs over and over (an
// outer one and, with reentrant checkpoint, one for each block), and binding a plan to a graph is several times
// cheaper than walking it, so these are tried before the cache is asked.
class RecentPlans {
 public:
  void clear() {
    while (size_ > 0) entries_[--size_] = {};
  }

  // The first recent plan that fits the graph under `root`, with call.nodes bound; null if none does.
  FoundPlan find(Node& root, PreparedCall& call) {
    const cache::Trie& trie = plan_trie();
    if (generation_ != trie.generation()) {  // cleared: let go of all
      generation_ = trie.generation();
      clear();
    }
    for (size_t i = 0; i < size_; ++i) {
      const FoundPlan& entry = entries_[i];
      // The root's input is not part of what bind() compares.
      if (call.single_root && entry.schedule->shape().root_input != call.roots[0].input_nr) continue;
      if (!entry.schedule->bind(root, call.nodes)) continue;
      cache::perturb("recent.bound");
      if (!trie.touch(*entry.leaf)) {  // evicted: must be found anew, or made anew
        forget(i);
        return {};
      }
      const size_t closer = i / 2;
      if (closer != i) std::swap(entries_[i], entries_[closer]);
      return entries_[closer];
    }
    return {};
  }

  void remember(const FoundPlan& found) {
    // It may be here already: bind() refuses a graph whose sequence numbers compare differently, though the order is
    // the same.
    for (size_t i = 0; i < size_; ++i) {
      if (entries_[i].schedule == found.schedule) return;
    }
    if (size_ < entries_.size()) ++size_;
    for (size_t i = size_ - 1; i > 0; --i) entries_[i] = std::move(entries_[i - 1]);
    entries_[0] = found;
  }

 private:
  void forget(size_t i) {
    for (; i + 1 < size_; ++i) entries_[i] = std::move(entries_[i + 1]);
    entries_[--size_] = {};
  }

  std::array<FoundPlan, 8> entries_;
  size_t size_ = 0;
  uint64_t generation_ = 0;
};

struct PerThread {
  RecentPlans recent;
  cache::Memo memo;

  // Working memory of a call that walks.
  struct Walked {
    GraphShape shape;
    WalkedGraph graph;
    cache::Path path;
  } walked;
};

PerThread& per_thread() {
  thread_local PerThread state;
  return state;
}

// Never destroyed: threads may run backward while static destructors run.
std::atomic<cache::Trie*>& trie_slot() {
  static std::atomic<cache::Trie*> slot{std::make_unique<cache::Trie>().release()};
  return slot;
}

}  // namespace

cache::Trie& plan_trie() { return *trie_slot().load(std::memory_order_acquire); }

// Another thread may have been anywhere inside the trie when the process forked, with locks that nobody will let go.
// The child starts with an empty one; the old one is never touched again.
void fork_part::plan_cache_after_in_child() {
  per_thread().recent.clear();
  trie_slot().store(std::make_unique<cache::Trie>().release(), std::memory_order_release);
}

void cache_clear() { plan_trie().clear(); }

FoundPlan find_plan(Node& root, PreparedCall& call, ThreadStats& stats) {
  PerThread& mine = per_thread();
  Stopwatch watch;
  const bool prunes = !call.outputs.empty();
  if (!prunes) {
    if (FoundPlan found = mine.recent.find(root, call); found.schedule != nullptr) {
      watch.lap(stats.walk_ns);
      found.hit = true;
      return found;
    }
  }

  GraphShape& shape = mine.walked.shape;
  WalkedGraph& graph = mine.walked.graph;
  cache::Path& path = mine.walked.path;
  if (!walk(root, call.accumulate, call.outputs, shape, graph)) return {};
  shape.root_input = call.single_root ? call.roots[0].input_nr : 0;
  call.nodes = graph.nodes;
  call.not_running = graph.not_running;
  watch.lap(stats.walk_ns);

  const bool large = shape.steps.size() > kLargeGraph;
  path.clear();
  append_keys(shape, path);
  FoundPlan found;
  cache::perturb("plan.walked");
  found.leaf = plan_trie().find_or_insert(path, large ? nullptr : &mine.memo).leaf;
  // The same structure in the same order makes the same schedule, so one per leaf is enough. Making it runs no
  // user code and takes microseconds: threads that want the same one wait.
  const void* plan = found.leaf->find({});
  found.hit = plan != nullptr;
  if (plan == nullptr) {
    plan = found.leaf->get_or_build({}, cache::Wait::kYes,
                                    [&]() -> std::shared_ptr<const void> { return make_schedule(shape, call.nodes); });
  }
  found.schedule = static_cast<const Schedule*>(plan);
  if (large) {
    mine.walked = {};
  } else if (!prunes) {
    mine.recent.remember(found);
  }
  watch.lap(stats.lookup_ns);
  return found;
}

}  // namespace retrograd
