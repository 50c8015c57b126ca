// The trie and its leaves from one thread. Threads: cache_threads_test.cpp.
#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "cache/trie.h"
#include "trie_model.h"

namespace retrograd::cache {
namespace {

KeyView bytes(std::string_view text) { return std::as_bytes(std::span(text.data(), text.size())); }

Path path(std::initializer_list<std::string_view> keys) {
  Path result;
  for (const std::string_view key : keys) {
    result.append(bytes(key));
  }
  return result;
}

std::shared_ptr<Leaf> insert(Trie& trie, const Path& path, Memo* memo = nullptr) {
  return trie.find_or_insert(path, memo).leaf;
}

// Sets a flag when it is destroyed.
std::shared_ptr<const void> plan_that_reports_its_end(bool& ended) {
  return {&ended, [](bool* flag) { *flag = true; }};
}

// --- Path ---

TEST(Path, KeepsKeysApart) {
  const Path p = path({"ab", "", "c"});
  ASSERT_EQ(p.size(), 3U);
  EXPECT_TRUE(std::ranges::equal(p[0], bytes("ab")));
  EXPECT_TRUE(p[1].empty());
  EXPECT_TRUE(std::ranges::equal(p[2], bytes("c")));
  EXPECT_EQ(p, path({"ab", "", "c"}));
  EXPECT_NE(p, path({"a", "b", "c"}));
  EXPECT_NE(p, path({"ab", "c"}));
}

TEST(Path, KeyInPiecesEqualsKeyInOne) {
  Path p;
  p.begin_key();
  p.put(uint16_t{0x6261});
  p.put_bytes(bytes("cd"));
  p.put('e');
  p.end_key();
  EXPECT_EQ(p, path({"abcde"}));
}

TEST(Path, BeginDropsAnUnfinishedKey) {
  Path p = path({"a"});
  p.begin_key();
  p.put(uint64_t{7});
  EXPECT_EQ(p, path({"a"}));
  p.append(bytes("b"));
  EXPECT_EQ(p, path({"a", "b"}));
}

TEST(Path, ReuseDoesNotMoveItsBuffer) {
  Path p;
  const std::string key(200, 'k');
  const auto fill = [&] {
    p.clear();
    for (int i = 0; i < 1000; ++i) {
      p.append(bytes(key));
    }
    return p[0].data();
  };
  const std::byte* first = fill();
  EXPECT_EQ(fill(), first);
  EXPECT_EQ(p.size(), 1000U);
}

TEST(Path, TooLongKeyThrowsAndLeavesThePathAsItWas) {
  Path p = path({"a"});
  const char byte = 'x';
  // Never read: the length is refused first.
  const KeyView huge(reinterpret_cast<const std::byte*>(&byte), Path::kMaxKeyBytes + 1);
  EXPECT_THROW(p.append(huge), std::length_error);
  EXPECT_EQ(p, path({"a"}));
}

// --- Lookup ---

TEST(Trie, FindsWhatWasInserted) {
  Trie trie;
  EXPECT_EQ(trie.find(path({"a", "b"})), nullptr);
  const Trie::Inserted first = trie.find_or_insert(path({"a", "b"}));
  ASSERT_NE(first.leaf, nullptr);
  EXPECT_TRUE(first.inserted);
  const Trie::Inserted second = trie.find_or_insert(path({"a", "b"}));
  EXPECT_FALSE(second.inserted);
  EXPECT_EQ(second.leaf, first.leaf);
  EXPECT_EQ(trie.find(path({"a", "b"})), first.leaf);
  EXPECT_EQ(trie.find(path({"a", "c"})), nullptr);
  EXPECT_EQ(trie.find(path({"b", "a"})), nullptr);
  EXPECT_EQ(trie.find(path({"ab"})), nullptr);
}

TEST(Trie, FindNeverCreates) {
  Trie trie;
  Memo memo;
  EXPECT_EQ(trie.find(path({"a", "b"}), &memo), nullptr);
  EXPECT_EQ(trie.find(path({"a", "b"}), &memo), nullptr);
  EXPECT_TRUE(trie.is_empty());
  EXPECT_EQ(trie.stats().nodes, 0U);
}

TEST(Trie, EmptyPathIsTheRootsLeaf) {
  Trie trie;
  EXPECT_EQ(trie.find(Path()), nullptr);
  const auto leaf = insert(trie, Path());
  EXPECT_EQ(trie.find(Path()), leaf);
  EXPECT_EQ(trie.find(path({""})), nullptr);
  EXPECT_EQ(trie.stats().leaves, 1U);
  EXPECT_EQ(trie.stats().nodes, 0U);
  trie.clear();
  EXPECT_EQ(trie.find(Path()), nullptr);
}

TEST(Trie, EmptyKeysCount) {
  Trie trie;
  const auto one = insert(trie, path({""}));
  const auto two = insert(trie, path({"", ""}));
  EXPECT_NE(one, two);
  EXPECT_EQ(trie.find(path({""})), one);
  EXPECT_EQ(trie.find(path({"", ""})), two);
  EXPECT_EQ(trie.find(path({"", "", ""})), nullptr);
}

TEST(Trie, KeyPastSixteenBitLengthIsTold) {
  Trie trie;
  const std::string half(1U << 16U, 'x');
  const auto leaf = insert(trie, path({half + "a"}));
  EXPECT_EQ(trie.find(path({"a"})), nullptr);
  EXPECT_EQ(trie.find(path({half + "b"})), nullptr);
  EXPECT_EQ(trie.find(path({half + "a"})), leaf);
}

TEST(Trie, DoesNotKeepReferencesIntoThePath) {
  Trie trie;
  auto p = std::make_unique<Path>(path({"a", "b"}));
  const auto leaf = insert(trie, *p);
  p.reset();
  EXPECT_EQ(trie.find(path({"a", "b"})), leaf);
}

TEST(Trie, SharesPrefixes) {
  Trie trie;
  insert(trie, path({"a", "b", "c"}));
  insert(trie, path({"a", "b", "d"}));
  insert(trie, path({"x", "b", "c"}));
  EXPECT_EQ(trie.stats().nodes, 4U + 3U);
  EXPECT_EQ(trie.stats().leaves, 3U);
}

TEST(Trie, LeafMayBePrefixOfLongerPath) {
  for (const bool short_first : {true, false}) {
    Trie trie;
    const auto first = insert(trie, short_first ? path({"a"}) : path({"a", "b"}));
    EXPECT_EQ(trie.find(short_first ? path({"a", "b"}) : path({"a"})), nullptr);
    const auto second = insert(trie, short_first ? path({"a", "b"}) : path({"a"}));
    EXPECT_NE(first, second);
    EXPECT_EQ(trie.find(short_first ? path({"a"}) : path({"a", "b"})), first);
    EXPECT_EQ(trie.find(short_first ? path({"a", "b"}) : path({"a"})), second);
    EXPECT_EQ(trie.stats().nodes, 2U);
  }
}

TEST(Trie, StatsCount) {
  Trie trie(Trie::Limits{.max_leaves = 2});
  insert(trie, path({"a"}));
  insert(trie, path({"a"}));
  insert(trie, path({"b", "c"}));
  insert(trie, path({"d"}));
  const Trie::Stats stats = trie.stats();
  EXPECT_EQ(stats.leaves, 2U);
  EXPECT_EQ(stats.nodes, 3U);
  EXPECT_EQ(stats.inserts, 3U);
  EXPECT_EQ(stats.evictions, 1U);
}

// --- first_miss ---

// The keys that stand where the path ends, in no particular order.
std::vector<std::string> siblings_of(const Trie::Miss& miss) {
  std::vector<std::string> keys;
  for (const auto& key : miss.siblings) {
    keys.emplace_back(reinterpret_cast<const char*>(key.data()), key.size());
  }
  std::ranges::sort(keys);
  return keys;
}
using Siblings = std::vector<std::string>;

TEST(TrieFirstMiss, TellsHowFarAPathIsThereAndWhatStandsThereInstead) {
  Trie trie;
  insert(trie, path({"a", "b", "c"}));
  insert(trie, path({"a", "b", "dd"}));
  insert(trie, path({"a", "b", ""}));
  insert(trie, path({"a", "x", "c"}));
  insert(trie, path({"q"}));

  Trie::Miss miss = trie.first_miss(path({"a", "b", "z", "c"}));
  EXPECT_EQ(miss.depth, 2U);
  EXPECT_EQ(siblings_of(miss), (Siblings{"", "c", "dd"}));
  miss = trie.first_miss(path({"a", "z"}));
  EXPECT_EQ(miss.depth, 1U);
  EXPECT_EQ(siblings_of(miss), (Siblings{"b", "x"}));
  miss = trie.first_miss(path({"z"}));
  EXPECT_EQ(miss.depth, 0U);
  EXPECT_EQ(siblings_of(miss), (Siblings{"a", "q"}));
  EXPECT_EQ(trie.first_miss(path({"ab"})).depth, 0U) << "keys are kept apart";
  miss = trie.first_miss(path({"a", ""}));
  EXPECT_EQ(miss.depth, 1U) << "an empty key is no end";
  EXPECT_EQ(siblings_of(miss), (Siblings{"b", "x"}));
}

TEST(TrieFirstMiss, NothingIsMissingWhereAllKeysAreThere) {
  Trie trie;
  insert(trie, path({"a", "b"}));
  for (const Path& there : {path({"a", "b"}), path({"a"}), Path()}) {  // with a leaf or without
    const Trie::Miss miss = trie.first_miss(there);
    EXPECT_EQ(miss.depth, there.size());
    EXPECT_TRUE(miss.siblings.empty());
  }
}

TEST(TrieFirstMiss, PathThatGoesOnBehindALeafHasNoSiblings) {
  Trie trie;
  insert(trie, path({"a", "b"}));
  const Trie::Miss miss = trie.first_miss(path({"a", "b", "c"}));
  EXPECT_EQ(miss.depth, 2U);
  EXPECT_TRUE(miss.siblings.empty()) << "the end of the shorter path is no key";
}

TEST(TrieFirstMiss, EmptyAndClearedTries) {
  Trie trie;
  EXPECT_EQ(trie.first_miss(path({"a"})).depth, 0U);
  EXPECT_TRUE(trie.first_miss(path({"a"})).siblings.empty());
  EXPECT_EQ(trie.first_miss(Path()).depth, 0U);
  insert(trie, path({"a", "b"}));
  trie.clear();
  EXPECT_EQ(trie.first_miss(path({"a", "b"})).depth, 0U);
  EXPECT_TRUE(trie.first_miss(path({"a", "b"})).siblings.empty());
}

TEST(TrieFirstMiss, MakesNothingAndCountsAsNoUse) {
  Trie trie(Trie::Limits{.max_leaves = 2});
  insert(trie, path({"a", "b"}));
  insert(trie, path({"a", "c"}));
  const Trie::Stats before = trie.stats();
  EXPECT_EQ(trie.first_miss(path({"a", "b"})).depth, 2U);
  EXPECT_EQ(trie.first_miss(path({"a", "b", "x", "y"})).depth, 2U);
  EXPECT_EQ(trie.stats().nodes, before.nodes);
  EXPECT_EQ(trie.stats().leaves, before.leaves);
  EXPECT_EQ(trie.stats().inserts, before.inserts);
  insert(trie, path({"q"}));  // evicts a b, which was inserted first and not used since
  EXPECT_EQ(trie.find(path({"a", "b"})), nullptr);
  EXPECT_NE(trie.find(path({"a", "c"})), nullptr);
  const Trie::Miss miss = trie.first_miss(path({"a", "b"}));
  EXPECT_EQ(miss.depth, 1U);
  EXPECT_EQ(siblings_of(miss), (Siblings{"c"}));
}

TEST(TrieFirstMiss, AgreesWithASetOfPaths) {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    std::mt19937 random(seed);
    const auto random_keys = [&] {
      std::vector<std::string> keys(random() % 5);
      for (std::string& key : keys) {
        key = std::string(random() % 3, static_cast<char>('x' + random() % 2));
      }
      return keys;
    };
    const auto to_path = [](const std::vector<std::string>& keys) {
      Path p;
      for (const std::string& key : keys) {
        p.append(bytes(key));
      }
      return p;
    };
    Trie trie;
    std::vector<std::vector<std::string>> inserted;
    for (int i = 0; i < 20; ++i) {
      const std::vector<std::string> asked = random_keys();
      size_t depth = 0;
      for (const auto& keys : inserted) {
        depth = std::max(depth, static_cast<size_t>(std::ranges::mismatch(asked, keys).in1 - asked.begin()));
      }
      std::vector<std::string> expected;
      for (const auto& keys : inserted) {
        if (depth < asked.size() && depth < keys.size() &&
            std::equal(asked.begin(), asked.begin() + static_cast<std::ptrdiff_t>(depth), keys.begin())) {
          expected.push_back(keys[depth]);
        }
      }
      std::ranges::sort(expected);
      expected.erase(std::unique(expected.begin(), expected.end()), expected.end());
      const Trie::Miss miss = trie.first_miss(to_path(asked));
      ASSERT_EQ(miss.depth, depth) << "seed " << seed << " step " << i;
      ASSERT_EQ(siblings_of(miss), expected) << "seed " << seed << " step " << i;
      inserted.push_back(random_keys());
      insert(trie, to_path(inserted.back()));
    }
  }
}

// --- clear ---

TEST(Trie, IsEmptyUntilAnInsertAndAfterClear) {
  Trie trie;
  EXPECT_TRUE(trie.is_empty());
  insert(trie, path({"a", "b"}));
  insert(trie, path({"a"}));
  EXPECT_FALSE(trie.is_empty());
  trie.clear();
  EXPECT_TRUE(trie.is_empty());
  EXPECT_EQ(trie.stats().leaves, 0U);
  EXPECT_EQ(trie.stats().nodes, 0U);
  EXPECT_EQ(trie.stats().evictions, 0U);
  EXPECT_EQ(trie.find(path({"a"})), nullptr);
  EXPECT_TRUE(trie.find_or_insert(path({"a"})).inserted);
}

TEST(Trie, ClearedLeafStaysWholeForItsHolder) {
  Trie trie;
  bool ended = false;
  auto leaf = insert(trie, path({"a"}));
  const void* plan = leaf->get_or_build({}, Wait::kYes, [&] { return plan_that_reports_its_end(ended); });
  EXPECT_TRUE(trie.touch(*leaf));
  trie.clear();
  EXPECT_FALSE(trie.touch(*leaf));
  EXPECT_FALSE(ended);
  EXPECT_EQ(leaf->find({}), plan);
  leaf.reset();
  EXPECT_TRUE(ended);
}

TEST(Trie, PlansEndWithClearWhenNobodyHoldsThem) {
  Trie trie;
  bool ended = false;
  insert(trie, path({"a"}))->get_or_build({}, Wait::kYes, [&] { return plan_that_reports_its_end(ended); });
  EXPECT_FALSE(ended);
  trie.clear();
  EXPECT_TRUE(ended);
}

// A plan may own anything; when it goes, the trie's mutex must be free.
TEST(Trie, PlanMayUseTheTrieWhenItIsDestroyed) {
  Trie trie(Trie::Limits{.max_leaves = 2});
  int calls = 0;
  const auto add = [&](const char* key) {
    insert(trie, path({key}))->get_or_build({}, Wait::kYes, [&] {
      return std::shared_ptr<const void>(&calls, [&](int* count) {
        ++*count;
        trie.stats();
        trie.find_or_insert(path({"a"}));
      });
    });
  };
  add("p");
  add("q");
  add("r");  // evicts p, whose plan inserts a, which evicts q
  EXPECT_EQ(calls, 2);
  trie.set_limits({.max_leaves = 0});
  trie.set_limits({.max_leaves = 2});
  add("s");
  trie.clear();
  EXPECT_EQ(calls, 4);
}

// --- Eviction ---

TEST(Trie, EvictsTheLeastRecentlyUsed) {
  Trie trie(Trie::Limits{.max_leaves = 3});
  const auto a = insert(trie, path({"a"}));
  insert(trie, path({"b"}));
  insert(trie, path({"c"}));
  EXPECT_NE(trie.find(path({"a"})), nullptr);  // the oldest insert, the latest use
  insert(trie, path({"d"}));
  EXPECT_EQ(trie.find(path({"b"})), nullptr);
  EXPECT_NE(trie.find(path({"c"})), nullptr);
  EXPECT_TRUE(trie.touch(*a));
  insert(trie, path({"e"}));  // of c, a (both used since d came) and d, d was used longest ago
  EXPECT_EQ(trie.find(path({"d"})), nullptr);
  EXPECT_NE(trie.find(path({"a"})), nullptr);
  EXPECT_NE(trie.find(path({"c"})), nullptr);
  EXPECT_NE(trie.find(path({"e"})), nullptr);
}

TEST(Trie, EveryKindOfHitCountsAsUse) {
  enum class Hit { kFind, kFindOrInsert, kMemo, kTouch };
  for (const Hit hit : {Hit::kFind, Hit::kFindOrInsert, Hit::kMemo, Hit::kTouch}) {
    Trie trie(Trie::Limits{.max_leaves = 2});
    Memo memo;
    const auto a = insert(trie, path({"a"}), &memo);
    insert(trie, path({"b"}));
    switch (hit) {
      case Hit::kFind:
        trie.find(path({"a"}));
        break;
      case Hit::kFindOrInsert:
        trie.find_or_insert(path({"a"}));
        break;
      case Hit::kMemo:
        trie.find(path({"a"}), &memo);
        break;
      case Hit::kTouch:
        trie.touch(*a);
        break;
    }
    insert(trie, path({"c"}));
    EXPECT_NE(trie.find(path({"a"})), nullptr) << static_cast<int>(hit);
    EXPECT_EQ(trie.find(path({"b"})), nullptr) << static_cast<int>(hit);
  }
}

TEST(Trie, EvictionPrunesOnlyWhatNobodyShares) {
  Trie trie(Trie::Limits{.max_leaves = 2});
  insert(trie, path({"a", "b", "c", "d"}));
  insert(trie, path({"a", "b", "x"}));
  insert(trie, path({"q"}));  // evicts a b c d
  EXPECT_EQ(trie.find(path({"a", "b", "c", "d"})), nullptr);
  EXPECT_NE(trie.find(path({"a", "b", "x"})), nullptr);
  EXPECT_EQ(trie.stats().nodes, 3U + 1U);
}

TEST(Trie, EvictionOfAPrefixKeepsTheLongerPathAndTheOtherWayRound) {
  Trie trie(Trie::Limits{.max_leaves = 2});
  insert(trie, path({"a"}));
  insert(trie, path({"a", "b"}));
  insert(trie, path({"q"}));  // evicts a
  EXPECT_EQ(trie.find(path({"a"})), nullptr);
  EXPECT_NE(trie.find(path({"a", "b"})), nullptr);
  EXPECT_EQ(trie.stats().nodes, 3U);
  insert(trie, path({"a"}));  // evicts q, older than the find of a b
  insert(trie, path({"r"}));  // evicts a b
  EXPECT_EQ(trie.find(path({"a", "b"})), nullptr);
  EXPECT_NE(trie.find(path({"a"})), nullptr);
  EXPECT_EQ(trie.stats().nodes, 2U);
}

TEST(Trie, EvictedLeafStaysWholeForItsHolder) {
  Trie trie(Trie::Limits{.max_leaves = 1});
  const auto leaf = insert(trie, path({"a"}));
  int plan = 0;
  leaf->get_or_build({}, Wait::kYes, [&] { return std::shared_ptr<int>(&plan, [](int*) {}); });
  insert(trie, path({"b"}));
  EXPECT_FALSE(trie.touch(*leaf));
  EXPECT_EQ(leaf->find({}), &plan);
  EXPECT_NE(insert(trie, path({"a"})), leaf);
  EXPECT_FALSE(trie.touch(*leaf));
}

TEST(Trie, EvictsWhatExceedsTheNodeLimit) {
  Trie trie(Trie::Limits{.max_nodes = 4});
  insert(trie, path({"a", "b"}));
  insert(trie, path({"c", "d"}));
  EXPECT_EQ(trie.stats().leaves, 2U);
  insert(trie, path({"e"}));  // five nodes: the oldest path goes, and with it two
  EXPECT_EQ(trie.stats().nodes, 3U);
  EXPECT_EQ(trie.find(path({"a", "b"})), nullptr);
  EXPECT_NE(trie.find(path({"c", "d"})), nullptr);
  EXPECT_NE(trie.find(path({"e"})), nullptr);
}

TEST(Trie, KeepsTheLastPathEvenIfItAloneExceedsTheNodeLimit) {
  Trie trie(Trie::Limits{.max_nodes = 2});
  insert(trie, path({"a"}));
  insert(trie, path({"b", "c", "d", "e"}));
  EXPECT_EQ(trie.stats().leaves, 1U);
  EXPECT_NE(trie.find(path({"b", "c", "d", "e"})), nullptr);
  insert(trie, path({"f"}));
  EXPECT_EQ(trie.find(path({"b", "c", "d", "e"})), nullptr);
  EXPECT_EQ(trie.stats().nodes, 1U);
}

TEST(Trie, SmallerNodeLimitEvictsAtOnce) {
  Trie trie;
  insert(trie, path({"a", "b"}));
  insert(trie, path({"c", "d"}));
  trie.set_limits({.max_nodes = 3});
  EXPECT_EQ(trie.stats().nodes, 2U);
  EXPECT_EQ(trie.stats().evictions, 1U);
  EXPECT_NE(trie.find(path({"c", "d"})), nullptr);
}

TEST(Trie, SmallerLimitEvictsAtOnce) {
  Trie trie;
  for (char c = 'a'; c <= 'j'; ++c) {
    insert(trie, path({std::string_view(&c, 1)}));
  }
  trie.set_limits({.max_leaves = 3});
  EXPECT_EQ(trie.stats().leaves, 3U);
  EXPECT_EQ(trie.stats().evictions, 7U);
  EXPECT_EQ(trie.find(path({"g"})), nullptr);
  EXPECT_NE(trie.find(path({"h"})), nullptr);
}

TEST(Trie, LimitOfZeroKeepsNothing) {
  Trie trie(Trie::Limits{.max_leaves = 0});
  const auto leaf = insert(trie, path({"a", "b"}));
  ASSERT_NE(leaf, nullptr);
  EXPECT_FALSE(trie.touch(*leaf));
  EXPECT_TRUE(trie.is_empty());
  EXPECT_EQ(trie.stats().nodes, 0U);
}

// --- Memo ---

TEST(Memo, HitReturnsTheSameLeaf) {
  Trie trie;
  Memo memo;
  const auto leaf = insert(trie, path({"a", "b"}), &memo);
  EXPECT_EQ(trie.find(path({"a", "b"}), &memo), leaf);
  EXPECT_EQ(trie.find(path({"a", "b"})), leaf);
  EXPECT_EQ(trie.find(path({"a"}), &memo), nullptr);
  EXPECT_EQ(trie.find(path({"a", "b", "c"}), &memo), nullptr);
}

// What makes hits of several threads scale: the counter of a remembered leaf is the memo's own.
TEST(Memo, CountsItsReferencesApart) {
  Trie trie;
  const auto shared = insert(trie, path({"a"}));
  const long count = shared.use_count();
  Memo memo;
  trie.find(path({"a"}), &memo);
  const auto first = trie.find(path({"a"}), &memo);
  const auto second = trie.find(path({"a"}), &memo);
  EXPECT_EQ(first.use_count(), 3);  // the memo, `first`, `second`
  EXPECT_EQ(shared.use_count(), count + 1);
}

// Whether two references come from one counter, as those do that a memo hands out for a path for as
// long as it remembers it.
bool same_counter(const std::shared_ptr<Leaf>& a, const std::shared_ptr<Leaf>& b) {
  return !a.owner_before(b) && !b.owner_before(a);
}

TEST(Memo, KeepsItsLatestPaths) {
  Trie trie;
  Memo memo;
  const std::vector<Path> paths = {path({"a"}), path({"b"}), path({"c"}), path({"d"})};
  ASSERT_EQ(paths.size(), Memo::kPaths);
  std::vector<std::shared_ptr<Leaf>> leaves;
  for (const Path& p : paths) {
    leaves.push_back(insert(trie, p, &memo));
  }
  for (const size_t i : {2, 0, 3, 1}) {
    EXPECT_TRUE(same_counter(trie.find(paths[i], &memo), leaves[i])) << i;
  }
  insert(trie, path({"e"}), &memo);  // displaces c, the least recent
  for (const size_t i : {0, 3, 1}) {
    EXPECT_TRUE(same_counter(trie.find(paths[i], &memo), leaves[i])) << i;
  }
  EXPECT_FALSE(same_counter(trie.find(paths[2], &memo), leaves[2]));
}

TEST(Memo, IsStaleAfterClear) {
  Trie trie;
  Memo memo;
  const auto old = insert(trie, path({"a"}), &memo);
  trie.clear();
  EXPECT_EQ(trie.find(path({"a"}), &memo), nullptr);
  const Trie::Inserted again = trie.find_or_insert(path({"a"}), &memo);
  EXPECT_TRUE(again.inserted);
  EXPECT_NE(again.leaf, old);
  EXPECT_EQ(trie.find(path({"a"}), &memo), again.leaf);
}

TEST(Memo, LetsGoOfEverythingAfterClear) {
  Trie trie;
  Memo memo;
  bool ended = false;
  insert(trie, path({"a"}), &memo)->get_or_build({}, Wait::kYes, [&] { return plan_that_reports_its_end(ended); });
  trie.clear();
  EXPECT_FALSE(ended);
  trie.find(path({"another"}), &memo);
  EXPECT_TRUE(ended);
}

TEST(Memo, IsStaleAfterEviction) {
  Trie trie(Trie::Limits{.max_leaves = 1});
  Memo memo;
  const auto old = insert(trie, path({"a"}), &memo);
  insert(trie, path({"b"}));
  EXPECT_EQ(trie.find(path({"a"}), &memo), nullptr);
  EXPECT_NE(insert(trie, path({"a"}), &memo), old);
}

TEST(Memo, RelearnsAnEvictedPathInItsOwnPlace) {
  Trie trie;
  Memo memo;
  insert(trie, path({"a"}), &memo);
  std::map<std::string, std::shared_ptr<Leaf>> others;
  for (const char* key : {"b", "c", "d"}) {
    others[key] = insert(trie, path({key}), &memo);
  }
  trie.set_limits({.max_leaves = 3});  // evicts a
  trie.set_limits({.max_leaves = 9});
  insert(trie, path({"a"}), &memo);
  for (const auto& [key, leaf] : others) {
    EXPECT_TRUE(same_counter(trie.find(path({key}), &memo), leaf)) << key;
  }
}

TEST(Memo, DoesNotMixUpTries) {
  Memo memo;
  auto one = std::make_unique<Trie>();
  Trie two;
  const auto leaf_of_one = insert(*one, path({"a"}), &memo);
  EXPECT_EQ(two.find(path({"a"}), &memo), nullptr);
  const auto leaf_of_two = insert(two, path({"a"}), &memo);
  EXPECT_EQ(one->find(path({"a"}), &memo), leaf_of_one);
  EXPECT_EQ(two.find(path({"a"}), &memo), leaf_of_two);
  one->find(path({"a"}), &memo);
  one = nullptr;
  one = std::make_unique<Trie>();  // most likely at the same address
  EXPECT_EQ(one->find(path({"a"}), &memo), nullptr);
}

TEST(Memo, MayOutliveItsTrie) {
  Memo memo;
  bool ended = false;
  {
    Trie trie;
    insert(trie, path({"a"}), &memo)->get_or_build({}, Wait::kYes, [&] { return plan_that_reports_its_end(ended); });
  }
  EXPECT_FALSE(ended);
  memo.clear();
  EXPECT_TRUE(ended);
}

// --- Leaf ---

TEST(Leaf, HoldsOnePlanPerSpecialization) {
  Leaf leaf;
  EXPECT_EQ(leaf.find({}), nullptr);
  EXPECT_EQ(leaf.plan_count(), 0U);
  const auto build = [](int value) { return [value] { return std::make_shared<int>(value); }; };
  const void* a = leaf.get_or_build(bytes("a"), Wait::kYes, build(1));
  const void* none = leaf.get_or_build({}, Wait::kNo, build(2));
  EXPECT_EQ(*static_cast<const int*>(a), 1);
  EXPECT_EQ(*static_cast<const int*>(none), 2);
  EXPECT_EQ(leaf.find(bytes("a")), a);
  EXPECT_EQ(leaf.find({}), none);
  EXPECT_EQ(leaf.find(bytes("b")), nullptr);
  EXPECT_EQ(leaf.find(bytes("aa")), nullptr);
  EXPECT_EQ(leaf.get_or_build(bytes("a"), Wait::kYes, build(3)), a);
  EXPECT_EQ(leaf.plan_count(), 2U);
}

TEST(Leaf, ExceptionInBuildLeavesItClean) {
  Leaf leaf;
  const auto fail = []() -> std::shared_ptr<const void> { throw std::runtime_error("no"); };
  EXPECT_THROW(leaf.get_or_build(bytes("a"), Wait::kYes, fail), std::runtime_error);
  EXPECT_EQ(leaf.find(bytes("a")), nullptr);
  EXPECT_EQ(leaf.plan_count(), 0U);
  EXPECT_NE(leaf.get_or_build(bytes("a"), Wait::kNo, [] { return std::make_shared<int>(1); }), nullptr);
}

TEST(Leaf, NullPlanIsNotKept) {
  Leaf leaf;
  EXPECT_EQ(leaf.get_or_build({}, Wait::kYes, [] { return nullptr; }), nullptr);
  EXPECT_EQ(leaf.plan_count(), 0U);
  EXPECT_NE(leaf.get_or_build({}, Wait::kYes, [] { return std::make_shared<int>(1); }), nullptr);
}

TEST(Leaf, BuildThatAsksForItselfGetsNull) {
  Leaf leaf;
  const void* outer = leaf.get_or_build(bytes("a"), Wait::kYes, [&] {
    const auto never = []() -> std::shared_ptr<const void> { throw std::logic_error("ran"); };
    EXPECT_EQ(leaf.get_or_build(bytes("a"), Wait::kYes, never), nullptr);
    EXPECT_NE(leaf.get_or_build(bytes("b"), Wait::kYes, [] { return std::make_shared<int>(1); }), nullptr);
    return std::make_shared<int>(2);
  });
  EXPECT_EQ(leaf.find(bytes("a")), outer);
  EXPECT_EQ(leaf.plan_count(), 2U);
}

TEST(Leaf, PlansEndWithTheLeaf) {
  int live = 0;
  {
    Leaf leaf;
    for (int i = 0; i < 100; ++i) {
      ++live;
      leaf.get_or_build(std::as_bytes(std::span(&i, 1)), Wait::kYes,
                        [&] { return std::shared_ptr<int>(&live, [](int* n) { --*n; }); });
    }
    EXPECT_EQ(live, 100);
  }
  EXPECT_EQ(live, 0);
}

// --- Size ---

TEST(Trie, LongChainsEndWithoutRecursion) {
  Path p;
  for (uint32_t i = 0; i < 100'000; ++i) {
    p.append(std::as_bytes(std::span(&i, 1)));
  }
  {
    Trie trie;
    insert(trie, p);
    EXPECT_EQ(trie.stats().nodes, 100'000U);
    trie.clear();
    EXPECT_EQ(trie.stats().nodes, 0U);
    insert(trie, p);
    trie.set_limits({.max_leaves = 0});
    EXPECT_EQ(trie.stats().nodes, 0U);
    trie.set_limits({.max_leaves = 1});
    insert(trie, p);
  }  // and by destruction
}

// --- Against a model ---

TEST(Trie, AgreesWithAMapOverRandomOperations) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
    const size_t limit = 1 + below(12);
    Trie trie(Trie::Limits{.max_leaves = limit});
    TrieModel model({.max_leaves = limit});
    std::deque<Memo> memos(2);
    Path p;
    for (int step = 0; step < 3'000; ++step) {
      TrieModel::Keys keys(below(4));
      p.clear();
      for (std::string& key : keys) {
        key = std::string(below(2), 'x') + std::string(below(2), 'y');
        p.append(bytes(key));
      }
      Memo* memo = below(3) == 0 ? nullptr : &memos[below(2)];
      const std::shared_ptr<Leaf> expected = model.find(keys);
      const uint32_t what = below(200);
      if (what < 100) {
        ASSERT_EQ(trie.find(p, memo), expected) << "seed " << seed << " step " << step;
      } else if (what < 198) {
        const Trie::Inserted got = trie.find_or_insert(p, memo);
        ASSERT_EQ(got.inserted, expected == nullptr) << "seed " << seed << " step " << step;
        if (got.inserted) {
          model.insert(keys, got.leaf);
        } else {
          ASSERT_EQ(got.leaf, expected) << "seed " << seed << " step " << step;
        }
      } else if (what == 198) {
        trie.find(p, memo);
        trie.clear();
        model.clear();
      } else {
        trie.find(p, memo);
        const size_t smaller = below(12);
        trie.set_limits({.max_leaves = smaller});
        model.set_limits({.max_leaves = smaller});
        trie.set_limits({.max_leaves = limit});
        model.set_limits({.max_leaves = limit});
      }
      const Trie::Stats a = trie.stats();
      const Trie::Stats b = model.stats();
      ASSERT_EQ(a.leaves, b.leaves) << "seed " << seed << " step " << step;
      ASSERT_EQ(a.nodes, b.nodes) << "seed " << seed << " step " << step;
      ASSERT_EQ(a.evictions, b.evictions) << "seed " << seed << " step " << step;
      ASSERT_EQ(a.inserts, b.inserts) << "seed " << seed << " step " << step;
    }
  }
}

}  // namespace
}  // namespace retrograd::cache
