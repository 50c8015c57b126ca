// Independent branches at the same time: how a graph's joints are found, when it is done at all, and that it does what
// the stock engine does. Hooks of all kinds, errors and nesting: tests/python/alone_parallel.py.
#include <atomic>
#include <cstdlib>
#include <string_view>
#include <thread>

#include <ATen/record_function.h>

#include "engine/parallel.h"
#include "engine/schedule.h"
#include "engine_test_util.h"

namespace retrograd::test {
namespace {

using std::chrono::microseconds;
using std::chrono::nanoseconds;

TEST(Joints, EdgesIntoAStepComeInTheOrderOfTheirProducers) {
  // 0 -> 1, 2; 1 -> 3 twice; 2 -> nowhere, 3
  GraphShape shape;
  const auto step = [&](uint32_t first, uint32_t count) {
    shape.steps.push_back({&typeid(int), 2, first, count, 0, 0, true});
  };
  step(0, 2);
  step(2, 2);
  step(4, 2);
  step(6, 0);
  shape.edges = {{1, 0}, {2, 0}, {3, 1}, {3, 0}, {kNoStep, 0}, {3, 1}};
  const Joints joints(shape);
  const auto into = [&](uint32_t k) {
    const auto edges = joints.edges_into(k);
    return std::vector<uint32_t>(edges.begin(), edges.end());
  };
  EXPECT_EQ(into(0), (std::vector<uint32_t>{}));
  EXPECT_EQ(into(1), (std::vector<uint32_t>{0}));
  EXPECT_EQ(into(2), (std::vector<uint32_t>{1}));
  EXPECT_EQ(into(3), (std::vector<uint32_t>{2, 3, 5}));
  EXPECT_EQ(joints.waits_for(3), 3U);
}

// Plays a graph that takes `serial` or `parallel`; the choices of that many calls.
std::vector<bool> play(Pace& pace, nanoseconds serial, nanoseconds parallel, int calls) {
  std::vector<bool> choices;
  for (int i = 0; i < calls; ++i) {
    choices.push_back(pace.choose_parallel());
    pace.note(choices.back(), choices.back() ? parallel : serial);
  }
  return choices;
}

TEST(Pace, SmallGraphsAreNeverSplit) {
  Pace pace;
  const auto choices = play(pace, microseconds(150), microseconds(1), 500);
  EXPECT_EQ(std::ranges::count(choices, true), 0);
}

TEST(Pace, TheFasterWayIsTakenAndTheOtherLookedAtNowAndThen) {
  Pace faster, slower;
  const auto split = play(faster, microseconds(1000), microseconds(600), 6 + 640);
  EXPECT_EQ(std::vector<bool>(split.begin(), split.begin() + 6),
            (std::vector<bool>{false, false, false, true, true, true}));
  EXPECT_EQ(std::ranges::count(split, false), 3 + 10);
  const auto whole = play(slower, microseconds(1000), microseconds(1100), 6 + 640);
  EXPECT_EQ(std::ranges::count(whole, true), 3 + 10);
}

TEST(Pace, AChangeIsNoticed) {
  Pace pace;
  play(pace, microseconds(1000), microseconds(600), 100);
  const auto later = play(pace, microseconds(1000), microseconds(3000), 100);
  EXPECT_FALSE(later.back());
}

class Parallel : public EngineTest {
 protected:
  void SetUp() override {
    EngineTest::SetUp();
    setenv("RETROGRAD_PARALLEL", "always", 1);
    if (!always_parallel()) GTEST_SKIP() << "RETROGRAD_PARALLEL was read before; run this test in a process of its own";
  }
};

TEST_F(Parallel, ManyBranchesGiveTheStockEnginesBits) {
  const auto run = [] {
    at::manual_seed(3);
    const at::Tensor x = at::randn({32, 32}).requires_grad_(), w = at::randn({32, 32}).requires_grad_();
    std::vector<at::Tensor> parts;
    for (int i = 0; i < 8; ++i) {
      at::Tensor y = x * i;
      for (int k = 0; k < 4; ++k) y = at::tanh(at::mm(y, w)) + x;
      parts.push_back(y);
    }
    at::stack(parts).sum().backward();
    return std::pair(x.grad(), w.grad());
  };
  const auto [want_x, want_w] = [&] {
    const Disable off;
    return run();
  }();
  const Enable on(Options().parallel(true));
  const Stats before = stats();
  for (int i = 0; i < 200; ++i) {
    const auto [x, w] = run();
    ASSERT_TRUE(x.equal(want_x));
    ASSERT_TRUE(w.equal(want_w));
  }
  EXPECT_EQ(stats().parallel_calls - before.parallel_calls, 200U);
}

TEST_F(Parallel, ManyThreadsAtOnce) {
  const Stats before = stats();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      const Enable on(Options().parallel(true));
      for (int i = 0; i < 100; ++i) {
        const at::Tensor x = at::ones({4}).requires_grad_();
        std::vector<at::Tensor> parts;
        for (int k = 0; k < 6; ++k) parts.push_back((x * k).exp().log());
        at::stack(parts).sum().backward();
        ASSERT_TRUE(at::allclose(x.grad(), at::full({4}, 15.0)));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(stats().parallel_calls - before.parallel_calls, 400U);
}

TEST_F(Parallel, AnErrorInABranchIsTheFirstOneOfTheStockOrder) {
  const auto run = [] {
    const at::Tensor x = at::ones({4}).requires_grad_(), done = at::ones({4}).requires_grad_();
    std::vector<at::Tensor> parts;
    std::vector<at::Tensor> squares;
    for (int k = 0; k < 6; ++k) {
      squares.push_back((x * k).exp());
      parts.push_back(squares.back() * done);
    }
    for (const at::Tensor& square : squares) square.detach().add_(1);  // what exp() and the product saved is gone
    std::string said;
    try {
      at::stack(parts).sum().backward();
    } catch (const c10::Error& error) {
      said = error.what_without_backtrace();
    }
    EXPECT_FALSE(x.grad().defined());
    return said;
  };
  const std::string want = [&] {
    const Disable off;
    return run();
  }();
  EXPECT_NE(want.find("modified by an inplace operation"), std::string::npos);
  const Enable on(Options().parallel(true));
  for (int i = 0; i < 50; ++i) EXPECT_EQ(run(), want);
}

// A caller that gets an error while a helper is in the middle of a step. The helper's step is held up where it begins,
// by a profiler's callback, until the error is under way and then some.
struct HeldUp {
  static inline std::thread::id caller;
  static inline std::atomic<int> begun, ended;  // steps of helpers
  static inline std::atomic<bool> failing;

  static bool is_helpers_step(const at::RecordFunction& range) {
    return std::this_thread::get_id() != caller &&
           std::string_view(range.name()).starts_with("autograd::engine::evaluate_function: ");
  }
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& range) {
    if (!is_helpers_step(range)) return nullptr;
    begun += 1;
    begun.notify_all();
    failing.wait(false);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    return nullptr;
  }
  static void end(const at::RecordFunction& range, at::ObserverContext*) {
    if (is_helpers_step(range)) ended += 1;
  }
};

TEST_F(Parallel, ACallThatFailsWaitsForItsHelpers) {
  HeldUp::caller = std::this_thread::get_id();
  const auto handle = at::addGlobalCallback(at::RecordFunctionCallback(&HeldUp::begin, &HeldUp::end));
  const Enable on(Options().parallel(true));
  const Stats before = stats();
  for (int i = 0; i < 5; ++i) {
    HeldUp::begun = HeldUp::ended = 0;
    HeldUp::failing = false;
    const at::Tensor x = at::ones({4}).requires_grad_();
    std::vector<at::Tensor> parts;
    for (int k = 0; k < 6; ++k) parts.push_back((x * k).exp());
    parts.push_back(x.sin());  // made last, so its turn is first
    parts.back().register_hook([](const at::Tensor&) {
      HeldUp::begun.wait(0);
      HeldUp::failing = true;
      HeldUp::failing.notify_all();
      throw std::runtime_error("on purpose");
    });
    EXPECT_THROW(at::stack(parts).sum().backward(), std::runtime_error);
    const int begun = HeldUp::begun;
    EXPECT_GT(begun, 0);
    EXPECT_EQ(HeldUp::ended, begun) << "a helper works for a call that is over";
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_EQ(HeldUp::begun, begun) << "a helper began a step of a call that is over";
    EXPECT_FALSE(x.grad().defined());
  }
  at::removeCallback(handle);
  EXPECT_EQ(stats().parallel_calls - before.parallel_calls, 5U);
}

TEST_F(Parallel, TheSettingReachesTheProcessDefault) {
  set_default(Options().parallel(true));
  EXPECT_TRUE(thread_context().in_force().options.parallel());
  EXPECT_FALSE(thread_context().in_force().options.dynamic());
  set_default(std::nullopt);
}

}  // namespace
}  // namespace retrograd::test
