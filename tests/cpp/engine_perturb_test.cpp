// Windows between threads of the engine that are a few instructions wide, held open by delays. CMake also runs
// engine_threads_test.cpp and the fused plans' tests of threads with delays.
#include <atomic>
#include <thread>
#include <vector>

#include "engine/retained.h"
#include "engine/stats.h"
#include "engine_test_util.h"
#include "perturb_util.h"

namespace retrograd::test {
namespace {

[[maybe_unused]] const bool watched = PerturbedProcess::watch();

class EnginePerturbed : public EngineTest, public testing::WithParamInterface<uint64_t> {
 private:
  const Perturbation perturbation_{GetParam()};
};

// A thread's counters go from the living ones to the totals when it ends: a reader must not miss them in between, nor
// count them twice.
TEST_P(EnginePerturbed, CountsNeitherDropNorDoubleWhileThreadsEnd) {
  constexpr uint64_t kRounds = 150;
  constexpr uint64_t kWorkers = 3;
  reset_stats();
  std::atomic<bool> stop{false};
  uint64_t drops = 0;
  {
    std::jthread reader([&] {
      for (uint64_t last = 0; !stop;) {
        const uint64_t now = stats().schedule_calls;
        drops += now < last || now > kRounds * kWorkers ? 1 : 0;
        last = now;
      }
    });
    std::vector<std::jthread> starters;
    for (uint64_t i = 0; i < kWorkers; ++i) {
      starters.emplace_back([] {
        for (uint64_t round = 0; round < kRounds; ++round) {
          std::jthread([] {
            const Enable on;
            whole(1).sum().backward();
          }).join();
        }
      });
    }
    starters.clear();
    stop = true;
  }
  EXPECT_EQ(drops, 0U);
  EXPECT_EQ(stats().schedule_calls, kRounds * kWorkers);
  EXPECT_EQ(stats().previous_total(), 0U);
}

// Either the call that comes in sees the capture, or the capture sees the call.
TEST_P(EnginePerturbed, NobodyIsInsideARetainedCallWhileItsGraphMayBeCaptured) {
  constexpr int kAttempts = 1'000;
  std::atomic<bool> stop{false};
  std::atomic<int> inside{0};
  std::vector<std::jthread> callers;
  for (int i = 0; i < 2; ++i) {
    callers.emplace_back([&] {
      while (!stop) {
        {
          const RetainedCall call(true);
          ++inside;
          cache::perturb("test.inside");
          --inside;
        }
        std::this_thread::yield();
      }
    });
  }
  int rights = 0;
  int seen_inside = 0;
  for (int attempt = 0; attempt < kAttempts || rights == 0; ++attempt) {
    const CaptureRight right(true, CallFrame{});
    if (!right.granted()) continue;
    ++rights;
    for (int look = 0; look < 200; ++look) {
      seen_inside += inside;
      std::this_thread::yield();
    }
  }
  stop = true;
  callers.clear();
  EXPECT_EQ(seen_inside, 0);
}

// The cache is cleared between any two steps of a call; what it returns and counts is as ever.
TEST_P(EnginePerturbed, CallsGoOnWhileTheCacheIsCleared) {
  constexpr int kThreads = 4;
  constexpr int kCalls = 200;
  reset_stats();
  std::atomic<bool> stop{false};
  std::jthread clearer([&] {
    while (!stop) {
      cache_clear();
      std::this_thread::yield();
    }
  });
  run_together(kThreads, [](int thread) {
    const Enable on;
    const at::Tensor w = whole(2);
    for (int i = 0; i < kCalls; ++i) {
      const int more = (i + thread) % 5;
      at::Tensor y = w;
      for (int k = 0; k < more; ++k) y = y + w;
      y.sum().backward();
      ASSERT_TRUE(at::equal(w.grad(), at::full({2}, more + 1.0)));
      w.mutable_grad() = at::Tensor();
    }
  });
  stop = true;
  clearer.join();
  const Stats s = stats();
  EXPECT_EQ(s.schedule_calls, static_cast<uint64_t>(kThreads * kCalls));
  EXPECT_EQ(s.hits + s.misses, s.schedule_calls);
  EXPECT_EQ(s.previous_total(), 0U);
}

INSTANTIATE_TEST_SUITE_P(Seeds, EnginePerturbed, testing::Values(1, 2, 3));

}  // namespace
}  // namespace retrograd::test
