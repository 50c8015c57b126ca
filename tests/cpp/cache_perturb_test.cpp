// Windows between threads that are a few instructions wide, held open by delays. CMake also runs all of
// cache_threads_test.cpp with delays.
#include <atomic>
#include <barrier>
#include <memory>
#include <thread>
#include <vector>

#include "cache/trie.h"
#include "perturb_util.h"

namespace retrograd::cache {
namespace {

[[maybe_unused]] const bool watched = test::PerturbedProcess::watch();

class Perturbed : public testing::TestWithParam<uint64_t> {
 private:
  const test::Perturbation perturbation_{GetParam()};
};

constexpr int kThreads = 4;

// Runs body(thread, round) on all threads, which begin each round together.
template <class Body>
void run_rounds(int rounds, Body body) {
  std::barrier step(kThreads);
  std::vector<std::jthread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (int round = 0; round < rounds; ++round) {
        step.arrive_and_wait();
        body(thread, round);
      }
    });
  }
}

Path path_of(int first, int second) {
  Path path;
  for (const int key : {first, second}) {
    path.append(std::as_bytes(std::span(&key, 1)));
  }
  return path;
}

// A thread that finds no plan may come to build one when another has landed and left meanwhile.
TEST_P(Perturbed, OneBuildWhereAMissAndALandingCross) {
  constexpr int kRounds = 300;
  std::vector<Leaf> leaves(kRounds);
  std::vector<std::atomic<int>> builds(kRounds);
  run_rounds(kRounds, [&](int, int round) {
    leaves[round].get_or_build({}, Wait::kYes, [&] {
      ++builds[round];
      return std::make_shared<int>(round);
    });
  });
  for (int round = 0; round < kRounds; ++round) {
    EXPECT_EQ(builds[round], 1);
    EXPECT_EQ(leaves[round].plan_count(), 1U);
  }
}

// As above, for leaves and for the nodes that their paths share.
TEST_P(Perturbed, OneInsertWhereMissesCross) {
  constexpr int kRounds = 300;
  Trie trie;
  std::atomic<int> inserts{0};
  run_rounds(kRounds, [&](int thread, int round) {
    for (const int last : {thread, 100}) {  // one of the thread's own, one of all
      const Path path = path_of(round, last);
      const Trie::Inserted got = trie.find_or_insert(path);
      inserts += got.inserted ? 1 : 0;
      EXPECT_EQ(trie.find(path), got.leaf);
    }
  });
  EXPECT_EQ(inserts, kRounds * (kThreads + 1));
  EXPECT_EQ(trie.stats().leaves, static_cast<size_t>(kRounds * (kThreads + 1)));
  EXPECT_EQ(trie.stats().nodes, static_cast<size_t>(kRounds * (kThreads + 2)));
}

// Plans of different keys land at once; none may fall off the list.
TEST_P(Perturbed, EveryPlanThatLandedIsFound) {
  constexpr int kRounds = 200;
  std::vector<Leaf> leaves(kRounds);
  run_rounds(kRounds, [&](int thread, int round) {
    leaves[round].get_or_build(std::as_bytes(std::span(&thread, 1)), Wait::kYes,
                               [&] { return std::make_shared<int>(thread); });
  });
  for (const Leaf& leaf : leaves) {
    for (int thread = 0; thread < kThreads; ++thread) {
      const void* plan = leaf.find(std::as_bytes(std::span(&thread, 1)));
      ASSERT_NE(plan, nullptr);
      EXPECT_EQ(*static_cast<const int*>(plan), thread);
    }
  }
}

// The trie holds one leaf at most: whoever was told that its leaf is in the trie finds it there or sees that it has
// gone, never another one under its path.
TEST_P(Perturbed, AMemoryOfAnEvictedPathIsNotFollowed) {
  constexpr int kRounds = 300;
  Trie trie(Trie::Limits{.max_leaves = 1});
  std::vector<Memo> memos(kThreads);
  run_rounds(kRounds, [&](int thread, int round) {
    const int first = (round + thread) % 3;
    const Path path = path_of(first, 0);
    const std::shared_ptr<Leaf> leaf = trie.find_or_insert(path, &memos[thread]).leaf;
    const void* plan = leaf->get_or_build({}, Wait::kYes, [&] { return std::make_shared<int>(first); });
    EXPECT_EQ(*static_cast<const int*>(plan), first);
    if (const std::shared_ptr<Leaf> again = trie.find(path)) {
      const void* found = again->find({});
      EXPECT_TRUE(found == nullptr || *static_cast<const int*>(found) == first);
    }
  });
  EXPECT_LE(trie.stats().leaves, 1U);
}

TEST(PerturbedOff, ThereAreNoDelays) {
  const uint64_t seed = perturb_with(0);
  const uint64_t before = perturbations();
  for (int i = 0; i < 100; ++i) Trie().find_or_insert(path_of(1, i));
  EXPECT_EQ(perturbations(), before);
  perturb_with(seed);
}

INSTANTIATE_TEST_SUITE_P(Seeds, Perturbed, testing::Values(1, 2, 3));

}  // namespace
}  // namespace retrograd::cache
