// A concurrent trie from a path (a sequence of opaque keys) to a leaf, bounded by evicting the
// leaves that were least recently used. See trie.cpp for the structure and its invariants.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cache/leaf.h"
#include "cache/mutex.h"
#include "cache/path.h"
#include "cache/thread_annotations.h"

namespace retrograd::cache {

// The few paths that one thread took last. It keeps a copy of each, so that a hit is one compare of
// contiguous memory, and a reference to each leaf that is counted apart from every other thread's:
// a hit writes to no cache line that another thread reads. Owned by one thread; may be used with
// any trie, and remembers paths of the last one only.
//
// A memo keeps its leaves, and so their plans, alive until the path is displaced, the thread looks
// into the trie again after a clear(), or the memo goes.
class Memo {
 public:
  static constexpr size_t kPaths = 4;

  Memo() = default;
  ~Memo();
  Memo(const Memo&) = delete;
  Memo& operator=(const Memo&) = delete;

  void clear() noexcept;

 private:
  friend class Trie;
  struct Entry {
    Path path;
    std::shared_ptr<Leaf> leaf;  // null: the entry is free
    uint64_t last_use = 0;

    void release() noexcept;
  };

  Entry* find(uint64_t generation, const Path& path) noexcept;
  std::shared_ptr<Leaf> remember(uint64_t generation, const Path& path, std::shared_ptr<Leaf> leaf);

  uint64_t generation_ = 0;
  uint64_t uses_ = 0;
  size_t latest_ = 0;
  std::array<Entry, kPaths> entries_;
};

// All methods may be called from any number of threads at any moment. Lookups take shared locks
// only, one map element at a time, and a hit in a memo takes none; inserts, evictions and clear()
// take turns. Those shared locks are counters, so threads that look up one path without a memo slow
// each other down: give every thread a memo. Leaves are shared: one that is evicted or cleared stays
// whole for the callers that hold it. No plan is destroyed under a lock of the trie.
class Trie {
 public:
  struct Limits {
    size_t max_leaves = 4096;  // zero: nothing is kept, every insert returns a detached leaf
    // Bounds memory where graphs are large; a node and its share of a plan take some 300 bytes. The leaf that was
    // inserted last is kept even if its path alone is longer.
    size_t max_nodes = size_t{1} << 20U;
  };
  struct Stats {
    size_t leaves = 0;
    size_t nodes = 0;  // one per distinct non-empty prefix; the root does not count
    uint64_t evictions = 0;
    uint64_t inserts = 0;
  };
  struct Inserted {
    std::shared_ptr<Leaf> leaf;  // never null
    bool inserted = false;       // true for exactly one of the callers that race for a path
  };

  Trie();
  explicit Trie(Limits limits);
  ~Trie();
  Trie(const Trie&) = delete;
  Trie& operator=(const Trie&) = delete;

  // The leaf of `path`, or null. A found leaf counts as used.
  std::shared_ptr<Leaf> find(const Path& path, Memo* memo = nullptr) const;

  // The leaf of `path`, made where there is none; may evict another. An exception (out of
  // memory) leaves no half-made path.
  Inserted find_or_insert(const Path& path, Memo* memo = nullptr) RETROGRAD_EXCLUDES(mutex_);

  // For a caller that kept a leaf of this trie: counts as a use. False when the leaf was evicted or
  // cleared, and the path must be looked up again.
  bool touch(Leaf& leaf) const noexcept {
    if (!leaf.attached_.load(std::memory_order_relaxed)) {
      return false;
    }
    const uint64_t now = epoch_.load(std::memory_order_relaxed);
    if (leaf.stamp_.load(std::memory_order_relaxed) != now) {
      leaf.stamp_.store(now, std::memory_order_relaxed);
    }
    return true;
  }

  // Changes with every clear(): what a caller kept from an earlier generation is out of the trie.
  uint64_t generation() const noexcept { return generation_.load(std::memory_order_relaxed); }

  // For a caller that explains a miss: how many of the path's keys are there one after the other, and the keys that
  // stand where the next one is missing. Slow: looks at every node.
  struct Miss {
    size_t depth = 0;  // path.size(): all are there, whether there is a leaf or not
    std::vector<std::vector<std::byte>> siblings;
  };
  Miss first_miss(const Path& path) const RETROGRAD_EXCLUDES(mutex_);

  void clear() RETROGRAD_EXCLUDES(mutex_);
  bool is_empty() const RETROGRAD_EXCLUDES(mutex_);
  Stats stats() const RETROGRAD_EXCLUDES(mutex_);

  // Evicts at once what exceeds the new limits.
  void set_limits(Limits limits) RETROGRAD_EXCLUDES(mutex_);

 private:
  struct Node;
  struct Edge;
  struct EdgeHash;
  struct Index;  // the concurrent map of edges, and the root

  // A leaf in the trie, and the last use of it that the writer knows of.
  struct Use {
    uint64_t stamp;
    uint64_t serial;  // the insert's number: breaks ties, older first
    Node* end;
    std::shared_ptr<Leaf> leaf;

    friend bool operator>(const Use& a, const Use& b) noexcept {
      return a.stamp != b.stamp ? a.stamp > b.stamp : a.serial > b.serial;
    }
  };

  std::shared_ptr<Leaf> lookup(const Path& path) const;
  Inserted insert(const Path& path) RETROGRAD_EXCLUDES(mutex_);
  Node* add(Node* parent, const Edge& edge, std::unique_ptr<Node> node) RETROGRAD_REQUIRES(mutex_);
  void prune(Node* node) noexcept RETROGRAD_REQUIRES(mutex_);
  void detach(Use& use) noexcept RETROGRAD_REQUIRES(mutex_);
  std::shared_ptr<Leaf> evict_one() noexcept RETROGRAD_REQUIRES(mutex_);
  bool exceeds_limits() const noexcept RETROGRAD_REQUIRES(mutex_);
  std::vector<std::shared_ptr<Leaf>> evict_excess() noexcept RETROGRAD_REQUIRES(mutex_);

  // Read by every hit, written by inserts and clear() only; on a line of their own, away from the
  // mutex. A generation is a number that no other trie, and no earlier filling of this one, has.
  alignas(64) const std::unique_ptr<Index> index_;
  std::atomic<uint64_t> epoch_{1};
  std::atomic<uint64_t> generation_;

  alignas(64) mutable Mutex mutex_;
  Limits limits_ RETROGRAD_GUARDED_BY(mutex_);
  Stats stats_ RETROGRAD_GUARDED_BY(mutex_);
  std::vector<Use> uses_ RETROGRAD_GUARDED_BY(mutex_);  // a heap, least recent use on top
};

}  // namespace retrograd::cache
