// Where a group's plans are kept by sizes and strides, and how an entry gets its plan.
#include <set>

#include "fused_test_util.h"

namespace retrograd::test {
namespace {

using Numbers = std::vector<int64_t>;
using Bits = std::vector<bool>;
using State = GroupEntry::State;

class NoPlan final : public GroupPlan {
 public:
  explicit NoPlan(ShapeGuards guards = {}) : GroupPlan({.inputs = {}, .outputs = {}, .guards = std::move(guards)}) {}
  variable_list run(variable_list&&) const override { return {}; }
};

// A plan for numbers whose first one is at most `most`.
std::shared_ptr<const GroupPlan> plan_up_to(int64_t most) {
  using G = ShapeGuards;
  return std::make_shared<const NoPlan>(ShapeGuards({0}, {{G::kSymbol, 0, G::kConstant, most, G::kLe, 0}}, {}));
}

// --- GroupEntry ---

TEST(GroupEntry, BeginsCold) {
  const GroupEntry entry;
  EXPECT_EQ(entry.state(), State::kCold);
  EXPECT_EQ(entry.plan(), nullptr);
  EXPECT_EQ(entry.refused_member(), -1);
}

TEST(GroupEntry, IsHotFromTheCallThatWasNamed) {
  const GroupEntry third, first;
  EXPECT_FALSE(third.is_hot(3));
  EXPECT_FALSE(third.is_hot(3));
  EXPECT_TRUE(third.is_hot(3));
  EXPECT_TRUE(third.is_hot(3));
  EXPECT_TRUE(first.is_hot(1));
}

TEST(GroupEntry, IsClaimedOnce) {
  const GroupEntry entry;
  EXPECT_TRUE(entry.claim());
  EXPECT_EQ(entry.state(), State::kMaking);
  EXPECT_FALSE(entry.claim());
  EXPECT_EQ(entry.plan(), nullptr);
}

TEST(GroupEntry, GivenBackItCanBeClaimedAgain) {
  const GroupEntry entry;
  ASSERT_TRUE(entry.claim());
  entry.give_back();
  EXPECT_EQ(entry.state(), State::kCold);
  EXPECT_TRUE(entry.claim());
  EXPECT_FALSE(entry.claim());
}

TEST(GroupEntry, SettledItHoldsItsPlan) {
  auto plan = std::make_shared<const NoPlan>();
  const std::weak_ptr<const NoPlan> watch = plan;
  {
    const GroupEntry entry;
    ASSERT_TRUE(entry.claim());
    entry.settle(plan);
    EXPECT_EQ(entry.state(), State::kReady);
    EXPECT_EQ(entry.plan(), plan.get());
    EXPECT_FALSE(entry.claim());
    plan.reset();
    EXPECT_FALSE(watch.expired());
  }
  EXPECT_TRUE(watch.expired());
}

TEST(GroupEntry, RefusedItStaysWithoutPlan) {
  const GroupEntry key, member;
  ASSERT_TRUE(key.claim() && member.claim());
  key.refuse(-1);
  member.refuse(2);
  for (const GroupEntry* entry : {&key, &member}) {
    EXPECT_EQ(entry->state(), State::kRefused);
    EXPECT_EQ(entry->plan(), nullptr);
    EXPECT_FALSE(entry->claim());
  }
  EXPECT_EQ(key.refused_member(), -1);
  EXPECT_EQ(member.refused_member(), 2);
}

TEST(GroupEntry, IsLookedForInTheStoreOnce) {
  const GroupEntry entry;
  EXPECT_TRUE(entry.first_look());
  EXPECT_FALSE(entry.first_look());
}

TEST(GroupEntry, OneOfManyThreadsClaimsIt) {
  for (int round = 0; round < 200; ++round) {
    const GroupEntry entry;
    std::atomic<int> claims{0};
    run_together(4, [&](int) {
      if (entry.claim()) claims.fetch_add(1);
    });
    EXPECT_EQ(claims.load(), 1);
  }
}

TEST(GroupEntry, AReaderThatSeesReadySeesThePlan) {
  for (int round = 0; round < 200; ++round) {
    const GroupEntry entry;
    ASSERT_TRUE(entry.claim());
    const auto plan = std::make_shared<const NoPlan>();
    run_together(3, [&](int thread) {
      if (thread == 0) {
        entry.settle(plan);
        return;
      }
      while (entry.state() != State::kReady) std::this_thread::yield();
      EXPECT_EQ(entry.plan(), plan.get());
    });
  }
}

// --- GroupShapes ---

TEST(GroupShapes, FindsNothingAtFirst) {
  const GroupShapes shapes;
  EXPECT_EQ(shapes.find(Numbers{3, 4}), nullptr);
  EXPECT_EQ(shapes.size(), 0U);
}

TEST(GroupShapes, TheFirstVersionIsExact) {
  const GroupShapes shapes;
  const auto* first = shapes.find_or_add(Numbers{3, 4});
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(first->numbers, (Numbers{3, 4}));
  EXPECT_TRUE(first->open.empty());
  EXPECT_FALSE(first->is_open(0));
  EXPECT_EQ(shapes.find(Numbers{3, 4}), first);
  EXPECT_EQ(shapes.find_or_add(Numbers{3, 4}), first);
  EXPECT_EQ(shapes.find(Numbers{3, 5}), nullptr);
  EXPECT_EQ(shapes.find(Numbers{3}), nullptr);
  EXPECT_EQ(shapes.find(Numbers{3, 4, 5}), nullptr);
  EXPECT_EQ(shapes.size(), 1U);
}

TEST(GroupShapes, WithoutNumbersThereIsOneVersion) {
  const GroupShapes shapes;
  const auto* first = shapes.find_or_add(Numbers{});
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(shapes.find(Numbers{}), first);
}

TEST(GroupShapes, TheSecondLeavesOpenWhatChanged) {
  const GroupShapes shapes;
  const auto* first = shapes.find_or_add(Numbers{3, 4, 5});
  const auto* second = shapes.find_or_add(Numbers{7, 4, 9});
  ASSERT_NE(second, nullptr);
  ASSERT_NE(second, first);
  EXPECT_EQ(second->numbers, (Numbers{7, 4, 9}));
  EXPECT_EQ(second->open, (Bits{true, false, true}));
  EXPECT_TRUE(second->is_open(0));
  EXPECT_FALSE(second->is_open(1));
  // Others that differ there only will be served by it; the first has its own.
  EXPECT_EQ(shapes.find(Numbers{8, 4, 10}), second);
  EXPECT_EQ(shapes.find_or_add(Numbers{100, 4, 2}), second);
  EXPECT_EQ(shapes.find(Numbers{3, 4, 5}), first);
  EXPECT_EQ(shapes.find(Numbers{7, 6, 9}), nullptr);
  EXPECT_EQ(shapes.find(Numbers{7, 4}), nullptr);
  EXPECT_EQ(shapes.size(), 2U);
}

TEST(GroupShapes, LaterVersionsLeaveOpenAllThatEverChanged) {
  const GroupShapes shapes;
  shapes.find_or_add(Numbers{3, 4, 5});
  shapes.find_or_add(Numbers{7, 4, 5});
  const auto* third = shapes.find_or_add(Numbers{3, 4, 6});
  ASSERT_NE(third, nullptr);
  EXPECT_EQ(third->open, (Bits{true, false, true}));
  EXPECT_EQ(shapes.find(Numbers{9, 4, 9}), third);
}

TEST(GroupShapes, APlanIsOfferedOnlyWhatItsGuardsAdmit) {
  const GroupShapes shapes;
  shapes.find_or_add(Numbers{3});
  const auto* open = shapes.find_or_add(Numbers{7});
  ASSERT_TRUE(open->entry->claim());
  EXPECT_EQ(shapes.find(Numbers{1000}), open) << "nothing is known of its guards yet";
  open->entry->settle(plan_up_to(100));
  EXPECT_EQ(shapes.find(Numbers{100}), open);
  EXPECT_EQ(shapes.find(Numbers{101}), nullptr);
  // What it does not admit gets a version of its own: there is one for these open places already.
  const auto* exact = shapes.find_or_add(Numbers{101});
  ASSERT_NE(exact, nullptr);
  EXPECT_TRUE(exact->open.empty());
  EXPECT_EQ(shapes.find(Numbers{101}), exact);
  EXPECT_EQ(shapes.find(Numbers{102}), nullptr);
}

// The static version was made for exactly its numbers: its guards are not asked.
TEST(GroupShapes, ExactVersionsNeedNoGuards) {
  const GroupShapes shapes;
  const auto* first = shapes.find_or_add(Numbers{7});
  ASSERT_TRUE(first->entry->claim());
  first->entry->settle(plan_up_to(3));
  EXPECT_EQ(shapes.find(Numbers{7}), first);
}

TEST(GroupShapes, ARefusedOpenVersionIsNotInTheWay) {
  const GroupShapes shapes;
  shapes.find_or_add(Numbers{3});
  const auto* open = shapes.find_or_add(Numbers{7});
  ASSERT_TRUE(open->entry->claim());
  open->entry->refuse(-1);
  EXPECT_EQ(shapes.find(Numbers{7}), nullptr);
  EXPECT_EQ(shapes.find(Numbers{8}), nullptr);
  std::set<const GroupShapes::Version*> exact;
  for (const int64_t n : {7, 8, 9}) {
    const auto* version = shapes.find_or_add(Numbers{n});
    ASSERT_NE(version, nullptr);
    EXPECT_TRUE(version->open.empty());
    EXPECT_EQ(shapes.find(Numbers{n}), version);
    exact.insert(version);
  }
  EXPECT_EQ(exact.size(), 3U);
}

// What was refused for one number may do for one that is open in another place too.
TEST(GroupShapes, AnotherPlaceMayBeOpenedAfterARefusal) {
  const GroupShapes shapes;
  shapes.find_or_add(Numbers{3, 4});
  const auto* open = shapes.find_or_add(Numbers{7, 4});
  ASSERT_TRUE(open->entry->claim());
  open->entry->refuse(-1);
  const auto* wider = shapes.find_or_add(Numbers{7, 5});
  ASSERT_NE(wider, nullptr);
  EXPECT_EQ(wider->open, (Bits{true, true}));
}

// A refused exact version stays: it would be refused again.
TEST(GroupShapes, ARefusedExactVersionIsStillFound) {
  const GroupShapes shapes;
  const auto* first = shapes.find_or_add(Numbers{3});
  ASSERT_TRUE(first->entry->claim());
  first->entry->refuse(-1);
  EXPECT_EQ(shapes.find(Numbers{3}), first);
  EXPECT_EQ(shapes.find_or_add(Numbers{3}), first);
}

TEST(GroupShapes, SizesOfZeroAndOneGetVersionsOfTheirOwn) {
  for (const int64_t special : {0, 1}) {
    const GroupShapes shapes;
    const auto* first = shapes.find_or_add(Numbers{5, 6});
    const auto* own = shapes.find_or_add(Numbers{special, 6});
    ASSERT_NE(own, nullptr);
    EXPECT_TRUE(own->open.empty());
    const auto* open = shapes.find_or_add(Numbers{2, 6});
    ASSERT_NE(open, nullptr);
    EXPECT_EQ(open->open, (Bits{true, false}));
    EXPECT_EQ(shapes.find(Numbers{5, 6}), first);
    EXPECT_EQ(shapes.find(Numbers{special, 6}), own);
  }
}

TEST(GroupShapes, SizesOfZeroOrOneThatNeverChangedAreNothingSpecial) {
  const GroupShapes shapes;
  shapes.find_or_add(Numbers{5, 1, 0});
  const auto* open = shapes.find_or_add(Numbers{6, 1, 0});
  ASSERT_NE(open, nullptr);
  EXPECT_EQ(open->open, (Bits{true, false, false}));
}

// The first call had a batch of one: its own plan, and one for all others.
TEST(GroupShapes, TheFirstMayBeOne) {
  const GroupShapes shapes;
  const auto* one = shapes.find_or_add(Numbers{1});
  ASSERT_NE(one, nullptr);
  const auto* open = shapes.find_or_add(Numbers{16});
  ASSERT_NE(open, nullptr);
  EXPECT_EQ(open->open, (Bits{true}));
  EXPECT_EQ(shapes.find(Numbers{1}), one);
}

// With the open one refused or not fit, a call of size one gets an exact version like any other.
TEST(GroupShapes, OneMayHaveAnExactVersionOnceTheOpenOneIsKnown) {
  const GroupShapes shapes;
  shapes.find_or_add(Numbers{5});
  const auto* open = shapes.find_or_add(Numbers{6});
  ASSERT_TRUE(open->entry->claim());
  using G = ShapeGuards;
  open->entry->settle(
      std::make_shared<const NoPlan>(ShapeGuards({0}, {{G::kConstant, 2, G::kSymbol, 0, G::kLe, 0}}, {})));
  const auto* one = shapes.find_or_add(Numbers{1});
  ASSERT_NE(one, nullptr);
  EXPECT_TRUE(one->open.empty());
  EXPECT_EQ(shapes.find(Numbers{1}), one);
  EXPECT_EQ(shapes.find(Numbers{7}), open);
}

// --- Plans that were made elsewhere ---

TEST(GroupShapes, AReadyVersionTakesThePlaceOfTheOneThatWasToBeMade) {
  const GroupShapes shapes;
  const auto* exact = shapes.find_or_add(Numbers{7, 4});
  ASSERT_TRUE(exact->entry->claim());
  shapes.add_ready(Numbers{3, 4}, Bits{true, false}, plan_up_to(100));
  EXPECT_EQ(shapes.find(Numbers{7, 4}), exact) << "until it steps aside";
  exact->entry->supersede();
  EXPECT_EQ(exact->entry->state(), State::kSuperseded);
  EXPECT_FALSE(exact->entry->claim());
  EXPECT_EQ(shapes.size(), 2U);
  const auto* ready = shapes.find(Numbers{7, 4});
  ASSERT_NE(ready, nullptr);
  ASSERT_NE(ready, exact);
  EXPECT_EQ(ready->numbers, (Numbers{3, 4}));
  EXPECT_EQ(ready->open, (Bits{true, false}));
  EXPECT_EQ(ready->entry->state(), State::kReady);
  EXPECT_NE(ready->entry->plan(), nullptr);
  EXPECT_FALSE(ready->entry->first_look()) << "it is from the store";
  EXPECT_EQ(shapes.find(Numbers{100, 4}), ready);
  EXPECT_EQ(shapes.find(Numbers{101, 4}), nullptr);
  EXPECT_EQ(shapes.find(Numbers{7, 5}), nullptr);
  // What it does not admit: open places are known, so an exact one.
  const auto* next = shapes.find_or_add(Numbers{101, 4});
  ASSERT_NE(next, nullptr);
  EXPECT_TRUE(next->open.empty());
}

TEST(GroupShapes, AReadyExactVersion) {
  const GroupShapes shapes;
  shapes.add_ready(Numbers{7}, Bits{}, plan_up_to(1));
  EXPECT_NE(shapes.find(Numbers{7}), nullptr);
  EXPECT_EQ(shapes.find(Numbers{1}), nullptr);
  EXPECT_EQ(shapes.find_or_add(Numbers{7}), shapes.find(Numbers{7}));
}

TEST(GroupShapes, VersionsAreLimited) {
  const GroupShapes shapes;
  shapes.find_or_add(Numbers{2});
  const auto* open = shapes.find_or_add(Numbers{3});
  ASSERT_TRUE(open->entry->claim());
  open->entry->refuse(-1);
  int64_t n = 10;
  for (; shapes.size() < GroupShapes::kMaxVersions; ++n) ASSERT_NE(shapes.find_or_add(Numbers{n}), nullptr);
  EXPECT_EQ(shapes.find_or_add(Numbers{n}), nullptr);
  EXPECT_EQ(shapes.size(), GroupShapes::kMaxVersions);
  for (int64_t known = 10; known < n; ++known) EXPECT_NE(shapes.find(Numbers{known}), nullptr);
  EXPECT_NE(shapes.find_or_add(Numbers{2}), nullptr);
}

TEST(GroupShapes, EntriesOutliveTheirShapes) {
  std::shared_ptr<const GroupEntry> entry;
  {
    const GroupShapes shapes;
    entry = shapes.find_or_add(Numbers{2})->entry;
    shapes.find_or_add(Numbers{3});
    ASSERT_TRUE(entry->claim());
  }
  entry->settle(std::make_shared<const NoPlan>());
  EXPECT_EQ(entry->state(), State::kReady);
}

// Many threads add, find, settle and refuse at once: never two versions for the same numbers, never more than the
// limit, and what was found once stays where it is.
TEST(GroupShapes, ManyThreadsAtOnce) {
  for (uint32_t round = 0; round < 60; ++round) {
    const GroupShapes shapes;
    std::vector<std::vector<const GroupShapes::Version*>> seen(4);
    run_together(4, [&](int thread) {
      std::mt19937 random(round * 4 + static_cast<uint32_t>(thread));
      for (int i = 0; i < 300; ++i) {
        const Numbers numbers{static_cast<int64_t>(random() % 12), 2 + static_cast<int64_t>(random() % 2)};
        const auto* version = shapes.find(numbers);
        if (version == nullptr) version = shapes.find_or_add(numbers);
        if (version == nullptr) continue;
        seen[static_cast<size_t>(thread)].push_back(version);
        EXPECT_EQ(version->numbers.size(), 2U);
        for (size_t k = 0; k < 2; ++k) {
          if (!version->is_open(k)) {
            EXPECT_EQ(version->numbers[k], numbers[k]);
          }
        }
        if (!version->entry->claim()) continue;
        if (random() % 3 == 0) {
          version->entry->give_back();
        } else if (random() % 2 == 0) {
          version->entry->refuse(-1);
        } else {
          version->entry->settle(plan_up_to(6));
        }
      }
    });
    std::set<const GroupShapes::Version*> versions;
    for (const auto& of_thread : seen) versions.insert(of_thread.begin(), of_thread.end());
    EXPECT_EQ(versions.size(), shapes.size());
    EXPECT_LE(shapes.size(), GroupShapes::kMaxVersions);
    std::set<std::pair<Numbers, Bits>> distinct;
    for (const auto* version : versions) distinct.emplace(version->numbers, version->open);
    EXPECT_EQ(distinct.size(), versions.size());
  }
}

}  // namespace
}  // namespace retrograd::test
