// What a hit costs on the path of a 52-node backward graph (a 10-layer MLP), alone and from two
// threads, and what it would cost with the obvious alternatives. All in one run, so that the
// figures may be compared.
//
// "items" are hits; scaling is items/s with two threads over items/s with one. ControlNothingShared
// is what the machine gives to two threads at that moment: read the other ratios against its own.
#include <memory>
#include <mutex>
#include <random>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <benchmark/benchmark.h>

#include "cache/trie.h"

namespace {

using retrograd::cache::KeyView;
using retrograd::cache::Leaf;
using retrograd::cache::Memo;
using retrograd::cache::Path;
using retrograd::cache::Trie;

constexpr size_t kNodes = 52;
constexpr int kOtherPaths = 64;  // so that the tries are not made of one path alone

// Keys as a walk makes them: a node's type and edges, then what it saved; 32 to 48 bytes. Paths
// differ in their last quarter.
Path make_path(uint32_t variant) {
  Path path;
  std::mt19937 common(1);
  std::mt19937 own(variant);
  for (size_t i = 0; i < kNodes; ++i) {
    path.begin_key();
    path.put(uint64_t{0x7f00'0000'1000} + 64 * (i % 5));  // the type
    path.put(static_cast<uint32_t>(i));
    path.put(static_cast<uint32_t>(i + 1));
    for (size_t word = 0; word < 4 + i % 5; ++word) {
      path.put(static_cast<uint32_t>(i < 3 * kNodes / 4 ? common() : own()));
    }
    path.end_key();
  }
  return path;
}

// The textbook trie: a hash map in every node, one lock around it all.
template <class SharedOrNot, class ReadLock>
class LockedTrie {
 public:
  std::shared_ptr<Leaf> find(const Path& path) const {
    const ReadLock lock(mutex_);
    const Node* node = &root_;
    for (size_t i = 0; i < path.size(); ++i) {
      const auto child = node->children.find(text(path[i]));
      if (child == node->children.end()) {
        return nullptr;
      }
      node = child->second.get();
    }
    return node->leaf;
  }

  void insert(const Path& path) {
    const std::unique_lock<SharedOrNot> lock(mutex_);
    Node* node = &root_;
    for (size_t i = 0; i < path.size(); ++i) {
      std::unique_ptr<Node>& child = node->children[std::string(text(path[i]))];
      if (child == nullptr) {
        child = std::make_unique<Node>();
      }
      node = child.get();
    }
    node->leaf = std::make_shared<Leaf>();
  }

 private:
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view key) const noexcept { return std::hash<std::string_view>()(key); }
  };
  struct Node {
    std::unordered_map<std::string, std::unique_ptr<Node>, Hash, std::equal_to<>> children;
    std::shared_ptr<Leaf> leaf;
  };

  static std::string_view text(KeyView key) { return {reinterpret_cast<const char*>(key.data()), key.size()}; }

  mutable SharedOrNot mutex_;
  Node root_;
};

using MutexTrie = LockedTrie<std::mutex, std::unique_lock<std::mutex>>;
using SharedMutexTrie = LockedTrie<std::shared_mutex, std::shared_lock<std::shared_mutex>>;

// Shared by a benchmark's threads; never destroyed, so that no thread outlives it.
template <class AnyTrie, class Insert>
AnyTrie& filled(Insert insert) {
  static AnyTrie& trie = [&]() -> AnyTrie& {
    static AnyTrie instance;
    for (uint32_t variant = 0; variant < kOtherPaths; ++variant) {
      insert(instance, make_path(variant));
    }
    return instance;
  }();
  return trie;
}

template <class Find>
void hit_repeatedly(benchmark::State& state, Find find) {
  const Path path = make_path(kOtherPaths / 2);
  for (auto _ : state) {
    auto leaf = find(path);
    if (leaf == nullptr) {
      state.SkipWithError("the path was not found");
      break;
    }
    benchmark::DoNotOptimize(leaf);
  }
  state.SetItemsProcessed(state.iterations());
}

// A thread's own arithmetic, about as long as a hit.
void ControlNothingShared(benchmark::State& state) {
  uint64_t value = 1;
  for (auto _ : state) {
    for (int i = 0; i < 100; ++i) {
      benchmark::DoNotOptimize(value = value * 6364136223846793005U + 1);
    }
  }
  state.SetItemsProcessed(state.iterations());
}

Trie& filled_trie() {
  return filled<Trie>([](Trie& trie, const Path& path) { trie.find_or_insert(path); });
}

void TrieWithMemo(benchmark::State& state) {
  const Trie& trie = filled_trie();
  Memo memo;
  hit_repeatedly(state, [&](const Path& path) { return trie.find(path, &memo); });
}

// A thread that takes as many paths in turn as a memo keeps.
void TrieWithMemoFourPathsInTurn(benchmark::State& state) {
  const Trie& trie = filled_trie();
  Memo memo;
  std::vector<Path> paths;
  for (uint32_t i = 0; i < Memo::kPaths; ++i) {
    paths.push_back(make_path(i));
  }
  size_t next = 0;
  for (auto _ : state) {
    auto leaf = trie.find(paths[next++ % paths.size()], &memo);
    benchmark::DoNotOptimize(leaf);
  }
  state.SetItemsProcessed(state.iterations());
}

void TrieWithoutMemo(benchmark::State& state) {
  const Trie& trie = filled_trie();
  hit_repeatedly(state, [&](const Path& path) { return trie.find(path); });
}

void UnorderedMapAndMutex(benchmark::State& state) {
  const auto& trie = filled<MutexTrie>([](MutexTrie& t, const Path& path) { t.insert(path); });
  hit_repeatedly(state, [&](const Path& path) { return trie.find(path); });
}

void UnorderedMapAndSharedMutex(benchmark::State& state) {
  const auto& trie = filled<SharedMutexTrie>([](SharedMutexTrie& t, const Path& path) { t.insert(path); });
  hit_repeatedly(state, [&](const Path& path) { return trie.find(path); });
}

// The rare path: an insert that evicts, in a full trie of default size.
void TrieInsertAndEvict(benchmark::State& state) {
  Trie trie;
  uint32_t variant = 0;
  for (size_t i = 0; i < Trie::Limits().max_leaves; ++i) {
    trie.find_or_insert(make_path(variant++));
  }
  for (auto _ : state) {
    state.PauseTiming();
    const Path path = make_path(variant++);
    state.ResumeTiming();
    benchmark::DoNotOptimize(trie.find_or_insert(path));
  }
  state.SetItemsProcessed(state.iterations());
}

BENCHMARK(ControlNothingShared)->Threads(1)->Threads(2)->UseRealTime();
BENCHMARK(TrieWithMemo)->Threads(1)->Threads(2)->UseRealTime();
BENCHMARK(TrieWithMemoFourPathsInTurn)->Threads(1)->Threads(2)->UseRealTime();
BENCHMARK(TrieWithoutMemo)->Threads(1)->Threads(2)->UseRealTime();
BENCHMARK(UnorderedMapAndMutex)->Threads(1)->Threads(2)->UseRealTime();
BENCHMARK(UnorderedMapAndSharedMutex)->Threads(1)->Threads(2)->UseRealTime();
BENCHMARK(TrieInsertAndEvict)->UseRealTime()->Iterations(3000);

}  // namespace

BENCHMARK_MAIN();
