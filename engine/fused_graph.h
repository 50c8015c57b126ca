// What the fused backend keeps for one graph: which of its nodes may be compiled together, the ways in which it has
// been cut into groups, and the groups' plans.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "cache/leaf.h"
#include "engine/group_site.h"
#include "engine/partition.h"
#include "engine/schedule.h"
#include "retrograd/retrograd.h"

namespace retrograd {

// Whether a node may be in a group, or why it runs by itself.
enum class Fusable : uint8_t {
  kYes,
  kNotNeeded,  // inputs= leaves it out
  kCaptured,   // grad() wants the gradient that arrives at it
  kUserCode,   // it has hooks, or is a Python function or custom function
  kKind,       // not made from a formula in derivatives.yaml, as AccumulateGrad; or very wide
  kFoundOut,   // it saved tensors with hooks, or could not be recorded, traced or compiled
  kCount
};
// As explain() in Python gives it, such as "user_code".
std::string_view name(Fusable fusable) noexcept;

// When to look again at a group that found no plan, for reasons that are likely to last (a refused key, constants that
// keep changing, kinds of tensors that no plan takes): looking costs about as much as running a few nodes. After some
// failures in a row the pauses between looks grow, up to 256 calls. Calls of other threads may be miscounted; no harm.
class Pause {
 public:
  // Whether this call is to look.
  bool is_over() noexcept {
    const uint32_t left = left_.load(std::memory_order_relaxed);
    if (left == 0) return true;
    left_.store(left - 1, std::memory_order_relaxed);
    return false;
  }
  void lengthen(ScheduleReason reason) noexcept {
    const uint32_t failures = failures_.load(std::memory_order_relaxed) + 1;
    failures_.store(failures, std::memory_order_relaxed);
    reason_.store(reason, std::memory_order_relaxed);
    if (failures > kPatience) left_.store(1U << std::min(failures - kPatience, 8U), std::memory_order_relaxed);
  }
  // Writes nothing where nothing is to be written: plans are found in parallel.
  void end() noexcept {
    if (failures_.load(std::memory_order_relaxed) != 0) failures_.store(0, std::memory_order_relaxed);
  }
  ScheduleReason reason() const noexcept { return reason_.load(std::memory_order_relaxed); }

 private:
  static constexpr uint32_t kPatience = 4;

  std::atomic<uint32_t> failures_{0}, left_{0};
  std::atomic<ScheduleReason> reason_{ScheduleReason::kNotFusable};
};

// Finds out, once for a group, what it is that keeps changing: from two keys for which no plan will be made.
class ChangeFinder {
 public:
  // `collect` makes the key at hand, with its places. Calls back with what changed since the last time, at most once.
  struct Change {
    std::optional<uint32_t> member;  // whose constants or sizes changed; none: the state outside the graph, or inputs
    bool sizes = false;
  };
  std::optional<Change> look(const GroupKey& key, const NumberPlaces& places);
  bool is_done() const noexcept { return done_.load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> done_{false};
  std::mutex mutex_;
  std::optional<GroupKey> before_;
};

// Everything about one group of a cut graph.
struct GroupSite {
  cache::Leaf shapes;  // GroupShapes by fixed key
  Pause pause;
  ChangeFinder changes;
};

// One way to cut the graph.
struct CutGraph {
  explicit CutGraph(Partition cut) : partition(std::move(cut)), sites(partition.groups.size()) {}

  const Partition partition;
  mutable std::vector<GroupSite> sites;  // by group
};

// Held by the graph's leaf. Any number of threads.
class FusedGraph {
 public:
  // The one of the graph whose schedule is `schedule`, both held by `leaf`.
  static const FusedGraph& of(cache::Leaf& leaf, const Schedule& schedule);

  explicit FusedGraph(const Schedule& schedule) : schedule_(schedule), refused_(schedule.shape().steps.size()) {}

  // From now on the node of `step` runs by itself.
  void refuse(uint32_t step) const noexcept { refused_[step].store(true, std::memory_order_relaxed); }

  // As things are at this moment: hooks come and go.
  Fusable fusable(uint32_t step, Node& node) const;

  // How the graph is cut, given what is fusable at this moment; null where it has been cut in too many ways already,
  // as when hooks come and go at ever new places.
  const CutGraph* cut(std::span<Node* const> nodes) const;

 private:
  const Schedule& schedule_;
  mutable std::vector<std::atomic<bool>> refused_;  // by step
  mutable cache::Leaf cuts_;                        // CutGraphs by the steps that may join a group
};

}  // namespace retrograd
