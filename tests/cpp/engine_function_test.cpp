// C++ torch::autograd::Function, and backward calls from inside backward, against the stock engine.
#include <atomic>
#include <set>
#include <stdexcept>
#include <thread>

#include <torch/csrc/autograd/custom_function.h>

#include "engine/context.h"
#include "engine_test_util.h"

namespace retrograd::test {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Engine;
using torch::autograd::Function;

class CustomFunctions : public EngineTest {};

Record* current_record = nullptr;  // where the functions below write; set by each program

// (x, y) -> (x * y, x + y, sign of x), the last one not differentiable
struct Pair : Function<Pair> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& y, double scale) {
    ctx->save_for_backward({x, y});
    ctx->saved_data["scale"] = scale;
    const at::Tensor sign = x.sign();
    ctx->mark_non_differentiable({sign});
    return {x * y * scale, x + y, sign};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const double scale = ctx->saved_data["scale"].toDouble();
    for (const at::Tensor& g : grads) current_record->tensor("Pair gets", g);
    current_record->line("needs ", ctx->needs_input_grad(0), " ", ctx->needs_input_grad(1));
    return {grads[0] * saved[1] * scale + grads[1], grads[0] * saved[0] * scale + grads[1], at::Tensor()};
  }
};

// Keeps undefined gradients as they are, and gives none to its first input.
struct Undefined : Function<Undefined> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& y) {
    ctx->set_materialize_grads(false);
    return {x * 2, y * 3};
  }
  static variable_list backward(AutogradContext*, const variable_list& grads) {
    for (const at::Tensor& g : grads) current_record->tensor("Undefined gets", g);
    return {at::Tensor(), grads[1].defined() ? grads[1] * 3 : at::Tensor()};
  }
};

struct Throws : Function<Throws> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x) { return x * 2; }
  static variable_list backward(AutogradContext*, const variable_list&) { throw std::out_of_range("function threw"); }
};

struct WrongCount : Function<WrongCount> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x) { return x * 2; }
  static variable_list backward(AutogradContext*, const variable_list& grads) { return {grads[0], grads[0]}; }
};

struct WrongShape : Function<WrongShape> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x) { return x * 2; }
  static variable_list backward(AutogradContext*, const variable_list&) { return {at::ones({17})}; }
};

// Leaves grad mode switched.
struct SwitchesGradMode : Function<SwitchesGradMode> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& x) { return x * 2; }
  static variable_list backward(AutogradContext*, const variable_list& grads) {
    at::GradMode::set_enabled(!at::GradMode::is_enabled());
    return {grads[0] * 2};
  }
};

// Runs a function recomputed in its own graph, as reentrant checkpoint does.
struct Checkpoint : Function<Checkpoint> {
  static at::Tensor body(const at::Tensor& x, const at::Tensor& w) { return (x * w).sin(); }
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& w) {
    ctx->save_for_backward({x, w});
    at::NoGradGuard no_grad;
    return body(x, w);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    current_record->line("checkpoint valid ", Engine::get_default_engine().is_checkpoint_valid());
    const auto saved = ctx->get_saved_variables();
    const at::Tensor x = saved[0].detach().requires_grad_();
    const at::Tensor w = saved[1].detach().requires_grad_();
    at::AutoGradMode with_grad(true);
    const at::Tensor y = body(x, w);
    torch::autograd::backward({y}, {grads[0]});
    return {x.grad(), w.grad()};
  }
};

// Its saved tensors and its backward are differentiable.
struct Cube : Function<Cube> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x) {
    ctx->save_for_backward({x});
    return x * x * x;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const at::Tensor x = ctx->get_saved_variables()[0];
    return {grads[0] * x * x * 3};
  }
};

struct InPlaceDouble : Function<InPlaceDouble> {
  static at::Tensor forward(AutogradContext* ctx, at::Tensor x) {
    x.mul_(2);
    ctx->mark_dirty({x});
    return x;
  }
  static variable_list backward(AutogradContext*, const variable_list& grads) { return {grads[0] * 2}; }
};

TEST_F(CustomFunctions, SeveralOutputsAndNonDifferentiableOnes) {
  expect_as_stock([](Record& record) {
    current_record = &record;
    const at::Tensor x = at::rand({3}).requires_grad_();
    const at::Tensor y = at::rand({3}).requires_grad_();
    for (const int use : {0b01, 0b10, 0b11}) {
      const auto out = Pair::apply(x, y, 2.5);
      at::Tensor loss = out[2].sum();
      if ((use & 0b01) != 0) loss = loss + out[0].exp().sum();
      if ((use & 0b10) != 0) loss = loss + out[1].sum();
      loss.backward();
      record.tensor("x", x.grad());
      record.tensor("y", y.grad());
    }
  });
}

TEST_F(CustomFunctions, NeedsInputGradFollowsInputs) {
  const Record stock = expect_as_stock([](Record& record) {
    current_record = &record;
    const at::Tensor x = at::rand({3}).requires_grad_();
    const at::Tensor y = at::rand({3}).requires_grad_();
    const at::Tensor loss = Pair::apply(x.exp(), y, 1.5)[0].sum();
    record.tensor("x", torch::autograd::grad({loss}, {x}, {}, true)[0]);
    record.tensor("y", torch::autograd::grad({loss}, {y}, {}, true)[0]);
    torch::autograd::backward({loss}, {}, true, false, {y});
    torch::autograd::backward({loss}, {}, true, false, {x});
    loss.backward();
    record.tensor("x", x.grad());
    record.tensor("y", y.grad());
  });
  EXPECT_TRUE(stock.contains("needs 1 0") || stock.contains("needs true false"));
}

TEST_F(CustomFunctions, UndefinedGradientsPassThrough) {
  expect_as_stock([](Record& record) {
    current_record = &record;
    const at::Tensor x = at::rand({3}).requires_grad_();
    const at::Tensor y = at::rand({3}).requires_grad_();
    for (const size_t use : {0U, 1U}) {
      const auto out = Undefined::apply(x.sin(), y.sin());
      out[use].sum().backward();
      record.tensor("x", x.grad());
      record.tensor("y", y.grad());
    }
    const auto out = Undefined::apply(x.sin(), y.sin());
    const auto got = torch::autograd::grad({out[0].sum() + out[1].sum()}, {x, y}, {}, false, false, true);
    record.tensor("captured x", got[0]);
    record.tensor("captured y", got[1]);
  });
}

TEST_F(CustomFunctions, ErrorsInFunctionsAreTheStockEngines) {
  const auto failing = [](const auto& apply) {
    return [apply](Record& record) {
      const at::Tensor x = at::rand({3}).requires_grad_();
      const at::Tensor y = at::rand({3}).requires_grad_();
      const at::Tensor loss = (apply(x.sin()) + y.exp()).sum();
      record_order(record, {loss.grad_fn()});
      record.attempt([&] { loss.backward(); });
      record.tensor("x", x.grad());
      record.tensor("y", y.grad());
    };
  };
  EXPECT_TRUE(
      expect_as_stock(failing([](const at::Tensor& x) { return Throws::apply(x); })).contains("function threw"));
  EXPECT_TRUE(expect_as_stock(failing([](const at::Tensor& x) {
                return WrongCount::apply(x);
              })).contains("incorrect number of gradients"));
  EXPECT_TRUE(expect_as_stock(failing([](const at::Tensor& x) {
                return WrongShape::apply(x);
              })).contains("invalid gradient at index 0"));
}

TEST_F(CustomFunctions, GradModeDoesNotLeakFromFunctions) {
  for (const bool create_graph : {false, true}) {
    expect_as_stock([&](Record& record) {
      const at::Tensor x = at::rand({3}).requires_grad_();
      const at::Tensor loss = SwitchesGradMode::apply(SwitchesGradMode::apply(x * 2).sin() * x).sum();
      for (const auto& node : nodes_under({loss.grad_fn()})) {
        add_pre_hook(node, [&record](const variable_list& grads) {
          record.line(at::GradMode::is_enabled());
          return grads;
        });
      }
      torch::autograd::backward({loss}, {}, std::nullopt, create_graph);
      record.line("after ", at::GradMode::is_enabled());
      record.tensor("x", x.grad());
      x.mutable_grad() = at::Tensor();  // with its graph it would keep x, and itself, for ever
    });
  }
}

TEST_F(CustomFunctions, FreedFunctionGivesTheStockError) {
  const Record stock = expect_as_stock([](Record& record) {
    current_record = &record;
    const at::Tensor x = at::rand({3}).requires_grad_();
    const at::Tensor loss = Pair::apply(x, x, 1.0)[0].sum();
    loss.backward();
    record.attempt([&] { loss.backward(); });
    record.tensor("x", x.grad());
  });
  EXPECT_TRUE(stock.contains("backward through the graph a second time"));
}

TEST_F(CustomFunctions, DoubleBackwardThroughAFunction) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = at::rand({3}).requires_grad_();
    at::Tensor y = Cube::apply(x.sin()).sum();
    for (int order = 1; order <= 3; ++order) {
      y = torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0].sum();
      record.tensor("derivative", y);
    }
    y.backward();
    record.tensor("x", x.grad());
  });
}

TEST_F(CustomFunctions, FunctionThatWorksInPlace) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = at::rand({4}).requires_grad_();
    const at::Tensor y = x.sin();
    const at::Tensor z = InPlaceDouble::apply(y);
    (z * x).sum().backward();
    record.tensor("x", x.grad());
    // Through a view: the function's node becomes part of a CopySlices.
    const at::Tensor base = x.cos();
    InPlaceDouble::apply(base.slice(0, 1, 3));
    record.line(base.grad_fn()->name());
    base.exp().sum().backward();
    record.tensor("x", x.grad());
  });
}

// --- Nested calls ---

class NestedCalls : public EngineTest {};

TEST_F(NestedCalls, ReentrantCheckpoint) {
  expect_as_stock([](Record& record) {
    current_record = &record;
    const at::Tensor x = at::rand({3}).requires_grad_();
    std::vector<at::Tensor> weights;
    at::Tensor y = x;
    for (int i = 0; i < 4; ++i) {
      weights.push_back(at::rand({3}).requires_grad_());
      y = Checkpoint::apply(y, weights.back());
    }
    y.sum().backward();
    record.tensor("x", x.grad());
    for (const at::Tensor& w : weights) record.tensor("w", w.grad());
  });
}

TEST_F(NestedCalls, CheckpointInsideGradIsInvalid) {
  expect_as_stock([](Record& record) {
    current_record = &record;
    const at::Tensor x = at::rand({3}).requires_grad_();
    const at::Tensor y = Checkpoint::apply(x, at::rand({3}).requires_grad_()).sum();
    record.tensor("x", torch::autograd::grad({y}, {x}, {}, true)[0]);
    torch::autograd::backward({y}, {}, true, false, {x});
    record.tensor("x", x.grad());
  });
}

TEST_F(NestedCalls, AreCountedAsNested) {
  Record record;
  current_record = &record;
  reset_stats();
  Enable on;
  const at::Tensor x = at::rand({3}).requires_grad_();
  Checkpoint::apply(Checkpoint::apply(x, x), x).sum().backward();
  const Stats s = stats();
  EXPECT_EQ(s.schedule_calls, 3U);
  EXPECT_EQ(s.nested_calls, 2U);
  EXPECT_EQ(s.max_depth, 2U);
}

// One level of a nest: a backward call whose hook makes the next level.
void nest(int depth, const std::function<void(int depth)>& inside, Record& record) {
  const at::AutoGradMode with_grad(true);  // the engine turns it off
  const at::Tensor x = at::full({2}, 1.0 + depth, at::kDouble).requires_grad_();
  const at::Tensor y = x * 2;
  y.register_hook([&, depth](const at::Tensor& g) {
    record.line("enter ", depth);
    inside(depth);
    if (depth > 0) nest(depth - 1, inside, record);
    record.line("leave ", depth, " task ", torch::autograd::get_current_graph_task_id() != -1, " node ",
                current_node()->name());
    return g * (depth + 1);
  });
  (y * x).sum().backward();
  record.tensor("grad", x.grad());
}

TEST_F(NestedCalls, TwoHundredLevelsDeepChangeThreadsAndStayOnTheSchedule) {
  std::set<std::thread::id> threads;
  const Program program = [&](Record& record) {
    threads.clear();
    nest(200, [&](int) { threads.insert(std::this_thread::get_id()); }, record);
  };
  expect_as_stock(program);
  EXPECT_GT(threads.size(), 2U) << "the stock engine hands deep calls to other threads; this test needs it to";

  reset_stats();
  {
    Enable on;
    Record record;
    program(record);
  }
  const Stats s = stats();
  EXPECT_EQ(s.schedule_calls, 201U);
  EXPECT_EQ(s.nested_calls, 200U);
  EXPECT_EQ(s.max_depth, 201U);
  EXPECT_EQ(s.previous_total(), 0U);

  // The threads that took part are the stock engine's; they must not stay enabled.
  reset_stats();
  Record record;
  program(record);
  EXPECT_EQ(stats().schedule_calls, 0U);
  EXPECT_EQ(previous_calls(stats(), PreviousReason::kNotEnabled), 201U);
}

TEST_F(NestedCalls, DisabledFromSomeDepthOn) {
  for (const bool default_on : {false, true}) {
    SCOPED_TRACE(default_on);
    if (default_on) set_default(Options());
    reset_stats();
    Record record;
    {
      Enable on;
      nest(
          30,
          [&](int level) {
            if (level != 0) return;
            Disable off;
            nest(70, [](int) {}, record);  // past 60 levels on threads of the stock engine, which set nothing
          },
          record);
    }
    EXPECT_EQ(stats().schedule_calls, 31U);
    EXPECT_EQ(previous_calls(stats(), PreviousReason::kNotEnabled), 71U);
  }
}

TEST_F(NestedCalls, EnabledFromSomeDepthOnAndDisabledAgain) {
  reset_stats();
  Record record;
  nest(
      70,  // its deepest level is on a thread of the stock engine
      [&](int level) {
        if (level != 0) return;
        Enable on;
        nest(
            70,
            [&](int inner) {
              if (inner != 0) return;
              Disable off;
              nest(70, [](int) {}, record);
            },
            record);
      },
      record);
  EXPECT_EQ(stats().schedule_calls, 71U);
  EXPECT_EQ(previous_calls(stats(), PreviousReason::kNotEnabled), 142U);
  EXPECT_EQ(stats().max_depth, 71U);

  reset_stats();
  nest(150, [](int) {}, record);
  EXPECT_EQ(stats().schedule_calls, 0U) << "threads of the stock engine keep a choice";
}

TEST_F(NestedCalls, DisabledThreadStaysDisabledAtEveryDepthWhateverTheDefault) {
  set_default(Options());
  reset_stats();
  Record record;
  {
    Disable off;
    nest(150, [](int) {}, record);
  }
  EXPECT_EQ(stats().schedule_calls, 0U);
  nest(150, [](int) {}, record);
  EXPECT_EQ(stats().schedule_calls, 151U);
}

TEST_F(NestedCalls, ExceptionFromTheDeepestLevelKeepsItsType) {
  for (const int depth : {1, 5, 70, 150}) {
    SCOPED_TRACE(depth);
    const Record stock = expect_as_stock([depth](Record& record) {
      record.attempt([&] {
        nest(
            depth,
            [](int level) {
              if (level == 0) throw std::domain_error("too deep");
            },
            record);
      });
      record.line("task ", torch::autograd::get_current_graph_task_id(), " node ", current_node() != nullptr);
      nest(2, [](int) {}, record);
    });
    EXPECT_TRUE(stock.contains("domain_error"));
  }
}

TEST_F(NestedCalls, ExceptionCaughtBetweenLevelsLetsTheOuterCallsFinish) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = at::rand({2}).requires_grad_();
    const at::Tensor y = x.sin();
    y.register_hook([&](const at::Tensor&) {
      record.attempt([&] {
        nest(
            3,
            [](int level) {
              if (level == 1) throw std::domain_error("inner");
            },
            record);
      });
      record.line(current_node()->name(), " ", at::GradMode::is_enabled());
    });
    y.sum().backward();
    record.tensor("grad", x.grad());
  });
}

TEST_F(NestedCalls, CallbacksFireAtTheEndOfTheirOwnCall) {
  for (const int depth : {0, 3, 70}) {
    SCOPED_TRACE(depth);
    const Record stock = expect_as_stock([depth](Record& record) {
      nest(
          depth,
          [&](int level) {
            for (const char* which : {"first", "second"}) {
              Engine::get_default_engine().queue_callback([&record, level, which] {
                record.line("callback ", which, " of ", level, " grad mode ", at::GradMode::is_enabled());
              });
            }
          },
          record);
    });
    EXPECT_TRUE(stock.contains(c10::str("callback second of ", depth)));
  }
}

TEST_F(NestedCalls, CallbacksMayQueueCallbacksCallBackwardAndThrow) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = at::rand({2}).requires_grad_();
    const at::Tensor y = x.sin();
    y.register_hook([&](const at::Tensor&) {
      Engine::get_default_engine().queue_callback([&record, x] {
        record.tensor("in callback", x.grad());
        nest(1, [](int) {}, record);
        Engine::get_default_engine().queue_callback([&record] { record.line("queued by a callback"); });
      });
    });
    y.sum().backward();
    const at::Tensor z = x.cos();
    z.register_hook([&](const at::Tensor&) {
      Engine::get_default_engine().queue_callback([] { throw std::domain_error("callback"); });
    });
    record.attempt([&] { z.sum().backward(); });
    record.attempt([&] { Engine::get_default_engine().queue_callback([] {}); });
    record.tensor("grad", x.grad());
  });
}

TEST_F(NestedCalls, CallbacksDoNotFireWhenTheCallThrows) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = at::rand({2}).requires_grad_();
    const at::Tensor y = x.sin();
    const at::Tensor z = y.sin();
    z.register_hook(
        [&](const at::Tensor&) { Engine::get_default_engine().queue_callback([&record] { record.line("fired"); }); });
    y.register_hook([](const at::Tensor&) { throw std::runtime_error("no"); });
    record.attempt([&] { z.sum().backward(); });
  });
}

TEST_F(NestedCalls, TaskIdIsOneForACallAndAnotherForANestedOne) {
  expect_as_stock([](Record& record) {
    std::vector<int> ids;
    const at::Tensor x = at::rand({2}).requires_grad_();
    const at::Tensor y = x.sin();
    const at::Tensor z = y.sin();
    const auto log = [&](const char* where) {
      const int id = torch::autograd::get_current_graph_task_id();
      size_t known = 0;
      while (known < ids.size() && ids[known] != id) ++known;
      if (known == ids.size()) ids.push_back(id);
      record.line(where, " id ", known, " valid ", id >= 0);
    };
    z.register_hook([&](const at::Tensor&) {
      log("outer");
      nest(2, [&](int) { log("nested"); }, record);
      log("outer again");
    });
    y.register_hook([&](const at::Tensor&) { log("outer, later"); });
    Engine& engine = Engine::get_default_engine();
    x.register_hook([&](const at::Tensor&) { engine.queue_callback([&] { log("callback"); }); });
    z.sum().backward();
    record.line("outside ", torch::autograd::get_current_graph_task_id());
  });
}

TEST_F(NestedCalls, NestedCallOverTheOuterGraph) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = at::rand({2}).requires_grad_();
    const at::Tensor y = x.sin();
    const at::Tensor z = (y * x).exp();
    bool inside = false;
    z.register_hook([&](const at::Tensor&) {
      if (inside) return;
      inside = true;
      record.tensor("nested", torch::autograd::grad({z}, {x, y}, {at::ones({2})}, /*retain_graph=*/true)[1]);
      y.backward(at::ones({2}), /*retain_graph=*/true);
    });
    z.sum().backward();
    record.tensor("grad", x.grad());
  });
}

TEST_F(NestedCalls, NestedCallThatFreesTheOuterGraph) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = at::rand({2}).requires_grad_();
    const at::Tensor y = x.exp();
    const at::Tensor z = y * x;
    z.register_hook([&](const at::Tensor&) { y.sum().backward(); });
    record.attempt([&] { z.sum().backward(); });
    record.tensor("grad", x.grad());
  });
}

// A nested call goes to the previous engine, and from there back to the schedule.
TEST_F(NestedCalls, EnginesTakeTurnsByLevel) {
  const auto levels = [](Record& record, bool switching) {
    std::function<void(int)> level = [&](int depth) {
      const at::AutoGradMode with_grad(true);
      const at::Tensor x = at::rand({2}).requires_grad_();
      const at::Tensor y = depth % 2 == 0 ? x.sin() : x.cos();  // a level's node has its own name
      y.register_hook([&, depth](const at::Tensor&) {
        record.line("own node ", current_node()->name(), " task ", torch::autograd::get_current_graph_task_id() >= 0);
        if (depth == 0) return;
        if (!switching) {
          level(depth - 1);
        } else if (depth % 2 == 0) {
          Disable off;
          level(depth - 1);
        } else {
          Enable on;
          level(depth - 1);
        }
        record.line("own node again ", current_node()->name());
      });
      y.sum().backward();
      record.tensor("grad", x.grad());
    };
    level(6);
  };
  Record expected;
  at::manual_seed(7);
  levels(expected, false);
  Record got;
  at::manual_seed(7);
  reset_stats();
  {
    Enable on;
    levels(got, true);
  }
  EXPECT_EQ(difference(got.lines(), expected.lines()), "");
  EXPECT_EQ(stats().schedule_calls, 4U);
  EXPECT_EQ(previous_calls(stats(), PreviousReason::kNotEnabled), 3U);
  EXPECT_FALSE(enabled_here());
}

TEST_F(NestedCalls, OwnFrameIsGoneAfterTheCall) {
  Enable on;
  EXPECT_EQ(thread_context().frame, nullptr);
  const at::Tensor x = at::rand({2}).requires_grad_();
  const at::Tensor y = x.sin();
  uint64_t depth = 0;
  y.register_hook([&](const at::Tensor&) {
    depth = thread_context().frame->depth;
    throw std::runtime_error("no");
  });
  EXPECT_THROW(y.sum().backward(), std::runtime_error);
  EXPECT_EQ(depth, 1U);
  EXPECT_EQ(thread_context().frame, nullptr);
}

}  // namespace
}  // namespace retrograd::test
