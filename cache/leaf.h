// A leaf: the end of one path, and the plans that were made for it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "cache/mutex.h"
#include "cache/path.h"
#include "cache/thread_annotations.h"

namespace retrograd::cache {

// What get_or_build() does while another caller builds the same plan.
enum class Wait { kNo, kYes };

// Holds one plan per *specialization* (opaque bytes, possibly none). The leaf knows nothing of a
// plan but how to drop it. All methods may be called from any number of threads.
//
// Plans are only ever added: published at the head of a list of immutable entries, and released
// together when the last holder of the leaf lets go. So a reader walks the list without a lock, and
// a plan's address stays good for as long as the leaf is held, evicted or not.
class Leaf {
 public:
  Leaf() = default;
  ~Leaf();
  Leaf(const Leaf&) = delete;
  Leaf& operator=(const Leaf&) = delete;

  // The plan for `specialization`, or null. Never blocks. The pointer is valid while the caller
  // holds the leaf.
  const void* find(KeyView specialization) const noexcept;

  // The plan for `specialization`; where there is none, the result of `build`, a callable that
  // returns std::shared_ptr<const void>. No two builds for one specialization run at a time, and no
  // lock is held while one runs; builds for other specializations run in parallel. A caller that
  // comes while another builds waits for it (kYes) or gets null at once (kNo).
  //
  // If `build` throws, the builder gets the exception, nothing is kept, and a waiter builds in its
  // turn. A null plan is returned to its builder and not kept either. A build that asks for the
  // plan it is building, from the same thread, gets null even with kYes; across threads such a
  // cycle deadlocks, so code that a build may call must use kNo.
  template <class Build>
  const void* get_or_build(KeyView specialization, Wait wait, Build&& build) RETROGRAD_EXCLUDES(mutex_) {
    if (const void* plan = find(specialization)) {
      return plan;
    }
    Flight flight(*this, specialization);
    if (!flight.take_off(wait)) {
      return flight.plan();
    }
    return flight.land(std::forward<Build>(build)());
  }

  size_t plan_count() const noexcept { return plan_count_.load(std::memory_order_acquire); }

  // Every plan that is there now, latest first, with its specialization. Never blocks.
  void for_each(const std::function<void(KeyView, const void*)>& visit) const;

 private:
  friend class Trie;
  struct Entry;

  // One caller's attempt to obtain a plan. The destructor ends a flight that did not land.
  class Flight {
   public:
    Flight(Leaf& leaf, KeyView specialization) : leaf_(leaf), specialization_(specialization) {}
    ~Flight();
    Flight(const Flight&) = delete;
    Flight& operator=(const Flight&) = delete;

    bool take_off(Wait wait);  // true: this caller builds; false: plan() is the answer
    const void* plan() const noexcept { return plan_; }
    const void* land(std::shared_ptr<const void> plan);

   private:
    Leaf& leaf_;
    KeyView specialization_;
    const void* plan_ = nullptr;
    bool flying_ = false;
  };

  struct Builder {
    KeyView specialization;  // the building caller's bytes, which outlive the build
    std::thread::id thread;
  };
  Builder* builder_of(KeyView specialization) RETROGRAD_REQUIRES(mutex_);

  std::atomic<Entry*> plans_{nullptr};
  std::atomic<size_t> plan_count_{0};

  // The trie's marks. `stamp_` is the epoch in which the leaf was last used. `attached_` turns
  // false, once and for good, when the leaf leaves the trie.
  std::atomic<uint64_t> stamp_{0};
  std::atomic<bool> attached_{false};

  Mutex mutex_;
  Condition build_ended_;
  std::vector<Builder> builders_ RETROGRAD_GUARDED_BY(mutex_);
};

}  // namespace retrograd::cache
