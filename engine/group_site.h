// Where a group's plans are kept, one entry for each key, and how an entry gets its plan.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "cache/perturb.h"
#include "engine/group_key.h"
#include "engine/group_plan.h"
#include "engine/region.h"

namespace retrograd {

// One key of one group: cold, then being made, then settled, with a plan or without. Shared with the threads
// that make the plan, which may outlive the cache's interest in it.
class GroupEntry {
 public:
  enum class State : uint8_t { kCold, kMaking, kReady, kRefused, kSuperseded };

  State state() const noexcept { return state_.load(std::memory_order_acquire); }
  // Null until ready. Good while the entry is held.
  const GroupPlan* plan() const noexcept { return plan_.load(std::memory_order_acquire); }

  // True for the first caller, who looks whether the plan store has the plan.
  bool first_look() const noexcept { return !looked_.exchange(true, std::memory_order_relaxed); }

  // Counts a call that found no plan; true from the `hot_after`-th one on. Lost counts are harmless.
  bool is_hot(uint32_t hot_after) const noexcept {
    const uint32_t calls = calls_.load(std::memory_order_relaxed) + 1;
    calls_.store(calls, std::memory_order_relaxed);
    return calls >= hot_after;
  }

  // True for exactly one caller, who must then settle it, or give it back.
  bool claim() const noexcept {
    State cold = State::kCold;
    return state_.compare_exchange_strong(cold, State::kMaking, std::memory_order_acq_rel);
  }
  void give_back() const noexcept { state_.store(State::kCold, std::memory_order_release); }

  // By whoever claimed it, once.
  void settle(std::shared_ptr<const GroupPlan> plan) const {
    owner_ = std::move(plan);
    plan_.store(owner_.get(), std::memory_order_release);
    cache::perturb("entry.settling");
    state_.store(State::kReady, std::memory_order_release);
  }
  // `member`: the node that cannot be in any group; -1: this key cannot be served.
  void refuse(int32_t member) const {
    refused_member_.store(member, std::memory_order_relaxed);
    state_.store(State::kRefused, std::memory_order_release);
  }
  // Whether the plan has run to its end once.
  bool is_proven() const noexcept { return proven_.load(std::memory_order_relaxed); }
  void prove() const noexcept { proven_.store(true, std::memory_order_relaxed); }
  // Refuses it after all: the plan fails. Whoever runs it goes on.
  void withdraw() const noexcept {
    plan_.store(nullptr, std::memory_order_release);
    refuse(-1);
  }
  // Another entry serves its calls.
  void supersede() const noexcept { state_.store(State::kSuperseded, std::memory_order_release); }
  int32_t refused_member() const noexcept { return refused_member_.load(std::memory_order_relaxed); }

 private:
  // Entries are const to the cache.
  mutable std::atomic<State> state_{State::kCold};
  mutable std::atomic<const GroupPlan*> plan_{nullptr};
  mutable std::atomic<bool> looked_{false};
  mutable std::atomic<bool> proven_{false};
  mutable std::atomic<uint32_t> calls_{0};
  mutable std::atomic<int32_t> refused_member_{-1};
  mutable std::shared_ptr<const GroupPlan> owner_;  // written once, before plan_
};

// The plans of one group for one fixed key, by its sizes and strides: a plan for exactly those seen first; then one
// that leaves open what was seen to change; then, for what that one does not admit, more of either kind up to a limit.
class GroupShapes {
 public:
  static constexpr size_t kMaxVersions = 8;

  struct Version {
    std::vector<int64_t> numbers;  // seen at its making
    std::vector<bool> open;        // by place; empty: none
    std::shared_ptr<const GroupEntry> entry = std::make_shared<const GroupEntry>();

    bool is_open(size_t place) const { return !open.empty() && open[place]; }
  };

  GroupShapes() = default;
  ~GroupShapes();
  GroupShapes(const GroupShapes&) = delete;
  GroupShapes& operator=(const GroupShapes&) = delete;

  // The version that serves `numbers`, or will; null: there is none. Never blocks. Good while this is held.
  const Version* find(std::span<const int64_t> numbers) const noexcept;

  // The same, made where there is none; null where none will be made.
  const Version* find_or_add(std::span<const int64_t> numbers) const;

  // Takes in a version with its plan, from the plan store. Whether there is one already does not matter.
  void add_ready(std::vector<int64_t> numbers, std::vector<bool> open, std::shared_ptr<const GroupPlan> plan) const;

  size_t size() const noexcept { return size_.load(std::memory_order_acquire); }

  // Every version that is there now, oldest first. Never blocks.
  template <class Visit>
  void for_each(Visit&& visit) const {
    for (const Link* link = first_.load(std::memory_order_acquire); link != nullptr;
         link = link->next.load(std::memory_order_acquire)) {
      visit(link->version);
    }
  }

 private:
  struct Link {
    Version version;
    std::atomic<Link*> next{nullptr};
  };
  static bool serves(const Version& version, std::span<const int64_t> numbers) noexcept;
  const Version* append(std::unique_ptr<Link> link) const;  // under mutex_

  mutable std::mutex mutex_;  // held while a version is added; readers need none
  mutable std::atomic<Link*> first_{nullptr};
  mutable std::atomic<size_t> size_{0};
};

// What a group's plan is to be made from.
struct GroupRequest {
  const Group& group;
  std::span<Node* const> nodes;    // the members
  std::span<Node* const> targets;  // of the group's outputs
  GroupInputs& inputs;
  const GroupShapes::Version& version;
  std::shared_ptr<const GroupEntry> entry;  // claimed by the caller
  bool wait;                                // for the plan to be made
};

// Makes plans. The engine knows no Python, which tracing needs; the bindings put the one there is in its place.
class GroupCompiler {
 public:
  virtual ~GroupCompiler() = default;

  // Records the group from the live graph, on the calling thread, and makes a plan from the record: at once
  // (request.wait) or later, on another thread. The entry is settled, refused or given back in any case; the graph is
  // as before. False when the graph must not be recorded now. Does not throw for anything that goes wrong in
  // compiling.
  virtual bool make(const GroupRequest& request, const PreparedCall& call, CallFrame& frame) = 0;

  // A group got as many plans as are made for one and keeps meeting new constants, or sizes, of `node` (null: of the
  // state outside the graph, or kinds of inputs): to tell the user. Once for a group; does not throw.
  virtual void report_change(Node* node, bool sizes) noexcept = 0;

  // One look at the outside world of a thread that waits for another one's plan, several times a second: may throw what
  // a signal handler of Python's throws.
  virtual void look_up_from_waiting() {}
};

// Set once; must live for ever. Null: none, as in a program without Python.
void set_group_compiler(GroupCompiler* compiler) noexcept;
GroupCompiler* group_compiler() noexcept;

}  // namespace retrograd
