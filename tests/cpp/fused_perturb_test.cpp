// Windows between threads that ask for a group's plan, held open by delays. CMake also runs the fused plans' tests of
// threads with delays.
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "engine/group_site.h"
#include "engine_test_util.h"
#include "perturb_util.h"

namespace retrograd::test {
namespace {

[[maybe_unused]] const bool watched = PerturbedProcess::watch();

constexpr int kThreads = 4;

class FusedPerturbed : public testing::TestWithParam<uint64_t> {
 private:
  const Perturbation perturbation_{GetParam()};
};

class NoPlan final : public GroupPlan {
 public:
  NoPlan() : GroupPlan({}) {}
  variable_list run(variable_list&&) const override { return {}; }
};

// Whoever sees that an entry is ready may run its plan.
TEST_P(FusedPerturbed, APlanIsThereBeforeItsEntryIsReady) {
  std::vector<GroupEntry> entries(100);
  const auto plan = std::make_shared<const NoPlan>();
  run_together(kThreads, [&](int thread) {
    for (const GroupEntry& entry : entries) {
      if (thread == 0) {
        ASSERT_TRUE(entry.claim());
        entry.settle(plan);
      } else {
        while (entry.state() != GroupEntry::State::kReady) std::this_thread::yield();
        ASSERT_EQ(entry.plan(), plan.get());
      }
    }
  });
}

// A thread that finds no version may come to add one when another has added it meanwhile.
TEST_P(FusedPerturbed, OneVersionWhereMissesCross) {
  std::vector<GroupShapes> all(200);
  const std::vector<int64_t> numbers{8, 64};
  std::vector<std::vector<const GroupShapes::Version*>> got(kThreads);
  run_together(kThreads, [&](int thread) {
    for (const GroupShapes& shapes : all) {
      const GroupShapes::Version* version = shapes.find(numbers);
      got[thread].push_back(version != nullptr ? version : shapes.find_or_add(numbers));
    }
  });
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(all[i].size(), 1U);
    for (const auto& of_thread : got) EXPECT_EQ(of_thread[i], all[i].find(numbers));
  }
}

// One of the threads that share a plan to be made makes it.
TEST_P(FusedPerturbed, OneThreadClaimsAnEntryAndOneLooksIntoTheStore) {
  std::vector<GroupEntry> entries(200);
  std::atomic<size_t> looks{0};
  std::atomic<size_t> claims{0};
  run_together(kThreads, [&](int) {
    for (const GroupEntry& entry : entries) {
      looks += entry.first_look() ? 1 : 0;
      cache::perturb("test.looked");
      claims += entry.claim() ? 1 : 0;
    }
  });
  EXPECT_EQ(looks, entries.size());
  EXPECT_EQ(claims, entries.size());
}

INSTANTIATE_TEST_SUITE_P(Seeds, FusedPerturbed, testing::Values(1, 2, 3));

}  // namespace
}  // namespace retrograd::test
