// The walk against the stock engine: which nodes run, in which order; and the table that numbers nodes.
#include <thread>

#include <gmock/gmock.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

#include "engine/walk.h"
#include "engine_test_util.h"

namespace retrograd::test {
namespace {

class Walk : public EngineTest {};

// The ids of TestNodes in the order that the stock engine ran them.
std::vector<size_t> stock_order(const edge_list& roots, const variable_list& gradients, bool accumulate,
                                const edge_list& outputs, const std::vector<c10::intrusive_ptr<TestNode>>& nodes) {
  Record record;
  for (const auto& node : nodes) node->record = &record;
  {
    Disable off;
    execute(roots, gradients, /*keep_graph=*/true, accumulate, outputs);
  }
  for (const auto& node : nodes) node->record = nullptr;
  std::vector<size_t> order;
  for (const std::string& line : record.lines()) {
    if (line.starts_with("run ")) order.push_back(std::stoul(line.substr(4)));
  }
  return order;
}

// The ids of TestNodes in the order that the walk says; nodes that do not run themselves are left out.
std::vector<size_t> walked_order(Node& root, bool accumulate, const edge_list& outputs) {
  GraphShape shape;
  WalkedGraph graph;
  EXPECT_TRUE(walk(root, accumulate, outputs, shape, graph));
  EXPECT_EQ(graph.nodes.size(), shape.steps.size());
  std::vector<size_t> order;
  for (size_t k = 0; k < graph.nodes.size(); ++k) {
    const auto* node = dynamic_cast<TestNode*>(graph.nodes[k]);
    if (node != nullptr && shape.steps[k].needed) order.push_back(node->id);
  }
  return order;
}

TEST_F(Walk, OrderIsTheStockEnginesOverRandomGraphs) {
  for (uint32_t seed = 0; seed < 600; ++seed) {
    SCOPED_TRACE(seed);
    const RandomGraph graph = random_graph(seed, 60, nullptr);
    const auto& root = graph.nodes.back();
    const auto expected = stock_order({Edge(root, 0)}, {pair_of(1, 2)}, true, {}, graph.nodes);
    ASSERT_EQ(walked_order(*root, true, {}), expected);
  }
}

TEST_F(Walk, OrderIsTheStockEnginesFromSeveralRoots) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    const RandomGraph graph = random_graph(seed, 40, nullptr);
    std::mt19937 random(seed);
    edge_list roots;
    variable_list gradients;
    for (size_t i = 0; i < 2 + seed % 4; ++i) {  // the same root twice is allowed
      const auto& node = graph.nodes[random() % graph.nodes.size()];
      roots.emplace_back(node, static_cast<uint32_t>(random() % node->num_inputs()));
      gradients.push_back(pair_of(1, static_cast<double>(i)));
    }
    const auto expected = stock_order(roots, gradients, true, {}, graph.nodes);
    const auto root = c10::make_intrusive<torch::autograd::GraphRoot>(roots, gradients);
    ASSERT_EQ(walked_order(*root, true, {}), expected);
  }
}

TEST_F(Walk, PrunedOrderIsTheStockEnginesOverRandomInputs) {
  for (uint32_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(seed);
    const RandomGraph graph = random_graph(seed, 40, nullptr);
    const RandomGraph elsewhere = random_graph(seed + 1, 5, nullptr);
    // Any node, leaf or not, sometimes one that cannot be reached, sometimes the root, sometimes twice.
    const edge_list outputs = random_outputs(seed, graph, elsewhere);
    const auto& root = graph.nodes.back();
    for (const bool accumulate : {false, true}) {
      const auto expected = stock_order({Edge(root, 0)}, {pair_of(1, 2)}, accumulate, outputs, graph.nodes);
      ASSERT_EQ(walked_order(*root, accumulate, outputs), expected) << "accumulate " << accumulate;
    }
  }
}

// What random graphs compute, gradients in every node's inputs included, and not their order alone.
TEST_F(Walk, RandomGraphsComputeTheStockEnginesBits) {
  for (uint32_t seed = 0; seed < 150; ++seed) {
    SCOPED_TRACE(seed);
    expect_as_stock([seed](Record& record) {
      const RandomGraph graph = random_graph(seed, 40, &record);
      execute({Edge(graph.nodes.back(), 0)}, {pair_of(0.1, 0.7)});
    });
    if (HasFailure()) break;
  }
}

TEST_F(Walk, RandomPrunedGraphsComputeTheStockEnginesBits) {
  for (uint32_t seed = 0; seed < 150; ++seed) {
    SCOPED_TRACE(seed);
    expect_as_stock([seed](Record& record) {
      const RandomGraph graph = random_graph(seed, 40, &record);
      std::mt19937 random(seed);
      edge_list outputs;
      for (size_t i = 0; i < 1 + seed % 4; ++i) {
        const auto& node = graph.nodes[random() % graph.nodes.size()];
        outputs.emplace_back(node, static_cast<uint32_t>(random() % node->num_inputs()));
        if (random() % 4 == 0) outputs.push_back(outputs.back());
      }
      const bool accumulate = seed % 2 == 0;
      const auto got = execute({Edge(graph.nodes.back(), 0)}, {pair_of(0.1, 0.7)}, false, accumulate, outputs);
      for (const at::Tensor& gradient : got) record.tensor("captured", gradient);
    });
    if (HasFailure()) break;
  }
}

TEST_F(Walk, GraphsBuiltBySeveralThreadsRunInStockOrder) {
  // The first thread's sequence numbers are far ahead of the others', and those of the others collide.
  for (uint32_t seed = 0; seed < 20; ++seed) {
    std::vector<at::Tensor> leaves;
    for (int i = 0; i < 3; ++i) leaves.push_back(at::full({2}, 0.5 + i, at::kDouble).requires_grad_());
    std::vector<at::Tensor> parts(3);
    for (uint32_t i = 0; i < 3; ++i) {
      std::thread([&, i] {
        std::mt19937 random(seed * 3 + i);
        at::Tensor x = leaves[i];
        for (int op = 0; op < 6; ++op) x = random() % 2 == 0 ? x * leaves[random() % 3] : x.sin() + leaves[i];
        parts[i] = x;
      }).join();
    }
    const at::Tensor loss = (parts[0] * parts[1] + parts[2].exp() * parts[0]).sum();
    Record stock;
    auto nodes = record_order(stock, {loss.grad_fn()});
    {
      Disable off;
      torch::autograd::backward({loss}, {}, /*retain_graph=*/true);
    }
    variable_list expected;
    for (at::Tensor& leaf : leaves) {
      expected.push_back(leaf.grad());
      leaf.mutable_grad() = at::Tensor();
    }
    for (const auto& node : nodes) node->pre_hooks().clear();

    Record got;
    nodes = record_order(got, {loss.grad_fn()});
    {
      Enable on;
      loss.backward();
    }
    EXPECT_EQ(difference(got.lines(), stock.lines()), "") << "seed " << seed;
    for (size_t i = 0; i < leaves.size(); ++i) EXPECT_EQ(describe(leaves[i].grad()), describe(expected[i]));
  }
}

TEST_F(Walk, TiesAmongLeavesComeOutAsInTheStockEngine) {
  for (const int width : {2, 3, 7, 20, 64}) {
    SCOPED_TRACE(width);
    expect_as_stock([width](Record& record) {
      std::vector<at::Tensor> leaves;
      for (int i = 0; i < width; ++i) leaves.push_back(at::rand({2}).requires_grad_());
      at::Tensor total = at::stack(leaves).sum();  // all leaves ready at once
      for (int i = 0; i < width; i += 2) total = total + leaves[static_cast<size_t>(i)].exp().sum();
      record_order(record, {total.grad_fn()});
      total.backward();
      for (const at::Tensor& leaf : leaves) record.tensor("grad", leaf.grad());
    });
  }
}

TEST_F(Walk, FanInAddsUpInStockOrder) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = at::rand({16}).requires_grad_();
    const at::Tensor y = x.exp();
    // Sums of floats of very different size: another order gives other bits.
    const at::Tensor loss =
        (y * 1e8).sum() + y.sin().sum() + (y * y * 1e-7).sum() + y.sqrt().sum() * 1e4 + (x * y).sum();
    record_order(record, {loss.grad_fn()});
    loss.backward();
    record.tensor("grad", x.grad());
  });
}

TEST_F(Walk, RootThatIsALeaf) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = at::rand({3}).requires_grad_();
    x.backward(at::ones({3}));
    record.tensor("grad", x.grad());
    const auto got = torch::autograd::grad({x}, {x}, {at::full({3}, 2.0)});
    record.tensor("captured", got[0]);
  });
}

TEST_F(Walk, RootIsAlsoReachedFromAnotherRoot) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = at::rand({3}).requires_grad_();
    const at::Tensor a = x.sin();
    const at::Tensor b = (a * x).exp();
    record_order(record, {b.grad_fn(), a.grad_fn()});
    torch::autograd::backward({a, b, a}, {at::ones({3}), at::rand({3}), at::rand({3})});
    record.tensor("grad", x.grad());
  });
}

TEST_F(Walk, RefusesAnEdgeIntoAMissingInput) {
  const auto leaf = make_node(UINT64_MAX, 2);
  const auto good = make_node(1, 1, {Edge(leaf, 1)});
  const auto bad = make_node(2, 1, {Edge(good, 0), Edge(leaf, 2)});
  GraphShape shape;
  WalkedGraph graph;
  EXPECT_TRUE(walk(*good, true, {}, shape, graph));
  EXPECT_FALSE(walk(*bad, true, {}, shape, graph));
  EXPECT_TRUE(walk(*good, true, {}, shape, graph)) << "a refused walk must leave nothing behind";
  EXPECT_EQ(shape.steps.size(), 2U);
}

TEST_F(Walk, RefusedGraphGoesToThePreviousEngine) {
  const auto leaf = make_node(UINT64_MAX, 1);
  const auto bad = make_node(2, 1, {Edge(leaf, 0), Edge(leaf, 5)});
  bad->undefined_outputs = 0b10;  // a gradient for an input that is not there would read past the metadata
  const auto outcome = [&] {
    Record record;
    leaf->record = bad->record = &record;
    record.attempt([&] { execute({Edge(bad, 0)}, {pair_of(1, 2)}); });
    return record.lines();
  };
  const auto expected = outcome();
  const Stats before = stats();
  Enable on;
  EXPECT_EQ(difference(outcome(), expected), "");
  const Stats delta = stats() - before;
  EXPECT_EQ(previous_calls(delta, PreviousReason::kIrregularCall), 1U);
  EXPECT_EQ(delta.schedule_calls, 0U);
}

TEST_F(Walk, ShapeDescribesTheGraph) {
  const auto leaf = make_node(UINT64_MAX, 2);
  const auto low = make_node(1, 1, {Edge(leaf, 1)});
  const auto root = make_node(2, 3, {Edge(low, 0), Edge(), Edge(leaf, 0), Edge(leaf, 1)});
  GraphShape shape;
  WalkedGraph graph;
  ASSERT_TRUE(walk(*root, true, {}, shape, graph));
  EXPECT_EQ(graph.nodes, (std::vector<Node*>{root.get(), low.get(), leaf.get()}));
  EXPECT_TRUE(graph.not_running.empty());
  EXPECT_FALSE(shape.pruned);
  const auto edges = shape.edges_of(shape.steps[0]);
  ASSERT_EQ(edges.size(), 4U);
  EXPECT_EQ(edges[0].step, 1U);
  EXPECT_EQ(edges[1].step, kNoStep);
  EXPECT_EQ(edges[2].step, 2U);
  EXPECT_EQ(edges[3].input_nr, 1U);
  EXPECT_EQ(shape.steps[0].num_inputs, 3U);
  EXPECT_EQ(*shape.steps[2].type, typeid(TestNode));
}

TEST_F(Walk, PrunedShapeTellsNeededFromCaptured) {
  //  root -> wanted -> below;  root -> other
  const auto below = make_node(UINT64_MAX, 1);
  const auto wanted = make_node(1, 2, {Edge(below, 0)});
  const auto other = make_node(2, 1, {});
  const auto root = make_node(3, 1, {Edge(wanted, 1), Edge(other, 0)});
  const edge_list outputs{Edge(wanted, 1), Edge(wanted, 0), Edge(wanted, 1)};
  GraphShape shape;
  WalkedGraph graph;
  ASSERT_TRUE(walk(*root, /*accumulate=*/false, outputs, shape, graph));
  EXPECT_TRUE(shape.pruned);
  EXPECT_EQ(graph.nodes, (std::vector<Node*>{root.get(), wanted.get()}));
  EXPECT_TRUE(shape.steps[0].needed);
  EXPECT_FALSE(shape.steps[1].needed) << "captured only";
  EXPECT_EQ(shape.edges_of(shape.steps[0])[1].step, kNoStep) << "leads to a node that does not run";
  const auto captures = shape.captures_of(shape.steps[1]);
  ASSERT_EQ(captures.size(), 3U);
  EXPECT_EQ(captures[0].input_nr, 1U);
  EXPECT_EQ(captures[1].input_nr, 0U);
  EXPECT_EQ(captures[2].output, 2U);
  EXPECT_THAT(graph.not_running, testing::UnorderedElementsAre(other.get(), below.get()));

  ASSERT_TRUE(walk(*root, /*accumulate=*/true, outputs, shape, graph));
  EXPECT_EQ(graph.nodes.size(), 2U);
  EXPECT_TRUE(shape.steps[1].needed) << "backward(inputs=) runs the input's own node";
  EXPECT_TRUE(shape.captures.empty());
}

TEST_F(Walk, VeryDeepGraphNeedsNoStack) {
  constexpr size_t kDepth = 100'000;
  std::vector<c10::intrusive_ptr<Node>> chain{make_node(UINT64_MAX, 1)};
  for (size_t i = 1; i < kDepth; ++i) chain.push_back(make_node(i, 1, {Edge(chain.back(), 0)}));
  GraphShape shape;
  WalkedGraph graph;
  ASSERT_TRUE(walk(*chain.back(), true, {}, shape, graph));
  EXPECT_EQ(shape.steps.size(), kDepth);
  ASSERT_TRUE(walk(*chain.back(), false, {Edge(chain.front(), 0)}, shape, graph));
  EXPECT_EQ(shape.steps.size(), kDepth);
  EXPECT_EQ(graph.nodes.back(), chain.front().get());
}

// --- NodeTable ---

// Addresses only; never dereferenced.
const Node* address(uintptr_t n) { return reinterpret_cast<const Node*>(n * 64 + 4096); }

TEST(NodeTable, NumbersEachNodeOnce) {
  NodeTable table;
  table.reset(4);
  EXPECT_EQ(table.find(address(0)), kNoStep);
  EXPECT_EQ(table.insert(address(0), 7), (std::pair<uint32_t, bool>{7, true}));
  EXPECT_EQ(table.insert(address(0), 8), (std::pair<uint32_t, bool>{7, false}));
  EXPECT_EQ(table.find(address(0)), 7U);
  EXPECT_EQ(table.find(address(1)), kNoStep);
}

TEST(NodeTable, GrowsPastWhatWasExpected) {
  NodeTable table;
  table.reset(0);
  constexpr uint32_t kCount = 10'000;
  for (uint32_t i = 0; i < kCount; ++i) ASSERT_TRUE(table.insert(address(i * 3), i).second);
  for (uint32_t i = 0; i < kCount; ++i) {
    ASSERT_EQ(table.find(address(i * 3)), i);
    ASSERT_EQ(table.find(address(i * 3 + 1)), kNoStep);
    ASSERT_FALSE(table.insert(address(i * 3), 0).second);
  }
}

TEST(NodeTable, ResetForgetsEverything) {
  NodeTable table;
  for (uint32_t round = 0; round < 50; ++round) {
    const uint32_t count = round % 7 == 0 ? 1'000 : 20;
    table.reset(round % 3 == 0 ? 0 : count);
    for (uint32_t i = 0; i < 1'000; ++i) ASSERT_EQ(table.find(address(i)), kNoStep) << "round " << round;
    for (uint32_t i = 0; i < count; ++i) ASSERT_TRUE(table.insert(address(i), i + round).second) << "round " << round;
    for (uint32_t i = 0; i < count; ++i) ASSERT_EQ(table.find(address(i)), i + round);
  }
}

TEST(NodeTable, GrowthAfterResetKeepsNoOldEntries) {
  NodeTable table;
  table.reset(8);
  for (uint32_t i = 0; i < 30; ++i) table.insert(address(i), i);
  table.reset(8);
  for (uint32_t i = 100; i < 1'000; ++i) table.insert(address(i), i);  // grows
  for (uint32_t i = 0; i < 30; ++i) EXPECT_EQ(table.find(address(i)), kNoStep);
  for (uint32_t i = 100; i < 1'000; ++i) EXPECT_EQ(table.find(address(i)), i);
}

}  // namespace
}  // namespace retrograd::test
