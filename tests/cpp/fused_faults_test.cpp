// Memory that runs out at any one point of a call: std::bad_alloc or the right gradients, and a next call as good as
// ever. Allocations of the engine's own code fail, not libtorch's, which does not outlive all of them.
#include <cstdlib>
#include <dlfcn.h>
#include <link.h>
#include <new>

#include <torch/csrc/autograd/custom_function.h>

#include "engine/context.h"
#include "fused_test_util.h"

namespace retrograd::test {
namespace {

// Where libretrograd's code lies.
struct Range {
  uintptr_t begin = 0, end = 0;
  bool contains(const void* address) const {
    const auto at = reinterpret_cast<uintptr_t>(address);
    return at >= begin && at < end;
  }
};
Range code_of_engine() {
  Range range;
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&retrograd::install), &info) == 0) return range;
  struct Search {
    uintptr_t base;
    Range* range;
  } search{reinterpret_cast<uintptr_t>(info.dli_fbase), &range};
  dl_iterate_phdr(
      [](dl_phdr_info* object, size_t, void* data) {
        auto& wanted = *static_cast<Search*>(data);
        if (object->dlpi_addr != wanted.base) return 0;
        for (int i = 0; i < object->dlpi_phnum; ++i) {
          const auto& segment = object->dlpi_phdr[i];
          if (segment.p_type != PT_LOAD || (segment.p_flags & PF_X) == 0) continue;
          wanted.range->begin = object->dlpi_addr + segment.p_vaddr;
          wanted.range->end = wanted.range->begin + segment.p_memsz;
        }
        return 1;
      },
      &search);
  return range;
}
const Range engine_code = code_of_engine();

enum class Shortage : uint8_t { kOnce, kFromThenOn };

// While it lives, the engine's allocation number `first` of this thread fails, and perhaps all after it.
thread_local class FailingAllocations* failing = nullptr;
class FailingAllocations {
 public:
  FailingAllocations(uint64_t first, Shortage shortage) : left_(first), shortage_(shortage) { failing = this; }
  ~FailingAllocations() { failing = nullptr; }
  FailingAllocations(const FailingAllocations&) = delete;
  FailingAllocations& operator=(const FailingAllocations&) = delete;

  bool fails_now() {
    if (failed_) return shortage_ == Shortage::kFromThenOn;
    failed_ = left_-- == 0;
    return failed_;
  }
  bool failed() const { return failed_; }

 private:
  uint64_t left_;
  const Shortage shortage_;
  bool failed_ = false;
};

}  // namespace
}  // namespace retrograd::test

// The whole program's, libretrograd included.
void* operator new(size_t size) {
  using namespace retrograd::test;
  if (failing != nullptr && engine_code.contains(__builtin_return_address(0)) && failing->fails_now()) {
    throw std::bad_alloc();
  }
  if (void* const memory = std::malloc(size != 0 ? size : 1)) return memory;
  throw std::bad_alloc();
}
// std::stable_sort asks in this way, and does without where there is nothing.
void* operator new(size_t size, const std::nothrow_t&) noexcept {
  using namespace retrograd::test;
  if (failing != nullptr && engine_code.contains(__builtin_return_address(0)) && failing->fails_now()) return nullptr;
  return std::malloc(size != 0 ? size : 1);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace retrograd::test {
namespace {

at::Tensor leaf(double first) { return at::tensor({first, 2., -1., 3.}, at::kDouble).requires_grad_(); }

// Calls backward of another graph inside its own.
struct Nested : torch::autograd::Function<Nested> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x * 2; }
  static variable_list backward(torch::autograd::AutogradContext*, variable_list grads) {
    const at::AutoGradMode grad_mode(true);
    const at::Tensor y = leaf(5);
    (y * y).sin().sum().backward();
    return {grads[0] * 2 + y.grad().detach() * 0};
  }
};

// A hook in the middle, a custom function, two roots; what grad() of it all is.
struct Net {
  at::Tensor x = leaf(1), w = leaf(2);
  at::Tensor a = (x * w).sin() + x;
  at::Tensor b = Nested::apply(a);
  at::Tensor c = (b * w).neg() + b.exp();
  int hooks = 0;

  Net() {
    a.register_hook([this](const at::Tensor& g) {
      ++hooks;
      return g * 3;
    });
  }
  variable_list gradients(bool keep_graph) { return torch::autograd::grad({c.sum(), a.sum()}, {x, w}, {}, keep_graph); }
  void backward() { torch::autograd::backward({c.sum(), a.sum()}, {}); }
};

std::string text_of(const variable_list& gradients) {
  std::string text;
  for (const at::Tensor& gradient : gradients) text += describe(gradient) + "\n";
  return text;
}

class Faults : public FusedTest, public testing::WithParamInterface<std::tuple<Backend, Shortage>> {
 protected:
  Options options() const { return Options().backend(std::get<Backend>(GetParam())).mode(Mode::kBlocking); }

  // Runs `call` on fresh graphs with allocation 0, 1, 2, ... failing, until it needs no more of them.
  template <class Call>
  void sweep(const std::function<void()>& prepare, const Call& call) {
    variable_list expected;
    {
      const Disable off;
      Net net;
      expected = call(net);
    }
    const bool fused = std::get<Backend>(GetParam()) == Backend::kInductor;
    uint64_t first = 0, threw = 0;
    for (bool failed = true; failed; ++first) {
      SCOPED_TRACE(c10::str("allocation ", first));
      ASSERT_LT(first, 2000U);
      prepare();
      const Enable on(options());
      Net net;
      std::optional<variable_list> got;
      {
        FailingAllocations shortage(first, std::get<Shortage>(GetParam()));
        try {
          got = call(net);
        } catch (const std::bad_alloc&) {
          ++threw;
        }
        failed = shortage.failed();
      }
      if (got) {
        EXPECT_EQ(text_of(*got), text_of(expected));
      }
      EXPECT_EQ(thread_context().frame, nullptr);
      EXPECT_EQ(current_node(), nullptr);
      const Stats before = stats();
      Net next;
      EXPECT_EQ(text_of(call(next)), text_of(expected));
      const Stats after = stats();
      EXPECT_EQ(after.previous_total(), before.previous_total());
      EXPECT_EQ(after.fused_calls - before.fused_calls + after.schedule_calls - before.schedule_calls, 2U);
      EXPECT_EQ(after.fused_calls - before.fused_calls, fused ? 2U : 0U);
    }
    EXPECT_GT(threw, 3U) << "of " << first << " runs";
  }
};

TEST_P(Faults, AtTheFirstSightOfAGraph) {
  sweep([] { cache_clear(); },
        [](Net& net) {
          net.backward();
          return variable_list{net.x.grad(), net.w.grad()};
        });
}

TEST_P(Faults, WhenThePlanIsThere) {
  cache_clear();
  sweep([] {},
        [](Net& net) {
          net.backward();
          return variable_list{net.x.grad(), net.w.grad()};
        });
}

TEST_P(Faults, TowardsSomeInputs) {
  sweep([] { cache_clear(); }, [](Net& net) { return net.gradients(/*keep_graph=*/false); });
}

// What failed may be asked again of the same graph.
TEST_P(Faults, OfAKeptGraph) {
  sweep([] { cache_clear(); },
        [](Net& net) {
          try {
            return net.gradients(/*keep_graph=*/true);
          } catch (const std::bad_alloc&) {
            FailingAllocations* const shortage = std::exchange(failing, nullptr);
            variable_list again = net.gradients(/*keep_graph=*/true);
            const Disable off;
            EXPECT_EQ(text_of(again), text_of(net.gradients(/*keep_graph=*/true)));
            failing = shortage;
            throw;
          }
        });
}

INSTANTIATE_TEST_SUITE_P(Memory, Faults,
                         testing::Combine(testing::Values(Backend::kSchedule, Backend::kInductor),
                                          testing::Values(Shortage::kOnce, Shortage::kFromThenOn)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param) == Backend::kSchedule ? "Schedule" : "Fused") +
                                  (std::get<1>(info.param) == Shortage::kOnce ? "Once" : "FromThenOn");
                         });

}  // namespace
}  // namespace retrograd::test
