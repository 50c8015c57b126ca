// The structure
// -------------
// All edges of the trie lie in one tbb::concurrent_hash_map, keyed by (parent node, key bytes) and
// holding the child node. A path of n keys takes n edges and then an *end edge*, which no key can
// equal, to an *end node* that holds the leaf. So a path that is a prefix of another one is no
// special case, and neither is the empty path.
//
// Invariants:
// 1. A node does not change while it is in the map, but for `children`, which only a holder of
//    `mutex_` reads or writes. An edge's key is a view of bytes that its child owns, so edge and
//    key go together.
// 2. Edges are added and erased under `mutex_` only. A node other than the root is in the map from
//    before its first child is added until after its last child is erased.
// 3. Every node leads to some end node: erasing one prunes the ancestors that it leaves childless.
//    Nodes do not own each other, so neither pruning nor destruction recurses.
// 4. A leaf has exactly one entry in `uses_` while its end edge is in the map, and
//    `attached_` is true for that time. Once false, it stays so.
//
// Readers
// -------
// A reader takes no mutex. It goes hand over hand: while it looks for the edge that leaves node N,
// it holds the map's accessor (a shared lock on one element) of the edge that led to N. Erasing an
// element unlinks it, waits for its accessors, and only then destroys the node; so N, whose address
// the reader searches by, cannot be freed and its address cannot be given to another node
// meanwhile. If N was unlinked, the reader finds nothing more and reports a miss, which is right.
// The writer holds no element while it waits for one, and a reader drops its accessors before it
// can become a writer, so neither can wait for the other in a circle.
//
// Accessors and buckets are locked shared by readers; the one exception is the map's own: after it
// grew, the first thread that comes to a bucket splits it, and others wait for that bucket.
//
// Most hits do not come here at all. A thread's Memo compares the whole path with a private copy
// (one memcmp, where comparing node by node would miss the cache once per node), then asks the
// leaf whether it is still attached. That flag alone decides whether a memo is stale; the
// generation only makes a memo let go of everything that clear() dropped, and tells tries apart.
//
// Eviction
// --------
// A use of a leaf stores the current epoch in its stamp, unless it is there already; inserts
// advance the epoch. So a hit writes at most one word, and in a process that has warmed up it
// writes nothing. `uses_` is a heap by the stamps as last seen. A stamp grows: when the top's real
// stamp is still the one seen, no other leaf is older; otherwise it goes back with its real stamp.
// (A reader that is delayed between reading the epoch and storing it can set a stamp back; that
// leaf then only looks less recently used than it was.) Order is exact to the epoch: leaves used
// between the same two inserts are evicted in the order in which they were inserted.
#include "cache/trie.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <new>
#include <string_view>
#include <utility>

#include <oneapi/tbb/concurrent_hash_map.h>

#include "cache/perturb.h"

namespace retrograd::cache {

namespace {

uint64_t next_generation() noexcept {
  static std::atomic<uint64_t> last{0};  // zero is the generation of a memo that was never filled
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

// A leaf reference with a counter of its own, on its own cache line. Threads that hit one leaf
// would otherwise take turns at its counter, once for every call.
struct alignas(64) PrivateReference {
  std::shared_ptr<Leaf> leaf;
};

std::shared_ptr<Leaf> counted_apart(std::shared_ptr<Leaf> leaf) {
  Leaf* const raw = leaf.get();
  return {std::make_shared<PrivateReference>(PrivateReference{std::move(leaf)}), raw};
}

}  // namespace

struct Trie::Node {
  Node* parent = nullptr;
  std::vector<std::byte> key;
  std::shared_ptr<Leaf> leaf;  // set in end nodes only
  size_t children = 0;
};

struct Trie::Edge {
  const Node* parent;
  KeyView key;
  bool is_end;
  size_t hash;

  static Edge along(const Node* parent, KeyView key) noexcept {
    const std::string_view bytes(reinterpret_cast<const char*>(key.data()), key.size());
    return {parent, key, false, mix(std::hash<std::string_view>()(bytes), parent)};
  }
  static Edge end_of(const Node* parent) noexcept { return {parent, {}, true, mix(0, parent)}; }
  static Edge to(const Node& node) noexcept {
    return node.leaf != nullptr ? end_of(node.parent) : along(node.parent, node.key);
  }

  // The map takes its buckets from the low bits, where addresses differ least.
  static size_t mix(size_t hash, const Node* parent) noexcept {
    hash ^= reinterpret_cast<uintptr_t>(parent) * 0x9E3779B97F4A7C15U;
    return hash ^ (hash >> 32U);
  }
};

struct Trie::EdgeHash {
  static size_t hash(const Edge& edge) noexcept { return edge.hash; }
  static bool equal(const Edge& a, const Edge& b) noexcept {
    return a.hash == b.hash && a.parent == b.parent && a.is_end == b.is_end && a.key.size() == b.key.size() &&
           (a.key.empty() || std::memcmp(a.key.data(), b.key.data(), a.key.size()) == 0);
  }
};

struct Trie::Index {
  using Map = tbb::concurrent_hash_map<Edge, std::unique_ptr<Node>, EdgeHash>;

  // For the writer, to whom nodes do not disappear.
  Node* child(const Edge& edge) const {
    Map::const_accessor found;
    return edges.find(found, edge) ? found->second.get() : nullptr;
  }

  Map edges;
  Node root;
};

Trie::Trie() : Trie(Limits()) {}

Trie::Trie(Limits limits) : index_(std::make_unique<Index>()), generation_(next_generation()), limits_(limits) {}

Trie::~Trie() = default;

std::shared_ptr<Leaf> Trie::find(const Path& path, Memo* memo) const {
  const uint64_t generation = generation_.load(std::memory_order_relaxed);
  if (memo != nullptr) {
    if (Memo::Entry* entry = memo->find(generation, path)) {
      perturb("trie.remembered");
      if (touch(*entry->leaf)) {
        return entry->leaf;
      }
      entry->release();  // evicted
    }
  }
  std::shared_ptr<Leaf> leaf = lookup(path);
  if (leaf == nullptr) {
    return nullptr;
  }
  perturb("trie.found");
  touch(*leaf);
  return memo == nullptr ? leaf : memo->remember(generation, path, std::move(leaf));
}

Trie::Inserted Trie::find_or_insert(const Path& path, Memo* memo) {
  if (std::shared_ptr<Leaf> leaf = find(path, memo)) {
    return {std::move(leaf), false};
  }
  const uint64_t generation = generation_.load(std::memory_order_relaxed);
  perturb("trie.missed");
  Inserted result = insert(path);
  perturb("trie.inserted");
  if (memo != nullptr) {
    result.leaf = memo->remember(generation, path, std::move(result.leaf));
  }
  return result;
}

std::shared_ptr<Leaf> Trie::lookup(const Path& path) const {
  std::array<Index::Map::const_accessor, 2> held;  // the edge to `node`, and the one being looked for
  const Node* node = &index_->root;
  for (size_t i = 0; i < path.size(); ++i) {
    Index::Map::const_accessor& next = held[i % 2];
    if (!index_->edges.find(next, Edge::along(node, path[i]))) {
      return nullptr;
    }
    node = next->second.get();
    perturb("trie.descending");
  }
  Index::Map::const_accessor& end = held[path.size() % 2];
  return index_->edges.find(end, Edge::end_of(node)) ? end->second->leaf : nullptr;
}

Trie::Inserted Trie::insert(const Path& path) {
  std::vector<std::shared_ptr<Leaf>> evicted;  // outlives the lock: plans go when nothing is held
  MutexLock lock(mutex_);

  Node* node = &index_->root;
  size_t depth = 0;
  while (depth < path.size()) {
    Node* child = index_->child(Edge::along(node, path[depth]));
    if (child == nullptr) {
      break;
    }
    node = child;
    ++depth;
  }
  if (depth == path.size()) {
    if (Node* end = index_->child(Edge::end_of(node))) {
      touch(*end->leaf);
      return {end->leaf, false};
    }
  }

  if (uses_.size() == uses_.capacity()) {
    uses_.reserve(std::max<size_t>(16, 2 * uses_.size()));  // so that nothing throws at the end
  }
  auto leaf = std::make_shared<Leaf>();
  // The insert takes one number and later uses the next, so that they count as later.
  const uint64_t stamp = epoch_.load(std::memory_order_relaxed) + 1;
  epoch_.store(stamp + 1, std::memory_order_relaxed);
  leaf->stamp_.store(stamp, std::memory_order_relaxed);
  leaf->attached_.store(true, std::memory_order_relaxed);
  Node* end = nullptr;
  try {
    for (; depth < path.size(); ++depth) {
      auto child = std::make_unique<Node>();
      child->key.assign(path[depth].begin(), path[depth].end());
      node = add(node, Edge::along(node, path[depth]), std::move(child));
      ++stats_.nodes;
    }
    auto child = std::make_unique<Node>();
    child->leaf = leaf;
    end = add(node, Edge::end_of(node), std::move(child));
  } catch (...) {
    prune(node);
    throw;
  }
  uses_.push_back({stamp, ++stats_.inserts, end, leaf});
  std::push_heap(uses_.begin(), uses_.end(), std::greater<>());
  evicted = evict_excess();
  return {std::move(leaf), true};
}

// `edge` equals the node's own edge, but its key lives with the caller.
Trie::Node* Trie::add(Node* parent, const Edge& edge, std::unique_ptr<Node> node) {
  node->parent = parent;
  Node* const raw = node.get();
  try {
    index_->edges.emplace(Edge::to(*raw), std::move(node));
  } catch (...) {
    index_->edges.erase(edge);  // the map may throw when it grows, after it took the element
    throw;
  }
  ++parent->children;
  return raw;
}

// Removes `node` and its ancestors as far as they have no children.
void Trie::prune(Node* node) noexcept {
  while (node->parent != nullptr && node->children == 0) {
    Node* const parent = node->parent;
    index_->edges.erase(Edge::to(*node));
    --parent->children;
    --stats_.nodes;
    node = parent;
  }
}

void Trie::detach(Use& use) noexcept {
  use.leaf->attached_.store(false, std::memory_order_relaxed);
  perturb("trie.detaching");
  Node* const parent = use.end->parent;
  index_->edges.erase(Edge::to(*use.end));
  --parent->children;
  prune(parent);
}

std::shared_ptr<Leaf> Trie::evict_one() noexcept {
  for (;;) {  // ends: a leaf goes back only with a later stamp, and the epoch stands still
    std::pop_heap(uses_.begin(), uses_.end(), std::greater<>());
    Use& oldest = uses_.back();
    const uint64_t stamp = oldest.leaf->stamp_.load(std::memory_order_relaxed);
    if (stamp <= oldest.stamp) {
      break;
    }
    oldest.stamp = stamp;
    std::push_heap(uses_.begin(), uses_.end(), std::greater<>());
  }
  perturb("trie.evicting");
  detach(uses_.back());
  std::shared_ptr<Leaf> leaf = std::move(uses_.back().leaf);
  uses_.pop_back();
  ++stats_.evictions;
  return leaf;
}

bool Trie::exceeds_limits() const noexcept {
  return uses_.size() > limits_.max_leaves || (stats_.nodes > limits_.max_nodes && uses_.size() > 1);
}

// What must go, oldest first. Without memory for the list, nothing goes until the next insert.
std::vector<std::shared_ptr<Leaf>> Trie::evict_excess() noexcept {
  std::vector<std::shared_ptr<Leaf>> evicted;
  try {
    while (exceeds_limits()) {
      if (evicted.size() == evicted.capacity()) evicted.reserve(std::max<size_t>(1, 2 * evicted.size()));
      evicted.push_back(evict_one());
    }
  } catch (const std::bad_alloc&) {  // from reserve(), before a leaf was taken out
  }
  return evicted;
}

Trie::Miss Trie::first_miss(const Path& path) const {
  MutexLock lock(mutex_);  // no writer: nodes stay where they are, and the map may be iterated
  Miss miss;
  const Node* node = &index_->root;
  while (miss.depth < path.size()) {
    const Node* const child = index_->child(Edge::along(node, path[miss.depth]));
    if (child == nullptr) {
      break;
    }
    node = child;
    ++miss.depth;
  }
  if (miss.depth < path.size()) {
    for (const auto& [edge, child] : index_->edges) {
      if (edge.parent == node && !edge.is_end) {
        miss.siblings.push_back(child->key);
      }
    }
  }
  return miss;
}

void Trie::clear() {
  std::vector<Use> dropped;  // outlives the lock, as above
  MutexLock lock(mutex_);
  generation_.store(next_generation(), std::memory_order_relaxed);
  perturb("trie.clearing");
  dropped.swap(uses_);
  for (Use& use : dropped) {
    detach(use);
  }
}

bool Trie::is_empty() const {
  MutexLock lock(mutex_);
  return uses_.empty();
}

Trie::Stats Trie::stats() const {
  MutexLock lock(mutex_);
  Stats stats = stats_;
  stats.leaves = uses_.size();
  return stats;
}

void Trie::set_limits(Limits limits) {
  std::vector<std::shared_ptr<Leaf>> evicted;  // outlives the lock, as above
  MutexLock lock(mutex_);
  limits_ = limits;
  evicted = evict_excess();
}

Memo::~Memo() = default;

// Empties the entry before the leaf goes: plans may run any code when they are destroyed, a lookup
// with this memo included.
void Memo::Entry::release() noexcept {
  last_use = 0;
  std::exchange(leaf, nullptr).reset();
}

void Memo::clear() noexcept {
  for (Entry& entry : entries_) {
    entry.release();
  }
}

Memo::Entry* Memo::find(uint64_t generation, const Path& path) noexcept {
  if (generation != generation_) {
    generation_ = generation;
    clear();
    return nullptr;
  }
  for (size_t i = 0; i < kPaths; ++i) {
    const size_t slot = (latest_ + i) % kPaths;
    Entry& entry = entries_[slot];
    if (entry.leaf != nullptr && entry.path == path) {
      latest_ = slot;
      entry.last_use = ++uses_;
      return &entry;
    }
  }
  return nullptr;
}

std::shared_ptr<Leaf> Memo::remember(uint64_t generation, const Path& path, std::shared_ptr<Leaf> leaf) {
  if (generation != generation_) {
    return leaf;  // the trie was cleared since
  }
  Entry& entry = *std::min_element(entries_.begin(), entries_.end(),
                                   [](const Entry& a, const Entry& b) { return a.last_use < b.last_use; });
  std::shared_ptr<Leaf> own = counted_apart(std::move(leaf));
  const std::shared_ptr<Leaf> displaced = std::exchange(entry.leaf, nullptr);
  entry.path = path;
  entry.leaf = own;
  entry.last_use = ++uses_;
  latest_ = static_cast<size_t>(&entry - entries_.data());
  return own;
}

}  // namespace retrograd::cache
