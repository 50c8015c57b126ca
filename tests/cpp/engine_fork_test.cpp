// A process that forks while its other threads are inside the engine. The child has one thread and uses the engine.
// With Python, and in the middle of calls: tests/python/alone_faults.py.
#include <atomic>
#include <cstdlib>
#include <functional>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include "engine/parallel.h"
#include "engine/retained.h"
#include "engine/stats.h"
#include "engine_test_util.h"
#include "perturb_util.h"

namespace retrograd::test {
namespace {

class Fork : public EngineTest {
 protected:
  // What the child's `body` returned; -1: it was killed, as it is when it hangs.
  static int in_child(const std::function<int()>& body) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(10);
      _exit(body());  // NOLINT(concurrency-mt-unsafe)
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

  // Forks again and again while another thread repeats `busy`; how many children did not end with 0, at most one.
  static int failures(const std::function<void()>& busy, const std::function<int()>& body) {
    constexpr int kForks = 200;
    std::atomic<bool> stop{false};
    const std::jthread thread([&] {
      while (!stop) busy();
    });
    int failed = 0;
    for (int i = 0; i < kForks && failed == 0; ++i) failed += in_child(body) != 0 ? 1 : 0;
    stop = true;
    return failed;
  }
};

TEST_F(Fork, TheLockOfInstallIsNotInheritedHeld) {
  EXPECT_EQ(failures(
                [] {
                  uninstall();
                  install();
                },
                [] {
                  uninstall();
                  install();
                  return is_installed() ? 0 : 1;
                }),
            0);
}

TEST_F(Fork, TheLockOfTheCountersIsNotInheritedHeld) {
  const Perturbation perturbation(1);  // reset_stats() takes a while
  EXPECT_EQ(failures([] { reset_stats(); },
                     [] {
                       reset_stats();
                       return stats().schedule_calls == 0 ? 0 : 1;
                     }),
            0);
}

// The child has no helpers, and asks for none: their queue's lock may have been held.
TEST_F(Fork, TheLockOfTheHelpersIsNotInheritedHeld) {
  setenv("RETROGRAD_PARALLEL", "always", 1);
  if (!always_parallel()) GTEST_SKIP() << "RETROGRAD_PARALLEL was read before; run this test in a process of its own";
  const Perturbation perturbation(1);
  bool parallel = false;
  const auto run = [&parallel] {
    const Enable on(Options().parallel(parallel));
    const at::Tensor x = at::ones({4}).requires_grad_();
    std::vector<at::Tensor> parts;
    for (int k = 0; k < 6; ++k) parts.push_back((x * k).exp().log());
    at::stack(parts).sum().backward();
    return at::allclose(x.grad(), at::full({4}, 15.0)) ? 0 : 1;
  };
  run();  // libtorch makes variables of its own on the first run, and a child would wait for those, too
  parallel = true;
  const Stats before = stats();
  EXPECT_EQ(failures(run, run), 0);
  EXPECT_GT(stats().parallel_calls, before.parallel_calls);
}

// A call of a thread that is alive in the parent and not there in the child.
TEST_F(Fork, CountsOfVanishedThreadsStay) {
  reset_stats();
  std::atomic<bool> called{false}, stop{false};
  const std::jthread thread([&] {
    {
      const Enable on;
      whole(1).sum().backward();
    }
    called = true;
    called.notify_all();
    stop.wait(false);
  });
  called.wait(false);
  EXPECT_EQ(in_child([] { return stats().schedule_calls == 1 ? 0 : 1; }), 0);
  EXPECT_EQ(in_child([] {
              reset_stats();
              return stats().schedule_calls == 0 ? 0 : 1;
            }),
            0);
  stop = true;
  stop.notify_all();
}

TEST_F(Fork, ACaptureOfTheParentsHoldsUpNoCallOfTheChild) {
  std::atomic<bool> capturing{false}, stop{false};
  const std::jthread thread([&] {
    const CaptureRight right(true, CallFrame{});
    capturing = true;
    capturing.notify_all();
    stop.wait(false);
  });
  capturing.wait(false);
  EXPECT_EQ(in_child([] {
              const RetainedCall call(true);
              return 0;
            }),
            0);
  stop = true;
  stop.notify_all();
}

TEST_F(Fork, ARetainedCallOfTheParentsForbidsNoCaptureOfTheChild) {
  std::atomic<bool> inside{false}, stop{false};
  const std::jthread thread([&] {
    const RetainedCall call(true);
    inside = true;
    inside.notify_all();
    stop.wait(false);
  });
  inside.wait(false);
  EXPECT_FALSE(CaptureRight(true, CallFrame{}).granted());
  EXPECT_EQ(in_child([] { return CaptureRight(true, CallFrame{}).granted() ? 0 : 1; }), 0);
  stop = true;
  stop.notify_all();
}

}  // namespace
}  // namespace retrograd::test
