// Schedules: when one fits a live graph without a walk, and when two graphs have one key.
#include <algorithm>
#include <string>

#include "engine/schedule.h"
#include "engine_test_util.h"

namespace retrograd::test {
namespace {

class OtherNode final : public Node {
 public:
  OtherNode(uint64_t sequence_nr, uint32_t inputs, edge_list edges) : Node(sequence_nr, std::move(edges)) {
    for (uint32_t i = 0; i < inputs; ++i) add_input_metadata(at::empty({2}, at::kDouble));
  }

 private:
  variable_list apply(variable_list&&) override { return variable_list(num_outputs()); }
};

bool binds(const Walked& plan, Node& root) {
  std::vector<Node*> nodes;
  return plan.schedule->bind(root, nodes);
}

cache::Path path_of(const GraphShape& shape) {
  cache::Path path;
  append_keys(shape, path);
  return path;
}

// root(3) -> left(2), right(1); left -> leaf a, right -> leaf b, both -> leaf a again
struct Diamond {
  c10::intrusive_ptr<Node> a, b, left, right, root;
  explicit Diamond(uint64_t left_nr = 2, uint64_t right_nr = 1, uint64_t root_nr = 3) {
    a = make_node(UINT64_MAX, 2);
    b = make_node(UINT64_MAX, 1);
    left = make_node(left_nr, 1, {Edge(a, 0)});
    right = make_node(right_nr, 1, {Edge(b, 0), Edge(a, 1)});
    root = make_node(root_nr, 1, {Edge(left, 0), Edge(right, 0)});
  }
};

TEST(ScheduleBind, FitsAnotherGraphOfTheSameStructureAndOrder) {
  const Diamond first;
  const Diamond second(20, 10, 35);
  const Walked plan = walked(*first.root);
  std::vector<Node*> nodes;
  ASSERT_TRUE(plan.schedule->bind(*second.root, nodes));
  EXPECT_EQ(nodes, walked(*second.root).graph.nodes);
  EXPECT_TRUE(plan.schedule->bind(*first.root, nodes));
  EXPECT_EQ(nodes, plan.graph.nodes);
}

TEST(ScheduleBind, RefusesAnotherOrderOfSequenceNumbers) {
  const Walked plan = walked(*Diamond().root);
  EXPECT_FALSE(binds(plan, *Diamond(1, 2).root));
  EXPECT_FALSE(binds(plan, *Diamond(2, 2).root)) << "a tie where the plan has none";
  const Walked tied = walked(*Diamond(2, 2).root);
  EXPECT_TRUE(binds(tied, *Diamond(5, 5, 9).root));
  EXPECT_FALSE(binds(tied, *Diamond(2, 1).root)) << "no tie where the plan has one";
  EXPECT_FALSE(binds(tied, *Diamond(1, 2).root));
}

TEST(ScheduleBind, RefusesAnotherStructure) {
  const Diamond d;
  const Walked plan = walked(*d.root);
  const auto with_edges = [&](edge_list edges, uint32_t inputs = 1) { return make_node(3, inputs, std::move(edges)); };
  EXPECT_TRUE(binds(plan, *with_edges({Edge(d.left, 0), Edge(d.right, 0)})));
  EXPECT_FALSE(binds(plan, *with_edges({Edge(d.left, 0)}))) << "an edge less";
  EXPECT_FALSE(binds(plan, *with_edges({Edge(d.left, 0), Edge(d.right, 0), Edge()}))) << "an edge more";
  EXPECT_FALSE(binds(plan, *with_edges({Edge(d.left, 0), Edge()}))) << "an empty edge";
  EXPECT_FALSE(binds(plan, *with_edges({Edge(d.right, 0), Edge(d.left, 0)}))) << "edges swapped";
  EXPECT_FALSE(binds(plan, *with_edges({Edge(d.left, 0), Edge(d.left, 0)}))) << "one target twice";
  EXPECT_FALSE(binds(plan, *with_edges({Edge(d.left, 0), Edge(d.right, 0)}, 2))) << "another number of inputs";
  const auto left = make_node(2, 1, {Edge(d.a, 1)});
  EXPECT_FALSE(binds(plan, *with_edges({Edge(left, 0), Edge(d.right, 0)}))) << "another input of the target";
  const auto empty = make_node(3, 1, {Edge(), Edge(d.right, 0)});
  const Walked with_empty = walked(*empty);
  EXPECT_TRUE(binds(with_empty, *make_node(3, 1, {Edge(), Edge(d.right, 0)})));
  EXPECT_FALSE(binds(with_empty, *d.root)) << "a target where the plan has an empty edge";
}

TEST(ScheduleBind, RefusesAnotherNodeType) {
  const Diamond d;
  const Walked plan = walked(*d.root);
  const auto other = c10::make_intrusive<OtherNode>(2, 1, edge_list{Edge(d.a, 0)});
  EXPECT_FALSE(binds(plan, *make_node(3, 1, {Edge(other, 0), Edge(d.right, 0)})));
  EXPECT_FALSE(binds(plan, *c10::make_intrusive<OtherNode>(3, 1, edge_list{Edge(d.left, 0), Edge(d.right, 0)})));
}

// Two leaves of the plan are one leaf of the graph: every step finds a node of the right type with the right edges,
// but the gradients must be summed before the leaf runs once.
TEST(ScheduleBind, RefusesAGraphWhereTwoStepsAreOneNode) {
  const auto a = make_node(UINT64_MAX, 1);
  const auto b = make_node(UINT64_MAX, 1);
  const Walked plan = walked(*make_node(1, 1, {Edge(a, 0), Edge(b, 0)}));
  EXPECT_TRUE(binds(plan, *make_node(1, 1, {Edge(b, 0), Edge(a, 0)})));
  EXPECT_FALSE(binds(plan, *make_node(1, 1, {Edge(a, 0), Edge(a, 0)})));
}

TEST(ScheduleBind, RefusesOneNodeForTwoStepsInTheMiddleOfATie) {
  std::vector<c10::intrusive_ptr<Node>> leaves;
  edge_list edges;
  for (int i = 0; i < 40; ++i) {
    leaves.push_back(make_node(UINT64_MAX, 1));
    edges.emplace_back(leaves.back(), 0);
  }
  const Walked plan = walked(*make_node(1, 1, edges));
  EXPECT_TRUE(binds(plan, *make_node(1, 1, edges)));
  for (const auto& [i, j] : {std::pair<size_t, size_t>{0, 39}, {0, 1}, {38, 39}, {5, 20}}) {
    edge_list aliased = edges;
    aliased[j] = aliased[i];
    EXPECT_FALSE(binds(plan, *make_node(1, 1, aliased))) << i << " and " << j;
  }
}

TEST(ScheduleBind, RefusesOneNodeForTwoStepsWithDifferentNumbersInThePlan) {
  const auto leaf = make_node(UINT64_MAX, 1);
  const auto high = make_node(2, 1, {Edge(leaf, 0)});
  const auto low = make_node(1, 1, {Edge(leaf, 0)});
  const Walked plan = walked(*make_node(3, 1, {Edge(high, 0), Edge(low, 0)}));
  EXPECT_FALSE(binds(plan, *make_node(3, 1, {Edge(high, 0), Edge(high, 0)})));
}

TEST(ScheduleBind, RefusesWhenTheTieWithTheRootIsGone) {
  const auto leaf = make_node(7, 1);
  const Walked plan = walked(*make_node(7, 1, {Edge(leaf, 0)}));  // root and leaf tie
  EXPECT_TRUE(binds(plan, *make_node(7, 1, {Edge(leaf, 0)})));
  EXPECT_FALSE(binds(plan, *make_node(8, 1, {Edge(leaf, 0)})));
}

TEST(ScheduleBind, NeverFitsWhenPruned) {
  const Diamond d;
  EXPECT_FALSE(binds(walked(*d.root, true, {Edge(d.b, 0)}), *d.root));
  EXPECT_FALSE(binds(walked(*d.root, false, {Edge(d.b, 0)}), *d.root));
  // Even where all nodes run, so that the steps look like those of a call without inputs=.
  EXPECT_FALSE(binds(walked(*d.root, true, {Edge(d.a, 0), Edge(d.b, 0)}), *d.root));
  EXPECT_FALSE(binds(walked(*d.root, false, {Edge(d.a, 0), Edge(d.b, 0)}), *d.root));
}

TEST(ScheduleBind, AgreesWithTheWalkOverRandomGraphs) {
  int bound = 0;
  for (uint32_t seed = 0; seed < 300; ++seed) {
    const RandomGraph one = random_graph(seed, 12, nullptr);
    const RandomGraph same = random_graph(seed, 12, nullptr);
    const RandomGraph other = random_graph(seed + 300, 12, nullptr);
    const Walked plan = walked(*one.nodes.back());
    std::vector<Node*> nodes;
    ASSERT_TRUE(plan.schedule->bind(*same.nodes.back(), nodes)) << seed;
    EXPECT_EQ(nodes, walked(*same.nodes.back()).graph.nodes) << seed;
    if (plan.schedule->bind(*other.nodes.back(), nodes)) {
      ++bound;
      EXPECT_EQ(nodes, walked(*other.nodes.back()).graph.nodes) << seed;
      EXPECT_EQ(path_of(plan.shape), path_of(walked(*other.nodes.back()).shape)) << seed;
    }
  }
  EXPECT_LT(bound, 60);
}

// One random change of a graph at a time. A plan that binds must bind to what the walk of that graph finds.
TEST(ScheduleBind, NeverBindsToWhatTheWalkWouldOrderOtherwise) {
  int bound = 0;
  for (uint32_t seed = 0; seed < 2'000; ++seed) {
    const RandomGraph one = random_graph(seed % 40, 8, nullptr);
    const RandomGraph changed = random_graph(seed % 40, 8, nullptr);
    std::mt19937 random(seed);
    const auto& node = changed.nodes[random() % changed.nodes.size()];
    switch (random() % 3) {
      case 0:
        node->set_sequence_nr(random() % 8);
        break;
      case 1:
        if (node->num_outputs() != 0) {
          const size_t place =
              static_cast<size_t>(std::find(changed.nodes.begin(), changed.nodes.end(), node) - changed.nodes.begin());
          const auto& target = changed.nodes[random() % place];
          node->next_edges()[random() % node->num_outputs()] = Edge(target, 0);
        }
        break;
      default:
        if (node->num_outputs() > 1) std::swap(node->next_edges().front(), node->next_edges().back());
    }
    const Walked plan = walked(*one.nodes.back());
    const Walked truth = walked(*changed.nodes.back());
    std::vector<Node*> nodes;
    const bool binds = plan.schedule->bind(*changed.nodes.back(), nodes);
    if (binds) {
      ++bound;
      ASSERT_EQ(nodes, truth.graph.nodes) << seed;
      ASSERT_EQ(path_of(plan.shape), path_of(truth.shape)) << seed;
    }
  }
  EXPECT_GT(bound, 50);
  EXPECT_LT(bound, 1'500);
}

// --- Keys ---

TEST(ScheduleKeys, EqualForEqualStructureAndOrder) {
  EXPECT_EQ(path_of(walked(*Diamond().root).shape), path_of(walked(*Diamond(20, 10, 30).root).shape));
  EXPECT_EQ(path_of(walked(*Diamond().root).shape).size(), 5U) << "one key for each step";
}

TEST(ScheduleKeys, DifferForAnotherOrder) {
  EXPECT_FALSE(path_of(walked(*Diamond().root).shape) == path_of(walked(*Diamond(1, 2).root).shape));
}

TEST(ScheduleKeys, DifferForEveryDetailOfTheStructure) {
  const auto a = make_node(UINT64_MAX, 2);
  const auto b = make_node(UINT64_MAX, 2);
  const auto other = c10::make_intrusive<OtherNode>(UINT64_MAX, 2, edge_list{});
  std::vector<std::pair<std::string, cache::Path>> paths;
  const auto add = [&](const std::string& name, edge_list edges, uint32_t inputs = 1) {
    paths.emplace_back(name, path_of(walked(*make_node(3, inputs, std::move(edges))).shape));
  };
  add("two leaves", {Edge(a, 0), Edge(b, 0)});
  add("one leaf twice", {Edge(a, 0), Edge(a, 0)});
  add("one leaf, two inputs", {Edge(a, 0), Edge(a, 1)});
  add("inputs swapped", {Edge(a, 1), Edge(a, 0)});
  add("one edge", {Edge(a, 0)});
  add("an empty edge", {Edge(a, 0), Edge()});
  add("an empty edge first", {Edge(), Edge(a, 0)});
  add("more inputs", {Edge(a, 0)}, 2);
  add("another type", {Edge(other, 0)});
  add("no edge", {});
  GraphShape shape = walked(*make_node(3, 2, {Edge(a, 0)})).shape;
  shape.root_input = 1;
  paths.emplace_back("gradient enters elsewhere", path_of(shape));
  const auto root = make_node(3, 1, {Edge(a, 0)});
  paths.emplace_back("backward(inputs=)", path_of(walked(*root, true, {Edge(a, 0)}).shape));
  paths.emplace_back("grad()", path_of(walked(*root, false, {Edge(a, 0)}).shape));
  paths.emplace_back("grad() of another input", path_of(walked(*root, false, {Edge(a, 1)}).shape));
  paths.emplace_back("grad() twice", path_of(walked(*root, false, {Edge(a, 0), Edge(a, 0)}).shape));
  paths.emplace_back("grad() of two inputs", path_of(walked(*root, false, {Edge(a, 0), Edge(a, 1)}).shape));
  paths.emplace_back("grad() of two inputs, swapped", path_of(walked(*root, false, {Edge(a, 1), Edge(a, 0)}).shape));
  paths.emplace_back("grad() of the root", path_of(walked(*root, false, {Edge(root, 0)}).shape));
  for (size_t i = 0; i < paths.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      EXPECT_FALSE(paths[i].second == paths[j].second) << paths[i].first << " and " << paths[j].first;
    }
  }
}

TEST(ScheduleKeys, DoNotDependOnHooks) {
  const Diamond plain;
  const Diamond hooked;
  add_pre_hook(hooked.left, [](const variable_list& grads) { return grads; });
  add_post_hook(hooked.right, [](const variable_list& outputs, const variable_list&) { return outputs; });
  EXPECT_EQ(path_of(walked(*plain.root).shape), path_of(walked(*hooked.root).shape));
  EXPECT_TRUE(binds(walked(*plain.root), *hooked.root));
}

// --- The whole way: a plan of one graph must not run another ---

class SchedulePlans : public EngineTest {};

TEST_F(SchedulePlans, SharedLeafAfterSeparateLeaves) {
  expect_as_stock([](Record& record) {
    for (const bool shared : {false, true, false}) {
      const at::Tensor x = at::rand({3}).requires_grad_();
      const at::Tensor y = shared ? x : at::rand({3}).requires_grad_();
      (x * y).sum().backward();
      record.tensor("x", x.grad());
      record.tensor("y", y.grad());
    }
  });
}

TEST_F(SchedulePlans, GradientEntersAnotherInputOfTheSameRoot) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = at::rand({4}).requires_grad_();
    for (const int64_t output : {0, 1, 0, 3}) {
      const auto parts = x.unbind(0);
      parts[static_cast<size_t>(output)].backward();
      record.tensor("grad", x.grad());
    }
  });
}

TEST_F(SchedulePlans, GradOfTheSameInputsInAnotherOrder) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = at::rand({3}).requires_grad_();
    const at::Tensor y = at::rand({3}).requires_grad_();
    for (const variable_list& inputs : {variable_list{x, y}, variable_list{y, x}, variable_list{x, y, x}}) {
      for (const at::Tensor& g : torch::autograd::grad({(x * y.exp()).sum()}, inputs)) record.tensor("captured", g);
    }
  });
}

TEST_F(SchedulePlans, ManyStructuresTakingTurns) {
  // More than a thread keeps at hand.
  expect_as_stock([](Record& record) {
    for (int round = 0; round < 3; ++round) {
      for (int depth = 1; depth <= 20; ++depth) {
        const at::Tensor x = at::rand({2}).requires_grad_();
        at::Tensor y = x;
        for (int i = 0; i < depth; ++i) y = y.sin();
        y.sum().backward();
        record.tensor("grad", x.grad());
      }
    }
  });
  const Stats s = stats();
  EXPECT_GE(s.cache_leaves, 20U);
}

TEST_F(SchedulePlans, BranchOrderMakesAnotherPlan) {
  const auto run = [](bool first) {
    const at::Tensor x = at::ones({2}).requires_grad_();
    const at::Tensor a = first ? x.sin() : at::Tensor();
    const at::Tensor b = x.cos();
    ((first ? a : x.sin()) * b).sum().backward();
  };
  Enable on;
  const Stats before = stats();
  run(true);
  run(false);
  EXPECT_EQ((stats() - before).misses, 2U);
  run(true);
  run(false);
  EXPECT_EQ((stats() - before).misses, 2U);
  EXPECT_EQ((stats() - before).hits, 2U);
}

TEST_F(SchedulePlans, ClearedCacheMakesPlansAnew) {
  const auto run = [] {
    const at::Tensor x = at::ones({2}).requires_grad_();
    x.sin().sum().backward();
  };
  Enable on;
  run();
  const Stats before = stats();
  run();
  EXPECT_EQ((stats() - before).hits, 1U);
  cache_clear();
  EXPECT_EQ(stats().cache_leaves, 0U);
  run();
  EXPECT_EQ((stats() - before).misses, 1U);
  EXPECT_EQ(stats().cache_leaves, 1U);
}

}  // namespace
}  // namespace retrograd::test
