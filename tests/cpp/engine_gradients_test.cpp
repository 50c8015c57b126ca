// Gradients of every kind, what becomes of saved tensors and of .grad, and errors, against the stock engine.
#include <atomic>
#include <tuple>

#include <ATen/LegacyVmapMode.h>
#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/custom_function.h>

#include "engine/engine.h"
#include "engine_test_util.h"

namespace retrograd::test {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;

class Gradients : public EngineTest {};

at::Tensor leaf(at::IntArrayRef sizes) { return at::rand(sizes).requires_grad_(); }

TEST_F(Gradients, MultilayerPerceptron) {
  expect_as_stock([](Record& record) {
    std::vector<at::Tensor> weights;
    std::vector<at::Tensor> biases;
    for (int i = 0; i < 4; ++i) {
      weights.push_back(leaf({8, 8}));
      biases.push_back(leaf({8}));
    }
    for (int step = 0; step < 3; ++step) {
      at::Tensor x = at::rand({5, 8});
      for (size_t i = 0; i < weights.size(); ++i) x = at::relu(at::linear(x, weights[i], biases[i]));
      at::mse_loss(x, at::rand({5, 8})).backward();
      for (size_t i = 0; i < weights.size(); ++i) {
        record.tensor("weight", weights[i].grad());
        record.tensor("bias", biases[i].grad());
      }
    }
  });
}

TEST_F(Gradients, NodesWithManyInputsAndOutputs) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = leaf({6, 4});
    const at::Tensor w = leaf({12, 4});
    const at::Tensor u = leaf({12, 3});
    const auto cell = at::lstm_cell(x, {at::zeros({6, 3}), leaf({6, 3})}, w, u);
    const auto [values, indices] = x.sort(1);
    const auto [q, r] = at::linalg_qr(x);
    const auto chunks = x.split(2, 0);
    at::Tensor loss = (values * at::arange(4)).sum() + q.sum() + r.sum() + std::get<0>(cell).sum();
    loss = loss + (chunks[0] * chunks[2]).sum() + at::cat({chunks[1], chunks[0].exp()}).sum();
    record_order(record, {loss.grad_fn()});
    loss.backward();
    for (const at::Tensor& t : {x, w, u}) record.tensor("grad", t.grad());
  });
}

TEST_F(Gradients, ViewsAndInPlaceOperations) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = leaf({4, 4});
    at::Tensor y = x * 2;
    y.select(0, 1).mul_(3);  // CopySlices
    y.narrow(1, 0, 2).add_(x.slice(1, 2, 4));
    const at::Tensor view = y.t();
    y.diagonal().copy_(x.diagonal().sin());
    at::Tensor z = view * 2;
    z.sigmoid_();
    const at::Tensor loss = (z * y).sum();
    record_order(record, {loss.grad_fn()});
    loss.backward();
    record.tensor("x", x.grad());
  });
}

TEST_F(Gradients, HooksAroundInPlaceOperations) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = leaf({4});
    at::Tensor y = x * 2;
    y.retain_grad();
    y.register_hook([&](const at::Tensor& g) { record.tensor("before", g); });
    y.mul_(3);
    y.register_hook([&](const at::Tensor& g) { record.tensor("after", g); });
    y.slice(0, 0, 2).exp_();
    y.sum().backward();
    record.tensor("y", y.grad());
    record.tensor("x", x.grad());
  });
}

TEST_F(Gradients, SparseEmbedding) {
  expect_as_stock([](Record& record) {
    const at::Tensor weight = leaf({10, 3});
    for (int step = 0; step < 3; ++step) {
      const at::Tensor index = at::randint(10, {2, 4}, at::kLong);
      at::embedding(weight, index, -1, false, /*sparse=*/true).sin().sum().backward();
      record.tensor("weight", weight.grad());
    }
    record.tensor("sum", weight.grad().to_dense());
  });
}

TEST_F(Gradients, SparseAndDenseMeetInEitherOrder) {
  for (const int order : {0, 1, 2}) {
    expect_as_stock([order](Record& record) {
      const at::Tensor weight = leaf({10, 3});
      const at::Tensor table = weight * 1;  // the two meet at a node, then at the leaf
      const at::Tensor index = at::randint(10, {6}, at::kLong);
      const auto sparse = [&](const at::Tensor& t) { return at::embedding(t, index, -1, false, true).sum(); };
      const auto dense = [&](const at::Tensor& t) { return t.exp().sum(); };
      at::Tensor loss = order == 0 ? sparse(weight) : dense(weight);
      loss = loss + (order == 0 ? dense(weight) : sparse(weight));
      if (order == 2) loss = loss + sparse(weight) + dense(table);
      loss.backward({}, /*retain_graph=*/true);
      record.tensor("weight", weight.grad());
      loss.backward();
      record.tensor("weight, twice", weight.grad());
    });
  }
}

TEST_F(Gradients, ComplexNumbers) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = at::rand({4}, at::kComplexFloat).requires_grad_();
    const at::Tensor r = leaf({4});
    const at::Tensor y = (x * r).exp() + at::conj(x) * x;  // a real leaf gets a complex gradient to cast
    const at::Tensor loss = at::real(y).sum() + y.abs().sum() + at::view_as_real(y).select(-1, 1).sum();
    loss.backward();
    record.tensor("x", x.grad());
    record.tensor("r", r.grad());
    y.sum().abs();
    record.attempt([&] { (x * r).sum().backward(); });
    record.attempt([&] { (x * r).sum().backward(at::ones({}, at::kComplexFloat)); });
    record.tensor("x", x.grad());
  });
}

TEST_F(Gradients, OtherTypesAndShapes) {
  expect_as_stock([](Record& record) {
    const at::Tensor d = at::rand({3}, at::kDouble).requires_grad_();
    const at::Tensor b = at::rand({3}).to(at::kBFloat16).requires_grad_();
    const at::Tensor row = leaf({1, 3});
    const at::Tensor scalar = leaf({});
    const at::Tensor empty = leaf({0, 3});
    const at::Tensor strided = at::rand({3, 2}).t().detach().requires_grad_();
    const at::Tensor channels = at::rand({2, 3, 4, 4}).contiguous(at::MemoryFormat::ChannelsLast).requires_grad_();
    at::Tensor loss = (d * b.to(at::kDouble) * row * scalar).sum() + (strided * leaf({2, 3})).sum();
    loss = loss + empty.exp().sum() + (channels * channels.exp()).sum();
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    for (const at::Tensor& t : {d, b, row, scalar, empty, strided, channels}) record.tensor("grad", t.grad());
  });
}

TEST_F(Gradients, GradientsGivenByTheCaller) {
  const Program program = [](Record& record) {
    const at::Tensor x = leaf({2, 3});
    const at::Tensor y = x.exp();
    y.backward(at::rand({2, 3}).t().contiguous().t(), /*retain_graph=*/true);
    record.tensor("x", x.grad());
    y.backward(at::ones({}).expand({2, 3}), true);
    record.attempt([&] { y.backward(at::ones({4}), true); });
    record.attempt([&] { y.backward({}, true); });
    record.attempt([&] { y.backward(at::ones({2, 3}, at::kDouble), true); });
    record.attempt([&] { torch::autograd::backward({y, y.sum()}, {at::ones({2, 3}), {}}); });
    record.tensor("x", x.grad());
  };
  expect_as_stock(program, /*refused=*/1);  // the gradient that has the wrong shape
}

TEST_F(Gradients, DoubleBackward) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = leaf({3});
    const at::Tensor w = leaf({3});
    const at::Tensor y = (x.pow(3) * w).sin().sum();
    const auto first = torch::autograd::grad({y}, {x, w}, {}, std::nullopt, /*create_graph=*/true);
    for (const at::Tensor& g : first) record.tensor("first", g);
    const at::Tensor penalty = first[0].pow(2).sum() + first[1].exp().sum();
    record_order(record, {penalty.grad_fn()});
    penalty.backward();
    record.tensor("x", x.grad());
    record.tensor("w", w.grad());
  });
}

TEST_F(Gradients, CreateGraphAccumulatesDifferentiableGradients) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = leaf({3});
    for (int i = 0; i < 2; ++i) {
      torch::autograd::backward({x.exp().sum()}, {}, std::nullopt, /*create_graph=*/true);
      record.tensor("x", x.grad());
    }
    const at::Tensor g = x.grad();
    x.mutable_grad() = at::Tensor();
    g.sum().backward();
    record.tensor("second", x.grad());
  });
}

TEST_F(Gradients, NoGradAroundBackwardStillCreatesTheGraph) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = leaf({3});
    const at::Tensor y = x.exp().sum();
    at::NoGradGuard no_grad;
    record.tensor("x", torch::autograd::grad({y}, {x}, {}, true, true)[0]);
    record.tensor("x", torch::autograd::grad({y}, {x}, {}, true, false)[0]);
    record.line(at::GradMode::is_enabled());
  });
}

TEST_F(Gradients, RetainedGraphRunsAgain) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = leaf({3});
    const at::Tensor y = (x.exp() * x).sum();
    for (int i = 0; i < 3; ++i) {
      y.backward({}, /*retain_graph=*/true);
      record.tensor("x", x.grad());
    }
  });
}

TEST_F(Gradients, FreedGraphGivesTheStockErrorAfterTheStockEffects) {
  const Record stock = expect_as_stock([](Record& record) {
    const at::Tensor x = leaf({3});
    const at::Tensor w = leaf({3});
    const at::Tensor y = (x.exp() + w).sin();
    y.sum().backward();
    record.attempt([&] { (y + w * 2).sum().backward(); });  // w's part runs before the freed one
    record.tensor("x", x.grad());
    record.tensor("w", w.grad());
    record.attempt([&] { (x + w).sum().backward(); });
    record.tensor("x", x.grad());
  });
  EXPECT_TRUE(stock.contains("backward through the graph a second time"));
}

TEST_F(Gradients, SavedTensorModifiedInPlaceGivesTheStockError) {
  const Record stock = expect_as_stock([](Record& record) {
    const at::Tensor x = leaf({3});
    const at::Tensor y = x.exp();
    const at::Tensor z = y * x;
    y.add_(1);
    record.attempt([&] { (z + x).sum().backward(); });
    record.tensor("x", x.grad());
  });
  EXPECT_TRUE(stock.contains("modified by an inplace operation"));
}

TEST_F(Gradients, UndefinedGradientsAndUnusedInputs) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = leaf({3});
    const at::Tensor y = leaf({3});
    const at::Tensor detached = x.detach();
    const at::Tensor loss = (x * detached).sum() + y.detach().sum();
    const auto got = torch::autograd::grad({loss}, {x, y}, {}, true, false, /*allow_unused=*/true);
    record.tensor("x", got[0]);
    record.tensor("y", got[1]);
    record.attempt([&] { torch::autograd::grad({loss}, {x, y}, {}, true); });
    loss.backward();
    record.tensor("x", x.grad());
    record.tensor("y", y.grad());
  });
}

TEST_F(Gradients, GradOfSeveralOutputsWithRespectToSeveralInputs) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = leaf({3});
    const at::Tensor a = x.sin();
    const at::Tensor b = a * x;
    const at::Tensor c = b.exp();
    const auto got = torch::autograd::grad({c, b, a.sum()}, {x, a, c, b, x}, {at::rand({3}), at::rand({3}), {}}, true);
    for (const at::Tensor& g : got) record.tensor("captured", g);
    const auto again = torch::autograd::grad({c.sum()}, {c, c}, {}, true, false, true);
    for (const at::Tensor& g : again) record.tensor("captured", g);
    torch::autograd::backward({c, a}, {at::rand({3}), at::rand({3})}, true, false, {x});
    record.tensor("x", x.grad());
  });
}

// --- Calls that the stock engine refuses or takes apart reach it ---

TEST_F(Gradients, IrregularCallsReachThePreviousEngine) {
  const at::Tensor x = leaf({3});
  const at::Tensor y = x.sin().sum();
  const Edge edge = torch::autograd::impl::gradient_edge(y);
  const auto outcome = [&](const edge_list& roots, const variable_list& gradients, bool accumulate,
                           const edge_list& outputs) {
    Record record;
    record.attempt([&] {
      for (const at::Tensor& g : execute(roots, gradients, /*keep_graph=*/true, accumulate, outputs)) {
        record.tensor("captured", g);
      }
    });
    record.tensor("x", x.grad());
    x.mutable_grad() = at::Tensor();
    return record.lines();
  };
  const at::Tensor one = at::ones({});
  const std::vector<std::tuple<edge_list, variable_list, bool, edge_list>> calls = {
      {{edge}, {at::Tensor()}, true, {}},
      {{edge}, {}, true, {}},
      {{edge}, {one, one}, true, {}},
  };
  for (size_t i = 0; i < calls.size(); ++i) {
    SCOPED_TRACE(i);
    const auto& [roots, gradients, accumulate, outputs] = calls[i];
    std::vector<std::string> expected;
    {
      Disable off;
      expected = outcome(roots, gradients, accumulate, outputs);
    }
    const Stats before = stats();
    Enable on;
    EXPECT_EQ(outcome(roots, gradients, accumulate, outputs), expected);
    EXPECT_EQ((stats() - before).schedule_calls, 0U);
    EXPECT_EQ(previous_calls(stats() - before, PreviousReason::kIrregularCall), 1U);
  }
}

TEST_F(Gradients, AnomalyModeReachesThePreviousEngine) {
  const at::Tensor x = leaf({3});
  const Stats before = stats();
  Enable on;
  torch::autograd::AnomalyMode::set_enabled(true);
  x.sin().sum().backward();
  torch::autograd::AnomalyMode::set_enabled(false);
  EXPECT_EQ(previous_calls(stats() - before, PreviousReason::kAnomalyMode), 1U);
  x.sin().sum().backward();
  EXPECT_EQ((stats() - before).schedule_calls, 1U);
}

TEST_F(Gradients, FunctorchAndCompiledAutogradReachThePreviousEngine) {
  const at::Tensor x = leaf({3});
  reset_stats();
  Enable on;
  const at::Tensor y = x.sin().sum();
  at::impl::VmapMode::increment_nesting();
  y.backward({}, /*retain_graph=*/true);
  at::impl::VmapMode::decrement_nesting();
  EXPECT_EQ(previous_calls(stats(), PreviousReason::kFunctorch), 1U);
  set_stock_compiled_autograd_active(true);
  y.backward({}, /*retain_graph=*/true);
  set_stock_compiled_autograd_active(false);
  EXPECT_EQ(previous_calls(stats(), PreviousReason::kCompiledAutograd), 1U);
  y.backward();
  EXPECT_EQ(stats().schedule_calls, 1U);
  EXPECT_EQ(stats().previous_total(), 2U);
}

// --- .grad ---

const void* last_gradient = nullptr;  // where the gradient lies that Source made last
at::Tensor kept_gradient;             // another reference to it, if Source is to keep one

// Its backward makes a gradient and notes where it lies.
struct Source : Function<Source> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, int64_t kind) {
    ctx->saved_data["kind"] = kind;
    return x * 2;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    at::Tensor g = grads[0] * 2;
    switch (ctx->saved_data["kind"].toInt()) {
      case 1:
        kept_gradient = g;
        break;
      case 2:
        g = g.t();
        break;  // not in the leaf's layout
      case 3:
        g = at::ones({1, 1}).expand(g.sizes());
        break;  // overlapping
      case 4:
        g = at::rand({6, 6}).slice(0, 0, g.size(0)).slice(1, 0, g.size(1));
        break;
      default:
        break;
    }
    last_gradient = g.const_data_ptr();
    return {g, at::Tensor()};
  }
};

TEST_F(Gradients, GradTakesGradientsOverExactlyWhenStockDoes) {
  const Record stock = expect_as_stock([](Record& record) {
    for (int64_t kind = 0; kind <= 4; ++kind) {
      for (const bool post_hook : {false, true}) {
        for (const bool pre_hook : {false, true}) {
          for (const bool create_graph : {false, true}) {
            const at::Tensor x = leaf({3, 3});
            const auto node = torch::autograd::impl::grad_accumulator(x);
            if (post_hook) {
              add_post_hook(node, [](const variable_list& outputs, const variable_list&) { return outputs; });
            }
            if (pre_hook) add_pre_hook(node, [](const variable_list& grads) { return grads; });
            const at::Tensor loss = Source::apply(x, kind).sum();
            torch::autograd::backward({loss}, {}, std::nullopt, create_graph);
            record.line("kind ", kind, " post ", post_hook, " pre ", pre_hook, " graph ", create_graph, ": taken over ",
                        x.grad().const_data_ptr() == last_gradient);
            record.tensor("x", x.grad());
            kept_gradient = at::Tensor();
            x.mutable_grad() = at::Tensor();  // with its graph it would keep x, and itself, for ever
          }
        }
      }
    }
  });
  EXPECT_TRUE(stock.contains("taken over true") || stock.contains("taken over 1"));
  EXPECT_TRUE(stock.contains("taken over false") || stock.contains("taken over 0"));
}

TEST_F(Gradients, GradSharesStorageExactlyWhenStockDoes) {
  expect_as_stock([](Record& record) {
    const auto same = [](const at::Tensor& a, const at::Tensor& b) { return a.is_alias_of(b); };
    const at::Tensor x = leaf({3});
    const at::Tensor y = leaf({3});
    const at::Tensor given = at::rand({3});
    (x + y).backward(given);  // one gradient for two leaves
    record.line("two leaves: ", same(x.grad(), y.grad()), same(x.grad(), given), same(y.grad(), given));
    const at::Tensor z = leaf({3});
    z.backward(given);
    record.line("root is a leaf: ", same(z.grad(), given));
    const at::Tensor u = leaf({3});
    u.backward(at::rand({3}));
    (u.view({3}) + leaf({3})).backward(at::rand({3}));
    record.tensor("u", u.grad());
    const at::Tensor v = leaf({3});
    const at::Tensor w = v + 0;
    w.retain_grad();
    w.backward(given);
    record.line("retained: ", same(v.grad(), w.grad()), same(v.grad(), given), same(w.grad(), given));
    const at::Tensor p = leaf({3});
    at::Tensor seen;
    p.register_hook([&](const at::Tensor& g) { seen = g; });
    (p * 2).sum().backward();
    record.line("hook keeps it: ", same(p.grad(), seen));
    const at::Tensor q = leaf({3});
    const auto got = torch::autograd::grad({q + 0}, {q}, {given});
    record.line("captured: ", same(got[0], given));
    torch::autograd::backward({q, q}, {given, given});
    record.line("two roots: ", same(q.grad(), given));
    record.tensor("q", q.grad());
    record.tensor("given", given);
  });
}

TEST_F(Gradients, AccumulationInPlaceKeepsTheGradWhereItIs) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = leaf({3});
    (x * 2).sum().backward();
    const at::Tensor held = x.grad();
    const void* place = held.const_data_ptr();
    x.exp().sum().backward();
    record.line("in place ", x.grad().const_data_ptr() == place, " same tensor ", x.grad().is_same(held));
    torch::autograd::backward({x.exp().sum()}, {}, std::nullopt, /*create_graph=*/true);
    record.line("with a graph ", x.grad().const_data_ptr() == place);
    record.tensor("x", x.grad());
    record.tensor("held", held);
    x.mutable_grad() = at::Tensor();  // with its graph it would keep x, and itself, for ever
  });
}

// Gradients given by the caller, or kept by a hook, must not be summed into.
TEST_F(Gradients, FanInNeverWritesIntoATensorThatOthersSee) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = leaf({3});
    const at::Tensor y = x.sin();
    std::vector<at::Tensor> kept;
    const at::Tensor a = y + 0;
    const at::Tensor b = y * 2;
    const at::Tensor c = y.exp();
    for (const at::Tensor& t : {a, b, c}) t.register_hook([&](const at::Tensor& g) { kept.push_back(g); });
    const auto node = b.grad_fn();
    add_post_hook(node, [&](const variable_list& outputs, const variable_list&) {
      kept.push_back(outputs[0]);
      return outputs;
    });
    const at::Tensor given = at::rand({3});
    (a + b + c).backward(given);
    for (const at::Tensor& g : kept) record.tensor("kept", g);
    record.tensor("given", given);
    record.tensor("x", x.grad());
  });
}

// --- Memory ---

std::atomic<int> live{0};  // gradients of Counted that are alive

at::Tensor counted_like(const at::Tensor& t) {
  ++live;
  auto* data = std::make_unique<std::vector<float>>(static_cast<size_t>(t.numel()), 1.5F).release();
  return at::from_blob(
      data->data(), t.sizes(),
      [data](void*) {
        const std::unique_ptr<std::vector<float>> owner(data);
        --live;
      },
      at::kFloat);
}

struct Counted : Function<Counted> {
  static variable_list forward(AutogradContext*, const at::Tensor& x) { return {x * 2, x * 3}; }
  static variable_list backward(AutogradContext*, const variable_list& grads) { return {counted_like(grads[0])}; }
};

TEST_F(Gradients, GradientsDieWhenStockLetsThemGo) {
  expect_as_stock([](Record& record) {
    live = 0;
    const at::Tensor x = leaf({4});
    std::vector<at::Tensor> branches;
    for (int i = 0; i < 3; ++i) {
      at::Tensor y = x;
      for (int k = 0; k < 3; ++k) {
        const auto out = Counted::apply(y);
        y = out[static_cast<size_t>(k % 2)] + (k == 1 ? out[1] : out[0]);
      }
      branches.push_back(y.sum());
    }
    const at::Tensor loss = at::stack(branches).sum();
    for (const auto& node : nodes_under({loss.grad_fn()})) {
      add_pre_hook(node, [&record, raw = node.get()](const variable_list& grads) {
        record.line(raw->name(), " starts with ", live.load(), " alive");
        return grads;
      });
    }
    loss.backward();
    record.line("after backward ", live.load());
    x.mutable_grad() = at::Tensor();
    record.line("after .grad is gone ", live.load());
  });
}

TEST_F(Gradients, SavedTensorsAreReleasedWhenStockReleasesThem) {
  for (const bool keep_graph : {false, true}) {
    const Record stock = expect_as_stock([keep_graph](Record& record) {
      const at::Tensor x = leaf({4});
      std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> saved;
      at::Tensor y = x;
      for (int i = 0; i < 4; ++i) {
        y = y.exp();  // saves its result
        saved.emplace_back(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(y.storage().unsafeGetStorageImpl()));
      }
      const at::Tensor loss = y.sum();
      y = at::Tensor();
      const auto alive = [&saved] {
        std::string text;
        for (const auto& storage : saved) text += storage.expired() ? '0' : '1';
        return text;
      };
      for (const auto& node : nodes_under({loss.grad_fn()})) {
        add_pre_hook(node, [&, raw = node.get()](const variable_list& grads) {
          record.line(raw->name(), " starts: ", alive());
          return grads;
        });
        add_post_hook(node, [&, raw = node.get()](const variable_list& outputs, const variable_list&) {
          record.line(raw->name(), " ends: ", alive());
          return outputs;
        });
      }
      loss.backward({}, keep_graph);
      record.line("after: ", alive());
    });
    EXPECT_TRUE(stock.contains(keep_graph ? "after: 1111" : "after: 0000"));
  }
}

TEST_F(Gradients, NothingHoldsTheGraphOrItsTensorsAfterTheCall) {
  Enable on;
  for (int round = 0; round < 3; ++round) {
    c10::weak_intrusive_ptr<Node> node{c10::intrusive_ptr<Node>()};
    c10::weak_intrusive_ptr<c10::TensorImpl> gradient{c10::intrusive_ptr<c10::TensorImpl>()};
    {
      const at::Tensor x = leaf({4});
      const at::Tensor y = x.exp();
      const at::Tensor loss = round == 2 ? (y * x).sum() : y.sum();
      node = c10::weak_intrusive_ptr<Node>(y.grad_fn());
      const at::Tensor given = at::ones({});
      gradient = c10::weak_intrusive_ptr<c10::TensorImpl>(given.getIntrusivePtr());
      loss.backward(given, /*retain_graph=*/round == 1);
      torch::autograd::grad({x.exp().sum() * loss.detach()}, {x});
    }
    EXPECT_TRUE(node.expired());
    EXPECT_TRUE(gradient.expired());
  }
}

TEST_F(Gradients, SequenceNumbersOfTheUserAreUntouched) {
  expect_as_stock([](Record& record) {
    const uint64_t start = at::sequence_number::peek();
    const at::Tensor x = leaf({4});
    for (int i = 0; i < 3; ++i) {
      x.exp().sum().backward();
      torch::autograd::grad({x.exp().sum()}, {x});
      torch::autograd::backward({x.exp().sum()}, {}, {}, false, {x});
    }
    record.line("numbers taken ", at::sequence_number::peek() - start);
  });
}

}  // namespace
}  // namespace retrograd::test
