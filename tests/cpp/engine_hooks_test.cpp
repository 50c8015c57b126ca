// Every kind of hook that C++ code can put on a graph, against the stock engine.
#include <memory>
#include <stdexcept>

#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include "engine/context.h"
#include "engine_test_util.h"

namespace retrograd::test {
namespace {

using torch::autograd::generated::MulBackward0;

class Hooks : public EngineTest {};

struct CustomError : std::exception {
  const char* what() const noexcept override { return "a custom error"; }
};

// x -> a -> b -> loss, and x straight into loss.
struct Net {
  at::Tensor x = at::rand({4}).requires_grad_();
  at::Tensor a = x.sin();
  at::Tensor b = a * x;
  at::Tensor loss = (b.exp() + x).sum();
};

TEST_F(Hooks, TensorHooksSeeAndReplaceGradients) {
  expect_as_stock([](Record& record) {
    Net net;
    net.a.register_hook([&](const at::Tensor& g) { record.tensor("a", g); });
    net.a.register_hook([](const at::Tensor& g) { return g * 3; });
    net.a.register_hook([&](const at::Tensor& g) {
      record.tensor("a, later", g);
      return at::Tensor();  // keeps the gradient
    });
    net.b.register_hook([](const at::Tensor& g) { return g + 1; });
    net.x.register_hook([&](const at::Tensor& g) {
      record.tensor("x", g);
      return g * 2;
    });
    net.loss.backward();
    record.tensor("grad", net.x.grad());
  });
}

TEST_F(Hooks, RemovedTensorHookDoesNotRun) {
  expect_as_stock([](Record& record) {
    Net net;
    const unsigned first = net.a.register_hook([&](const at::Tensor&) { record.line("first"); });
    net.a.register_hook([&](const at::Tensor&) { record.line("second"); });
    net.a.remove_hook(first);
    net.loss.backward();
  });
}

TEST_F(Hooks, RetainGradComesAfterOtherTensorHooks) {
  expect_as_stock([](Record& record) {
    Net net;
    net.a.retain_grad();
    net.a.register_hook([](const at::Tensor& g) { return g * 3; });
    net.b.retain_grad();
    net.loss.backward();
    record.tensor("a", net.a.grad());
    record.tensor("b", net.b.grad());
    record.tensor("x", net.x.grad());
  });
}

TEST_F(Hooks, PreAndPostHooksOfNodes) {
  const Record stock = expect_as_stock([](Record& record) {
    Net net;
    const auto node = net.b.grad_fn();
    add_pre_hook(node, [&](const variable_list& grads) {
      record.tensor("pre", grads[0]);
      return variable_list{grads[0] * 2};
    });
    add_pre_hook(node, [&](const variable_list& grads) {
      record.tensor("pre, second", grads[0]);
      return grads;
    });
    add_post_hook(node, [&](const variable_list& outputs, const variable_list& inputs) {
      record.tensor("post output 0", outputs[0]);
      record.tensor("post output 1", outputs[1]);
      record.tensor("post input", inputs[0]);
      return variable_list{outputs[0] * 5, outputs[1]};
    });
    add_post_hook(node, [&](const variable_list& outputs, const variable_list& inputs) {
      record.tensor("post, second", outputs[0]);
      record.line(inputs.size());
      return outputs;
    });
    net.loss.backward();
    record.tensor("grad", net.x.grad());
  });
  EXPECT_TRUE(stock.contains("post, second"));
}

TEST_F(Hooks, AllKindsOnOneNodeRunInStockOrder) {
  expect_as_stock([](Record& record) {
    Net net;
    const auto log = [&record](std::string name) { return [&record, name](const at::Tensor&) { record.line(name); }; };
    net.a.retain_grad();
    add_pre_hook(net.a.grad_fn(), [&](const variable_list& grads) {
      record.line("pre; retained ", net.a.grad().defined());
      return grads;
    });
    net.a.register_hook(log("tensor 1"));
    add_post_hook(net.a.grad_fn(), [&](const variable_list& outputs, const variable_list&) {
      record.line("post");
      return outputs;
    });
    net.a.register_hook(log("tensor 2"));
    net.x.register_hook(log("leaf tensor"));
    const auto leaf = torch::autograd::impl::grad_accumulator(net.x);
    add_pre_hook(leaf, [&](const variable_list& grads) {
      record.line("leaf pre; grad ", net.x.grad().defined());
      return grads;
    });
    add_post_hook(leaf, [&](const variable_list& outputs, const variable_list& inputs) {
      record.line("leaf post ", outputs.size(), " ", inputs.size(), "; grad ", net.x.grad().defined());
      return outputs;
    });
    add_post_accumulate_hook(net.x, [&](const at::Tensor& t) { record.tensor("post accumulate", t.grad()); });
    net.loss.backward();
  });
}

TEST_F(Hooks, PostAccumulateHookMayTakeTheGradientAway) {
  expect_as_stock([](Record& record) {
    Net net;
    add_post_accumulate_hook(net.x, [&](const at::Tensor& t) {
      record.tensor("grad", t.grad());
      t.mutable_grad() = at::Tensor();
    });
    for (int i = 0; i < 2; ++i) net.loss.backward({}, /*retain_graph=*/true);
    record.tensor("left", net.x.grad());
  });
}

TEST_F(Hooks, HooksOfNodesWithSeveralGradients) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = at::rand({2, 3}).requires_grad_();
    const auto parts = x.unbind(1);
    for (size_t i = 0; i < 3; ++i) {
      parts[i].register_hook([&record, i](const at::Tensor& g) {
        record.tensor(c10::str("part ", i), g);
        return g.defined() ? g * static_cast<double>(i + 2) : g;
      });
    }
    parts[2].retain_grad();
    parts[0].retain_grad();
    (parts[0].sum() + parts[2].sin().sum()).backward();  // part 1 gets no gradient
    record.tensor("part 0", parts[0].grad());
    record.tensor("part 2", parts[2].grad());
    record.tensor("grad", x.grad());
  });
}

TEST_F(Hooks, GradCapturesAfterTensorHooksAndBeforeNodeHooks) {
  expect_as_stock([](Record& record) {
    Net net;
    const at::Tensor unused = at::rand({2}).requires_grad_();
    for (const at::Tensor& t : {net.x, net.a, net.b}) {
      t.register_hook([&record](const at::Tensor& g) {
        record.tensor("hook", g);
        return g * 2;
      });
    }
    for (const at::Tensor& t : {net.a, net.b}) {
      t.retain_grad();
      add_pre_hook(t.grad_fn(), [&record](const variable_list& grads) {
        record.line("pre");
        return variable_list{grads[0] * 7};
      });
      add_post_hook(t.grad_fn(), [&record](const variable_list& outputs, const variable_list&) {
        record.line("post");
        return outputs;
      });
    }
    add_post_accumulate_hook(net.x, [&](const at::Tensor&) { record.line("post accumulate"); });
    for (const variable_list& inputs :
         {variable_list{net.x}, variable_list{net.a}, variable_list{net.b, net.a, net.x, net.b},
          variable_list{net.loss}, variable_list{unused, net.b}}) {
      const auto got = torch::autograd::grad({net.loss}, inputs, {}, /*retain_graph=*/true, false,
                                             /*allow_unused=*/true);
      for (const at::Tensor& g : got) record.tensor("captured", g);
      record.tensor("a", net.a.grad());
      record.tensor("b", net.b.grad());
      net.a.mutable_grad() = at::Tensor();
      net.b.mutable_grad() = at::Tensor();
    }
    record.tensor("x", net.x.grad());
  });
}

TEST_F(Hooks, BackwardWithInputsRunsHooksOfWhatItPasses) {
  expect_as_stock([](Record& record) {
    Net net;
    const at::Tensor y = at::rand({4}).requires_grad_();
    const at::Tensor loss = (net.b * y).sum();
    for (const at::Tensor& t : {net.x, y, net.a, net.b}) {
      t.register_hook([&record](const at::Tensor& g) { record.tensor("hook", g); });
    }
    add_post_accumulate_hook(y, [&](const at::Tensor&) { record.line("post accumulate"); });
    for (const variable_list& inputs : {variable_list{y}, variable_list{net.x}, variable_list{net.a}}) {
      torch::autograd::backward({loss}, {}, /*retain_graph=*/true, false, inputs);
      record.tensor("x", net.x.grad());
      record.tensor("y", y.grad());
    }
  });
}

TEST_F(Hooks, HooksMayAddHooksToNodesThatHaveYetToRun) {
  const Record stock = expect_as_stock([](Record& record) {
    Net net;
    net.b.register_hook([&](const at::Tensor&) {
      net.a.register_hook([&](const at::Tensor& g) {
        record.tensor("added tensor hook", g);
        return g * 2;
      });
      net.a.retain_grad();
      add_pre_hook(net.a.grad_fn(), [&](const variable_list& grads) {
        record.line("added pre hook");
        return grads;
      });
      add_post_hook(net.a.grad_fn(), [&](const variable_list& outputs, const variable_list& inputs) {
        record.line("added post hook ", inputs.size());
        return variable_list{outputs[0] * 3};
      });
      add_post_accumulate_hook(net.x, [&](const at::Tensor&) { record.line("added post accumulate hook"); });
      net.x.register_hook([&](const at::Tensor&) { record.line("added leaf hook"); });
    });
    net.loss.backward();
    record.tensor("a", net.a.grad());
    record.tensor("x", net.x.grad());
  });
  for (const char* kind : {"tensor hook", "pre hook", "post hook 1", "post accumulate hook", "leaf hook"}) {
    EXPECT_TRUE(stock.contains(std::string("added ") + kind)) << kind;
  }
}

TEST_F(Hooks, HooksMayRemoveHooksOfNodesThatHaveYetToRun) {
  expect_as_stock([](Record& record) {
    Net net;
    const unsigned hook = net.a.register_hook([&](const at::Tensor&) { record.line("removed too late"); });
    const auto node = net.a.grad_fn();
    const uintptr_t post =
        node->add_post_hook(std::make_unique<PostHook>([&](const variable_list& outputs, const variable_list&) {
          record.line("removed too late");
          return outputs;
        }));
    net.b.register_hook([&](const at::Tensor&) {
      net.a.remove_hook(hook);
      node->del_post_hook(post);
    });
    net.loss.backward();
  });
}

// A post-hook added while the node's own pre-hooks run finds the list empty no more, and sees the inputs.
TEST_F(Hooks, PreHookAddsAPostHookToItsOwnNode) {
  expect_as_stock([](Record& record) {
    Net net;
    const auto node = net.a.grad_fn();
    add_pre_hook(node, [&record, raw = node.get()](const variable_list& grads) {
      raw->add_post_hook(std::make_unique<PostHook>([&record](const variable_list& outputs, const variable_list& in) {
        record.line("post ", in.size());
        return outputs;
      }));
      return grads;
    });
    net.loss.backward();
    record.tensor("grad", net.x.grad());
  });
}

// --- Exceptions ---

enum class Where { kTensor, kPre, kPost, kPostAccumulate, kLeafTensor };

template <class Throw>
Program throwing(Where where, Throw fail) {
  return [where, fail](Record& record) {
    Net net;
    const at::Tensor y = at::rand({4}).requires_grad_();
    const at::Tensor loss = (net.loss + (y.exp() * net.a).sum()) * 2;
    record_order(record, {loss.grad_fn()});
    switch (where) {
      case Where::kTensor:
        net.a.register_hook([fail](const at::Tensor&) { fail(); });
        break;
      case Where::kPre:
        add_pre_hook(net.a.grad_fn(), [fail](const variable_list& grads) {
          fail();
          return grads;
        });
        break;
      case Where::kPost:
        add_post_hook(net.a.grad_fn(), [fail](const variable_list& outputs, const variable_list&) {
          fail();
          return outputs;
        });
        break;
      case Where::kPostAccumulate:
        add_post_accumulate_hook(y, [fail](const at::Tensor&) { fail(); });
        break;
      case Where::kLeafTensor:
        net.x.register_hook([fail](const at::Tensor&) { fail(); });
        break;
    }
    record.attempt([&] { loss.backward({}, /*retain_graph=*/true); });
    record.tensor("x", net.x.grad());
    record.tensor("y", y.grad());
    record.line("grad mode ", at::GradMode::is_enabled(), " task ", torch::autograd::get_current_graph_task_id(),
                " node ", current_node() != nullptr);
    // The graph and the thread are as good as before.
    record.attempt([&] {
      const auto got = torch::autograd::grad({loss}, {net.a}, {}, /*retain_graph=*/true);
      record.tensor("after", got[0]);
    });
  };
}

TEST_F(Hooks, ExceptionsKeepTypeTextAndPartialEffects) {
  for (const Where where : {Where::kTensor, Where::kPre, Where::kPost, Where::kPostAccumulate, Where::kLeafTensor}) {
    SCOPED_TRACE(static_cast<int>(where));
    const Record stock = expect_as_stock(throwing(where, [] { throw std::runtime_error("no more"); }));
    EXPECT_TRUE(stock.contains("no more"));
    expect_as_stock(throwing(where, [] { throw CustomError(); }));
    expect_as_stock(throwing(where, [] { TORCH_CHECK_VALUE(false, "bad value"); }));
  }
}

TEST_F(Hooks, WrongGradientsFromHooksAreReportedAsInStock) {
  const std::vector<std::function<at::Tensor(const at::Tensor&)>> wrong = {
      [](const at::Tensor&) { return at::ones({9}); },      [](const at::Tensor& g) { return g.to(at::kDouble); },
      [](const at::Tensor& g) { return g.expand({3, 4}); }, [](const at::Tensor& g) { return g.to(at::kComplexFloat); },
      [](const at::Tensor& g) { return g.to_sparse(); },
  };
  for (size_t i = 0; i < wrong.size(); ++i) {
    SCOPED_TRACE(i);
    expect_as_stock([&](Record& record) {
      Net net;
      add_post_hook(net.b.grad_fn(), [&](const variable_list& outputs, const variable_list&) {
        return variable_list{wrong[i](outputs[0]), outputs[1]};
      });
      record.attempt([&] { net.loss.backward(); });
      record.tensor("x", net.x.grad());
    });
    expect_as_stock([&](Record& record) {
      Net net;
      net.b.register_hook(wrong[i]);
      record.attempt([&] { net.loss.backward(); });
      record.tensor("x", net.x.grad());
    });
  }
}

// --- Post-hooks that return fewer gradients than the node has edges ---

TEST_F(Hooks, FewerGradientsLeaveNodesOutSilentlyWhenNothingWaits) {
  const Record stock = expect_as_stock([](Record& record) {
    const at::Tensor x = at::rand({2}).requires_grad_();
    const at::Tensor y = at::rand({2}).requires_grad_();
    const at::Tensor product = x * y.sin();
    add_post_hook(product.grad_fn(),
                  [](const variable_list& outputs, const variable_list&) { return variable_list{outputs[0]}; });
    record_order(record, {product.grad_fn()});
    record.attempt([&] { product.sum().backward(); });
    record.tensor("x", x.grad());
    record.tensor("y", y.grad());
  });
  EXPECT_TRUE(stock.contains("returned"));
  EXPECT_TRUE(stock.contains("y: undefined"));
}

TEST_F(Hooks, FewerGradientsAreAnErrorWhenAGradientWaits) {
  const Record stock = expect_as_stock([](Record& record) {
    const at::Tensor x = at::rand({2}).requires_grad_();
    const at::Tensor y = at::rand({2}).requires_grad_();
    const at::Tensor shared = y.sin();
    const at::Tensor product = x * shared;
    add_post_hook(product.grad_fn(),
                  [](const variable_list& outputs, const variable_list&) { return variable_list{outputs[0]}; });
    const at::Tensor loss = (product + shared * 2).sum();
    record_order(record, {loss.grad_fn()});
    record.attempt([&] { loss.backward(); });
    record.tensor("x", x.grad());
    record.tensor("y", y.grad());
  });
  EXPECT_TRUE(stock.contains("could not compute gradients for some functions"));
}

TEST_F(Hooks, NoGradientsAtAllFromAPostHook) {
  expect_as_stock([](Record& record) {
    Net net;
    add_post_hook(net.b.grad_fn(), [](const variable_list&, const variable_list&) { return variable_list{}; });
    record_order(record, {net.loss.grad_fn()});
    record.attempt([&] { net.loss.backward(); });
    record.tensor("x", net.x.grad());
  });
}

// The node that waits was sent an undefined gradient; it waits all the same.
TEST_F(Hooks, FewerGradientsAreAnErrorWhenAnUndefinedGradientWaits) {
  const Record stock = expect_as_stock([](Record& record) {
    const auto leaf = make_node(UINT64_MAX, 1);
    const auto other = make_node(UINT64_MAX, 1);
    const auto waiting = make_node(1, 1, {Edge(leaf, 0)});
    const auto undefined = make_node(2, 1, {Edge(waiting, 0)});
    undefined->undefined_outputs = 1;
    const auto starving = make_node(3, 1, {Edge(other, 0), Edge(waiting, 0)});
    const auto root = make_node(4, 1, {Edge(undefined, 0), Edge(starving, 0)});
    for (const auto& node : {leaf, other, waiting, undefined, starving, root}) node->record = &record;
    add_post_hook(starving,
                  [](const variable_list& outputs, const variable_list&) { return variable_list{outputs[0]}; });
    record.attempt([&] { execute({Edge(root, 0)}, {pair_of(1, 2)}); });
  });
  EXPECT_TRUE(stock.contains("could not compute gradients for some functions")) << stock.lines().back();
}

TEST_F(Hooks, FewerGradientsInRandomGraphs) {
  for (uint32_t seed = 0; seed < 150; ++seed) {
    SCOPED_TRACE(seed);
    expect_as_stock([seed](Record& record) {
      const RandomGraph graph = random_graph(seed, 15, &record);
      const auto& victim = graph.nodes[graph.nodes.size() - 1 - seed % std::min<size_t>(graph.nodes.size(), 3)];
      const size_t keep = seed % (victim->num_outputs() + 1);
      add_post_hook(victim, [keep](const variable_list& outputs, const variable_list&) {
        return variable_list(outputs.begin(), outputs.begin() + static_cast<ptrdiff_t>(keep));
      });
      record.attempt([&] { execute({Edge(graph.nodes.back(), 0)}, {pair_of(1, 2)}); });
    });
    if (HasFailure()) break;
  }
}

// --- Thread-local state ---

std::string thread_state() {
  return c10::str("grad ", at::GradMode::is_enabled(), " inference ", c10::InferenceMode::is_enabled(), " autocast ",
                  at::autocast::is_autocast_enabled(at::kCPU), " multithreading ",
                  c10::AutogradState::get_tls_state().get_multithreading_enabled());
}

void upset_thread_state() {
  at::GradMode::set_enabled(!at::GradMode::is_enabled());
  at::autocast::set_autocast_enabled(at::kCPU, true);
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
}

TEST_F(Hooks, ThreadStateDoesNotLeakFromHooks) {
  for (const bool create_graph : {false, true}) {
    SCOPED_TRACE(create_graph);
    expect_as_stock([&](Record& record) {
      Net net;
      for (const auto& node : nodes_under({net.loss.grad_fn()})) {
        add_pre_hook(node, [&record](const variable_list& grads) {
          record.line("pre: ", thread_state());
          upset_thread_state();
          return grads;
        });
        add_post_hook(node, [&record](const variable_list& outputs, const variable_list&) {
          record.line("post: ", thread_state());
          upset_thread_state();
          return outputs;
        });
      }
      net.a.register_hook([&](const at::Tensor&) {
        record.line("tensor: ", thread_state());
        upset_thread_state();
      });
      add_post_accumulate_hook(net.x, [&](const at::Tensor&) {
        record.line("post accumulate: ", thread_state());
        upset_thread_state();
      });
      torch::autograd::backward({net.loss}, {}, /*retain_graph=*/true, create_graph);
      record.line("after: ", thread_state());
      record.tensor("grad", net.x.grad());
      const auto got = torch::autograd::grad({net.loss}, {net.a, net.x}, {}, true, create_graph);
      record.line("after: ", thread_state());
      for (const at::Tensor& g : got) record.tensor("captured", g);
      net.x.mutable_grad() = at::Tensor();  // with its graph it would keep x, and itself, for ever
    });
  }
}

TEST_F(Hooks, ThreadStateDoesNotLeakWhenAHookThrows) {
  expect_as_stock([](Record& record) {
    Net net;
    net.a.register_hook([](const at::Tensor&) {
      upset_thread_state();
      throw std::runtime_error("no");
    });
    record.attempt([&] { net.loss.backward(); });
    record.line(thread_state());
  });
}

TEST_F(Hooks, CallersThreadStateReachesEveryNode) {
  expect_as_stock([](Record& record) {
    Net net;
    for (const auto& node : nodes_under({net.loss.grad_fn()})) {
      add_pre_hook(node, [&record](const variable_list& grads) {
        record.line(thread_state());
        return grads;
      });
    }
    at::NoGradGuard no_grad;
    at::autocast::set_autocast_enabled(at::kCPU, true);
    net.loss.backward();
    record.line("after: ", thread_state());
    at::autocast::set_autocast_enabled(at::kCPU, false);
    record.tensor("grad", net.x.grad());
  });
}

// A capture-only stop in a pruned graph runs tensor hooks too.
TEST_F(Hooks, ThreadStateDoesNotLeakFromHooksOfCapturedTensors) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = at::rand({2}).requires_grad_();
    const at::Tensor y = at::rand({2}).requires_grad_();
    const at::Tensor b = y.sin();
    const at::Tensor a = x.sin();
    for (const at::Tensor& t : {a, b, x, y}) {
      t.register_hook([&record](const at::Tensor&) {
        record.line(thread_state());
        upset_thread_state();
      });
    }
    const auto got = torch::autograd::grad({(a * b).sum()}, {a, x, y}, {}, false, /*create_graph=*/true);
    for (const at::Tensor& g : got) record.tensor("captured", g);
    record.line(thread_state());
  });
}

class LambdaSavedHooks final : public torch::autograd::SavedVariableHooks {
 public:
  explicit LambdaSavedHooks(std::function<void()> on_unpack) : on_unpack_(std::move(on_unpack)) {}
  void call_pack_hook(const at::Tensor& tensor) override { packed_ = tensor.detach().clone(); }
  at::Tensor call_unpack_hook() override {
    on_unpack_();
    return packed_;
  }

 private:
  std::function<void()> on_unpack_;
  at::Tensor packed_;
};

// A libtorch node runs user code only here: when it unpacks what it saved.
TEST_F(Hooks, SavedTensorHooksOfLibtorchNodes) {
  expect_as_stock([](Record& record) {
    Net net;
    auto* node = dynamic_cast<MulBackward0*>(net.b.grad_fn().get());
    ASSERT_NE(node, nullptr);
    node->other_.register_hooks(std::make_unique<LambdaSavedHooks>([&record] {
      record.line("unpack: ", thread_state(), " node ", current_node()->name());
      upset_thread_state();
    }));
    add_pre_hook(net.a.grad_fn(), [&record](const variable_list& grads) {
      record.line("next node: ", thread_state());
      return grads;
    });
    net.loss.backward();
    record.line("after: ", thread_state());
    record.tensor("grad", net.x.grad());
  });
}

TEST_F(Hooks, SavedTensorHookThatThrows) {
  expect_as_stock([](Record& record) {
    Net net;
    dynamic_cast<MulBackward0&>(*net.b.grad_fn()).other_.register_hooks(std::make_unique<LambdaSavedHooks>([] {
      throw CustomError();
    }));
    record.attempt([&] { net.loss.backward(); });
    record.line(thread_state());
    record.tensor("grad", net.x.grad());
  });
}

TEST_F(Hooks, SavedTensorHookMayAddAPostHookToItsOwnNode) {
  expect_as_stock([](Record& record) {
    Net net;
    auto& node = dynamic_cast<MulBackward0&>(*net.b.grad_fn());
    node.other_.register_hooks(std::make_unique<LambdaSavedHooks>([&record, &node] {
      node.add_post_hook(std::make_unique<PostHook>([&record](const variable_list& outputs, const variable_list& in) {
        record.line("post ", outputs.size(), " ", in.size());
        return variable_list{outputs[0] * 2, outputs[1]};
      }));
    }));
    net.loss.backward();
    record.tensor("grad", net.x.grad());
  });
}

// --- What a hook can ask ---

TEST_F(Hooks, GraphTaskDescribesTheRealGraph) {
  expect_as_stock([](Record& record) {
    Net net;
    const at::Tensor y = at::rand({4}).requires_grad_();
    const at::Tensor pruned = y.exp();
    const at::Tensor loss = (net.loss + (pruned * net.a).sum());
    const at::Tensor elsewhere = at::rand({2}).requires_grad_().sin();
    const auto nodes = nodes_under({loss.grad_fn(), elsewhere.grad_fn()});
    const auto describe_task = [&](const char* where) {
      record.line(where, ": task ", torch::autograd::get_current_graph_task_id() != -1, " keep graph ",
                  torch::autograd::get_current_graph_task_keep_graph());
      const auto* in_graph = torch::autograd::get_current_graph_task_nodes_in_graph();
      const auto* exec_info = torch::autograd::get_current_graph_task_exec_info();
      for (size_t i = 0; i < nodes.size(); ++i) {
        Node* node = nodes[i].get();
        const auto info = exec_info->find(node);
        std::string needed;
        for (size_t e = 0; e < node->num_outputs(); ++e) {
          needed += node->should_compute_output(e) && node->task_should_compute_output(e) ? '1' : '0';
        }
        record.line("  node ", i, " ", node->name(), " in graph ", in_graph->contains(node), " executes ",
                    exec_info->empty() || (info != exec_info->end() && info->second.should_execute()), " outputs ",
                    needed);
      }
    };
    net.b.register_hook([&](const at::Tensor&) { describe_task("b"); });
    net.x.register_hook([&](const at::Tensor&) { describe_task("x"); });
    loss.backward({}, /*retain_graph=*/true);
    torch::autograd::backward({loss, net.a}, {{}, at::ones({4})}, /*retain_graph=*/true);
    for (const variable_list& inputs : {variable_list{net.x}, variable_list{net.b}, variable_list{net.a, net.b}}) {
      torch::autograd::backward({loss}, {}, /*retain_graph=*/true, false, inputs);
      torch::autograd::grad({loss}, inputs, {}, /*retain_graph=*/true);
    }
    loss.backward();
    record.line("outside: ", torch::autograd::get_current_graph_task_id());
  });
}

// Asked at the first node of all (a call with several roots has one before any hook): later the stock engine has
// used up what it counts with.
TEST_F(Hooks, ExecutionOrderOfTheTaskIsTheRealGraphs) {
  const Record stock = expect_as_stock([](Record& record) {
    Net net;
    const auto nodes = nodes_under({net.loss.grad_fn()});
    const auto log_order = [&] {
      for (Node* node : torch::autograd::get_current_graph_task_execution_order()) {
        size_t i = 0;
        while (i < nodes.size() && nodes[i].get() != node) ++i;
        record.line("  ", i == nodes.size() ? "other node " : "node ", i, " ", node->name());
      }
    };
    net.loss.register_hook([&](const at::Tensor&) { record.attempt(log_order); });  // refuses: multithreading is on
    c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
    net.loss.backward({}, /*retain_graph=*/true);
    torch::autograd::grad({net.loss}, {net.a}, {}, /*retain_graph=*/true);
    c10::AutogradState::get_tls_state().set_multithreading_enabled(true);
    net.loss.backward();
  });
  EXPECT_TRUE(stock.contains("node 0 SumBackward0"));
}

TEST_F(Hooks, CurrentNodeIsTheStepsOwn) {
  expect_as_stock([](Record& record) {
    Net net;
    const auto nodes = nodes_under({net.loss.grad_fn()});
    for (const auto& node : nodes) {
      add_pre_hook(node, [&record, raw = node.get()](const variable_list& grads) {
        record.line("pre: own ", current_node().get() == raw);
        return grads;
      });
      add_post_hook(node, [&record, raw = node.get()](const variable_list& outputs, const variable_list&) {
        record.line("post: own ", current_node().get() == raw);
        return outputs;
      });
    }
    net.a.register_hook([&](const at::Tensor&) {
      record.line("tensor: ", current_node()->name());
      const at::AutoGradMode with_grad(true);
      const at::Tensor inner = at::rand({2}).requires_grad_();
      const at::Tensor root = inner.exp();
      root.register_hook([&](const at::Tensor&) { record.line("nested: ", current_node()->name()); });
      root.sum().backward();
      record.line("tensor, after a nested call: ", current_node()->name());
    });
    record.line("before ", current_node() == nullptr);
    net.loss.backward();
    record.line("after ", current_node() == nullptr);
  });
}

}  // namespace
}  // namespace retrograd::test
