// Many threads in backward at once: on models of their own, on one model, on one graph.
#include <atomic>
#include <functional>
#include <stdexcept>
#include <thread>
#include <vector>

#include "engine_test_util.h"

namespace retrograd::test {
namespace {

constexpr int kThreads = 8;
constexpr int kCalls = 2'000;

class Threads : public EngineTest {
 protected:
  static void run(const std::function<void(int thread)>& body) { run_together(kThreads, body); }
};

TEST_F(Threads, SeparateModels) {
  reset_stats();
  run([](int thread) {
    Enable on;
    const at::Tensor w = whole(2);
    const at::Tensor v = whole(thread + 1);
    for (int i = 0; i < kCalls; ++i) {
      at::Tensor y = w * v;
      for (int k = 0; k < thread % 3; ++k) y = y + w;  // three structures in all
      y.sum().backward();
    }
    ASSERT_TRUE(at::equal(w.grad(), at::full({2}, kCalls * (thread + 1.0 + thread % 3))));
    ASSERT_TRUE(at::equal(v.grad(), at::full({2}, kCalls * 2.0)));
  });
  const Stats s = stats();
  EXPECT_EQ(s.schedule_calls, static_cast<uint64_t>(kThreads * kCalls));
  EXPECT_EQ(s.hits + s.misses, s.schedule_calls);
  EXPECT_EQ(s.previous_total(), 0U);
  EXPECT_EQ(s.cache_leaves, 3U);
  EXPECT_GE(s.misses, 3U);
  EXPECT_LE(s.misses, 3U * kThreads);
}

TEST_F(Threads, OneSharedModel) {
  reset_stats();
  const at::Tensor w = whole(2);
  const at::Tensor v = whole(3);
  std::atomic<int> accumulated{0};
  add_post_accumulate_hook(w, [&](const at::Tensor&) { ++accumulated; });
  run([&](int) {
    Enable on;
    for (int i = 0; i < kCalls; ++i) (w * v + w).sum().backward();
  });
  EXPECT_TRUE(at::equal(w.grad(), at::full({2}, kThreads * kCalls * 4.0)));
  EXPECT_TRUE(at::equal(v.grad(), at::full({2}, kThreads * kCalls * 2.0)));
  EXPECT_EQ(accumulated, kThreads * kCalls);
  EXPECT_EQ(stats().schedule_calls, static_cast<uint64_t>(kThreads * kCalls));
}

TEST_F(Threads, OneSharedModelHalfOfItOnTheStockEngine) {
  reset_stats();
  const at::Tensor w = whole(2);
  run([&](int thread) {
    std::optional<Enable> on;
    if (thread % 2 == 0) on.emplace();
    for (int i = 0; i < kCalls; ++i) (w * w).sum().backward();
  });
  EXPECT_TRUE(at::equal(w.grad(), at::full({2}, kThreads * kCalls * 4.0)));
  EXPECT_EQ(stats().schedule_calls, static_cast<uint64_t>(kThreads * kCalls / 2));
  EXPECT_EQ(stats().previous_total(), static_cast<uint64_t>(kThreads * kCalls / 2));
}

TEST_F(Threads, OneSharedRetainedGraph) {
  reset_stats();
  const at::Tensor w = whole(2);
  const at::Tensor v = whole(3);
  const at::Tensor y = w * v;
  const at::Tensor loss = (y * y + y).sum();  // d/dw = 39, d/dv = 26
  run([&](int thread) {
    Enable on;
    for (int i = 0; i < kCalls; ++i) {
      if ((i + thread) % 4 == 0) {
        const auto got = torch::autograd::grad({loss}, {y, w}, {}, /*retain_graph=*/true);
        ASSERT_TRUE(at::equal(got[0], at::full({2}, 13.0)));
        ASSERT_TRUE(at::equal(got[1], at::full({2}, 39.0)));
      } else {
        loss.backward({}, /*retain_graph=*/true);
      }
    }
  });
  const double calls = kThreads * kCalls * 3.0 / 4;
  EXPECT_TRUE(at::equal(w.grad(), at::full({2}, calls * 39)));
  EXPECT_TRUE(at::equal(v.grad(), at::full({2}, calls * 26)));
  EXPECT_EQ(stats().schedule_calls, static_cast<uint64_t>(kThreads * kCalls));
  EXPECT_EQ(stats().previous_total(), 0U);
}

TEST_F(Threads, NestedCallsAndExceptionsOnEveryThread) {
  constexpr int kRounds = 300;
  reset_stats();
  run([](int thread) {
    Enable on;
    for (int i = 0; i < kRounds; ++i) {
      const at::Tensor x = whole(1);
      const at::Tensor y = x * 2;
      const bool fails = (i + thread) % 3 == 0;
      const int own_task_before = torch::autograd::get_current_graph_task_id();
      y.register_hook([&](const at::Tensor&) {
        const at::AutoGradMode with_grad(true);
        const at::Tensor inner = whole(thread);
        const at::Tensor z = inner * inner;
        z.register_hook([&](const at::Tensor&) {
          if (fails) throw std::domain_error(std::to_string(thread));
        });
        z.sum().backward();
        ASSERT_TRUE(at::equal(inner.grad(), at::full({2}, thread * 2.0)));
      });
      try {
        y.sum().backward();
        ASSERT_FALSE(fails);
        ASSERT_TRUE(at::equal(x.grad(), at::full({2}, 2.0)));
      } catch (const std::domain_error& e) {
        ASSERT_TRUE(fails);
        ASSERT_EQ(e.what(), std::to_string(thread));
        ASSERT_FALSE(x.grad().defined());
      }
      ASSERT_EQ(torch::autograd::get_current_graph_task_id(), own_task_before);
    }
  });
  EXPECT_EQ(stats().schedule_calls, static_cast<uint64_t>(2 * kThreads * kRounds));
  EXPECT_EQ(stats().nested_calls, static_cast<uint64_t>(kThreads * kRounds));
}

TEST_F(Threads, DeepNestsOnEveryThread) {
  constexpr int kDepth = 100;
  reset_stats();
  run([](int) {
    Enable on;
    int levels = 0;
    std::function<void(int)> level = [&](int depth) {
      const at::AutoGradMode with_grad(true);
      const at::Tensor x = whole(1);
      const at::Tensor y = x * 2;
      y.register_hook([&, depth](const at::Tensor&) {
        ++levels;
        if (depth > 0) level(depth - 1);
      });
      y.sum().backward();
      ASSERT_TRUE(at::equal(x.grad(), at::full({2}, 2.0)));
    };
    for (int i = 0; i < 3; ++i) level(kDepth - 1);
    ASSERT_EQ(levels, 3 * kDepth);
  });
  EXPECT_EQ(stats().schedule_calls, static_cast<uint64_t>(kThreads * 3 * kDepth));
  EXPECT_EQ(stats().max_depth, static_cast<uint64_t>(kDepth));
  EXPECT_EQ(stats().previous_total(), 0U);
}

TEST_F(Threads, CacheClearedAndStatsReadWhileThreadsRun) {
  std::atomic<bool> stop{false};
  std::jthread clearer([&] {
    while (!stop) {
      cache_clear();
      const Stats s = stats();
      ASSERT_LE(s.hits + s.misses, static_cast<uint64_t>(kThreads * kCalls));
      std::this_thread::yield();
    }
  });
  reset_stats();
  run([](int thread) {
    Enable on;
    const at::Tensor w = whole(2);
    for (int i = 0; i < kCalls / 2; ++i) {
      at::Tensor y = w;
      for (int k = 0; k < (i + thread) % 12; ++k) y = y + w;
      y.sum().backward();
      ASSERT_TRUE(at::equal(w.grad(), at::full({2}, (i + thread) % 12 + 1.0)));
      w.mutable_grad() = at::Tensor();
    }
  });
  stop = true;
  clearer.join();
  const Stats s = stats();
  EXPECT_EQ(s.schedule_calls, static_cast<uint64_t>(kThreads * kCalls / 2));
  EXPECT_EQ(s.hits + s.misses, s.schedule_calls);
}

TEST_F(Threads, ManyThreadsThatComeAndGo) {
  reset_stats();
  for (int round = 0; round < 20; ++round) {
    run([](int) {
      Enable on;
      const at::Tensor w = whole(2);
      (w * w).sum().backward();
      ASSERT_TRUE(at::equal(w.grad(), at::full({2}, 4.0)));
    });
  }
  EXPECT_EQ(stats().schedule_calls, 20U * kThreads);
}

}  // namespace
}  // namespace retrograd::test
