// The trie and its leaves from several threads; run under ThreadSanitizer as well.
#include <atomic>
#include <barrier>
#include <chrono>
#include <memory>
#include <random>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "cache/trie.h"

namespace retrograd::cache {
namespace {

using namespace std::chrono_literals;

template <class Body>
void run_threads(int count, Body body) {
  std::vector<std::jthread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&body, i] { body(i); });
  }
}

KeyView bytes(std::string_view text) { return std::as_bytes(std::span(text.data(), text.size())); }

// `count` keys that depend on `seed` from key `shared` on.
Path path_of(uint32_t seed, uint32_t count, uint32_t shared) {
  Path path;
  for (uint32_t i = 0; i < count; ++i) {
    path.begin_key();
    path.put(i);
    path.put(i < shared ? 0U : seed + 1);
    path.end_key();
  }
  return path;
}

// --- Trie ---

TEST(TrieThreads, RacingInsertersGetTheSameLeaf) {
  constexpr int kThreads = 4;
  constexpr uint32_t kRounds = 300;
  Trie trie;
  std::barrier start(kThreads);
  std::vector<std::vector<Trie::Inserted>> got(kThreads);
  run_threads(kThreads, [&](int thread) {
    Memo memo;
    for (uint32_t round = 0; round < kRounds; ++round) {
      const Path path = path_of(round, 20, round % 20);
      start.arrive_and_wait();
      got[thread].push_back(trie.find_or_insert(path, thread % 2 == 0 ? &memo : nullptr));
    }
  });
  for (uint32_t round = 0; round < kRounds; ++round) {
    int inserters = 0;
    for (int thread = 0; thread < kThreads; ++thread) {
      EXPECT_EQ(got[thread][round].leaf, got[0][round].leaf);
      inserters += got[thread][round].inserted ? 1 : 0;
    }
    EXPECT_EQ(inserters, 1);
  }
}

// Evictions prune around the shared prefixes of the stable paths all the time.
TEST(TrieThreads, ReadersOfStablePathsNeverMissWhileOthersComeAndGo) {
  Trie trie(Trie::Limits{.max_leaves = 8});
  const std::vector<Path> stable = {path_of(0, 30, 29), path_of(1, 30, 15), path_of(2, 15, 15)};
  for (const Path& path : stable) {
    trie.find_or_insert(path);
  }
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> hits{0};
  {
    std::vector<std::jthread> readers;
    for (int i = 0; i < 2; ++i) {
      readers.emplace_back([&] {
        while (!stop) {
          for (const Path& path : stable) {
            ASSERT_NE(trie.find(path), nullptr);
            ++hits;
          }
        }
      });
    }
    // The writer uses the stable paths too, before each insert, so that they are never the oldest.
    for (uint32_t seed = 10; seed < 2'000 || hits < 1'000; ++seed) {
      for (const Path& path : stable) {
        ASSERT_NE(trie.find(path), nullptr);
      }
      trie.find_or_insert(path_of(seed, 30, seed % 30));
    }
    stop = true;
  }
  EXPECT_GE(trie.stats().evictions, 1'900U);
}

// Every leaf carries its path's seed as its plan, so a reader that ended in the wrong place, or in
// freed memory, is seen.
TEST(TrieThreads, ClearAndEvictionUnderReadersAndInserters) {
  constexpr uint32_t kPaths = 40;
  Trie trie(Trie::Limits{.max_leaves = 12});
  std::vector<Path> paths;
  for (uint32_t seed = 0; seed < kPaths; ++seed) {
    paths.push_back(path_of(seed, 5 + seed % 30, seed % 25));
  }
  std::atomic<bool> stop{false};
  std::atomic<int64_t> live{0};
  {
    std::vector<std::jthread> workers;
    for (uint32_t i = 0; i < 4; ++i) {
      workers.emplace_back([&, i] {
        std::mt19937 random(i);
        Memo own;
        std::shared_ptr<Leaf> kept;
        uint32_t kept_seed = 0;
        while (!stop) {
          const uint32_t seed = static_cast<uint32_t>(random() % kPaths);
          Memo* memo = random() % 2 == 0 ? &own : nullptr;
          const std::shared_ptr<Leaf> leaf =
              random() % 3 == 0 ? trie.find(paths[seed], memo) : trie.find_or_insert(paths[seed], memo).leaf;
          if (leaf != nullptr) {
            const void* plan = leaf->get_or_build({}, Wait::kYes, [&] {
              ++live;
              return std::shared_ptr<const uint32_t>(new uint32_t(seed), [&](const uint32_t* value) {
                --live;
                delete value;
              });
            });
            ASSERT_EQ(*static_cast<const uint32_t*>(plan), seed);
          }
          if (kept != nullptr) {
            trie.touch(*kept);
            const void* plan = kept->find({});
            ASSERT_EQ(*static_cast<const uint32_t*>(plan), kept_seed);
          }
          if (leaf != nullptr && random() % 8 == 0) {
            kept = leaf;
            kept_seed = seed;
          }
        }
      });
    }
    const auto end = std::chrono::steady_clock::now() + 1s;
    while (std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(1ms);
      trie.clear();
      trie.stats();
      trie.set_limits({.max_leaves = 6});
      trie.set_limits({.max_leaves = 12});
    }
    stop = true;
  }
  EXPECT_LE(trie.stats().leaves, 12U);
  trie.clear();
  EXPECT_EQ(trie.stats().nodes, 0U);
  EXPECT_EQ(live, 0);
}

// Paths that differ in their first key only come and go at once, so that their nodes take turns at
// the same addresses: a reader that does not keep the node it stands on ends in another path.
TEST(TrieThreads, ReaderNeverStraysIntoAPathThatTookItsNodesPlace) {
  constexpr uint32_t kPaths = 8;
  Trie trie(Trie::Limits{.max_leaves = 1});
  std::vector<Path> paths(kPaths);
  for (uint32_t first = 0; first < kPaths; ++first) {
    for (uint32_t i = 0; i < 20; ++i) {
      paths[first].begin_key();
      paths[first].put(i == 0 ? first : 1'000 + i);
      paths[first].end_key();
    }
  }
  std::atomic<bool> stop{false};
  const auto check = [](Leaf& leaf, uint32_t first) {
    const void* plan = leaf.get_or_build({}, Wait::kYes, [&] { return std::make_shared<uint32_t>(first); });
    ASSERT_EQ(*static_cast<const uint32_t*>(plan), first);
  };
  std::vector<std::jthread> readers;
  for (uint32_t i = 0; i < 4; ++i) {
    readers.emplace_back([&, i] {
      for (uint32_t first = i; !stop; first = (first + 1) % kPaths) {
        if (const std::shared_ptr<Leaf> leaf = trie.find(paths[first])) {
          check(*leaf, first);
        }
      }
    });
  }
  const auto end = std::chrono::steady_clock::now() + 1s;
  for (uint32_t n = 0; std::chrono::steady_clock::now() < end; ++n) {
    check(*trie.find_or_insert(paths[n % kPaths]).leaf, n % kPaths);
  }
  stop = true;
}

TEST(TrieThreads, ClearIsSeenByEveryThreadOnceItReturned) {
  Trie trie;
  const Path path = path_of(0, 10, 0);
  std::barrier step(2);
  constexpr int kRounds = 500;
  std::jthread reader([&] {
    Memo memo;
    for (int round = 0; round < kRounds; ++round) {
      trie.find_or_insert(path, &memo);
      step.arrive_and_wait();  // the other clears
      step.arrive_and_wait();
      ASSERT_EQ(trie.find(path, &memo), nullptr);
    }
  });
  for (int round = 0; round < kRounds; ++round) {
    step.arrive_and_wait();
    trie.clear();
    step.arrive_and_wait();
  }
}

// --- Leaf ---

// Blocks builders until it is opened, and tells how many came.
class Gate {
 public:
  void pass() {
    ++arrived_;
    while (!open_) {
      std::this_thread::yield();
    }
  }
  void await_arrivals(int count) const {
    while (arrived_ < count) {
      std::this_thread::yield();
    }
  }
  void open() { open_ = true; }

 private:
  std::atomic<int> arrived_{0};
  std::atomic<bool> open_{false};
};

TEST(LeafThreads, OneBuildForManyCallers) {
  for (int round = 0; round < 50; ++round) {
    Leaf leaf;
    std::atomic<int> builds{0};
    std::atomic<const void*> plan{nullptr};
    std::barrier start(4);
    run_threads(4, [&](int) {
      start.arrive_and_wait();
      const void* got = leaf.get_or_build(bytes("s"), Wait::kYes, [&] {
        ++builds;
        std::this_thread::sleep_for(1ms);
        return std::make_shared<int>(7);
      });
      const void* expected = nullptr;
      if (!plan.compare_exchange_strong(expected, got)) {
        EXPECT_EQ(got, expected);
      }
    });
    EXPECT_EQ(builds, 1);
    EXPECT_EQ(leaf.plan_count(), 1U);
  }
}

TEST(LeafThreads, NoWaitReturnsNullWhileAnotherBuilds) {
  Leaf leaf;
  Gate gate;
  std::jthread builder([&] {
    leaf.get_or_build(bytes("s"), Wait::kYes, [&] {
      gate.pass();
      return std::make_shared<int>(7);
    });
  });
  gate.await_arrivals(1);
  const auto never = []() -> std::shared_ptr<const void> { throw std::logic_error("ran"); };
  EXPECT_EQ(leaf.get_or_build(bytes("s"), Wait::kNo, never), nullptr);
  EXPECT_EQ(leaf.find(bytes("s")), nullptr);
  gate.open();
  builder.join();
  EXPECT_NE(leaf.get_or_build(bytes("s"), Wait::kNo, never), nullptr);
}

TEST(LeafThreads, BuildsOfDifferentSpecializationsOverlap) {
  Leaf leaf;
  Gate gate;
  const auto build = [&] {
    gate.pass();
    return std::make_shared<int>(7);
  };
  std::jthread a([&] { leaf.get_or_build(bytes("a"), Wait::kYes, build); });
  std::jthread b([&] { leaf.get_or_build(bytes("b"), Wait::kYes, build); });
  gate.await_arrivals(2);  // hangs if one waits for the other
  gate.open();
}

TEST(LeafThreads, WaiterBuildsWhenTheBuilderThrows) {
  Leaf leaf;
  Gate gate;
  std::jthread builder([&] {
    EXPECT_THROW(leaf.get_or_build(bytes("s"), Wait::kYes,
                                   [&]() -> std::shared_ptr<const void> {
                                     gate.pass();
                                     throw std::runtime_error("no");
                                   }),
                 std::runtime_error);
  });
  gate.await_arrivals(1);
  std::atomic<bool> built{false};
  std::jthread waiter([&] {
    const void* plan = leaf.get_or_build(bytes("s"), Wait::kYes, [&] {
      built = true;
      return std::make_shared<int>(8);
    });
    EXPECT_EQ(*static_cast<const int*>(plan), 8);
  });
  std::this_thread::sleep_for(20ms);
  EXPECT_FALSE(built);
  gate.open();
  builder.join();
  waiter.join();
  EXPECT_TRUE(built);
  EXPECT_EQ(leaf.plan_count(), 1U);
}

TEST(LeafThreads, ReadersRunWhileOthersPublish) {
  constexpr uint32_t kPlans = 200;
  Leaf leaf;
  run_threads(4, [&](int thread) {
    std::mt19937 random(static_cast<uint32_t>(thread));
    for (int i = 0; i < 3'000; ++i) {
      const uint32_t key = static_cast<uint32_t>(random() % kPlans);
      const KeyView view = std::as_bytes(std::span(&key, 1));
      const void* plan = leaf.find(view);
      if (plan == nullptr) {
        plan = leaf.get_or_build(view, i % 2 == 0 ? Wait::kYes : Wait::kNo,
                                 [&] { return std::make_shared<uint32_t>(key); });
      }
      if (plan != nullptr) {
        ASSERT_EQ(*static_cast<const uint32_t*>(plan), key);
      }
    }
  });
  EXPECT_LE(leaf.plan_count(), kPlans);
}

}  // namespace
}  // namespace retrograd::cache
