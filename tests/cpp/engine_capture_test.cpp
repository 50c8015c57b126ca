// What stands between the engine and a backend that runs whole calls by compiled graphs: the order and the inputs of a
// capture, leaves whose gradients are handed over, retained graphs, and the backend's place.
#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstring>
#include <functional>
#include <latch>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

#include "engine/callable.h"
#include "engine/collect.h"
#include "engine/context.h"
#include "engine/engine.h"
#include "engine/graph_task.h"
#include "engine/handed_leaf.h"
#include "engine/retained.h"
#include "engine/schedule.h"
#include "engine/stats.h"
#include "engine_test_util.h"

namespace retrograd::test {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::GraphRoot;
using torch::dynamo::autograd::CompiledNodeArgs;
using torch::dynamo::autograd::SizeInput;

// Gives up after a while, so that a thread that waits for what never comes fails its test instead of hanging it.
template <class Condition>
bool eventually(const Condition& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

at::Tensor leaf(at::IntArrayRef sizes = {3}) { return at::rand(sizes).requires_grad_(); }

Edge edge_to(const at::Tensor& tensor) { return torch::autograd::impl::gradient_edge(tensor); }

// --- Capture order ---

struct Visit {
  Node* node;
  bool needed;
  friend bool operator==(const Visit&, const Visit&) = default;
};

std::vector<Visit> in_capture_order(const Walked& w) {
  std::vector<Visit> visits;
  for (const uint32_t k : w.schedule->capture_order()) visits.push_back({w.graph.nodes[k], w.shape.steps[k].needed});
  return visits;
}

// Torch's compiled autograd in words: pop the last node that became ready, and follow its edges to nodes that lead to
// an output. Knows nothing of steps.
class LastInFirstOut {
 public:
  LastInFirstOut(bool accumulate, const edge_list& outputs) : accumulate_(accumulate) {
    for (const Edge& output : outputs) outputs_.insert(output.function.get());
  }

  std::vector<Visit> from(Node& root) {
    std::vector<Node*> reached{&root};
    std::unordered_set<Node*> seen{&root};
    std::unordered_map<Node*, size_t> waits_for;
    for (size_t i = 0; i < reached.size(); ++i) {
      for (const Edge& edge : reached[i]->next_edges()) {
        if (!edge.is_valid()) continue;
        ++waits_for[edge.function.get()];
        if (seen.insert(edge.function.get()).second) reached.push_back(edge.function.get());
      }
    }
    std::vector<Visit> visits;
    std::vector<Node*> ready{&root};
    while (!ready.empty()) {
      Node* const node = ready.back();
      ready.pop_back();
      visits.push_back({node, needed(node)});
      for (const Edge& edge : node->next_edges()) {
        if (edge.is_valid() && runs(edge.function.get()) && --waits_for[edge.function.get()] == 0) {
          ready.push_back(edge.function.get());
        }
      }
    }
    return visits;
  }

 private:
  bool runs(Node* node) { return needed(node) || outputs_.contains(node); }
  bool needed(Node* node) {
    if (outputs_.empty() || (accumulate_ && outputs_.contains(node))) return true;
    if (const auto known = needed_.find(node); known != needed_.end()) return known->second;
    bool result = false;
    for (const Edge& edge : node->next_edges()) result = (edge.is_valid() && runs(edge.function.get())) || result;
    return needed_[node] = result;
  }

  const bool accumulate_;
  std::unordered_set<Node*> outputs_;
  std::unordered_map<Node*, bool> needed_;
};

c10::intrusive_ptr<Node> random_roots(uint32_t seed, const RandomGraph& graph) {
  std::mt19937 random(seed);
  edge_list roots;
  variable_list gradients;
  for (size_t i = 0; i < 2 + seed % 4; ++i) {  // the same root twice is allowed
    const auto& node = graph.nodes[random() % graph.nodes.size()];
    roots.emplace_back(node, static_cast<uint32_t>(random() % node->num_inputs()));
    gradients.push_back(pair_of(1, static_cast<double>(i)));
  }
  return c10::make_intrusive<GraphRoot>(roots, gradients);
}

TEST(CaptureOrder, LastReadyRunsFirst) {
  //  root -> a -> below;  root -> b -> below;  below -> leaf
  const auto leaf_node = make_node(UINT64_MAX, 1);
  const auto below = make_node(1, 2, {Edge(leaf_node, 0)});
  const auto a = make_node(3, 1, {Edge(below, 0)});
  const auto b = make_node(2, 1, {Edge(below, 1)});
  const auto root = make_node(4, 1, {Edge(a, 0), Edge(b, 0)});
  const Walked w = walked(*root);
  EXPECT_EQ(w.graph.nodes, (std::vector<Node*>{root.get(), a.get(), b.get(), below.get(), leaf_node.get()}));
  EXPECT_EQ(in_capture_order(w),
            (std::vector<Visit>{
                {root.get(), true}, {b.get(), true}, {a.get(), true}, {below.get(), true}, {leaf_node.get(), true}}));
}

TEST(CaptureOrder, IsTheLastInFirstOutWalkOverRandomGraphs) {
  size_t not_the_engines = 0;
  for (uint32_t seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE(seed);
    const RandomGraph graph = random_graph(seed, 60, nullptr);
    Node& root = *graph.nodes.back();
    const Walked w = walked(root);
    const auto expected = LastInFirstOut(true, {}).from(root);
    ASSERT_EQ(in_capture_order(w), expected);
    ASSERT_EQ(expected.size(), w.graph.nodes.size()) << "every step, once";
    not_the_engines += std::ranges::is_sorted(w.schedule->capture_order()) ? 0 : 1;
  }
  EXPECT_GT(not_the_engines, 250U) << "the graphs must tell the two orders apart";
}

TEST(CaptureOrder, IsTheLastInFirstOutWalkFromSeveralRoots) {
  for (uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    const RandomGraph graph = random_graph(seed, 40, nullptr);
    const auto root = random_roots(seed, graph);
    ASSERT_EQ(in_capture_order(walked(*root)), LastInFirstOut(true, {}).from(*root));
  }
}

TEST(CaptureOrder, IsTheLastInFirstOutWalkOfPrunedGraphs) {
  size_t captured_only = 0;
  for (uint32_t seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE(seed);
    const RandomGraph graph = random_graph(seed, 40, nullptr);
    const RandomGraph elsewhere = random_graph(seed + 1, 5, nullptr);
    const edge_list outputs = random_outputs(seed, graph, elsewhere);
    const auto several = random_roots(seed, graph);
    for (Node* root : {static_cast<Node*>(graph.nodes.back().get()), several.get()}) {
      for (const bool accumulate : {false, true}) {
        const auto visits = in_capture_order(walked(*root, accumulate, outputs));
        ASSERT_EQ(visits, LastInFirstOut(accumulate, outputs).from(*root)) << "accumulate " << accumulate;
        for (const Visit& visit : visits) captured_only += visit.needed ? 0 : 1;
      }
    }
  }
  EXPECT_GT(captured_only, 100U);
}

TEST(CaptureOrder, VeryDeepGraph) {
  constexpr size_t kDepth = 50'000;
  std::vector<c10::intrusive_ptr<Node>> chain{make_node(UINT64_MAX, 1)};
  for (size_t i = 1; i < kDepth; ++i) chain.push_back(make_node(i, 1, {Edge(chain.back(), 0)}));
  const Walked w = walked(*chain.back());
  EXPECT_EQ(w.schedule->capture_order().size(), kDepth);
  EXPECT_TRUE(std::ranges::is_sorted(w.schedule->capture_order()));
}

TEST(CaptureOrder, IsFoundOnceByThreadsThatAskAtOnce) {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    const RandomGraph graph = random_graph(seed, 60, nullptr);
    const Walked w = walked(*graph.nodes.back());
    std::vector<std::span<const uint32_t>> orders(4);
    run_together(4, [&](int thread) { orders[static_cast<size_t>(thread)] = w.schedule->capture_order(); });
    for (const auto& order : orders) {
      EXPECT_EQ(order.data(), orders[0].data());
      EXPECT_EQ(order.size(), w.graph.nodes.size());
    }
  }
}

// --- Collecting for a capture ---

// Hooks that can be collected without Python: they put a number into the key, and count how often.
struct CollectedAs {
  uint32_t number = 0;
  std::atomic<int>* times = nullptr;
  void operator()(CompiledNodeArgs& args) const {
    if (times != nullptr) ++*times;
    args.collect(number);
  }
};

class CollectedPreHook final : public FunctionPreHook {
 public:
  explicit CollectedPreHook(CollectedAs as) : as_(as) {}
  variable_list operator()(const variable_list& grads) override { return grads; }
  void compiled_args(CompiledNodeArgs& args) const override { as_(args); }

 private:
  CollectedAs as_;
};

class CollectedPostHook final : public FunctionPostHook {
 public:
  explicit CollectedPostHook(CollectedAs as) : as_(as) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override { return outputs; }
  void compiled_args(CompiledNodeArgs& args) const override { as_(args); }

 private:
  CollectedAs as_;
};

class CollectedPostAccumulateHook final : public PostAccumulateGradHook {
 public:
  using Body = std::function<void(const at::Tensor&)>;
  explicit CollectedPostAccumulateHook(
      CollectedAs as, Body body = [](const at::Tensor&) {})
      : as_(as), body_(std::move(body)) {}
  void operator()(const at::Tensor& tensor) override { body_(tensor); }
  void compiled_args(CompiledNodeArgs& args) const override { as_(args); }

 private:
  CollectedAs as_;
  Body body_;
};

template <class... Args>
void add_collected_post_accumulate_hook(const at::Tensor& variable, Args&&... args) {
  torch::autograd::impl::set_post_acc_grad_hooks(
      variable, std::make_unique<CollectedPostAccumulateHook>(std::forward<Args>(args)...));
}

// The first key of every path, as the callable backend gives it: whose it is, and its mode.
constexpr std::array<uint32_t, 2> kHead{7, 1};

// A call as a backend prepares it: its nodes in capture order, behind a GraphRoot.
struct Prepared {
  explicit Prepared(const variable_list& of, const variable_list& inputs = {}, bool accumulate = true,
                    variable_list with = {})
      : gradients(std::move(with)) {
    for (const at::Tensor& tensor : of) {
      roots.push_back(edge_to(tensor));
      if (gradients.size() < roots.size()) gradients.push_back(at::ones_like(tensor));
    }
    for (const at::Tensor& tensor : inputs) outputs.push_back(edge_to(tensor));
    root = c10::make_intrusive<GraphRoot>(roots, gradients);
    const bool single = of.size() == 1;
    const Walked w = walked(single ? *roots[0].function : *root, accumulate, outputs);
    std::vector<Visit> visits = in_capture_order(w);
    if (single) visits.insert(visits.begin(), {root.get(), true});
    needed = std::make_unique<bool[]>(visits.size());
    for (size_t k = 0; k < visits.size(); ++k) {
      nodes.push_back(visits[k].node);
      needed[k] = visits[k].needed;
    }
  }

  std::unique_ptr<Collected> collect(bool hand_over = true, bool track_origins = false,
                                     SizeInput::DynType type = SizeInput::STATIC) {
    return collect_for_capture(nodes, {needed.get(), nodes.size()}, outputs, type, track_origins, hand_over, handed,
                               kHead);
  }
  cache::Path keys(bool hand_over = true) { return std::move(collect(hand_over)->path); }

  size_t place_of(const c10::intrusive_ptr<Node>& node) const {
    return static_cast<size_t>(std::ranges::find(nodes, node.get()) - nodes.begin());
  }

  edge_list roots, outputs;
  variable_list gradients;
  c10::intrusive_ptr<Node> root;
  std::vector<Node*> nodes;
  std::unique_ptr<bool[]> needed;
  std::vector<HandedLeaf> handed;
};

const variable_list& inputs_of(const Collected& collected) { return collected.call.tensor_args.inputs; }

size_t times_in(const variable_list& tensors, const at::Tensor& tensor) {
  return static_cast<size_t>(std::ranges::count_if(tensors, [&](const at::Tensor& t) { return t.is_same(tensor); }));
}

// The leaves that were handed, as the variables that their input indices name.
variable_list handed_variables(const Prepared& call, const Collected& collected) {
  variable_list variables;
  for (const HandedLeaf& h : call.handed) {
    EXPECT_LT(h.input, inputs_of(collected).size());
    variables.push_back(inputs_of(collected).at(h.input));
    EXPECT_TRUE(variables.back().is_same(h.node->variable));
  }
  return variables;
}

class CollectForCapture : public EngineTest {};

TEST_F(CollectForCapture, GraphRootComesFirst) {
  const at::Tensor x = leaf();
  const at::Tensor y = x.exp();
  Prepared one({y});
  const auto collected = one.collect();
  EXPECT_EQ(one.nodes[0], one.root.get());
  EXPECT_EQ(collected->call.node_calls.lookup(one.root).id, 0U);
  EXPECT_TRUE(inputs_of(*collected)[0].is_same(one.gradients[0]));

  Prepared two({y, x.sin()});
  const auto collected_two = two.collect();
  EXPECT_EQ(two.nodes[0], two.root.get());
  EXPECT_EQ(collected_two->call.node_calls.lookup(two.root).id, 0U);
  EXPECT_TRUE(inputs_of(*collected_two)[0].is_same(two.gradients[0]));
  EXPECT_TRUE(inputs_of(*collected_two)[1].is_same(two.gradients[1]));

  const at::Tensor ones = at::ones({3});
  Prepared same({y, x.sin()}, {}, true, {ones, ones});
  EXPECT_EQ(times_in(inputs_of(*same.collect()), ones), 1U);
  EXPECT_FALSE(same.keys() == two.keys()) << "one gradient for two roots is one input";

  // What inputs= names is numbered before, as in torch.
  Prepared pruned({y}, {x, x}, false);
  EXPECT_EQ(pruned.collect()->call.node_calls.lookup(pruned.root).id, 1U);
}

TEST_F(CollectForCapture, OneKeyForEachNodeInTheOrderGivenBehindOneOfItsOwn) {
  const at::Tensor x = leaf();
  Prepared call({(x.exp() * x).sum()});
  const cache::Path path = call.keys();
  ASSERT_EQ(path.size(), call.nodes.size() + 1);
  EXPECT_TRUE(std::ranges::equal(path[0], std::as_bytes(std::span(kHead))));
  for (size_t k = 0; k < call.nodes.size(); ++k) {
    const Node& node = *call.nodes[k];
    const auto type = reinterpret_cast<uintptr_t>(&typeid(node));
    ASSERT_GE(path[k + 1].size(), sizeof type);
    EXPECT_EQ(std::memcmp(path[k + 1].data(), &type, sizeof type), 0) << k;
  }
  std::ranges::reverse(call.nodes);
  const cache::Path reversed = call.keys();
  const Node& first = *call.nodes.front();
  const auto type = reinterpret_cast<uintptr_t>(&typeid(first));
  EXPECT_EQ(std::memcmp(reversed[1].data(), &type, sizeof type), 0);
}

TEST_F(CollectForCapture, EqualGraphsHaveEqualKeys) {
  const auto build = [](const at::Tensor& x, const at::Tensor& w) { return (x.pow(2.5) * w).sin().sum(); };
  const at::Tensor x = leaf();
  const at::Tensor w = leaf();
  const at::Tensor root = build(x, w);
  Prepared call({root});
  const cache::Path path = call.keys();
  EXPECT_EQ(path, call.keys()) << "collecting changes nothing";
  EXPECT_EQ(path, Prepared({build(x, w)}).keys());
  EXPECT_EQ(path, Prepared({build(leaf(), leaf())}).keys());
  Prepared larger({build(leaf({7}), leaf({7}))});
  EXPECT_EQ(path, larger.keys()) << "sizes are inputs, not constants";
  EXPECT_EQ(path, std::move(call.collect(true, true)->path)) << "nor do origins count";
  EXPECT_EQ(path, std::move(call.collect(true, false, SizeInput::DYNAMIC)->path));
  for (const bool accumulate : {false, true}) {
    EXPECT_EQ(Prepared({root}, {x, w}, accumulate).keys(), Prepared({build(x, w)}, {x, w}, accumulate).keys());
  }
}

TEST_F(CollectForCapture, SizesAreInputsOfTheTypeAskedFor) {
  const auto values = [](at::IntArrayRef sizes, SizeInput::DynType type) {
    const at::Tensor root = (leaf(sizes) * 2).sum();
    std::vector<int64_t> found;
    const auto collected = Prepared({root}).collect(true, false, type);
    for (const SizeInput& size : collected->call.all_size_inputs) {
      EXPECT_EQ(size.dyn_type, type);
      found.push_back(size.value);
    }
    return found;
  };
  const auto three = values({3}, SizeInput::STATIC);
  const auto seven = values({7}, SizeInput::DYNAMIC);
  ASSERT_FALSE(three.empty());
  ASSERT_EQ(three.size(), seven.size());
  EXPECT_NE(three, seven);
  EXPECT_TRUE(std::ranges::count(three, 3) > 0 && std::ranges::count(seven, 7) == std::ranges::count(three, 3));
}

TEST_F(CollectForCapture, StructureConstantsOutputsNeedAndHooksMakeOtherKeys) {
  const at::Tensor x = leaf({2, 3});
  const at::Tensor w = leaf({2, 3});
  std::vector<std::pair<std::string, cache::Path>> paths;
  const auto add = [&](const std::string& name, Prepared call) { paths.emplace_back(name, call.keys()); };
  // Structure
  add("x * w", Prepared({x * w}));
  add("x * x", Prepared({x * x}));
  add("x * w + x", Prepared({x * w + x}));
  add("x * w + w", Prepared({x * w + w}));
  add("x + x * w", Prepared({x + x * w}));
  add("x * w of two roots", Prepared({x * w, x * w}));
  // Constants
  add("pow 2", Prepared({x.pow(2)}));
  add("pow 3", Prepared({x.pow(3)}));
  add("pow 3.0", Prepared({x.pow(3.0)}));
  add("sum of dim 0", Prepared({x.sum(0)}));
  add("sum of dim 1", Prepared({x.sum(1)}));
  add("double", Prepared({at::rand({2, 3}, at::kDouble).requires_grad_().pow(2)}));
  // Outputs, and with them what is needed
  const at::Tensor product = x * w;
  add("grad of x", Prepared({product}, {x}, false));
  add("grad of w", Prepared({product}, {w}, false));
  add("grad of x and w", Prepared({product}, {x, w}, false));
  add("grad of w and x", Prepared({product}, {w, x}, false));
  add("grad of x twice", Prepared({product}, {x, x}, false));
  add("grad of the product", Prepared({product}, {product}, false));
  add("backward to x", Prepared({product}, {x}));
  add("backward to w", Prepared({product}, {w}));
  add("backward to x and w", Prepared({product}, {x, w}));
  Prepared one_less({product});
  one_less.needed[one_less.place_of(edge_to(x).function)] = false;
  paths.emplace_back("x * w, x not needed", one_less.keys());
  // Hooks
  const at::Tensor retained = x * w;
  retained.retain_grad();
  add("retained .grad", Prepared({retained}));
  const at::Tensor inside = x * w;
  inside.retain_grad();
  add("retained .grad further in", Prepared({inside * x}));
  for (const uint32_t number : {1U, 2U}) {
    const at::Tensor before = x * w;
    before.grad_fn()->add_pre_hook(std::make_unique<CollectedPreHook>(CollectedAs{number}));
    add(c10::str("pre-hook ", number), Prepared({before}));
    const at::Tensor after = x * w;
    after.grad_fn()->add_post_hook(std::make_unique<CollectedPostHook>(CollectedAs{number + 2}));
    add(c10::str("post-hook ", number), Prepared({after}));
    const at::Tensor hooked = leaf({2, 3});
    add_collected_post_accumulate_hook(hooked, CollectedAs{number + 4});
    add(c10::str("post-accumulate hook ", number), Prepared({hooked * w}));
  }
  // The rest
  {
    const at::AutoGradMode no_grad(false);
    add("x * w, without grad mode", Prepared({product}));
  }
  const at::Tensor frozen = leaf({2, 3});
  const at::Tensor of_frozen = frozen * w;
  frozen.requires_grad_(false);
  add("a leaf that no longer requires grad", Prepared({of_frozen}));

  for (size_t i = 0; i < paths.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      EXPECT_FALSE(paths[i].second == paths[j].second) << paths[i].first << " and " << paths[j].first;
    }
  }
}

TEST_F(CollectForCapture, PathsAreNoSchedulesPaths) {
  const at::Tensor x = leaf();
  const at::Tensor y = x.exp();
  Prepared call({y});
  const Walked w = walked(*y.grad_fn());
  cache::Path schedules;
  append_keys(w.shape, schedules);
  for (size_t k = 0; k < schedules.size(); ++k) EXPECT_GT(schedules[k].size(), sizeof(kHead));
  EXPECT_EQ(call.keys()[0].size(), sizeof(kHead));
  EXPECT_FALSE(std::ranges::equal(call.keys()[0], schedules[0]));
  const auto for_tensors = collect(call.nodes, true, {});
  EXPECT_FALSE(std::ranges::equal(call.keys()[0], for_tensors->path[0]));
}

TEST_F(CollectForCapture, HandedLeavesNameTheirInput) {
  const at::Tensor x = leaf();
  const at::Tensor w = leaf();
  // Both leaves are saved by the product already, and x is reached along two ways.
  Prepared saved({(x * w + x).sum()});
  auto collected = saved.collect();
  variable_list variables = handed_variables(saved, *collected);
  EXPECT_EQ(variables.size(), 2U);
  EXPECT_EQ(times_in(variables, x), 1U);
  EXPECT_EQ(times_in(variables, w), 1U);
  EXPECT_EQ(inputs_of(*collected).size(), 3U) << "the gradient, x and w: each once";
  for (const at::Tensor& input : inputs_of(*collected)) EXPECT_EQ(times_in(inputs_of(*collected), input), 1U);

  // Nothing saves them here: they become inputs by being handed.
  Prepared bare({(x + w).sum()});
  collected = bare.collect();
  variables = handed_variables(bare, *collected);
  EXPECT_EQ(variables.size(), 2U);
  EXPECT_EQ(inputs_of(*collected).size(), 3U);
  for (const HandedLeaf& h : bare.handed) EXPECT_NE(std::ranges::find(bare.nodes, h.node), bare.nodes.end());

  // In the order in which the nodes come.
  EXPECT_LT(bare.place_of(bare.handed[0].node->getptr()), bare.place_of(bare.handed[1].node->getptr()));
}

TEST_F(CollectForCapture, EveryAttemptBeginsWithNothingHanded) {
  const at::Tensor x = leaf();
  Prepared call({x.exp()});
  call.collect();
  ASSERT_EQ(call.handed.size(), 1U);
  call.collect();
  EXPECT_EQ(call.handed.size(), 1U);
  call.collect(/*hand_over=*/false);
  EXPECT_TRUE(call.handed.empty());
}

TEST_F(CollectForCapture, HandedLeafIsWhatLibtorchSaysOfOneWithoutGrad) {
  const at::Tensor x = leaf({2, 3});
  const at::Tensor w = leaf({2, 3});
  const at::Tensor y = (x * w + x).sum();
  Prepared call({y});
  for (const bool with_grad : {true, false}) {
    const at::AutoGradMode mode(with_grad);
    const auto ours = call.collect();
    const auto libtorchs = call.collect(/*hand_over=*/false);
    EXPECT_EQ(ours->path, libtorchs->path);
    ASSERT_EQ(inputs_of(*ours).size(), inputs_of(*libtorchs).size());
    for (size_t i = 0; i < inputs_of(*ours).size(); ++i) {
      EXPECT_TRUE(inputs_of(*ours)[i].is_same(inputs_of(*libtorchs)[i]));
    }
  }
  // The same for a leaf that asks for no gradient any more.
  x.requires_grad_(false);
  const auto ours = call.collect();
  EXPECT_EQ(handed_variables(call, *ours).size(), 1U);
  EXPECT_EQ(ours->path, call.keys(/*hand_over=*/false));
}

TEST_F(CollectForCapture, GradOfAHandedLeafIsNotLookedAt) {
  const at::Tensor x = leaf();
  const at::Tensor y = x.exp();
  Prepared call({y});
  const cache::Path before = call.keys();
  const cache::Path stock_before = call.keys(/*hand_over=*/false);
  x.mutable_grad() = at::ones({3});
  const auto after = call.collect();
  EXPECT_EQ(after->path, before);
  EXPECT_EQ(times_in(inputs_of(*after), x.grad()), 0U);

  const auto stock_after = call.collect(/*hand_over=*/false);
  EXPECT_TRUE(call.handed.empty());
  EXPECT_FALSE(stock_after->path == stock_before);
  EXPECT_EQ(times_in(inputs_of(*stock_after), x.grad()), 1U);
  EXPECT_EQ(times_in(inputs_of(*stock_after), x), 1U);
}

TEST_F(CollectForCapture, LeavesWithHooksOfTheirOwnAreNotHanded) {
  for (const bool post_accumulate : {true, false}) {
    SCOPED_TRACE(post_accumulate);
    const at::Tensor x = leaf();
    const at::Tensor w = leaf();
    const at::Tensor y = x * w;
    const auto node = torch::autograd::impl::grad_accumulator(x);
    EXPECT_FALSE(may_look_at_grad(static_cast<AccumulateGrad&>(*node)));
    if (post_accumulate) {
      add_collected_post_accumulate_hook(x, CollectedAs{1});
    } else {
      node->add_post_hook(std::make_unique<CollectedPostHook>(CollectedAs{1}));
    }
    EXPECT_TRUE(may_look_at_grad(static_cast<AccumulateGrad&>(*node)));
    Prepared call({y});
    const auto without = call.collect();
    variable_list variables = handed_variables(call, *without);
    ASSERT_EQ(variables.size(), 1U);
    EXPECT_TRUE(variables[0].is_same(w));

    x.mutable_grad() = at::ones({3});
    w.mutable_grad() = at::ones({3});
    const auto with = call.collect();
    EXPECT_EQ(handed_variables(call, *with).size(), 1U);
    EXPECT_EQ(times_in(inputs_of(*with), x.grad()), 1U);
    EXPECT_EQ(times_in(inputs_of(*with), w.grad()), 0U);
    EXPECT_FALSE(with->path == without->path);
  }
}

TEST_F(CollectForCapture, HooksThatRunBeforeDoNotCount) {
  const at::Tensor x = leaf();
  const at::Tensor w = leaf();
  const at::Tensor y = x * w;
  torch::autograd::impl::add_hook(x, std::make_unique<CollectedPreHook>(CollectedAs{1}));
  torch::autograd::impl::grad_accumulator(w)->add_pre_hook(std::make_unique<CollectedPreHook>(CollectedAs{2}));
  Prepared call({y});
  EXPECT_EQ(handed_variables(call, *call.collect()).size(), 2U);
}

TEST_F(CollectForCapture, LeafThatIsOnlyCapturedIsNotHanded) {
  const at::Tensor x = leaf();
  const at::Tensor y = x.exp();
  Prepared captured({y}, {x}, /*accumulate=*/false);
  const auto collected = captured.collect();
  EXPECT_TRUE(captured.handed.empty());
  EXPECT_EQ(times_in(inputs_of(*collected), x), 0U);
  const auto& call = collected->call.node_calls.lookup(edge_to(x).function);
  EXPECT_FALSE(call.needed);
  EXPECT_EQ(call.graph_output, (std::vector<std::pair<int, int>>{{0, 0}}));
  Prepared accumulated({y}, {x}, /*accumulate=*/true);
  EXPECT_EQ(handed_variables(accumulated, *accumulated.collect()).size(), 1U);
}

struct Scale : torch::autograd::Function<Scale> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, double by) {
    ctx->saved_data["by"] = by;
    ctx->save_for_backward({x});
    return x * by;
  }
  static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grads) {
    return {grads[0] * ctx->saved_data["by"].toDouble(), at::Tensor()};
  }
};

TEST_F(CollectForCapture, OriginsNameTheNodeThatBroughtAnInput) {
  const at::Tensor x = leaf();
  const at::Tensor w = leaf();
  const at::Tensor y = x.exp();
  const at::Tensor scaled = Scale::apply(y, 2.0);
  const at::Tensor root = (scaled + w).sum();
  Prepared call({root});
  const auto collected = call.collect(true, /*track_origins=*/true);
  const auto& args = collected->call.tensor_args;
  ASSERT_EQ(args.input_origins.size(), args.inputs.size());
  const auto origins = [&](const auto& is_it) {
    std::vector<size_t> found;
    for (size_t i = 0; i < args.inputs.size(); ++i) {
      if (is_it(args.inputs[i])) found.push_back(args.input_origins[i]);
    }
    return found;
  };
  using Places = std::vector<size_t>;
  EXPECT_EQ(args.inputs.size(), 5U);
  EXPECT_EQ(origins([&](const at::Tensor& t) { return t.is_same(call.gradients[0]); }), Places{0}) << "GraphRoot";
  EXPECT_EQ(origins([&](const at::Tensor& t) { return t.is_same(x); }), Places{call.place_of(edge_to(x).function)});
  EXPECT_EQ(origins([&](const at::Tensor& t) { return t.is_same(w); }), Places{call.place_of(edge_to(w).function)});
  EXPECT_EQ(origins([&](const at::Tensor& t) { return t.is_alias_of(y); }),
            (Places{call.place_of(scaled.grad_fn()), call.place_of(y.grad_fn())}))
      << "each unpacks a tensor of its own";
  ASSERT_EQ(collected->call.lifted_ivalue_args.args_origins.size(), 1U);
  EXPECT_EQ(collected->call.lifted_ivalue_args.args_origins[0], call.place_of(scaled.grad_fn()));
  ASSERT_EQ(collected->call.size_input_origins.size(), collected->call.all_size_inputs.size());
  EXPECT_TRUE(std::ranges::is_sorted(collected->call.size_input_origins));

  const auto untracked = call.collect(true, /*track_origins=*/false);
  EXPECT_TRUE(untracked->call.tensor_args.input_origins.empty());
  EXPECT_TRUE(untracked->call.size_input_origins.empty());
  EXPECT_TRUE(untracked->call.lifted_ivalue_args.args_origins.empty());
}

TEST_F(CollectForCapture, ThrowsTheStockErrorAndLeavesTheGraphAsItWas) {
  const at::Tensor x = leaf();
  const at::Tensor y = (x.exp() * x).sum();
  y.backward();
  Record collecting;
  Record running;
  Prepared call({y});
  collecting.attempt([&] { call.collect(); });
  running.attempt([&] { y.backward(); });
  EXPECT_EQ(collecting.lines(), running.lines());
  EXPECT_TRUE(running.contains("backward through the graph a second time"));

  const at::Tensor hooked = x.exp();
  hooked.register_hook([](const at::Tensor& g) { return g * 2; });
  EXPECT_THROW(Prepared({hooked}).collect(), c10::NotImplementedError);
  x.mutable_grad() = at::Tensor();
  hooked.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), x.exp() * 2));
}

// --- Another thread at a leaf ---

TEST_F(CollectForCapture, TriesAgainWhileAnotherThreadHoldsALeafsLock) {
  const at::Tensor x = leaf();
  const at::Tensor w = leaf();
  const at::Tensor y = x * w;
  std::atomic<int> attempts{0};
  y.grad_fn()->add_pre_hook(std::make_unique<CollectedPreHook>(CollectedAs{1, &attempts}));
  add_collected_post_accumulate_hook(x, CollectedAs{1});
  x.mutable_grad() = at::zeros({3});
  Prepared call({y});
  const cache::Path alone = call.keys();
  attempts = 0;

  const auto node = torch::autograd::impl::grad_accumulator(x);
  std::latch held(1);
  bool let_go = false;
  std::jthread holder([&] {
    const std::lock_guard lock(node_mutex(*node));
    held.count_down();
    EXPECT_TRUE(eventually([&] { return attempts >= 3; })) << "does not try again, or waits for the lock";
    x.mutable_grad() = at::ones({3});
    let_go = true;
  });
  held.wait();
  const auto collected = call.collect(true, /*track_origins=*/true);
  {
    const std::lock_guard lock(node_mutex(*node));
    EXPECT_TRUE(let_go);
  }
  EXPECT_GE(attempts, 3);
  EXPECT_EQ(times_in(inputs_of(*collected), x.grad()), 1U) << "the one that the holder left";
  EXPECT_EQ(collected->path, alone);
  EXPECT_EQ(inputs_of(*collected).size(), 4U) << "nothing of the attempts before: gradient, x, w, x.grad()";
  EXPECT_EQ(collected->call.tensor_args.input_origins.size(), 4U);
  EXPECT_EQ(handed_variables(call, *collected).size(), 1U);
}

// libtorch 2.13 lets go of the lock before it runs post-accumulate-grad hooks.
TEST_F(CollectForCapture, DoesNotWaitForAPostAccumulateGradHook) {
  const at::Tensor x = leaf();
  const at::Tensor y = x.exp();
  std::latch in_hook(1);
  std::atomic<bool> collected{false};
  add_collected_post_accumulate_hook(x, CollectedAs{1}, [&](const at::Tensor&) {
    in_hook.count_down();
    EXPECT_TRUE(eventually([&] { return collected.load(); }));
  });
  Prepared call({y});
  std::jthread backward([&] { (x * 3).sum().backward(); });
  in_hook.wait();
  EXPECT_EQ(times_in(inputs_of(*call.collect()), x.grad()), 1U);
  EXPECT_TRUE(call.handed.empty());
  collected = true;
}

TEST_F(CollectForCapture, DoesNotWaitForTheLockOfAHandedLeaf) {
  const at::Tensor x = leaf();
  const at::Tensor y = x.exp();
  const auto node = torch::autograd::impl::grad_accumulator(x);
  Prepared call({y});
  std::latch held(1);
  std::atomic<bool> collected{false};
  std::jthread holder([&] {
    const std::lock_guard lock(node_mutex(*node));
    held.count_down();
    EXPECT_TRUE(eventually([&] { return collected.load(); }));
  });
  held.wait();
  EXPECT_EQ(handed_variables(call, *call.collect()).size(), 1U);
  collected = true;
}

TEST_F(CollectForCapture, ThreadsCollectWhileOthersAccumulate) {
  const at::Tensor x = whole(2);
  const at::Tensor w = whole(3);
  add_collected_post_accumulate_hook(x, CollectedAs{1});
  x.mutable_grad() = at::zeros({2});
  const at::Tensor y = (x * w).sum();
  constexpr int kCalls = 500;
  const cache::Path expected = Prepared({y}).keys();
  std::vector<std::jthread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      at::init_num_threads();
      Prepared call({y});
      for (int k = 0; k < kCalls; ++k) {
        if (i % 2 == 0) {
          ASSERT_EQ(call.keys(), expected);
          ASSERT_EQ(call.handed.size(), 1U);
        } else {
          y.backward({}, /*retain_graph=*/true);
        }
      }
    });
  }
  threads.clear();
  EXPECT_TRUE(at::equal(x.grad(), at::full({2}, 2 * kCalls * 3.0)));
  EXPECT_TRUE(at::equal(w.grad(), at::full({2}, 2 * kCalls * 2.0)));
}

// --- Stand-ins ---

class StandIn : public EngineTest {
 protected:
  // Everything that a graph could tell apart, but for .grad.
  static void expect_alike(const at::Tensor& stand_in, const at::Tensor& variable) {
    EXPECT_FALSE(stand_in.is_same(variable));
    EXPECT_TRUE(stand_in.is_leaf());
    EXPECT_TRUE(stand_in.requires_grad());
    EXPECT_EQ(stand_in.grad_fn(), nullptr);
    EXPECT_FALSE(stand_in.grad().defined());
    EXPECT_EQ(stand_in.key_set(), variable.key_set());
    EXPECT_EQ(stand_in.dtype(), variable.dtype());
    EXPECT_EQ(stand_in.sizes(), variable.sizes());
    EXPECT_TRUE(stand_in.is_alias_of(variable));
    EXPECT_EQ(stand_in._version(), variable._version());
    if (variable.layout() != at::kStrided) return;
    EXPECT_EQ(stand_in.strides(), variable.strides());
    EXPECT_EQ(stand_in.storage_offset(), variable.storage_offset());
    EXPECT_EQ(stand_in.const_data_ptr(), variable.const_data_ptr());
    EXPECT_EQ(stand_in.is_contiguous(), variable.is_contiguous());
  }
};

TEST_F(StandIn, IsALeafOfTheSameDataAndStrides) {
  const at::Tensor base = at::rand({4, 6});
  for (const at::Tensor& data :
       {at::rand({3}), at::rand({4, 5}).t(), base.slice(0, 1, 3), base.slice(1, 0, 6, 2), at::rand({}),
        at::rand({0, 3}), at::rand({1}).expand({4}), at::rand({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast),
        at::rand({3}, at::kDouble), at::rand({3}, at::kComplexFloat), at::rand({3}, at::kComplexFloat).conj(),
        at::rand({3}).to(at::kBFloat16)}) {
    SCOPED_TRACE(c10::str(data.toString(), data.sizes(), data.strides()));
    const at::Tensor variable = data.detach().requires_grad_();
    const at::Tensor stand_in = make_stand_in(variable);
    expect_alike(stand_in, variable);
    EXPECT_TRUE(at::equal(stand_in.detach(), variable.detach()));
    EXPECT_FALSE(stand_in.is_view());
  }
}

TEST_F(StandIn, OfASparseLeaf) {
  const at::Tensor indices = at::tensor({0, 2}, at::kLong).unsqueeze(0);
  const at::Tensor variable = at::sparse_coo_tensor(indices, at::rand({2}), {4})._coalesced_(true).requires_grad_();
  const at::Tensor stand_in = make_stand_in(variable);
  EXPECT_TRUE(stand_in.requires_grad() && stand_in.is_leaf() && stand_in.is_sparse());
  EXPECT_FALSE(stand_in.grad().defined());
  EXPECT_EQ(stand_in._values().const_data_ptr(), variable._values().const_data_ptr());
  EXPECT_TRUE(at::equal(stand_in.detach().to_dense(), variable.detach().to_dense()));
}

TEST_F(StandIn, HasNoGradWhateverTheVariableHas) {
  const at::Tensor x = leaf();
  x.mutable_grad() = at::ones({3});
  const at::Tensor grad = x.grad();
  const at::Tensor stand_in = make_stand_in(x);
  expect_alike(stand_in, x);
  (stand_in * 3).sum().backward();
  EXPECT_TRUE(at::equal(stand_in.grad(), at::full({3}, 3.0)));
  EXPECT_TRUE(x.grad().is_same(grad));
  EXPECT_TRUE(at::equal(grad, at::ones({3})));
  EXPECT_NE(torch::autograd::impl::grad_accumulator(x), torch::autograd::impl::grad_accumulator(stand_in));
}

TEST_F(StandIn, HasNoHooks) {
  const at::Tensor x = leaf();
  int calls = 0;
  x.register_hook([&](const at::Tensor&) { ++calls; });
  add_post_accumulate_hook(x, [&](const at::Tensor&) { ++calls; });
  make_stand_in(x).sum().backward();
  EXPECT_EQ(calls, 0);
}

TEST_F(StandIn, ChangesOfOnesDataAreSeenInTheOther) {
  const at::Tensor x = leaf();
  const at::Tensor stand_in = make_stand_in(x);
  const at::NoGradGuard no_grad;
  const auto version = x._version();
  x.fill_(2);
  EXPECT_TRUE(at::equal(stand_in, at::full({3}, 2.0)));
  EXPECT_EQ(x._version(), version + 1);
  EXPECT_EQ(stand_in._version(), version + 1);
  stand_in.mul_(3);
  EXPECT_TRUE(at::equal(x, at::full({3}, 6.0)));
  EXPECT_EQ(x._version(), version + 2);
  EXPECT_EQ(stand_in._version(), version + 2);
  x.mul_(1);
  expect_alike(make_stand_in(x), x);
}

TEST_F(StandIn, ChangeOfTheVariableIsFoundInWhatAStandInsGraphSaved) {
  const at::Tensor x = leaf();
  const at::Tensor stand_in = make_stand_in(x);
  const at::Tensor y = (stand_in * stand_in).sum();
  {
    const at::NoGradGuard no_grad;
    x.add_(1);
  }
  Record record;
  record.attempt([&] { y.backward(); });
  EXPECT_TRUE(record.contains("modified by an inplace operation"));
}

TEST_F(StandIn, IsWhatDetachGives) {
  const at::Tensor x = leaf({2, 3});
  const at::Tensor detached = x.detach().requires_grad_();
  const at::Tensor stand_in = make_stand_in(x);
  EXPECT_EQ(describe(stand_in), describe(detached));
  EXPECT_EQ(stand_in.key_set(), detached.key_set());
  EXPECT_EQ(stand_in.is_view(), detached.is_view());
  for (const auto& build : {+[](const at::Tensor& t) { return t.sin(); }, +[](const at::Tensor& t) { return t * t; },
                            +[](const at::Tensor& t) { return t.t().contiguous(); }}) {
    build(stand_in).sum().backward();
    build(detached).sum().backward();
    EXPECT_EQ(describe(stand_in.grad()), describe(detached.grad()));
  }
  // A call under no_grad, as a region is one, and one of another dispatch state, change nothing.
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowAutograd below;
  expect_alike(make_stand_in(x), x);
}

// --- Handing over ---

class HandOver : public EngineTest {
 protected:
  explicit HandOver() : variable(at::zeros({2}).requires_grad_()) {}

  AccumulateGrad& leaf_node() { return static_cast<AccumulateGrad&>(*node); }
  void give(at::Tensor gradient) { hand_over(leaf_node(), gradient); }

  at::Tensor variable;
  c10::intrusive_ptr<Node> node = torch::autograd::impl::grad_accumulator(variable);
};

TEST_F(HandOver, FirstGradientIsTakenOverWithoutACopy) {
  const at::NoGradGuard no_grad;  // as in a region
  at::Tensor gradient = at::full({2}, 3.0);
  const at::TensorImpl* const impl = gradient.unsafeGetTensorImpl();
  const void* const data = gradient.const_data_ptr();
  hand_over(leaf_node(), gradient);
  EXPECT_FALSE(gradient.defined());
  EXPECT_EQ(variable.grad().unsafeGetTensorImpl(), impl);
  EXPECT_EQ(variable.grad().const_data_ptr(), data);
  EXPECT_TRUE(at::equal(variable.grad(), at::full({2}, 3.0)));
}

TEST_F(HandOver, SecondGradientIsAddedInPlace) {
  const at::NoGradGuard no_grad;
  give(at::full({2}, 3.0));
  const at::Tensor grad = variable.grad();
  at::Tensor second = at::full({2}, 4.0);
  hand_over(leaf_node(), second);
  EXPECT_TRUE(variable.grad().is_same(grad));
  EXPECT_TRUE(at::equal(grad, at::full({2}, 7.0)));
  EXPECT_TRUE(at::equal(second, at::full({2}, 4.0))) << "left to the caller, unchanged";
}

TEST_F(HandOver, UnderGradModeASumIsMade) {
  give(at::full({2}, 3.0));
  const at::Tensor grad = variable.grad();
  give(at::full({2}, 4.0));
  EXPECT_FALSE(variable.grad().is_same(grad));
  EXPECT_TRUE(at::equal(grad, at::full({2}, 3.0)));
  EXPECT_TRUE(at::equal(variable.grad(), at::full({2}, 7.0)));
}

TEST_F(HandOver, AccumulatesAsTheNodeItselfDoes) {
  const auto sparse = [](double value) {
    return at::sparse_coo_tensor(at::tensor({1}, at::kLong).unsqueeze(0), at::full({1}, value), {2});
  };
  const auto dense = [](double value) { return at::full({2}, value); };
  using Make = std::function<at::Tensor(double)>;
  const at::NoGradGuard no_grad;
  for (const Make& first : {Make(sparse), Make(dense)}) {
    for (const Make& second : {Make(sparse), Make(dense)}) {
      for (const Make& third : {Make(sparse), Make(dense)}) {
        const at::Tensor twin = at::zeros({2}).requires_grad_();
        const auto twin_node = torch::autograd::impl::grad_accumulator(twin);
        variable.mutable_grad() = at::Tensor();
        double value = 1;
        for (const Make& make : {first, second, third}) {
          give(make(value));
          (*twin_node)({make(value)});
          value *= 10;
        }
        EXPECT_EQ(describe(variable.grad()), describe(twin.grad()));
        EXPECT_TRUE(at::equal(variable.grad().to_dense().narrow(0, 1, 1), at::full({1}, 111.0)));
      }
    }
  }
}

TEST_F(HandOver, SparseGradientMeetsDenseOnes) {
  const at::NoGradGuard no_grad;
  const auto sparse = [] {
    return at::sparse_coo_tensor(at::tensor({1}, at::kLong).unsqueeze(0), at::full({1}, 5.0), {2});
  };
  give(at::full({2}, 1.0));
  const at::Tensor dense = variable.grad();
  give(sparse());
  EXPECT_TRUE(variable.grad().is_same(dense)) << "in place";
  EXPECT_TRUE(at::equal(dense, at::tensor({1.0F, 6.0F})));

  variable.mutable_grad() = at::Tensor();
  give(sparse());
  EXPECT_TRUE(variable.grad().is_sparse());
  const at::Tensor former = variable.grad();
  give(at::full({2}, 1.0));
  EXPECT_FALSE(variable.grad().is_sparse());
  EXPECT_TRUE(at::equal(variable.grad(), at::tensor({1.0F, 6.0F})));
  EXPECT_TRUE(at::equal(former.to_dense(), at::tensor({0.0F, 5.0F})));
}

TEST_F(HandOver, LeafWhoseVariableIsGoneGetsNothing) {
  node->release_variables();
  static_cast<AccumulateGrad&>(*node).variable = at::Tensor();
  at::Tensor gradient = at::ones({2});
  hand_over(leaf_node(), gradient);
  EXPECT_TRUE(gradient.defined());
  EXPECT_FALSE(variable.grad().defined());
}

TEST_F(HandOver, WaitsForTheNodesLock) {
  std::atomic<bool> done{false};
  std::jthread other;
  {
    const std::lock_guard lock(node_mutex(*node));
    std::latch started(1);
    other = std::jthread([&] {
      const at::NoGradGuard no_grad;
      started.count_down();
      give(at::full({2}, 3.0));
      done = true;
    });
    started.wait();
    for (int i = 0; i < 1'000; ++i) std::this_thread::yield();
    EXPECT_FALSE(done);
    EXPECT_FALSE(variable.grad().defined());
    variable.mutable_grad() = at::full({2}, 4.0);
  }
  other.join();
  EXPECT_TRUE(at::equal(variable.grad(), at::full({2}, 7.0)));
}

// Large enough that additions that are not alone lose some of each other's work; whole numbers, so that sums are exact.
constexpr int64_t kLarge = 1 << 16;

class HandOverByThreads : public EngineTest {
 protected:
  static constexpr int kThreads = 4;

  static void run(const std::function<void(int thread)>& body) { run_together(kThreads, body); }
};

TEST_F(HandOverByThreads, NoGradientIsLost) {
  constexpr int kCalls = 1'000;
  const at::Tensor variable = whole(0, {kLarge});
  const auto node = torch::autograd::impl::grad_accumulator(variable);
  run([&](int thread) {
    const at::NoGradGuard no_grad;
    for (int i = 0; i < kCalls; ++i) {
      at::Tensor gradient = at::full({kLarge}, thread + 1.0);
      hand_over(static_cast<AccumulateGrad&>(*node), gradient);
    }
  });
  EXPECT_TRUE(at::equal(variable.grad(), at::full({kLarge}, kCalls * 10.0)));
}

TEST_F(HandOverByThreads, FirstGradientsOfAllThreadsMeet) {
  constexpr int kRounds = 2'000;
  at::Tensor variable;
  c10::intrusive_ptr<Node> node;
  const auto renew = [&] {
    variable = whole(0, {64});
    node = torch::autograd::impl::grad_accumulator(variable);
  };
  renew();
  int wrong = 0;
  std::barrier begin(kThreads);
  std::barrier end(kThreads, [&]() noexcept {
    wrong += at::equal(variable.grad(), at::full({64}, 10.0)) ? 0 : 1;
    renew();
  });
  run([&](int thread) {
    const at::NoGradGuard no_grad;
    for (int i = 0; i < kRounds; ++i) {
      at::Tensor gradient = at::full({64}, thread + 1.0);
      begin.arrive_and_wait();
      hand_over(static_cast<AccumulateGrad&>(*node), gradient);
      end.arrive_and_wait();
    }
  });
  EXPECT_EQ(wrong, 0);
}

TEST_F(HandOverByThreads, NoGradientIsLostBesideTheStockEngine) {
  constexpr int kCalls = 1'000;
  const at::Tensor variable = whole(0, {kLarge});
  const auto node = torch::autograd::impl::grad_accumulator(variable);
  run([&](int thread) {
    for (int i = 0; i < kCalls; ++i) {
      if (thread < 2) {
        const at::NoGradGuard no_grad;
        at::Tensor gradient = at::full({kLarge}, thread + 1.0);
        hand_over(static_cast<AccumulateGrad&>(*node), gradient);
      } else if (thread == 2) {
        (variable * 3).sum().backward();
      } else {
        const at::NoGradGuard no_grad;
        (*node)({at::full({kLarge}, 4.0)});  // AccumulateGrad::apply
      }
    }
  });
  EXPECT_TRUE(at::equal(variable.grad(), at::full({kLarge}, kCalls * 10.0)));
}

// --- Calls that keep their graph ---

uint32_t retained_here() { return thread_stats().retained_calls; }

bool granted(bool keep_graph, const CallFrame& frame = {}) { return CaptureRight(keep_graph, frame).granted(); }

// A thread that is inside so many calls, until it is told to leave.
class OtherThread {
 public:
  explicit OtherThread(bool keep_graph, int calls = 1)
      : thread_([this, keep_graph, calls] {
          std::vector<std::unique_ptr<RetainedCall>> inside;
          for (int i = 0; i < calls; ++i) inside.push_back(std::make_unique<RetainedCall>(keep_graph));
          stats_ = &thread_stats();
          entered_.count_down();
          leave_.wait();
        }) {
    entered_.wait();
  }
  ~OtherThread() { leave(); }
  OtherThread(const OtherThread&) = delete;
  OtherThread& operator=(const OtherThread&) = delete;

  void leave() {
    if (!thread_.joinable()) return;
    leave_.count_down();
    thread_.join();
  }
  const ThreadStats* stats() const { return stats_; }

 private:
  std::latch entered_{1}, leave_{1};
  const ThreadStats* stats_ = nullptr;
  std::thread thread_;
};

class Retained : public EngineTest {
 protected:
  void TearDown() override {
    EXPECT_EQ(retained_here(), 0U);
    EXPECT_TRUE(granted(true)) << "something is left";
    EngineTest::TearDown();
  }
};

TEST_F(Retained, CallsAreCountedWhileTheyLast) {
  EXPECT_EQ(retained_here(), 0U);
  {
    const RetainedCall outer(true);
    EXPECT_EQ(retained_here(), 1U);
    {
      const RetainedCall frees(false);
      const RetainedCall inner(true);
      EXPECT_EQ(retained_here(), 2U);
    }
    EXPECT_EQ(retained_here(), 1U);
  }
  EXPECT_EQ(retained_here(), 0U);
}

TEST_F(Retained, RightIsGrantedAlone) {
  EXPECT_TRUE(granted(true));
  EXPECT_TRUE(granted(true)) << "again";
  const RetainedCall outer(true);
  EXPECT_TRUE(granted(true)) << "the thread's own call waits for the capture";
  const RetainedCall inner(true);
  EXPECT_TRUE(granted(true));
}

TEST_F(Retained, RightIsNotGrantedWhileAnotherThreadIsInsideARetainedCall) {
  OtherThread one(true);
  EXPECT_FALSE(granted(true));
  OtherThread two(true, 2);
  EXPECT_FALSE(granted(true));
  one.leave();
  EXPECT_FALSE(granted(true));
  two.leave();
  EXPECT_TRUE(granted(true));
}

TEST_F(Retained, CallsThatFreeTheirGraphAreNotCounted) {
  OtherThread other(false, 3);
  EXPECT_EQ(other.stats()->retained_calls, 0U);
  EXPECT_TRUE(granted(true));
}

TEST_F(Retained, GraphThatIsFreedMayBeCapturedAlwaysAndKeepsNobodyWaiting) {
  OtherThread other(true);
  const CaptureRight right(false, CallFrame{});
  EXPECT_TRUE(right.granted());
  OtherThread arrival(true);  // comes in, or this would hang
  EXPECT_EQ(arrival.stats()->retained_calls, 1U);
}

TEST_F(Retained, ArrivalsWaitUntilTheRightGoes) {
  constexpr int kArrivals = 3;
  std::atomic<int> waiting{0};
  std::atomic<int> inside{0};
  std::atomic<uint32_t> counted_while_waiting{0};
  std::optional<CaptureRight> right(std::in_place, true, CallFrame{});
  ASSERT_TRUE(right->granted());
  std::vector<std::jthread> arrivals;
  for (int i = 0; i < kArrivals; ++i) {
    arrivals.emplace_back([&] {
      bool told = false;
      const RetainedCall call(true, [&](RetainedCall::Wait wait) {
        counted_while_waiting += retained_here();
        if (!std::exchange(told, true)) ++waiting;
        wait();
      });
      ++inside;
      EXPECT_TRUE(told);
      EXPECT_EQ(retained_here(), 1U);
    });
  }
  EXPECT_TRUE(eventually([&] { return waiting == kArrivals; }));
  for (int i = 0; i < 1'000; ++i) std::this_thread::yield();
  EXPECT_EQ(inside, 0);
  right.reset();
  arrivals.clear();
  EXPECT_EQ(inside, kArrivals);
  EXPECT_EQ(counted_while_waiting, 0U) << "a call that waits is not inside";
}

TEST_F(Retained, ThreadsThatWaitDoNotStandInTheWayOfTheNextCapture) {
  std::atomic<bool> waiting{false};
  std::atomic<bool> go_on{false};
  std::optional<CaptureRight> right(std::in_place, true, CallFrame{});
  std::jthread arrival([&] {
    const RetainedCall call(true, [&](RetainedCall::Wait wait) {
      waiting = true;
      EXPECT_TRUE(eventually([&] { return go_on.load(); }));
      wait();
    });
  });
  EXPECT_TRUE(eventually([&] { return waiting.load(); }));
  right.reset();
  EXPECT_TRUE(granted(true));
  go_on = true;
}

TEST_F(Retained, CallsThatFreeTheirGraphDoNotWait) {
  const CaptureRight right(true, CallFrame{});
  std::jthread([] { const RetainedCall call(false, [](RetainedCall::Wait) { ADD_FAILURE() << "waits"; }); }).join();
}

TEST_F(Retained, CallsNestedInACountedOnePassWhileARightIsHeld) {
  std::latch entered(1);
  std::latch asked(1);
  std::atomic<bool> passed{false};
  std::thread other([&] {
    const RetainedCall outer(true);
    entered.count_down();
    asked.wait();
    const RetainedCall nested(true, [](RetainedCall::Wait wait) {
      ADD_FAILURE() << "waits for a capture that may be waiting for it";
      wait();
    });
    EXPECT_EQ(retained_here(), 2U);
    passed = true;
  });
  entered.wait();
  {
    const CaptureRight right(true, CallFrame{});
    EXPECT_FALSE(right.granted());
    asked.count_down();
    EXPECT_TRUE(eventually([&] { return passed.load(); }));
  }
  other.join();
}

TEST_F(Retained, CallsOfTheChainOnOtherThreadsAreSubtracted) {
  OtherThread other(true, 2);
  CallFrame outermost;
  CallFrame middle{.parent = &outermost};
  CallFrame inner{.parent = &middle};
  EXPECT_FALSE(granted(true, inner));
  outermost.retained_on = other.stats();
  EXPECT_FALSE(granted(true, inner)) << "one of its two calls is not in the chain";
  middle.retained_on = other.stats();
  EXPECT_TRUE(granted(true, inner));
  EXPECT_FALSE(granted(true, outermost)) << "frames further in are not its chain";
  inner.retained_on = &thread_stats();
  EXPECT_TRUE(granted(true, inner));
  OtherThread stranger(true);
  EXPECT_FALSE(granted(true, inner));
}

// The two sides race: either the call that comes in sees the right, or the right sees the call.
TEST_F(Retained, NobodyIsInsideWhileARightIsGranted) {
  std::atomic<bool> stop{false};
  std::atomic<int> inside{0};
  std::barrier start(3);
  std::vector<std::jthread> callers;
  for (int i = 0; i < 2; ++i) {
    callers.emplace_back([&, i] {
      start.arrive_and_wait();
      while (!stop) {
        {
          const RetainedCall call(true);
          ++inside;
          if (i == 0) std::this_thread::yield();  // one stays, the other comes and goes
          --inside;
        }
        std::this_thread::yield();
      }
    });
  }
  int rights = 0;
  int seen_inside = 0;
  start.arrive_and_wait();
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(500);
  EXPECT_TRUE(eventually([&] {
    const CaptureRight right(true, CallFrame{});
    rights += right.granted() ? 1 : 0;
    for (int k = 0; right.granted() && k < 50; ++k) seen_inside += inside;
    return rights > 0 && std::chrono::steady_clock::now() > end;
  }));
  stop = true;
  callers.clear();
  EXPECT_EQ(seen_inside, 0);
}

// The engine's own entry counts its calls, whichever engine runs them.
TEST_F(Retained, BackwardCallsAreCountedAtTheEntry) {
  for (const bool enabled : {false, true}) {
    for (const auto& [keep_graph, create_graph] :
         {std::pair{false, false}, std::pair{true, false}, std::pair{false, true}, std::pair{true, true}}) {
      SCOPED_TRACE(c10::str(enabled, keep_graph, create_graph));
      std::latch in_hook(1);
      std::latch leave(1);
      std::jthread other([&, keep = keep_graph, create = create_graph] {
        std::optional<Enable> on;
        if (enabled) on.emplace();
        const at::Tensor x = whole(1);
        const at::Tensor y = x * 3;
        y.register_hook([&](const at::Tensor&) {
          in_hook.count_down();
          leave.wait();
        });
        torch::autograd::grad({y.sum()}, {x}, {}, keep, create);
        EXPECT_EQ(retained_here(), 0U);
      });
      in_hook.wait();
      EXPECT_EQ(granted(true), !keep_graph && !create_graph);
      leave.count_down();
    }
  }
}

TEST_F(Retained, BackwardCallsThatThrowAreCountedNoLonger) {
  const at::Tensor x = whole(1);
  const at::Tensor y = x * 3;
  y.register_hook([](const at::Tensor&) { throw std::domain_error("no"); });
  const at::Tensor loss = y.sum();
  EXPECT_THROW(loss.backward({}, /*retain_graph=*/true), std::domain_error);
  EXPECT_EQ(retained_here(), 0U);
  Enable on;
  EXPECT_THROW(loss.backward({}, /*retain_graph=*/true), std::domain_error);
  EXPECT_EQ(retained_here(), 0U);
}

TEST_F(Retained, BackwardCallWaitsWhileARightIsHeld) {
  const at::Tensor x = whole(1);
  const at::Tensor loss = (x * 3).sum();
  std::atomic<bool> done{false};
  std::jthread other;
  {
    const CaptureRight right(true, CallFrame{});
    std::latch started(1);
    other = std::jthread([&] {
      started.count_down();
      loss.backward({}, /*retain_graph=*/true);
      done = true;
    });
    started.wait();
    (whole(2) * 2).sum().backward();  // a call that frees its graph does not
    for (int i = 0; i < 1'000; ++i) std::this_thread::yield();
    EXPECT_FALSE(done);
  }
  other.join();
  EXPECT_TRUE(at::equal(x.grad(), at::full({2}, 3.0)));
}

// --- The backend's place ---

// Notes how it is asked, and does what the test says.
class FakeBackend final : public CallableBackend {
 public:
  using Answer = std::optional<ScheduleReason>;
  using Body = std::function<Answer(PreparedCall&, CallFrame&, c10::function_ref<void()> describe_task)>;
  struct Asked {
    uint32_t compiler;
    bool dynamic;
    uint64_t depth;
    std::thread::id thread;
  };

  Answer run(PreparedCall& call, CallFrame& frame, c10::function_ref<void()> describe_task) override {
    {
      const std::lock_guard lock(mutex_);
      const Options& options = call.setting.options;
      asked_.push_back({options.compiler(), options.dynamic(), frame.depth, std::this_thread::get_id()});
    }
    return body ? body(call, frame, describe_task) : std::nullopt;
  }

  // What it was asked since the last time.
  std::vector<Asked> take_asked() {
    const std::lock_guard lock(mutex_);
    return std::exchange(asked_, {});
  }

  Body body;  // nothing: says that it has run the call, and has not

 private:
  std::mutex mutex_;
  std::vector<Asked> asked_;
};

uint64_t fallbacks(const Stats& s, ScheduleReason reason) { return s.schedule_reasons[static_cast<size_t>(reason)]; }
uint64_t all_fallbacks(const Stats& s) {
  uint64_t total = 0;
  for (const uint64_t n : s.schedule_reasons) total += n;
  return total;
}

constexpr ScheduleReason kReasons[] = {ScheduleReason::kCreateGraph, ScheduleReason::kCaptureInProgress,
                                       ScheduleReason::kGraphInUse,  ScheduleReason::kInsideCapture,
                                       ScheduleReason::kNoCompiler,  ScheduleReason::kNotCapturable};

Options compiled_by(uint32_t number, bool dynamic = false) { return Options().compiler(number, dynamic); }

at::Tensor one_backward() {
  const at::AutoGradMode with_grad(true);  // the engine turns it off, for hooks too
  const at::Tensor x = at::ones({2}).requires_grad_();
  (x * 3).sum().backward();
  return x.grad();
}

struct Keep {
  bool graph = false;
  bool create = false;
};

// Backward calls inside one another, depth + 1 of them. inside(level) runs in each one's hook before the next call.
void nest(int depth, const std::function<void(int level)>& inside, const std::function<Keep(int level)>& keep = {}) {
  const at::AutoGradMode with_grad(true);
  const at::Tensor x = whole(1);
  const at::Tensor y = x * 2;
  y.register_hook([&, depth](const at::Tensor&) {
    inside(depth);
    if (depth > 0) nest(depth - 1, inside, keep);
  });
  const Keep how = keep ? keep(depth) : Keep{};
  y.sum().backward({}, how.graph, how.create);
  x.mutable_grad() = at::Tensor();
}

class CallableBackends : public EngineTest {
 protected:
  void SetUp() override {
    EngineTest::SetUp();
    set_callable_backend(&backend);
    reset_stats();
  }
  void TearDown() override {
    set_callable_backend(nullptr);
    set_stock_compiled_autograd_active(false);
    torch::autograd::AnomalyMode::set_enabled(false);
    EXPECT_EQ(thread_context().frame, nullptr);
    EXPECT_EQ(retained_here(), 0U);
    EngineTest::TearDown();
  }

  FakeBackend backend;
};

TEST_F(CallableBackends, IsAskedExactlyForCallsWhoseSettingNamesACompiler) {
  one_backward();
  {
    Enable on;
    one_backward();
    EXPECT_TRUE(backend.take_asked().empty());
    {
      Enable compiled(compiled_by(3));
      EXPECT_FALSE(one_backward().defined()) << "the fake does nothing";
      const auto asked = backend.take_asked();
      ASSERT_EQ(asked.size(), 1U);
      EXPECT_EQ(asked[0].compiler, 3U);
      EXPECT_FALSE(asked[0].dynamic);
      EXPECT_EQ(asked[0].depth, 1U);
      EXPECT_EQ(asked[0].thread, std::this_thread::get_id());
      {
        Disable off;
        EXPECT_TRUE(one_backward().defined());
      }
      {
        Enable none(compiled_by(0, true));
        EXPECT_TRUE(one_backward().defined());
      }
      {
        Enable other(compiled_by(4, true));
        one_backward();
      }
      std::jthread([] { EXPECT_TRUE(one_backward().defined()); }).join();
      const auto again = backend.take_asked();
      ASSERT_EQ(again.size(), 1U);
      EXPECT_EQ(again[0].compiler, 4U);
      EXPECT_TRUE(again[0].dynamic);
    }
    EXPECT_TRUE(one_backward().defined());
  }
  EXPECT_TRUE(backend.take_asked().empty());
  const Stats s = stats();
  EXPECT_EQ(all_fallbacks(s), 0U);
  EXPECT_EQ(s.schedule_calls, 3U) << "calls that the backend ran do not count";
}

TEST_F(CallableBackends, IsAskedByTheDefaultToo) {
  for (const uint32_t number : {1U, 0x8000U, 0x10000U, 0x80000001U, UINT32_MAX}) {
    for (const bool dynamic : {false, true}) {
      SCOPED_TRACE(c10::str(number, " ", dynamic));
      set_default(compiled_by(number, dynamic));
      one_backward();
      std::jthread([] {
        one_backward();
        Enable plain;
        EXPECT_TRUE(one_backward().defined());
      }).join();
      const auto asked = backend.take_asked();
      ASSERT_EQ(asked.size(), 2U);
      for (const auto& a : asked) {
        EXPECT_EQ(a.compiler, number);
        EXPECT_EQ(a.dynamic, dynamic);
      }
    }
  }
  set_default(std::nullopt);
  one_backward();
  EXPECT_TRUE(backend.take_asked().empty());
}

TEST_F(CallableBackends, GetsTheCall) {
  const at::Tensor x = whole(1);
  const at::Tensor w = whole(2);
  const at::Tensor y = x * w;
  const at::Tensor loss = y.sum();
  Enable on(compiled_by(1));
  backend.body = [&](PreparedCall& call, CallFrame& frame, auto) -> FakeBackend::Answer {
    EXPECT_EQ(call.roots.size(), 1U);
    EXPECT_TRUE(call.single_root);
    EXPECT_EQ(call.nodes.at(0), loss.grad_fn().get());
    EXPECT_EQ(call.nodes.size(), call.schedule->capture_order().size());
    EXPECT_TRUE(call.keep_graph);
    EXPECT_FALSE(call.accumulate);
    EXPECT_EQ(call.outputs.size(), 2U);
    EXPECT_EQ(call.captured.size(), 2U);
    EXPECT_EQ(frame.parent, nullptr);
    EXPECT_EQ(frame.retained_on, &thread_stats());
    EXPECT_EQ(thread_context().frame, &frame);
    EXPECT_FALSE(at::GradMode::is_enabled());
    EXPECT_GE(torch::autograd::get_current_graph_task_id(), 0);
    EXPECT_EQ(current_node(), nullptr) << "a compiled function is no single node";
    call.captured[1] = at::full({2}, 5.0);
    return std::nullopt;
  };
  const auto captured = torch::autograd::grad({loss}, {x, w}, {}, /*retain_graph=*/true, false, /*allow_unused=*/true);
  ASSERT_EQ(captured.size(), 2U);
  EXPECT_FALSE(captured[0].defined());
  EXPECT_TRUE(at::equal(captured[1], at::full({2}, 5.0)));

  backend.body = [&](PreparedCall& call, CallFrame& frame, auto) -> FakeBackend::Answer {
    EXPECT_EQ(call.roots.size(), 2U);
    EXPECT_FALSE(call.single_root);
    EXPECT_NE(dynamic_cast<GraphRoot*>(call.nodes.at(0)), nullptr);
    EXPECT_FALSE(call.keep_graph);
    EXPECT_TRUE(call.accumulate);
    EXPECT_TRUE(call.outputs.empty());
    EXPECT_EQ(frame.retained_on, nullptr);
    return std::nullopt;
  };
  torch::autograd::backward({loss, y.sum()});
  EXPECT_EQ(backend.take_asked().size(), 2U);
}

TEST_F(CallableBackends, DescribesTheTaskWhenAsked) {
  const at::Tensor x = whole(1);
  const at::Tensor w = whole(2);
  Enable on(compiled_by(1));
  backend.body = [&](PreparedCall& call, CallFrame&, c10::function_ref<void()> describe_task) -> FakeBackend::Answer {
    const auto* const nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
    const auto to_x = edge_to(x).function.get();
    EXPECT_FALSE(nodes->contains(to_x));
    describe_task();
    EXPECT_TRUE(nodes->contains(to_x));
    EXPECT_TRUE(nodes->contains(edge_to(w).function.get()));
    const auto dependencies = current_graph_task().dependencies_;
    EXPECT_EQ(dependencies.at(to_x), 1);
    if (!call.outputs.empty()) {
      const auto* const exec_info = torch::autograd::get_current_graph_task_exec_info();
      EXPECT_TRUE(exec_info->at(to_x).should_execute());
      EXPECT_FALSE(exec_info->contains(edge_to(w).function.get()));
    }
    describe_task();  // once more adds nothing
    EXPECT_EQ(current_graph_task().dependencies_, dependencies);
    return ScheduleReason::kGraphInUse;
  };
  (x * w).sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), at::full({2}, 2.0)));
  for (const bool accumulate : {false, true}) {
    const auto got = execute({edge_to((x * w).sum())}, {at::ones({})}, false, accumulate, {edge_to(x)});
    if (!accumulate) {
      EXPECT_TRUE(at::equal(got.at(0), at::full({2}, 2.0)));
    }
  }
  EXPECT_TRUE(at::equal(x.grad(), at::full({2}, 4.0)));
  EXPECT_TRUE(at::equal(w.grad(), at::full({2}, 1.0)));
}

// A random program of several calls, some pruned, with hooks and a nested call.
void several_calls(Record& record) {
  const at::Tensor x = at::rand({3}).requires_grad_();
  const at::Tensor w = at::rand({3}).requires_grad_();
  const at::Tensor y = x.exp() * w;
  y.register_hook([&](const at::Tensor& g) {
    record.tensor("hook", g);
    record.tensor("nested", one_backward());
    return g * 2;
  });
  const at::Tensor loss = (y * y + x).sum();
  loss.backward({}, /*retain_graph=*/true);
  for (const at::Tensor& g : torch::autograd::grad({loss, y.sum()}, {w, y}, {}, /*retain_graph=*/true)) {
    record.tensor("captured", g);
  }
  torch::autograd::backward({loss}, {}, false, false, {w});
  record.tensor("x", x.grad());
  record.tensor("w", w.grad());
}
constexpr uint64_t kSeveralCalls = 6;

TEST_F(CallableBackends, ReasonMakesTheScheduleRunWithTheStockEnginesBits) {
  Record expected;
  at::manual_seed(7);
  several_calls(expected);
  for (const ScheduleReason reason : kReasons) {
    SCOPED_TRACE(name(reason));
    backend.body = [&](PreparedCall&, CallFrame&, auto) { return reason; };
    reset_stats();
    Record got;
    {
      Enable on(compiled_by(9, true));
      at::manual_seed(7);
      several_calls(got);
    }
    EXPECT_EQ(difference(got.lines(), expected.lines()), "");
    const Stats s = stats();
    EXPECT_EQ(s.schedule_calls, kSeveralCalls);
    EXPECT_EQ(fallbacks(s, reason), kSeveralCalls);
    EXPECT_EQ(all_fallbacks(s), kSeveralCalls);
    EXPECT_EQ(s.previous_total(), 0U);
    EXPECT_EQ(s.nested_calls, kSeveralCalls / 2);
    EXPECT_EQ(s.hits + s.misses, kSeveralCalls);
    EXPECT_EQ(backend.take_asked().size(), kSeveralCalls);
  }
}

TEST_F(CallableBackends, WithoutABackendTheScheduleRuns) {
  set_callable_backend(nullptr);
  EXPECT_EQ(callable_backend(), nullptr);
  Record expected;
  at::manual_seed(7);
  several_calls(expected);
  reset_stats();
  Record got;
  {
    Enable on(compiled_by(9));
    at::manual_seed(7);
    several_calls(got);
  }
  EXPECT_EQ(difference(got.lines(), expected.lines()), "");
  EXPECT_EQ(fallbacks(stats(), ScheduleReason::kNoCompiler), kSeveralCalls);
  EXPECT_EQ(stats().schedule_calls, kSeveralCalls);
  EXPECT_TRUE(backend.take_asked().empty());
  reset_stats();
  EXPECT_EQ(all_fallbacks(stats()), 0U);
}

TEST_F(CallableBackends, CreateGraphGoesToTheSchedule) {
  const at::Tensor x = at::full({2}, 3.0).requires_grad_();
  {
    Enable on(compiled_by(1));
    const at::Tensor first = torch::autograd::grad({x.pow(3).sum()}, {x}, {}, std::nullopt, /*create_graph=*/true)[0];
    EXPECT_TRUE(first.requires_grad());
    EXPECT_TRUE(backend.take_asked().empty());
    EXPECT_EQ(fallbacks(stats(), ScheduleReason::kCreateGraph), 1U);
    EXPECT_EQ(all_fallbacks(stats()), 1U);
    EXPECT_EQ(stats().schedule_calls, 1U);
    backend.body = [](PreparedCall&, CallFrame&, auto) { return ScheduleReason::kInsideCapture; };
    first.sum().backward();
  }
  EXPECT_TRUE(at::equal(x.grad(), at::full({2}, 18.0)));
  EXPECT_EQ(backend.take_asked().size(), 1U) << "the second derivative creates no graph";
  EXPECT_EQ(fallbacks(stats(), ScheduleReason::kInsideCapture), 1U);
  {
    set_callable_backend(nullptr);
    Enable on(compiled_by(1));
    torch::autograd::grad({x.pow(3).sum()}, {x}, {}, std::nullopt, /*create_graph=*/true);
  }
  EXPECT_EQ(fallbacks(stats(), ScheduleReason::kCreateGraph), 2U);
}

TEST_F(CallableBackends, UnderAnomalyModeWhatItDoesNotAnswerGoesToThePreviousEngine) {
  const bool was_enabled = torch::autograd::AnomalyMode::is_enabled();
  torch::autograd::AnomalyMode::set_enabled(true);
  Enable on(compiled_by(1));
  for (const auto reason : kReasons) {
    backend.body = [=](PreparedCall&, CallFrame&, auto) { return reason; };
    const at::Tensor x = at::zeros({2}).requires_grad_();
    const bool create_graph = reason == ScheduleReason::kCreateGraph;
    EXPECT_THROW(torch::autograd::grad({x.sqrt().mul(0).sum()}, {x}, {}, std::nullopt, create_graph), c10::Error)
        << name(reason);
    EXPECT_TRUE(at::equal(one_backward(), at::full({2}, 3.0)));
  }
  EXPECT_EQ(stats().schedule_calls, 0U);
  EXPECT_EQ(all_fallbacks(stats()), 0U);
  EXPECT_EQ(stats().previous_calls[static_cast<size_t>(PreviousReason::kAnomalyMode)], 2 * std::size(kReasons));
  torch::autograd::AnomalyMode::set_enabled(was_enabled);
}

TEST_F(CallableBackends, ExceptionsReachTheCaller) {
  // Few levels under anomaly mode, which takes a stack trace for every node.
  for (const auto& [anomaly, levels] :
       {std::pair{false, 0}, std::pair{false, 3}, std::pair{false, 70}, std::pair{true, 0}, std::pair{true, 1}}) {
    const int depth = levels;
    SCOPED_TRACE(c10::str("anomaly ", anomaly, " depth ", depth));
    torch::autograd::AnomalyMode::set_enabled(anomaly);
    Enable on(compiled_by(1));
    const auto call = [&] { nest(depth, [](int) {}); };
    const auto throws_at_the_bottom = [&](auto error) {
      // By count: under anomaly mode the outer calls go on to the previous engine, outside their regions.
      backend.body = [=, above = std::make_shared<int>(depth)](PreparedCall&, CallFrame&, auto) -> FakeBackend::Answer {
        if ((*above)-- == 0) throw error;
        return ScheduleReason::kGraphInUse;
      };
    };
    throws_at_the_bottom(std::domain_error("compiler"));
    EXPECT_THROW(call(), std::domain_error);
    throws_at_the_bottom(std::bad_alloc());
    EXPECT_THROW(call(), std::bad_alloc);
    backend.body = [above = std::make_shared<int>(depth)](PreparedCall&, CallFrame&, auto) -> FakeBackend::Answer {
      TORCH_CHECK_VALUE((*above)-- > 0, "the compiler says no");
      return ScheduleReason::kGraphInUse;
    };
    Record record;
    record.attempt(call);
    EXPECT_TRUE(record.contains("ValueError"));
    EXPECT_TRUE(record.contains("the compiler says no"));

    EXPECT_EQ(thread_context().frame, nullptr);
    EXPECT_EQ(torch::autograd::get_current_graph_task_id(), -1);
    EXPECT_TRUE(at::GradMode::is_enabled());
    backend.body = [](PreparedCall&, CallFrame&, auto) { return ScheduleReason::kGraphInUse; };
    EXPECT_TRUE(at::equal(one_backward(), at::full({2}, 3.0))) << "the next call finds all in order";
  }
}

TEST_F(CallableBackends, ExceptionLeavesTheGraphToTheCaller) {
  const at::Tensor x = whole(2);
  const at::Tensor loss = (x * x).sum();
  backend.body = [](PreparedCall&, CallFrame&, auto) -> FakeBackend::Answer { throw std::domain_error("no"); };
  {
    Enable on(compiled_by(1));
    EXPECT_THROW(loss.backward(), std::domain_error);
    EXPECT_FALSE(x.grad().defined());
  }
  EXPECT_EQ(all_fallbacks(stats()), 0U);
  EXPECT_EQ(stats().schedule_calls, 0U);
  loss.backward();
  EXPECT_TRUE(at::equal(x.grad(), at::full({2}, 4.0)));
}

TEST_F(CallableBackends, AnomalyModeDoesNotKeepCallsThatNameACompilerFromIt) {
  torch::autograd::AnomalyMode::set_enabled(true);
  {
    Enable on(compiled_by(1));
    one_backward();
  }
  EXPECT_EQ(backend.take_asked().size(), 1U);
  Enable plain;
  one_backward();
  EXPECT_TRUE(backend.take_asked().empty());
  EXPECT_EQ(previous_calls(stats(), PreviousReason::kAnomalyMode), 1U);
}

// --- The setting on its way ---

struct Named {
  uint32_t number;
  bool dynamic;
};
constexpr Named kNamed[] = {{1, false}, {1, true}, {0x10000, true}, {0x80000001, false}, {UINT32_MAX, true}};

void expect_all(const std::vector<FakeBackend::Asked>& asked, size_t count, Named named) {
  EXPECT_EQ(asked.size(), count);
  for (const auto& a : asked) {
    EXPECT_EQ(a.compiler, named.number) << "at depth " << a.depth;
    EXPECT_EQ(a.dynamic, named.dynamic) << "at depth " << a.depth;
  }
}

size_t threads_of(const std::vector<FakeBackend::Asked>& asked) {
  std::set<std::thread::id> threads;
  for (const auto& a : asked) threads.insert(a.thread);
  return threads.size();
}

TEST_F(CallableBackends, NestedCallsInHooksSeeTheSameCompilerAtEveryDepth) {
  backend.body = [](PreparedCall&, CallFrame&, auto) { return ScheduleReason::kGraphInUse; };
  for (const Named& named : kNamed) {
    SCOPED_TRACE(c10::str(named.number, " ", named.dynamic));
    reset_stats();
    {
      Enable on(compiled_by(named.number, named.dynamic));
      nest(150, [](int) {});
    }
    const auto asked = backend.take_asked();
    expect_all(asked, 151, named);
    EXPECT_GT(threads_of(asked), 2U) << "past 60 levels the stock engine changes threads; this test needs it to";
    EXPECT_EQ(fallbacks(stats(), ScheduleReason::kGraphInUse), 151U);
    EXPECT_EQ(stats().schedule_calls, 151U);
    EXPECT_EQ(stats().max_depth, 151U);
    std::set<uint64_t> depths;
    for (const auto& a : asked) depths.insert(a.depth);
    EXPECT_EQ(depths.size(), 151U);

    // The stock engine's threads keep nothing of it.
    nest(150, [](int) {});
    EXPECT_TRUE(backend.take_asked().empty());
  }
}

TEST_F(CallableBackends, NestedCallsInsideTheBackendSeeTheSameCompilerAtEveryDepth) {
  for (const Named& named : kNamed) {
    SCOPED_TRACE(c10::str(named.number, " ", named.dynamic));
    backend.body = [&](PreparedCall& call, CallFrame& frame, auto) -> FakeBackend::Answer {
      EXPECT_EQ(call.parent, frame.parent);
      EXPECT_EQ(frame.depth, frame.parent == nullptr ? 1 : frame.parent->depth + 1);
      if (frame.depth < 100) {
        one_backward();
        EXPECT_EQ(thread_context().frame, &frame) << "as before, when the nested call is over";
      }
      return std::nullopt;
    };
    {
      Enable on(compiled_by(named.number, named.dynamic));
      one_backward();
    }
    const auto asked = backend.take_asked();
    expect_all(asked, 100, named);
    EXPECT_GE(threads_of(asked), 2U);
    EXPECT_EQ(asked.back().depth, 100U);
  }
}

TEST_F(CallableBackends, CompilerChangesFromSomeDepthOn) {
  backend.body = [](PreparedCall&, CallFrame&, auto) { return ScheduleReason::kGraphInUse; };
  Enable on(compiled_by(1));
  nest(70, [](int level) {
    if (level != 0) return;
    Enable other(compiled_by(2, true));
    nest(70, [](int inner) {
      if (inner != 0) return;
      Disable off;
      nest(70, [](int) {});
    });
  });
  const auto asked = backend.take_asked();
  ASSERT_EQ(asked.size(), 142U);
  expect_all({asked.begin(), asked.begin() + 71}, 71, {1, false});
  expect_all({asked.begin() + 71, asked.end()}, 71, {2, true});
  EXPECT_EQ(previous_calls(stats(), PreviousReason::kNotEnabled), 71U);
}

// A call that an enabled thread makes goes to the previous engine; calls nested in it, past 60 levels on threads that
// set nothing, come here again.
TEST_F(CallableBackends, CallsNestedInThePreviousEnginesCallsSeeTheSameCompiler) {
  for (const int depth : {0, 5, 70, 130}) {
    for (const Named& named : kNamed) {
      SCOPED_TRACE(c10::str(depth, ": ", named.number, " ", named.dynamic));
      reset_stats();
      set_default(compiled_by(77, !named.dynamic));  // must not win over the thread's own choice
      std::thread::id bottom;
      {
        Enable on(compiled_by(named.number, named.dynamic));
        set_stock_compiled_autograd_active(true);  // as good a reason as any
        nest(depth, [&](int level) {
          if (level != 0) return;
          bottom = std::this_thread::get_id();
          set_stock_compiled_autograd_active(false);
          one_backward();
          set_stock_compiled_autograd_active(true);
        });
        set_stock_compiled_autograd_active(false);
      }
      set_default(std::nullopt);
      const auto asked = backend.take_asked();
      expect_all(asked, 1, named);
      ASSERT_EQ(asked.size(), 1U);
      EXPECT_EQ(asked[0].thread, bottom);
      EXPECT_EQ(asked[0].depth, 1U);
      EXPECT_EQ(bottom == std::this_thread::get_id(), depth < 60);
      EXPECT_EQ(previous_calls(stats(), PreviousReason::kCompiledAutograd), static_cast<uint64_t>(depth) + 1);
    }
  }
}

TEST_F(CallableBackends, CarriedSettingIsSeenByThreadsThatSetNothing) {
  for (const Named& named : kNamed) {
    const at::Tensor x = whole(1);
    const at::Tensor y = x * 2;
    int seen = 0;
    y.register_hook([&](const at::Tensor&) {
      // As if this were a thread of the stock engine.
      const detail::Setting own = std::exchange(thread_context().setting, detail::Setting{});
      const detail::Setting carried = thread_context().in_force();
      thread_context().setting = own;
      EXPECT_EQ(carried.mode, detail::Setting::Mode::kEnabled);
      EXPECT_EQ(carried.options.compiler(), named.number);
      EXPECT_EQ(carried.options.dynamic(), named.dynamic);
      EXPECT_EQ(carried.options.backend(), Backend::kSchedule);
      ++seen;
    });
    Enable on(compiled_by(named.number, named.dynamic));
    set_stock_compiled_autograd_active(true);
    y.sum().backward();
    set_stock_compiled_autograd_active(false);
    EXPECT_EQ(seen, 1);
    const detail::Setting own = std::exchange(thread_context().setting, detail::Setting{});
    EXPECT_EQ(thread_context().in_force().mode, detail::Setting::Mode::kDisabled) << "outside, nothing is carried";
    const at::Tensor later = x * 2;
    later.register_hook([&](const at::Tensor&) {
      EXPECT_EQ(thread_context().in_force().mode, detail::Setting::Mode::kDisabled) << "nor in the next call";
      ++seen;
    });
    later.sum().backward();
    EXPECT_EQ(seen, 2);
    thread_context().setting = own;
  }
}

TEST_F(CallableBackends, CallInsideACompiledFunctionIsACallOfItsOwn) {
  std::vector<bool> in_region;
  backend.body = [&](PreparedCall&, CallFrame& frame, auto) -> FakeBackend::Answer {
    FrontEndFlags& flags = thread_context().flags;
    in_region.push_back(flags.in_region || flags.active_disable);
    if (frame.depth < 3) {
      flags.in_region = flags.active_disable = true;  // what a backend does while the compiled function runs
      flags.verbose_logger = 5;
      one_backward();
      EXPECT_TRUE(flags.in_region && flags.active_disable);
    } else {
      EXPECT_EQ(flags.verbose_logger, 5U) << "the rest is inherited";
    }
    return std::nullopt;
  };
  Enable on(compiled_by(1));
  one_backward();
  EXPECT_EQ(in_region, (std::vector<bool>{false, false, false}));
  EXPECT_FALSE(thread_context().flags.in_region);
  EXPECT_EQ(thread_context().flags.verbose_logger, 0U);
}

// --- The right to capture in a chain of calls ---

TEST_F(CallableBackends, CallsOfTheOwnChainDoNotForbidACapture) {
  for (const int depth : {0, 3, 70, 150}) {
    SCOPED_TRACE(depth);
    std::vector<bool> rights;
    backend.body = [&](PreparedCall& call, CallFrame& frame, auto) -> FakeBackend::Answer {
      rights.push_back(granted(call.keep_graph, frame));
      return ScheduleReason::kGraphInUse;
    };
    const auto run = [&] {
      rights.clear();
      Enable on(compiled_by(1));
      nest(depth, [](int) {}, [](int level) { return Keep{.graph = level % 3 != 1}; });
    };
    run();
    EXPECT_EQ(rights, std::vector<bool>(static_cast<size_t>(depth) + 1, true));
    {
      OtherThread stranger(true);
      run();
      for (int level = depth; level >= 0; --level) {
        EXPECT_EQ(rights[static_cast<size_t>(depth - level)], level % 3 == 1) << "level " << level;
      }
    }
    EXPECT_GE(threads_of(backend.take_asked()), depth > 60 ? 2U : 1U);
  }
}

// --- All of it together ---

// Runs a call node by node in capture order, as a compiled graph would, with leaves handed. Graphs without hooks.
FakeBackend::Answer interpret(PreparedCall& call, c10::function_ref<void()> describe_task,
                              const std::function<void()>& meanwhile = {}) {
  if (!call.outputs.empty()) describe_task();  // nodes ask which of their outputs are needed
  const auto order = call.schedule->capture_order();
  const GraphShape& shape = call.schedule->shape();
  std::vector<Node*> nodes;
  const auto needed = std::make_unique<bool[]>(order.size());
  for (const uint32_t k : order) {
    needed[nodes.size()] = shape.steps[k].needed;
    nodes.push_back(call.nodes[k]);
  }
  std::vector<HandedLeaf> handed;
  const auto collected = collect_for_capture(nodes, {needed.get(), nodes.size()}, call.outputs, SizeInput::STATIC,
                                             /*track_origins=*/false, /*hand_over=*/true, handed);
  std::unordered_map<Node*, at::Tensor> stand_ins;
  for (const HandedLeaf& h : handed) stand_ins[h.node] = make_stand_in(inputs_of(*collected)[h.input]);

  std::unordered_map<Node*, variable_list> buffers;
  const auto add = [&](Node* node, uint32_t input_nr, const at::Tensor& gradient) {
    at::Tensor& sum = buffers.try_emplace(node, node->num_inputs()).first->second[input_nr];
    sum = sum.defined() ? sum + gradient : gradient;
  };
  if (call.single_root) add(nodes[0], call.roots[0].input_nr, call.gradients[0]);
  for (size_t i = 0; i < nodes.size(); ++i) {
    Node& node = *nodes[i];
    variable_list inputs(node.num_inputs());
    if (auto buffer = buffers.extract(&node)) inputs = std::move(buffer.mapped());
    for (const CaptureShape& capture : shape.captures_of(shape.steps[order[i]])) {
      call.captured[capture.output] = inputs[capture.input_nr];
    }
    if (!needed[i]) continue;
    if (const auto stand_in = stand_ins.find(&node); stand_in != stand_ins.end()) {
      if (inputs[0].defined()) stand_in->second.mutable_grad() = inputs[0].clone();
      continue;
    }
    const variable_list outputs = node(std::move(inputs));
    for (size_t k = 0; k < outputs.size(); ++k) {
      const Edge& edge = node.next_edge(k);
      if (edge.is_valid() && outputs[k].defined()) add(edge.function.get(), edge.input_nr, outputs[k]);
    }
  }
  if (meanwhile) meanwhile();
  for (const HandedLeaf& h : handed) {
    if (stand_ins[h.node].grad().defined()) hand_over(*h.node, stand_ins[h.node].mutable_grad());
  }
  return std::nullopt;
}

TEST_F(CallableBackends, GraphInterpretedWithHandedLeavesGivesTheStockEnginesGradients) {
  const Program program = [](Record& record) {
    const at::Tensor x = at::rand({3, 2}).requires_grad_();
    const at::Tensor w = at::rand({2, 4}).requires_grad_();
    for (int i = 0; i < 3; ++i) {
      const at::Tensor loss = at::mm(x, w).tanh().pow(2).sum();
      loss.backward({}, /*retain_graph=*/true);
      record.tensor("captured", torch::autograd::grad({loss}, {w}, {}, /*retain_graph=*/true)[0]);
      torch::autograd::backward({loss}, {}, false, false, {x});
      record.tensor("x", x.grad());
      record.tensor("w", w.grad());
    }
  };
  Record expected;
  at::manual_seed(7);
  program(expected);
  backend.body = [](PreparedCall& call, CallFrame&, auto describe_task) { return interpret(call, describe_task); };
  Record got;
  {
    Enable on(compiled_by(1));
    at::manual_seed(7);
    program(got);
  }
  EXPECT_EQ(difference(got.lines(), expected.lines()), "");
  EXPECT_EQ(backend.take_asked().size(), 9U);
  EXPECT_EQ(all_fallbacks(stats()), 0U);
}

TEST_F(CallableBackends, GradientsThatNestedCallsAccumulateMeanwhileAreNotLost) {
  const at::Tensor x = whole(1);
  backend.body = [&](PreparedCall& call, CallFrame&, auto describe_task) {
    return interpret(call, describe_task, [&] {
      const at::AutoGradMode with_grad(true);
      Disable off;
      (x * 10).sum().backward();
    });
  };
  Enable on(compiled_by(1));
  for (int i = 1; i <= 3; ++i) {
    (x * 3).sum().backward();
    EXPECT_TRUE(at::equal(x.grad(), at::full({2}, i * 13.0)));
  }
}

TEST_F(CallableBackends, SharedModelOfThreadsOnBothEngines) {
  constexpr int kCalls = 300;
  const at::Tensor w = whole(2, {kLarge});
  const at::Tensor v = whole(3, {kLarge});
  const at::Tensor shared = (w * w).sum();
  backend.body = [](PreparedCall& call, CallFrame&, auto describe_task) { return interpret(call, describe_task); };
  run_together(4, [&](int thread) {
    std::optional<Enable> on;
    if (thread < 2) on.emplace(compiled_by(1));
    if (thread == 2) on.emplace();
    for (int k = 0; k < kCalls; ++k) {
      (w * v + w).sum().backward();
      if (k % 4 == 0) shared.backward({}, /*retain_graph=*/true);
    }
  });
  EXPECT_TRUE(at::equal(w.grad(), at::full({kLarge}, 4 * (kCalls * 4.0 + kCalls / 4 * 4.0))));
  EXPECT_TRUE(at::equal(v.grad(), at::full({kLarge}, 4 * kCalls * 2.0)));
  EXPECT_EQ(backend.take_asked().size(), 2U * (kCalls + kCalls / 4));
}

}  // namespace
}  // namespace retrograd::test
