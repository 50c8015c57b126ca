// Whole backward calls from C++, no Python in the process: the stock engine and retrograd's schedule in turn, in one
// process. Each benchmark prints the medians of both sides (us) and their ratio; above 1 retrograd is faster. A run in
// which a call took another path than the one that is measured ends in an error. Those with "fused" in their name need
// plans in the plan store, which a C++ program cannot make: bench/python/fused.py does and runs them.
#include <algorithm>
#include <barrier>
#include <chrono>
#include <thread>

#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>
#include <c10/core/CPUAllocator.h>
#include <torch/torch.h>

#include "retrograd/retrograd.h"

namespace {

using Clock = std::chrono::steady_clock;

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

template <class F>
double microseconds(F&& f) {
  const auto start = Clock::now();
  f();
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

// `layers` times Linear(width, width) + ReLU.
struct Mlp {
  torch::nn::Sequential layers;
  torch::Tensor input;

  Mlp(int depth, int width, int batch, bool relu = true) : input(torch::randn({batch, width})) {
    for (int i = 0; i < depth; ++i) {
      layers->push_back(torch::nn::Linear(width, width));
      if (relu) layers->push_back(torch::nn::ReLU());
    }
  }
  torch::Tensor loss() {
    layers->zero_grad();
    return layers->forward(input).sum();
  }
};

Mlp mlp10x64() { return {10, 64, 8}; }
Mlp gemm4x512() { return {4, 512, 64, false}; }

void require_schedule(benchmark::State& state, uint64_t expected) {
  const retrograd::Stats stats = retrograd::stats();
  if (stats.schedule_calls != expected) state.SkipWithError("calls did not run on the schedule");
}

// One call on each side, alternating.
void compare(benchmark::State& state, Mlp model) {
  at::set_num_threads(1);
  std::vector<double> stock, ours;
  for (int i = 0; i < 20; ++i) {
    retrograd::Enable on;
    model.loss().backward();
  }
  retrograd::reset_stats();
  for (auto _ : state) {
    torch::Tensor loss = model.loss();
    stock.push_back(microseconds([&] { loss.backward(); }));
    loss = model.loss();
    retrograd::Enable on;
    ours.push_back(microseconds([&] { loss.backward(); }));
  }
  require_schedule(state, ours.size());
  state.counters["stock_us"] = median(stock);
  state.counters["retrograd_us"] = median(ours);
  state.counters["ratio"] = median(stock) / median(ours);
}
BENCHMARK_CAPTURE(compare, mlp10x64, mlp10x64())->Iterations(4000)->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(compare, gemm4x512, gemm4x512())->Iterations(300)->Unit(benchmark::kMicrosecond);

// The process without retrograd against the process with it, no thread opted in.
void installed_not_enabled(benchmark::State& state) {
  at::set_num_threads(1);
  Mlp model = mlp10x64();
  std::vector<double> without, with;
  retrograd::reset_stats();
  for (auto _ : state) {
    torch::Tensor loss = model.loss();
    retrograd::uninstall();
    without.push_back(microseconds([&] { loss.backward(); }));
    loss = model.loss();
    retrograd::install();
    with.push_back(microseconds([&] { loss.backward(); }));
  }
  const retrograd::Stats stats = retrograd::stats();
  const auto not_enabled = stats.previous_calls[static_cast<size_t>(retrograd::PreviousReason::kNotEnabled)];
  // Without retrograd, calls from C++ reach its engine no more, so only the other half is counted.
  if (not_enabled != with.size()) state.SkipWithError("not every call passed through the installed engine");
  require_schedule(state, 0);
  state.counters["absent_us"] = median(without);
  state.counters["installed_us"] = median(with);
  state.counters["ratio"] = median(without) / median(with);
}
BENCHMARK(installed_not_enabled)->Iterations(4000)->Unit(benchmark::kMicrosecond);

// Backward calls per second of `threads` threads, each on a model of its own; only backward is inside the clock.
double calls_per_second(int threads, std::optional<retrograd::Options> options, int calls) {
  std::barrier start(threads);
  std::vector<double> seconds(static_cast<size_t>(threads));
  std::vector<std::thread> workers;
  for (int t = 0; t < threads; ++t) {
    workers.emplace_back([&, t] {
      at::init_num_threads();
      Mlp model = mlp10x64();
      std::optional<retrograd::Enable> on;
      if (options) on.emplace(*options);
      torch::Tensor loss = model.loss();
      const auto run = [&] {
        model.layers->zero_grad();
        loss.backward({}, /*retain_graph=*/true);
      };
      for (int i = 0; i < 20; ++i) run();
      start.arrive_and_wait();
      seconds[static_cast<size_t>(t)] = microseconds([&] {
                                          for (int i = 0; i < calls; ++i) run();
                                        }) *
                                        1e-6;
    });
  }
  for (auto& worker : workers) worker.join();
  return threads * calls / *std::max_element(seconds.begin(), seconds.end());
}

// Two threads against one, no Python: each round measures all four cases. Returns how many calls were made.
uint64_t measure_two_threads(benchmark::State& state, retrograd::Options options) {
  at::set_num_threads(1);
  constexpr int kCalls = 1500;
  std::vector<double> stock, ours, ratio;
  retrograd::reset_stats();
  for (auto _ : state) {
    const double stock_one = calls_per_second(1, std::nullopt, kCalls);
    const double one = calls_per_second(1, options, kCalls);
    const double stock_two = calls_per_second(2, std::nullopt, kCalls);
    const double two = calls_per_second(2, options, kCalls);
    stock.push_back(stock_two / stock_one);
    ours.push_back(two / one);
    ratio.push_back(two / stock_two);
  }
  state.counters["stock_scaling"] = median(stock);
  state.counters["retrograd_scaling"] = median(ours);
  state.counters["two_vs_stock_two"] = median(ratio);
  return 3 * (kCalls + 20) * ours.size();
}

void two_threads(benchmark::State& state) { require_schedule(state, measure_two_threads(state, {})); }
BENCHMARK(two_threads)->Iterations(7)->Unit(benchmark::kMillisecond);

void two_threads_fused(benchmark::State& state) {
  const uint64_t calls = measure_two_threads(state, retrograd::Options().backend(retrograd::Backend::kInductor));
  const retrograd::Stats stats = retrograd::stats();
  if (stats.fused_calls != calls || stats.unfused_groups != 0) {
    state.SkipWithError("calls did not run fused: is the plan in the store?");
  }
}
BENCHMARK(two_threads_fused)->Iterations(7)->Unit(benchmark::kMillisecond);

// Counts bytes of tensor memory. Registered for the whole process; only one thread allocates while it measures.
class CountingAllocator final : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator& inner) : inner_(inner) {}
  c10::DataPtr allocate(size_t bytes) override {
    live_ += static_cast<int64_t>(bytes);
    peak_ = std::max(peak_, live_);
    auto holder = std::make_unique<Held>(Held{inner_.allocate(bytes), bytes, this});
    void* data = holder->memory.get();
    const c10::Device device = holder->memory.device();
    return {data, holder.release(), &CountingAllocator::drop, device};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  void reset_peak() { peak_ = live_; }
  int64_t peak_since(int64_t live_before) const { return peak_ - live_before; }
  int64_t live() const { return live_; }

 private:
  struct Held {
    c10::DataPtr memory;
    size_t bytes;
    CountingAllocator* owner;
  };
  static void drop(void* context) {
    const std::unique_ptr<Held> held(static_cast<Held*>(context));
    held->owner->live_ -= static_cast<int64_t>(held->bytes);
  }
  c10::Allocator& inner_;
  int64_t live_ = 0, peak_ = 0;
};

// Tensor memory at the peak of a backward over what was live before it, both sides.
void peak_memory(benchmark::State& state, Mlp model) {
  static CountingAllocator counting(*c10::GetCPUAllocator());
  c10::SetCPUAllocator(&counting, /*priority=*/1);
  at::set_num_threads(1);
  const auto peak = [&](bool enabled) {
    torch::Tensor loss = model.loss();
    std::optional<retrograd::Enable> on;
    if (enabled) on.emplace();
    const int64_t before = counting.live();
    counting.reset_peak();
    loss.backward();
    return static_cast<double>(counting.peak_since(before));
  };
  peak(true);
  retrograd::reset_stats();
  std::vector<double> stock, ours;
  for (auto _ : state) {
    stock.push_back(peak(false));
    ours.push_back(peak(true));
  }
  require_schedule(state, ours.size());
  state.counters["stock_bytes"] = median(stock);
  state.counters["retrograd_bytes"] = median(ours);
  state.counters["ratio"] = median(ours) / median(stock);
}
BENCHMARK_CAPTURE(peak_memory, mlp10x64, mlp10x64())->Iterations(20)->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(peak_memory, gemm4x512, gemm4x512())->Iterations(5)->Unit(benchmark::kMicrosecond);

}  // namespace

int main(int argc, char** argv) {
  retrograd::install();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
