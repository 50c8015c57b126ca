// Collecting: what becomes of a graph's constants, tensors, sizes and hooks, and what errors leave behind.
#include <algorithm>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/autograd/custom_function.h>

#include "engine/collect.h"
#include "engine_test_util.h"

namespace retrograd::test {
namespace {

class Collect : public EngineTest {};

std::vector<Node*> nodes_of(const at::Tensor& root) {
  GraphShape shape;
  WalkedGraph graph;
  EXPECT_TRUE(walk(*root.grad_fn(), true, {}, shape, graph));
  return graph.nodes;
}

std::unique_ptr<Collected> collect_under(const at::Tensor& root) { return collect(nodes_of(root), true, {}); }

cache::Path keys(const at::Tensor& root) { return std::move(collect_under(root)->path); }

bool has_input(const Collected& collected, const at::Tensor& tensor) {
  const auto& inputs = collected.call.tensor_args.inputs;
  return std::any_of(inputs.begin(), inputs.end(), [&](const at::Tensor& t) { return t.is_alias_of(tensor); });
}

at::Tensor leaf(at::IntArrayRef sizes = {3}) { return at::rand(sizes).requires_grad_(); }

TEST_F(Collect, OneKeyForEachNodeInTheOrderGiven) {
  const at::Tensor x = leaf();
  const at::Tensor y = (x.exp() * x).sum();
  auto nodes = nodes_of(y);
  const auto all = collect(nodes, true, {});
  EXPECT_EQ(all->path.size(), nodes.size());
  EXPECT_EQ(all->path.size(), 4U);
  const auto some = collect(std::span(nodes).first(2), true, {});
  EXPECT_EQ(some->path.size(), 2U);
  EXPECT_EQ(collect({}, true, {})->path.size(), 0U);
}

TEST_F(Collect, EqualGraphsHaveEqualKeys) {
  const auto build = [](const at::Tensor& x, const at::Tensor& w) { return (x.pow(2.5) * w).sin().sum(); };
  const at::Tensor x = leaf();
  const at::Tensor w = leaf();
  const at::Tensor first = build(x, w);
  const cache::Path path = keys(first);
  EXPECT_EQ(path, keys(first)) << "collecting changes nothing";
  EXPECT_EQ(path, keys(build(x, w)));
  EXPECT_EQ(path, keys(build(leaf(), leaf())));
  EXPECT_EQ(path, keys(build(leaf({7}), leaf({7})))) << "sizes are inputs, not constants";
}

TEST_F(Collect, ConstantsAndTypesMakeOtherKeys) {
  const at::Tensor x = leaf({2, 3});
  std::vector<std::pair<std::string, cache::Path>> paths;
  const auto add = [&](const std::string& name, const at::Tensor& root) { paths.emplace_back(name, keys(root)); };
  add("pow 2", x.pow(2));
  add("pow 3", x.pow(3));
  add("pow 3.0", x.pow(3.0));
  add("sum of dim 0", x.sum(0));
  add("sum of dim 1", x.sum(1));
  add("sum of dim 1, kept", x.sum(1, true));
  add("add, alpha 1", at::add(x, x, 1));
  add("add, alpha 2", at::add(x, x, 2));
  add("leaky relu", at::leaky_relu(x, 0.1));
  add("leaky relu, another slope", at::leaky_relu(x, 0.2));
  add("gelu", at::gelu(x, "none"));
  add("gelu, approximate", at::gelu(x, "tanh"));
  add("double", at::rand({2, 3}, at::kDouble).requires_grad_().pow(2));
  for (size_t i = 0; i < paths.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      EXPECT_FALSE(paths[i].second == paths[j].second) << paths[i].first << " and " << paths[j].first;
    }
  }
}

// Numbers that a node saves as numbers are constants; those it saves as tensors are inputs.
TEST_F(Collect, NumbersAreConstantsUnlessSavedAsTensors) {
  const at::Tensor x = leaf();
  EXPECT_FALSE(keys(x * 2.0) == keys(x * 3.0));
  EXPECT_EQ(keys(x * 2.0), keys(x * 2.0));
  const at::Tensor twice = x * at::scalar_tensor(2.0);
  const at::Tensor thrice = x * at::scalar_tensor(3.0);
  const auto a = collect_under(twice);
  const auto b = collect_under(thrice);
  ASSERT_EQ(a->call.tensor_args.inputs.size(), 1U);
  ASSERT_EQ(b->call.tensor_args.inputs.size(), 1U);
  EXPECT_EQ(a->call.tensor_args.inputs[0].item().toDouble(), 2.0);
  EXPECT_EQ(b->call.tensor_args.inputs[0].item().toDouble(), 3.0);
  EXPECT_EQ(a->path, b->path);
}

TEST_F(Collect, WiringMakesOtherKeys) {
  const at::Tensor x = leaf();
  const at::Tensor y = leaf();
  EXPECT_FALSE(keys(x * y + x) == keys(x * y + y));
  EXPECT_FALSE(keys(x - y) == keys(x - x));
  const at::Tensor product = x * y;
  const auto nodes = nodes_of(product);
  const edge_list to_x{torch::autograd::impl::gradient_edge(x)};
  const edge_list to_y{torch::autograd::impl::gradient_edge(y)};
  EXPECT_FALSE(collect(nodes, false, to_x)->path == collect(nodes, true, {})->path) << "captures are part of the key";
  EXPECT_FALSE(collect(nodes, false, to_x)->path == collect(nodes, false, {to_x[0], to_y[0]})->path);
  EXPECT_EQ(collect(nodes, true, to_x)->path, collect(nodes, true, to_y)->path) << "backward(inputs=) captures nothing";
}

TEST_F(Collect, FindsSavedTensors) {
  const at::Tensor x = leaf();
  const at::Tensor w = leaf();
  const at::Tensor y = x.exp();
  const at::Tensor z = (y * w).sum();
  const auto collected = collect_under(z);
  EXPECT_TRUE(has_input(*collected, y));
  EXPECT_TRUE(has_input(*collected, w));
  EXPECT_FALSE(has_input(*collected, x));
  EXPECT_EQ(collected->call.tensor_args.inputs.size(), 3U) << "y as exp's result, y and w as mul's operands";
  EXPECT_GE(collected->call.all_size_inputs.size(), 1U) << "the sizes that sum expands to";
}

// The length of libtorch's own key is cut to 16 bits.
TEST_F(Collect, WideNodesHaveKeysOfFullLength) {
  const at::Tensor x = leaf({2});
  const auto cat = [&](size_t width) { return at::cat(std::vector<at::Tensor>(width, x)); };
  const auto length = [&](size_t width) {
    const auto path = keys(cat(width));
    return path[0].size();
  };
  const size_t one = length(1'001) - length(1'000);
  EXPECT_GT(one, 0U);
  EXPECT_EQ(length(5'000) - length(1'000), 4'000 * one);
  EXPECT_GT(length(5'000), size_t{1} << 16);

  // Two widths whose lengths are equal modulo 2^16.
  const size_t apart = (size_t{1} << 16) / std::gcd(one, size_t{1} << 16);
  if (apart < 100'000) {
    const auto narrow = keys(cat(100));
    const auto wide = keys(cat(100 + apart));
    EXPECT_FALSE(std::ranges::equal(narrow[0], wide[0]));
  }
  EXPECT_FALSE(keys(cat(5'000)) == keys(cat(5'001)));
  EXPECT_EQ(keys(cat(5'000)), keys(cat(5'000)));
}

TEST_F(Collect, GradOfALeafIsNotLookedAt) {
  const at::Tensor x = leaf();
  const at::Tensor y = x.exp().sum();
  const auto before = collect_under(y);
  y.backward({}, /*retain_graph=*/true);
  ASSERT_TRUE(x.grad().defined());
  const auto after = collect_under(y);
  EXPECT_EQ(before->path, after->path);
  EXPECT_FALSE(has_input(*after, x.grad()));
}

TEST_F(Collect, LeavesOfOtherShapesOrTypesHaveTheirOwnKeys) {
  const at::Tensor x = leaf({2, 3});
  const at::Tensor y = leaf({6});
  EXPECT_FALSE(keys(x.view({6})) == keys(y.view({6}))) << "sizes of a gradient's target count: outputs are validated";
}

TEST_F(Collect, FreedGraphThrowsTheStockErrorAndIsLeftAsItWas) {
  const at::Tensor x = leaf();
  const at::Tensor y = (x.exp() * x).sum();
  y.backward();
  Record collecting;
  Record running;
  collecting.attempt([&] { collect_under(y); });
  {
    Disable off;
    running.attempt([&] { y.backward(); });
  }
  EXPECT_EQ(collecting.lines(), running.lines());
  EXPECT_TRUE(running.contains("backward through the graph a second time"));

  const at::Tensor z = (x.sin() * 2).sum() + y;  // freed in part: nothing of the rest is touched
  EXPECT_ANY_THROW(collect_under(z));
  Record stock;
  stock.attempt([&] { z.backward(); });
  EXPECT_EQ(stock.lines(), running.lines());
}

TEST_F(Collect, OverwrittenSavedTensorThrowsTheStockError) {
  const at::Tensor x = leaf();
  const at::Tensor y = x.exp();
  const at::Tensor z = y.sum();
  y.add_(1);
  Record collecting;
  Record running;
  collecting.attempt([&] { collect_under(z); });
  {
    Disable off;
    running.attempt([&] { z.backward(); });
  }
  EXPECT_EQ(collecting.lines(), running.lines());
  EXPECT_TRUE(running.contains("modified by an inplace operation"));
}

TEST_F(Collect, GraphRunsAsBeforeAfterItWasCollected) {
  const Program program = [](Record& record) {
    const at::Tensor x = leaf();
    const at::Tensor w = leaf();
    at::Tensor y = x.exp() * w;
    y.slice(0, 0, 2).mul_(3);
    const at::Tensor loss = at::cat({y, x.pow(3)}).sum();
    collect_under(loss);
    loss.backward({}, /*retain_graph=*/true);
    collect_under(loss);
    loss.backward();
    record.tensor("x", x.grad());
    record.tensor("w", w.grad());
  };
  expect_as_stock(program);
}

TEST_F(Collect, RetainGradHooksAreCollected) {
  const at::Tensor x = leaf();
  const at::Tensor y = x.exp();
  const at::Tensor z = y.sum();
  const auto plain = collect_under(z);
  EXPECT_EQ(plain->call.cpp_tensor_pre_hooks.size(), 0U);
  y.retain_grad();
  const auto hooked = collect_under(z);
  ASSERT_EQ(hooked->call.cpp_tensor_pre_hooks.size(), 1U);
  EXPECT_FALSE(hooked->path == plain->path);
  hooked->call.cpp_tensor_pre_hooks[0](at::full({3}, 5.0));
  EXPECT_TRUE(at::equal(y.grad(), at::full({3}, 5.0)));
}

TEST_F(Collect, HooksThatCannotBeCollectedThrowNotImplemented) {
  const at::Tensor x = leaf();
  const at::Tensor y = x.exp();
  add_pre_hook(y.grad_fn(), [](const variable_list& grads) { return grads; });
  EXPECT_THROW(collect_under(y), c10::NotImplementedError);
  const at::Tensor z = x.exp();
  add_post_hook(z.grad_fn(), [](const variable_list& outputs, const variable_list&) { return outputs; });
  EXPECT_THROW(collect_under(z), c10::NotImplementedError);
  const at::Tensor w = x.exp();
  w.register_hook([](const at::Tensor& g) { return g * 2; });
  EXPECT_THROW(collect_under(w), c10::NotImplementedError);
  const auto node = make_node(1, 1, {torch::autograd::impl::gradient_edge(x)});
  Node* nodes[] = {node.get()};
  EXPECT_THROW(collect(nodes, true, {}), c10::NotImplementedError);
}

struct Scale : torch::autograd::Function<Scale> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, double by, bool flag) {
    ctx->saved_data["by"] = by;
    ctx->saved_data["flag"] = flag;
    ctx->save_for_backward({x});
    return x * by;
  }
  static variable_list backward(torch::autograd::AutogradContext* ctx, const variable_list& grads) {
    return {grads[0] * ctx->saved_data["by"].toDouble(), at::Tensor(), at::Tensor()};
  }
};

TEST_F(Collect, CustomFunctions) {
  const at::Tensor x = leaf();
  const at::Tensor two = Scale::apply(x, 2.0, true);
  const at::Tensor three = Scale::apply(x, 3.0, true);
  const at::Tensor other = Scale::apply(x, 2.0, false);
  const auto collected = collect_under(two);
  EXPECT_EQ(collected->call.lifted_ivalue_args.args.size(), 1U) << "the number is an input";
  EXPECT_TRUE(has_input(*collected, x));
  EXPECT_EQ(collected->path, keys(three));
  EXPECT_FALSE(collected->path == keys(other));
}

TEST_F(Collect, NothingReachesPythonWithoutPython) {
  const at::Tensor x = leaf();
  const at::Tensor y = x.exp();
  y.register_hook([](const at::Tensor&) {});
  y.retain_grad();
  add_post_accumulate_hook(x, [](const at::Tensor&) {});
  EXPECT_FALSE(reaches_python(nodes_of(y)));
}

TEST_F(Collect, ThreadsCollectAndRunOneRetainedGraph) {
  const at::Tensor w = at::full({2}, 2.0).requires_grad_();
  const at::Tensor y = w * w;
  const at::Tensor loss = (y * y).sum();  // 4 w^3 = 32
  const cache::Path expected = keys(loss);
  constexpr int kCalls = 500;
  std::vector<std::jthread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      at::init_num_threads();
      Enable on;
      for (int k = 0; k < kCalls; ++k) {
        if (i % 2 == 0) {
          ASSERT_EQ(keys(loss), expected);
        } else {
          loss.backward({}, /*retain_graph=*/true);
        }
      }
    });
  }
  threads.clear();
  EXPECT_TRUE(at::equal(w.grad(), at::full({2}, 2 * kCalls * 32.0)));
}

}  // namespace
}  // namespace retrograd::test
