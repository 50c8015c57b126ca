// What it costs to find a graph's plan, by part, on the backward graph of 10 x Linear(64, 64) + ReLU:
//   bind            a plan that this thread used lately is laid over the live graph (what a hit costs)
//   walk            the graph is walked and the stock engine's order found (what a call with inputs= costs)
//   walk_and_keys   ... and the schedule's keys are made and looked up
//   walk_collect    ... and every node's constants, tensors and sizes are collected by compiled_args
// ns_per_node is the figure to compare.
#include <chrono>

#include <benchmark/benchmark.h>
#include <torch/torch.h>

#include "cache/trie.h"
#include "engine/collect.h"
#include "engine/schedule.h"
#include "engine/walk.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Graph {
  torch::nn::Sequential layers;
  torch::Tensor loss;
  retrograd::GraphShape shape;
  retrograd::WalkedGraph walked;

  Graph() {
    for (int i = 0; i < 10; ++i) {
      layers->push_back(torch::nn::Linear(64, 64));
      layers->push_back(torch::nn::ReLU());
    }
    loss = layers->forward(torch::randn({8, 64})).sum();
    walk();
  }
  retrograd::Node& root() const { return *loss.grad_fn(); }
  void walk() { retrograd::walk(root(), /*accumulate=*/true, {}, shape, walked); }
  // Wall time since `start`, which the caller takes right before its loop.
  void report(benchmark::State& state, Clock::time_point start) const {
    const double ns = std::chrono::duration<double, std::nano>(Clock::now() - start).count();
    const auto nodes = static_cast<double>(walked.nodes.size());
    state.counters["nodes"] = nodes;
    state.counters["ns_per_node"] = ns / nodes / static_cast<double>(state.iterations());
  }
};

void bind(benchmark::State& state) {
  const Graph graph;
  const auto schedule = retrograd::make_schedule(graph.shape, graph.walked.nodes);
  std::vector<retrograd::Node*> nodes;
  const auto start = Clock::now();
  for (auto _ : state) {
    if (!schedule->bind(graph.root(), nodes)) state.SkipWithError("the schedule does not fit its own graph");
    benchmark::DoNotOptimize(nodes.data());
  }
  graph.report(state, start);
}
BENCHMARK(bind);

void walk(benchmark::State& state) {
  Graph graph;
  const auto start = Clock::now();
  for (auto _ : state) graph.walk();
  graph.report(state, start);
}
BENCHMARK(walk);

void walk_and_keys(benchmark::State& state) {
  Graph graph;
  retrograd::cache::Trie trie;
  retrograd::cache::Memo memo;
  retrograd::cache::Path path;
  const auto start = Clock::now();
  for (auto _ : state) {
    graph.walk();
    path.clear();
    retrograd::append_keys(graph.shape, path);
    benchmark::DoNotOptimize(trie.find_or_insert(path, &memo).leaf.get());
  }
  graph.report(state, start);
}
BENCHMARK(walk_and_keys);

void walk_collect(benchmark::State& state) {
  Graph graph;
  size_t tensors = 0;
  const auto start = Clock::now();
  for (auto _ : state) {
    graph.walk();
    const auto collected = retrograd::collect(graph.walked.nodes, /*accumulate=*/true, {});
    tensors = collected->call.tensor_args.inputs.size();
  }
  if (tensors == 0) state.SkipWithError("nothing was collected");
  state.counters["tensors"] = static_cast<double>(tensors);
  graph.report(state, start);
}
BENCHMARK(walk_collect);

}  // namespace

BENCHMARK_MAIN();
