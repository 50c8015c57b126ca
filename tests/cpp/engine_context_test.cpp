// Opting in and out, installing, and the counters.
#include <atomic>
#include <functional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "engine/context.h"
#include "engine_test_util.h"

namespace retrograd::test {
namespace {

class Context : public EngineTest {};

void one_backward() {
  const at::AutoGradMode with_grad(true);  // the engine turns it off, for hooks too
  const at::Tensor x = at::ones({2}).requires_grad_();
  (x * 3).sum().backward();
  TORCH_CHECK(at::equal(x.grad(), at::full({2}, 3.0)));
}

// Whether calls of this thread run on retrograd.
bool on_schedule() {
  const Stats before = stats();
  one_backward();
  return (stats() - before).schedule_calls == 1;
}

TEST_F(Context, NothingRunsOnRetrogradUnlessAsked) { EXPECT_FALSE(on_schedule()); }

TEST_F(Context, EnableAndDisableNest) {
  {
    Enable on;
    EXPECT_TRUE(on_schedule());
    {
      Disable off;
      EXPECT_FALSE(on_schedule());
      {
        Enable again(Options().backend(Backend::kSchedule));
        EXPECT_TRUE(on_schedule());
        Enable twice;
        EXPECT_TRUE(on_schedule());
      }
      EXPECT_FALSE(on_schedule());
    }
    EXPECT_TRUE(on_schedule());
  }
  EXPECT_FALSE(on_schedule());
}

TEST_F(Context, ExceptionsRestoreTheOuterChoice) {
  const auto fail = [] {
    Enable on;
    Disable off;
    Enable again;
    throw std::runtime_error("no");
  };
  EXPECT_THROW(fail(), std::runtime_error);
  EXPECT_FALSE(on_schedule());
  Enable on;
  EXPECT_THROW(fail(), std::runtime_error);
  EXPECT_TRUE(on_schedule());
}

TEST_F(Context, ChoiceIsThisThreadsOnly) {
  Enable on;
  bool there = true;
  std::thread([&] { there = on_schedule(); }).join();
  EXPECT_FALSE(there);
  EXPECT_TRUE(on_schedule());
  std::thread([&] {
    Enable other;
    there = on_schedule();
  }).join();
  EXPECT_TRUE(there);
}

TEST_F(Context, DefaultReachesThreadsThatSetNothing) {
  set_default(Options());
  EXPECT_TRUE(on_schedule());
  bool fresh = false;
  bool disabled = true;
  std::thread([&] {
    fresh = on_schedule();
    Disable off;
    disabled = on_schedule();
  }).join();
  EXPECT_TRUE(fresh);
  EXPECT_FALSE(disabled);
  {
    Disable off;
    EXPECT_FALSE(on_schedule());
  }
  EXPECT_TRUE(on_schedule());
  set_default(std::nullopt);
  EXPECT_FALSE(on_schedule());
}

TEST_F(Context, DefaultChangesForARunningThread) {
  std::atomic<int> stage{0};
  std::vector<bool> seen;
  std::thread worker([&] {
    for (int i = 0; i < 3; ++i) {
      while (stage != i * 2) std::this_thread::yield();
      seen.push_back(on_schedule());
      ++stage;
    }
  });
  for (int i = 0; i < 3; ++i) {
    while (stage != i * 2 + 1) std::this_thread::yield();
    set_default(i == 0 ? std::optional(Options()) : std::nullopt);
    ++stage;
  }
  worker.join();
  EXPECT_EQ(seen, (std::vector<bool>{false, true, false}));
}

TEST_F(Context, EnableNeedsInstall) {
  uninstall();
  EXPECT_FALSE(is_installed());
  try {
    Enable on;
    ADD_FAILURE() << "did not throw";
  } catch (const std::logic_error& e) {
    EXPECT_STREQ(e.what(), "retrograd is not installed; call retrograd::install() first.");
  }
  EXPECT_EQ(thread_context().setting.mode, detail::Setting::Mode::kInherit);
  Disable off;  // needs nothing
  install();
  EXPECT_TRUE(is_installed());
}

TEST_F(Context, InstallAndUninstallAreIdempotent) {
  auto* const ours = &torch::autograd::Engine::get_default_engine();
  install();
  install();
  EXPECT_EQ(&torch::autograd::Engine::get_default_engine(), ours);
  uninstall();
  auto* const previous = &torch::autograd::Engine::get_default_engine();
  EXPECT_NE(previous, ours);
  uninstall();
  EXPECT_EQ(&torch::autograd::Engine::get_default_engine(), previous);
  one_backward();
  install();
  EXPECT_EQ(&torch::autograd::Engine::get_default_engine(), ours);
  Enable on;
  EXPECT_TRUE(on_schedule());
}

TEST_F(Context, UninstallTurnsEnabledThreadsAndDefaultsOff) {
  Enable on;
  set_default(Options());
  uninstall();
  EXPECT_FALSE(on_schedule());
  install();
  EXPECT_TRUE(on_schedule());
}

TEST_F(Context, CallInProgressFinishesOnItsEngine) {
  reset_stats();
  Enable on;
  const at::Tensor x = at::ones({2}).requires_grad_();
  const at::Tensor y = x * 3;
  y.register_hook([](const at::Tensor&) {
    uninstall();
    one_backward();
  });
  y.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), at::full({2}, 3.0)));
  EXPECT_EQ(stats().schedule_calls, 1U);
  EXPECT_EQ(stats().nested_calls, 0U);
}

TEST_F(Context, InstalledAndUninstalledWhileThreadsRunBackward) {
  std::atomic<bool> stop{false};
  std::atomic<int> calls{0};
  std::vector<std::thread> workers;
  for (int i = 0; i < 4; ++i) {
    workers.emplace_back([&, i] {
      at::init_num_threads();
      const at::Tensor x = at::ones({2}).requires_grad_();
      while (!stop) {
        std::optional<Enable> on;
        try {
          if (i % 2 == 0) on.emplace();
        } catch (const std::logic_error&) {  // uninstalled at this moment
        }
        x.mutable_grad() = at::Tensor();
        const at::Tensor y = x * 3;
        y.register_hook([](const at::Tensor&) { one_backward(); });
        y.sum().backward();
        ASSERT_TRUE(at::equal(x.grad(), at::full({2}, 3.0)));
        ++calls;
      }
    });
  }
  set_default(Options());
  for (int i = 0; i < 300 || calls < 1'000; ++i) {
    uninstall();
    std::this_thread::yield();
    install();
    std::this_thread::yield();
  }
  stop = true;
  for (std::thread& worker : workers) worker.join();
}

TEST_F(Context, NestedCallsOfAnEnabledThreadInheritItsChoiceOverTheDefault) {
  set_default(Options());
  reset_stats();
  Disable off;
  const at::Tensor x = at::ones({2}).requires_grad_();
  const at::Tensor y = x * 3;
  y.register_hook([](const at::Tensor&) { one_backward(); });
  y.sum().backward();
  EXPECT_EQ(stats().schedule_calls, 0U);
  EXPECT_EQ(stats().previous_total(), 2U);
}

// A guard that a hook leaves behind on another thread, or one that dies late, is the user's mistake; one that a hook
// makes and ends is not, and must change nothing outside.
TEST_F(Context, GuardsInsideHooksEndWithThem) {
  Enable on;
  reset_stats();
  const at::Tensor x = at::ones({2}).requires_grad_();
  const at::Tensor y = x * 3;
  const at::Tensor z = y * 2;
  z.register_hook([](const at::Tensor&) {
    Disable off;
    one_backward();
  });
  y.register_hook([](const at::Tensor&) { one_backward(); });
  z.sum().backward();
  EXPECT_EQ(stats().schedule_calls, 2U);
  EXPECT_EQ(stats().previous_total(), 1U);
  EXPECT_TRUE(on_schedule());
}

// --- Stats ---

TEST_F(Context, StatsCountCallsHitsMissesAndTime) {
  reset_stats();
  Stats s = stats();
  EXPECT_EQ(s.schedule_calls, 0U);
  EXPECT_EQ(s.max_depth, 0U);
  EXPECT_EQ(s.previous_total(), 0U);
  Enable on;
  for (int i = 0; i < 3; ++i) one_backward();
  s = stats();
  EXPECT_EQ(s.schedule_calls, 3U);
  EXPECT_EQ(s.misses, 1U);
  EXPECT_EQ(s.hits, 2U);
  EXPECT_EQ(s.nested_calls, 0U);
  EXPECT_EQ(s.max_depth, 1U);
  EXPECT_EQ(s.cache_leaves, 1U);
  EXPECT_EQ(s.cache_nodes, 3U) << "sum, mul, AccumulateGrad";
  EXPECT_GT(s.walk_seconds, 0.0);
  EXPECT_GT(s.lookup_seconds, 0.0);
  EXPECT_GT(s.run_seconds, 0.0);
  EXPECT_LT(s.run_seconds, 60.0);
  {
    Disable off;
    one_backward();
  }
  EXPECT_EQ(previous_calls(stats(), PreviousReason::kNotEnabled), 1U);
  reset_stats();
  s = stats();
  EXPECT_EQ(s.schedule_calls + s.hits + s.misses + s.previous_total() + s.max_depth, 0U);
  EXPECT_EQ(s.run_seconds, 0.0);
  EXPECT_EQ(s.cache_leaves, 1U) << "the cache is not reset";
}

TEST_F(Context, FailedCallsAreCountedToo) {
  Enable on;
  reset_stats();
  const at::Tensor x = at::ones({2}).requires_grad_();
  const at::Tensor y = x * 3;
  y.register_hook([](const at::Tensor&) { throw std::runtime_error("no"); });
  EXPECT_THROW(y.sum().backward(), std::runtime_error);
  EXPECT_EQ(stats().schedule_calls, 1U);
  EXPECT_GT(stats().run_seconds, 0.0);
}

TEST_F(Context, StatsKeepWhatExitedThreadsCounted) {
  reset_stats();
  std::thread([] {
    Enable on;
    const at::Tensor x = at::ones({2}).requires_grad_();
    const at::Tensor y = x * 3;
    y.register_hook([](const at::Tensor&) { one_backward(); });
    y.sum().backward();
  }).join();
  EXPECT_EQ(stats().schedule_calls, 2U);
  EXPECT_EQ(stats().nested_calls, 1U);
  EXPECT_EQ(stats().max_depth, 2U);
  reset_stats();
  EXPECT_EQ(stats().schedule_calls, 0U);
  EXPECT_EQ(stats().max_depth, 0U);
}

TEST_F(Context, ReasonsHaveTheirOwnNames) {
  std::set<std::string_view> names;
  for (size_t i = 0; i < static_cast<size_t>(PreviousReason::kCount); ++i) {
    names.insert(name(static_cast<PreviousReason>(i)));
  }
  EXPECT_EQ(names.size(), static_cast<size_t>(PreviousReason::kCount));
  EXPECT_EQ(name(PreviousReason::kNotEnabled), "not_enabled");
  EXPECT_FALSE(names.contains("unknown"));
}

}  // namespace
}  // namespace retrograd::test
