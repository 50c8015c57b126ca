// Whole calls with fused plans, against the stock engine.
#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <dlfcn.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include "engine/context.h"
#include "engine/fused_graph.h"
#include "fused_test_util.h"

namespace retrograd::test {
namespace {

using torch::autograd::generated::MulBackward0;

class FusedRuns : public FusedTest {};

struct CustomError : std::exception {
  const char* what() const noexcept override { return "a custom error"; }
};

at::Tensor small(std::initializer_list<double> values) { return at::tensor(std::vector<double>(values), at::kDouble); }
at::Tensor leaf(double first = 1) { return small({first, 2, -1, 3}).requires_grad_(); }

// Writes a line at the hook of a tensor.
void log_hook(Record& record, const std::string& name, const at::Tensor& t) {
  t.register_hook([&record, name](const at::Tensor& g) { record.tensor(name, g); });
}
void log_leaf(Record& record, const std::string& name, const at::Tensor& t) {
  add_post_accumulate_hook(t, [&record, name](const at::Tensor& l) { record.tensor(name + " done", l.grad()); });
}

// x -> a -> b -> c -> d -> loss; weights w1 and w2 on the way. A hook at b makes two groups.
struct Net {
  at::Tensor x = leaf(), w1 = leaf(2), w2 = leaf(-3);
  at::Tensor a = x * w1;
  at::Tensor b = a + x;
  at::Tensor c = b * w2;
  at::Tensor d = c.neg();
  at::Tensor loss = (d + b * 2).sum();
};

// Graphs without saved sizes, so that a recorded plan serves any.
void run_of_size(Record& record, int64_t size) {
  const at::Tensor x = at::arange(size, at::kDouble).requires_grad_();
  const at::Tensor y = (x * x).neg() * x;
  y.backward(at::ones({size}, at::kDouble));
  record.tensor(c10::str("x of ", size), x.grad());
}

TEST_F(FusedRuns, NoPythonIsInThisProcess) { EXPECT_EQ(dlsym(RTLD_DEFAULT, "Py_IsInitialized"), nullptr); }

TEST_F(FusedRuns, OneGroup) {
  expect_as_stock([](Record& record) {
    Net net;
    net.loss.backward();
    for (const at::Tensor& t : {net.x, net.w1, net.w2}) record.tensor("grad", t.grad());
  });
  EXPECT_EQ(fused_groups_, 1U);
  EXPECT_EQ(unfused_groups_, 0U);
  EXPECT_EQ(compiler_.asked, 1);
  EXPECT_EQ(compiler_.runs, 3);
}

TEST_F(FusedRuns, RealKernels) {
  expect_as_stock([](Record& record) {
    const at::Tensor w = at::rand({5, 4}).requires_grad_(), v = at::rand({3, 5}).requires_grad_();
    const at::Tensor x = at::rand({7, 4});
    const at::Tensor hidden = at::linear(x, w).relu();
    const at::Tensor loss = (at::log_softmax(at::linear(hidden, v), 1).narrow(1, 0, 1)).mean();
    loss.backward();
    record.tensor("w", w.grad());
    record.tensor("v", v.grad());
  });
  EXPECT_EQ(fused_groups_, 1U);
}

TEST_F(FusedRuns, HooksCutAndKeepTheirOrder) {
  const Record stock = expect_as_stock([](Record& record) {
    Net net;
    log_hook(record, "b", net.b);
    net.b.register_hook([](const at::Tensor& g) { return g * 2; });
    for (const auto& [name, t] : {std::pair("x", net.x), std::pair("w1", net.w1), std::pair("w2", net.w2)}) {
      log_hook(record, name, t);
      log_leaf(record, name, t);
    }
    net.loss.backward();
  });
  EXPECT_TRUE(stock.contains("w2 done"));
  EXPECT_EQ(fused_groups_, 1U) << "behind b, a product alone is left";
}

TEST_F(FusedRuns, AllKindsOfHooks) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = leaf(), y = leaf(2);
    const at::Tensor a = (x * y).neg();
    const at::Tensor b = (a * x).neg();
    const at::Tensor c = (b * y).neg();
    const at::Tensor loss = (c * x).neg().sum();
    a.retain_grad();
    log_hook(record, "b", b);
    add_pre_hook(c.grad_fn(), [&record](const variable_list& grads) {
      record.line("pre: own ", current_node()->name());
      return variable_list{grads[0] * 2};
    });
    add_post_hook(b.grad_fn(), [&record](const variable_list& outputs, const variable_list& inputs) {
      record.tensor("post output", outputs[0]);
      record.tensor("post input", inputs[0]);
      return variable_list{outputs[0] * 3};
    });
    const auto accumulator = torch::autograd::impl::grad_accumulator(y);
    add_pre_hook(accumulator, [&record](const variable_list& grads) {
      record.tensor("y pre", grads[0]);
      return grads;
    });
    log_leaf(record, "x", x);
    log_leaf(record, "y", y);
    loss.backward();
    record.tensor("a", a.grad());
    record.line("no node: ", current_node() == nullptr);
  });
  EXPECT_GE(fused_groups_, 1U);
}

TEST_F(FusedRuns, CapturesInTheMiddle) {
  for (int what = 0; what < 6; ++what) {
    SCOPED_TRACE(what);
    expect_as_stock([what](Record& record) {
      Net net;
      const at::Tensor unused = leaf();
      const std::vector<variable_list> wanted{{net.x},         {net.b},           {net.b, net.x},
                                              {net.c, net.w1}, {net.loss, net.b}, {unused, net.w2, net.w2}};
      const auto got = torch::autograd::grad({net.loss}, wanted.at(static_cast<size_t>(what)), {}, false, false, true);
      for (const at::Tensor& g : got) record.tensor("captured", g);
      record.line("grad ", net.x.grad().defined());
    });
    EXPECT_GE(fused_groups_, 1U);
  }
}

TEST_F(FusedRuns, BackwardTowardsSomeInputsOnly) {
  for (int what = 0; what < 3; ++what) {
    SCOPED_TRACE(what);
    expect_as_stock([what](Record& record) {
      Net net;
      net.b.retain_grad();
      const std::vector<variable_list> wanted{{net.w2}, {net.w1, net.w2}, {net.b}};
      torch::autograd::backward({net.loss}, {}, false, false, wanted.at(static_cast<size_t>(what)));
      for (const at::Tensor& t : {net.x, net.w1, net.w2, net.b}) record.tensor("grad", t.grad());
    });
    EXPECT_GE(fused_groups_, 1U);
  }
}

// Nodes ask the task which of their outputs are needed; hooks may, too.
TEST_F(FusedRuns, TheTaskIsDescribedForPrunedCalls) {
  expect_as_stock([](Record& record) {
    Net net;
    const auto nodes = nodes_under({net.loss.grad_fn()});
    net.b.register_hook([&](const at::Tensor&) {
      const auto* exec_info = torch::autograd::get_current_graph_task_exec_info();
      for (size_t i = 0; i < nodes.size(); ++i) {
        const auto info = exec_info->find(nodes[i].get());
        record.line(i, " ", info != exec_info->end() && info->second.should_execute());
        for (size_t e = 0; e < nodes[i]->num_outputs(); ++e) record.line(nodes[i]->task_should_compute_output(e));
      }
    });
    for (const at::Tensor& g : torch::autograd::grad({net.loss}, {net.x, net.w2})) record.tensor("captured", g);
  });
}

TEST_F(FusedRuns, SeveralRoots) {
  expect_as_stock([](Record& record) {
    Net net;
    log_hook(record, "d", net.d);
    torch::autograd::backward({net.loss, net.a, net.b}, {{}, small({1, 2, 3, 4}), small({5, 6, 7, 8})});
    for (const at::Tensor& t : {net.x, net.w1, net.w2}) record.tensor("grad", t.grad());
  });
  EXPECT_GE(fused_groups_, 1U);
}

TEST_F(FusedRuns, KeptGraphs) {
  expect_as_stock([](Record& record) {
    Net net;
    for (int i = 0; i < 3; ++i) {
      net.loss.backward({}, /*retain_graph=*/i < 2);
      record.tensor("grad", net.x.grad());
    }
    record.attempt([&] { net.loss.backward(); });
    record.tensor("grad", net.x.grad());
  });
}

TEST_F(FusedRuns, WritesThroughViews) {
  const auto program = [](Record& record, bool whole) {
    const at::Tensor x = at::arange(12, at::kDouble).view({3, 4}).requires_grad_();
    const at::Tensor y = leaf();
    at::Tensor base = x * 2;
    at::Tensor row = base[1];
    row.mul_(y);
    base.t()[2].neg_();
    log_leaf(record, "y", y);
    if (whole) {
      (base * base).sum().backward();
      record.tensor("x", x.grad());
    } else {
      record.tensor("x", torch::autograd::grad({(base * base).sum()}, {x})[0]);
    }
  };
  expect_as_stock([&](Record& record) { program(record, true); });
  EXPECT_EQ(fused_groups_, 1U);
  expect_as_stock([&](Record& record) { program(record, false); });
}

TEST_F(FusedRuns, GradientsThatDoNotCome) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = at::arange(12, at::kDouble).view({3, 4}).requires_grad_();
    const auto parts = (x * 2).unbind();
    const at::Tensor kept = parts[1] * 3;  // leads nowhere
    const at::Tensor loss = (parts[0] * parts[0] + parts[2].neg()).sum();
    loss.backward();
    record.tensor("x", x.grad());
  });
  EXPECT_EQ(fused_groups_, 1U);
}

class Blocks final : public torch::autograd::Function<Blocks> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static variable_list backward(torch::autograd::AutogradContext*, variable_list) { return {at::Tensor()}; }
};

TEST_F(FusedRuns, AGroupThatGetsNothingAtAll) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = leaf(), y = leaf();
    log_hook(record, "x", x);
    const at::Tensor behind = (x.exp() * x).neg();
    (Blocks::apply(behind) + y * y).sum().backward();
    record.tensor("x", x.grad());
    record.tensor("y", y.grad());
  });
}

TEST_F(FusedRuns, CustomFunctionsRunByThemselves) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = leaf();
    struct Double final : torch::autograd::Function<Double> {
      static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& t) { return t * 2; }
      static variable_list backward(torch::autograd::AutogradContext*, variable_list g) { return {g[0] * 2}; }
    };
    (Double::apply((x * x).neg()) * x).neg().sum().backward();
    record.tensor("x", x.grad());
  });
  EXPECT_EQ(fused_groups_, 2U);
}

// The leaf takes over what the plan gave, without a copy.
TEST_F(FusedRuns, LeavesTakeResultsOver) {
  class Watch final : public GroupPlan {
   public:
    Watch(std::shared_ptr<const GroupPlan> inner, const void** result)
        : GroupPlan(inner->io()), inner_(std::move(inner)), result_(result) {}
    variable_list run(variable_list&& inputs) const override {
      variable_list results = inner_->run(std::move(inputs));
      *result_ = results.at(0).const_data_ptr();
      return results;
    }

   private:
    std::shared_ptr<const GroupPlan> inner_;
    const void** result_;
  };
  const void* result = nullptr;
  compiler_.wrap = [&](std::shared_ptr<const GroupPlan> plan) { return std::make_shared<const Watch>(plan, &result); };
  const Enable on(fused());
  const at::Tensor x = leaf();
  (x.neg() * 3).sum().backward();
  EXPECT_EQ(compiler_.runs, 1);
  EXPECT_EQ(x.grad().const_data_ptr(), result);
}

// What the group saved is the plan's alone when it runs, so that it can go when it was used; a kept graph keeps it.
TEST_F(FusedRuns, InputsAreGivenAway) {
  class Count final : public GroupPlan {
   public:
    Count(std::shared_ptr<const GroupPlan> inner, std::vector<size_t>* counts)
        : GroupPlan(inner->io()), inner_(std::move(inner)), counts_(counts) {}
    variable_list run(variable_list&& inputs) const override {
      counts_->clear();
      for (const at::Tensor& input : inputs)
        counts_->push_back(std::max<size_t>(input.use_count(), input.storage().use_count()));
      return inner_->run(std::move(inputs));
    }

   private:
    std::shared_ptr<const GroupPlan> inner_;
    std::vector<size_t>* counts_;
  };
  std::vector<size_t> counts;
  compiler_.wrap = [&](std::shared_ptr<const GroupPlan> plan) { return std::make_shared<const Count>(plan, &counts); };
  const Enable on(fused());
  for (int i = 0; i < 2; ++i) {
    for (const bool keep : {false, true}) {
      const at::Tensor x = leaf();
      at::Tensor root;
      {
        // A gradient between two steps, and results that only nodes hold.
        const at::Tensor middle = x.exp().exp().exp();
        middle.register_hook([](const at::Tensor& g) { return g * 1; });
        root = middle.sum();
      }
      root.backward({}, keep);
      ASSERT_EQ(counts.size(), 3U);
      // The last exp has a hook: its node runs by itself. Of the gradient, nobody else has a hold.
      // On a plan's first run all is kept, in case it fails.
      for (const size_t count : counts) EXPECT_TRUE(keep || i == 0 || count == 1) << count;
    }
  }
  EXPECT_EQ(compiler_.runs, 4);
}

// Nor is anything held while nodes run one by one: a leaf takes over what passes through them.
TEST_F(FusedRuns, NothingIsHeldWhileNodesRun) {
  compiler_.instead = [](const GroupRequest& request) {
    request.entry->refuse(-1);
    return true;
  };
  const Record stock = expect_as_stock([](Record& record) {
    const at::Tensor x = leaf();
    const at::Tensor y = (x + 1) + 1;
    const at::Tensor z = y * 2;
    const void* passed = nullptr;
    z.register_hook([&](const at::Tensor& g) { return g * 1; });
    add_post_hook(z.grad_fn(), [&](const variable_list& outputs, const variable_list&) {
      passed = outputs[0].const_data_ptr();
      return outputs;
    });
    z.backward(small({1, 2, 3, 4}));
    record.line("taken over ", x.grad().const_data_ptr() == passed);
  });
  EXPECT_TRUE(stock.contains("taken over 1"));
  EXPECT_EQ(unfused_groups_, 1U);
}

// --- Errors ---

TEST_F(FusedRuns, AFreedGraph) {
  expect_as_stock([](Record& record) {
    Net net;
    net.loss.backward();
    record.attempt([&] { net.loss.backward(); });
    for (const at::Tensor& t : {net.x, net.w1, net.w2}) record.tensor("grad", t.grad());
  });
}

// Part of a graph is freed: what stock does before it comes to that part is done, and no more.
TEST_F(FusedRuns, AFreedPart) {
  for (int where = 0; where < 4; ++where) {
    SCOPED_TRACE(where);
    expect_as_stock([where](Record& record) {
      std::vector<at::Tensor> leaves, shared;
      for (int i = 0; i < 4; ++i) leaves.push_back(leaf(i));
      at::Tensor total;
      for (int i = 0; i < 4; ++i) {
        const at::Tensor part = (leaves[static_cast<size_t>(i)].exp() * 2).neg();
        shared.push_back(part);
        log_leaf(record, c10::str("leaf ", i), leaves[static_cast<size_t>(i)]);
        const at::Tensor more = (part * leaves[static_cast<size_t>((i + 1) % 4)]).neg();
        if (i == 2) log_hook(record, "more", more);
        total = total.defined() ? total + more : more;
      }
      shared[static_cast<size_t>(where)].sum().backward();
      record.attempt([&] { total.sum().backward(); });
      for (const at::Tensor& t : leaves) record.tensor("grad", t.grad());
    });
  }
}

TEST_F(FusedRuns, OverwrittenTensors) {
  expect_as_stock([](Record& record) {
    Net net;
    log_hook(record, "b", net.b);
    {
      const at::NoGradGuard no_grad;
      net.w1.add_(1);
    }
    record.attempt([&] { net.loss.backward(); });
    for (const at::Tensor& t : {net.x, net.w1, net.w2}) record.tensor("grad", t.grad());
  });
}

TEST_F(FusedRuns, HooksThatThrow) {
  for (int where = 0; where < 3; ++where) {
    SCOPED_TRACE(where);
    expect_as_stock([where](Record& record) {
      Net net;
      const std::vector<at::Tensor> at{net.b, net.d, net.w1};
      at[static_cast<size_t>(where)].register_hook([](const at::Tensor&) { throw CustomError(); });
      log_hook(record, "c", net.c);
      record.attempt([&] { net.loss.backward(); });
      for (const at::Tensor& t : {net.x, net.w1, net.w2}) record.tensor("grad", t.grad());
      record.line("no node: ", current_node() == nullptr);
    });
  }
}

// A node whose backward fails can be in no group, which its compiler says. Until it does, and from then on, the error
// comes at stock's point.
TEST_F(FusedRuns, ANodeThatThrowsWhenItRuns) {
  compiler_.instead = [this](const GroupRequest& request) {
    for (size_t m = 0; m < request.nodes.size(); ++m) {
      if (request.nodes[m]->name() == "MulBackward0") {
        request.entry->refuse(static_cast<int32_t>(m));
        return true;
      }
    }
    request.entry->settle(compiler_.plan_for(request));
    return true;
  };
  expect_as_stock([](Record& record) {
    const at::Tensor x = leaf(), y = leaf(2), z = leaf(3);
    const at::Tensor a = x.neg() * y;
    // A gradient of the wrong size: the node before says so.
    const at::Tensor b = (a.neg() + z).neg();
    dynamic_cast<MulBackward0&>(*a.grad_fn()).other_ =
        torch::autograd::SavedVariable(at::ones({3}, at::kDouble), false);
    for (const auto& [name, t] : {std::pair("x", x), std::pair("y", y), std::pair("z", z)}) log_leaf(record, name, t);
    record.attempt([&] { b.sum().backward(); });
    for (const at::Tensor& t : {x, y, z}) record.tensor("grad", t.grad());
  });
}

class Failing final : public GroupPlan {
 public:
  explicit Failing(const GroupPlan& like) : GroupPlan(like.io()) {}
  variable_list run(variable_list&&) const override { throw CustomError(); }
};

TEST_F(FusedRuns, APlanThatThrows) {
  compiler_.wrap = [](const std::shared_ptr<const GroupPlan>& plan) { return std::make_shared<const Failing>(*plan); };
  const Enable on(fused());
  for (int i = 0; i < 2; ++i) {
    Net net;
    Record record;
    log_hook(record, "b", net.b);
    const Stats before = stats();
    EXPECT_THROW(net.loss.backward(), CustomError);
    EXPECT_TRUE(record.lines().empty());
    EXPECT_FALSE(net.w2.grad().defined());
    EXPECT_EQ(current_node(), nullptr);
    const Stats after = stats();
    EXPECT_EQ(after.schedule_calls + after.fused_calls, before.schedule_calls + before.fused_calls + 1);
    EXPECT_THROW(net.loss.backward(), CustomError);  // the graph is still there
  }
  compiler_.wrap = nullptr;
  cache_clear();
  Net net;
  net.loss.backward();
  EXPECT_TRUE(net.x.grad().defined());
}

// A plan that works in another process, or on other values, and not here.
class FailingSometimes final : public GroupPlan {
 public:
  FailingSometimes(std::shared_ptr<const GroupPlan> inner, std::function<bool(int)> fails, int& tries)
      : GroupPlan(inner->io()), inner_(std::move(inner)), fails_(std::move(fails)), tries_(tries) {}
  variable_list run(variable_list&& inputs) const override {
    if (fails_(tries_++)) throw std::runtime_error("no such kernel");
    return inner_->run(std::move(inputs));
  }

 private:
  const std::shared_ptr<const GroupPlan> inner_;
  const std::function<bool(int)> fails_;
  int& tries_;
};

TEST_F(FusedRuns, APlanThatFailsOnItsFirstRunIsNotMissed) {
  int tries = 0;
  compiler_.wrap = [&](std::shared_ptr<const GroupPlan> plan) {
    return std::make_shared<const FailingSometimes>(std::move(plan), [](int) { return true; }, tries);
  };
  const auto run = [](Record& record) {
    for (int i = 0; i < 3; ++i) {
      Net net;
      log_hook(record, "b", net.b);
      net.loss.backward();
      for (const at::Tensor& t : {net.x, net.w1, net.w2}) record.tensor("grad", t.grad());
    }
  };
  Record want, got;
  run(want);
  const Stats before = stats();
  {
    const Enable on(fused());
    run(got);
  }
  EXPECT_EQ(got.lines(), want.lines());
  const Stats after = stats();
  EXPECT_EQ(after.schedule_calls, before.schedule_calls + 3);
  EXPECT_EQ(fallbacks(after, ScheduleReason::kNotFusable), fallbacks(before, ScheduleReason::kNotFusable) + 3);
  EXPECT_EQ(tries, compiler_.asked) << "a plan that had failed was run again";
  EXPECT_GT(tries, 0);
}

TEST_F(FusedRuns, APlanThatFailsWhereItsNodesDoIsKept) {
  class Fails final : public GroupPlan {
   public:
    Fails(size_t outputs, int& tries)
        : GroupPlan({.inputs = {}, .outputs = std::vector<int32_t>(outputs, -1), .guards = {}}), tries_(tries) {}
    variable_list run(variable_list&&) const override {
      ++tries_;
      throw std::runtime_error("no such kernel");
    }

   private:
    int& tries_;
  };
  int tries = 0;
  compiler_.instead = [&](const GroupRequest& request) {
    request.entry->settle(std::make_shared<const Fails>(request.group.outputs.size(), tries));
    return true;
  };
  const Enable on(fused());
  for (int i = 1; i <= 2; ++i) {
    const at::Tensor a = leaf().neg() * leaf(2);
    const at::Tensor b = a.neg().neg();
    dynamic_cast<MulBackward0&>(*a.grad_fn()).other_ =
        torch::autograd::SavedVariable(at::ones({3}, at::kDouble), false);
    EXPECT_THROW(b.sum().backward(), c10::Error);
    EXPECT_EQ(tries, i) << "the nodes failed, too, so nothing is known about the plan";
  }
}

TEST_F(FusedRuns, APlanThatFailsLaterSaysSo) {
  int tries = 0;
  compiler_.wrap = [&](std::shared_ptr<const GroupPlan> plan) {
    return std::make_shared<const FailingSometimes>(std::move(plan), [](int run) { return run > 0; }, tries);
  };
  const Enable on(fused());
  const auto run = [] { leaf().neg().neg().neg().sum().backward(); };
  run();
  EXPECT_EQ(tries, 1);
  EXPECT_THROW(run(), std::runtime_error);
  EXPECT_THROW(run(), std::runtime_error);
  EXPECT_EQ(tries, 3);
}

// A function of the user's that fails between two groups, and one before and after any.
TEST_F(FusedRuns, FunctionsThatThrow) {
  struct Fails final : torch::autograd::Function<Fails> {
    static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& t) { return t.clone(); }
    static variable_list backward(torch::autograd::AutogradContext*, variable_list) { throw CustomError(); }
  };
  for (int where = 0; where < 3; ++where) {
    SCOPED_TRACE(where);
    expect_as_stock([where](Record& record) {
      const at::Tensor x = leaf(), y = leaf(2);
      for (const auto& [name, t] : {std::pair("x", x), std::pair("y", y)}) log_leaf(record, name, t);
      const at::Tensor a = where == 0 ? Fails::apply(x) : x;
      const at::Tensor b = (a * 2).neg();
      const at::Tensor c = where == 1 ? Fails::apply(b) : b;
      const at::Tensor d = (c * y).neg();
      const at::Tensor e = where == 2 ? Fails::apply(d) : d;
      record.attempt([&] { e.backward(small({1, 1, 1, 1})); });
      record.line("x ", x.grad().defined(), " y ", y.grad().defined());
    });
  }
}

// One node is no group, but may be ahead of its turn like one.
TEST_F(FusedRuns, ASingleNodeThatThrows) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = leaf(), y = leaf(2), z = leaf(3), v = leaf(4);
    for (const auto& [name, t] : {std::pair("x", x), std::pair("y", y), std::pair("z", z), std::pair("v", v)}) {
      log_leaf(record, name, t);
    }
    const at::Tensor a = x * y;
    a.register_hook([&](const at::Tensor&) { record.line("a"); });
    const at::Tensor b = z * v;
    const at::Tensor root = a + b;
    root.register_hook([&](const at::Tensor&) { record.line("root"); });
    dynamic_cast<MulBackward0&>(*b.grad_fn()).other_ =
        torch::autograd::SavedVariable(at::ones({3}, at::kDouble), false);
    record.attempt([&] { (root.neg() * 2).backward(small({1, 1, 1, 1})); });
    for (const at::Tensor& t : {x, y, z, v}) record.tensor("grad", t.grad());
  });
}

// --- Compilers ---

TEST_F(FusedRuns, ACompilerThatRefusesAMemberHasTheGraphCutAnew) {
  compiler_.instead = [this](const GroupRequest& request) {
    for (size_t m = 0; m < request.nodes.size(); ++m) {
      if (request.nodes[m]->name() == "ExpBackward0") {
        request.entry->refuse(static_cast<int32_t>(m));
        return true;
      }
    }
    request.entry->settle(compiler_.plan_for(request));
    return true;
  };
  expect_as_stock(
      [](Record& record) {
        const at::Tensor x = leaf();
        (x.neg() * 2).exp().neg().sum().backward();
        record.tensor("x", x.grad());
      },
      /*times=*/4);
  EXPECT_EQ(fused_groups_, 2U);
  EXPECT_EQ(unfused_groups_, 0U);
  EXPECT_EQ(compiler_.asked, 3);
  EXPECT_EQ(compiler_.members, 4);
}

TEST_F(FusedRuns, ACompilerThatRefusesTheKeyIsNotAskedAgain) {
  compiler_.instead = [](const GroupRequest& request) {
    request.entry->refuse(-1);
    return true;
  };
  const Stats before = stats();
  expect_as_stock([](Record& record) {
    Net net;
    net.loss.backward();
    record.tensor("x", net.x.grad());
  });
  EXPECT_EQ(compiler_.asked, 1);
  EXPECT_EQ(fused_groups_, 0U);
  EXPECT_EQ(unfused_groups_, 1U);
  EXPECT_EQ(fallbacks(stats(), ScheduleReason::kNotFusable) - fallbacks(before, ScheduleReason::kNotFusable), 3U);
}

TEST_F(FusedRuns, ACompilerThatGivesBackIsAskedAgain) {
  int asked = 0;
  compiler_.instead = [&](const GroupRequest& request) {
    if (++asked <= 2) {
      request.entry->give_back();
      return asked == 1;  // 2: the graph was in use
    }
    request.entry->settle(compiler_.plan_for(request));
    return true;
  };
  const Stats before = stats();
  expect_as_stock(
      [](Record& record) {
        Net net;
        net.loss.backward();
        record.tensor("x", net.x.grad());
      },
      4);
  EXPECT_EQ(asked, 3);
  EXPECT_EQ(compiler_.runs, 2);
  const Stats after = stats();
  EXPECT_EQ(fallbacks(after, ScheduleReason::kCompiling) - fallbacks(before, ScheduleReason::kCompiling), 1U);
  EXPECT_EQ(fallbacks(after, ScheduleReason::kGraphInUse) - fallbacks(before, ScheduleReason::kGraphInUse), 1U);
}

TEST_F(FusedRuns, WithoutCompiler) {
  set_group_compiler(nullptr);
  const Stats before = stats();
  expect_as_stock([](Record& record) {
    Net net;
    net.loss.backward();
    record.tensor("x", net.x.grad());
  });
  EXPECT_EQ(fallbacks(stats(), ScheduleReason::kNoCompiler) - fallbacks(before, ScheduleReason::kNoCompiler), 3U);
  set_group_compiler(&compiler_);
}

TEST_F(FusedRuns, TheRequestSaysWhatTheGroupIs) {
  bool blocking = false;
  compiler_.instead = [&](const GroupRequest& request) {
    EXPECT_EQ(request.wait, blocking);
    EXPECT_EQ(request.entry->state(), GroupEntry::State::kMaking);
    EXPECT_EQ(request.entry, request.version.entry);
    EXPECT_EQ(request.nodes.size(), request.group.steps.size());
    EXPECT_EQ(request.targets.size(), request.group.outputs.size());
    EXPECT_EQ(request.inputs.gradients.size(), request.group.inputs.size());
    EXPECT_EQ(request.nodes[0]->name(), "SumBackward0");
    EXPECT_EQ(request.targets[0]->name(), "torch::autograd::AccumulateGrad");
    request.entry->give_back();
    return true;
  };
  for (const Mode mode : {Mode::kBackground, Mode::kBlocking}) {
    blocking = mode == Mode::kBlocking;
    const Enable on(fused(mode));
    for (int i = 0; i < 4; ++i) {
      Net net;
      net.loss.backward();
    }
  }
  EXPECT_GE(compiler_.asked, 5);
}

// A plan says of which outputs it never gives a gradient.
TEST_F(FusedRuns, OutputsWithoutResult) {
  class Nothing final : public GroupPlan {
   public:
    explicit Nothing(size_t outputs)
        : GroupPlan({.inputs = {}, .outputs = std::vector<int32_t>(outputs, -1), .guards = {}}) {}
    variable_list run(variable_list&& inputs) const override {
      EXPECT_TRUE(inputs.empty());
      return {};
    }
  };
  compiler_.instead = [&](const GroupRequest& request) {
    if (request.inputs.gradients.at(0).defined()) {
      request.entry->settle(compiler_.plan_for(request));
    } else {
      request.entry->settle(std::make_shared<const Nothing>(request.group.outputs.size()));
    }
    return true;
  };
  expect_as_stock([](Record& record) {
    const at::Tensor x = leaf(), y = leaf(2);
    log_hook(record, "x", x);
    log_hook(record, "y", y);
    (Blocks::apply(x.neg().neg()) + y.neg().neg()).sum().backward();
    record.tensor("x", x.grad());
    record.tensor("y", y.grad());
  });
  EXPECT_EQ(fused_groups_, 2U);
}

// Sizes of one and none are not what a plan with open sizes is made from, whichever call finds it hot.
TEST_F(FusedRuns, OpenSizesAreMadeFromOrdinaryCalls) {
  std::vector<int64_t> made;
  compiler_.instead = [&](const GroupRequest& request) {
    made.push_back(request.inputs.gradients.at(0).size(0));
    request.entry->settle(compiler_.plan_for(request));
    return true;
  };
  const Enable on(fused(Mode::kBackground));
  Record record;
  for (const int64_t size : {4, 4, 4, 6, 6, 1, 0, 7}) run_of_size(record, size);
  EXPECT_EQ(made, (std::vector<int64_t>{4, 7}));
}

// In the background, the third call asks; the plan is used from whenever it is there.
TEST_F(FusedRuns, InTheBackground) {
  std::vector<std::pair<std::shared_ptr<const GroupEntry>, std::shared_ptr<const GroupPlan>>> waiting;
  compiler_.instead = [&](const GroupRequest& request) {
    waiting.emplace_back(request.entry, compiler_.plan_for(request));
    return true;
  };
  const Enable on(fused(Mode::kBackground));
  Record expected;
  {
    const Disable off;
    Net net;
    net.loss.backward();
    expected.tensor("x", net.x.grad());
  }
  const auto reasons = [&](ScheduleReason reason, int calls) {
    for (int i = 0; i < calls; ++i) {
      const Stats before = stats();
      Net net;
      net.loss.backward();
      Record got;
      got.tensor("x", net.x.grad());
      EXPECT_EQ(difference(got.lines(), expected.lines()), "");
      const Stats after = stats();
      if (reason == ScheduleReason::kCount) {
        EXPECT_EQ(after.fused_calls, before.fused_calls + 1);
      } else {
        EXPECT_EQ(after.schedule_calls, before.schedule_calls + 1);
        EXPECT_EQ(fallbacks(after, reason), fallbacks(before, reason) + 1);
      }
    }
  };
  reasons(ScheduleReason::kWarmingUp, 2);
  EXPECT_EQ(compiler_.asked, 0);
  reasons(ScheduleReason::kCompiling, 3);
  ASSERT_EQ(waiting.size(), 1U);
  waiting[0].first->settle(waiting[0].second);
  reasons(ScheduleReason::kCount, 2);
  EXPECT_EQ(compiler_.asked, 1);
}

// A compiler runs Python, whose garbage collector may run anything: backward too.
TEST_F(FusedRuns, ACompilerThatCallsBackward) {
  bool inside = false;
  compiler_.instead = [&](const GroupRequest& request) {
    auto plan = compiler_.plan_for(request);
    if (!std::exchange(inside, true)) {
      const at::AutoGradMode with_grad(true);
      const at::Tensor x = at::ones({2, 2, 2}).requires_grad_();
      x.exp().tanh().exp().neg().sum().backward();
      EXPECT_TRUE(x.grad().defined());
    }
    request.entry->settle(std::move(plan));
    return true;
  };
  const Enable on(fused());
  const Stats before = stats();
  for (int i = 0; i < 2; ++i) {
    const at::Tensor x = leaf();
    (x * x).neg().backward(small({1, 1, 1, 1}));
    EXPECT_TRUE(at::equal(x.grad(), x.detach() * -2));
  }
  EXPECT_EQ(stats().fused_calls, before.fused_calls + 3) << "each call had its plan at once";
  EXPECT_EQ(compiler_.asked, 2);
}

// It may even be for the graph that the plan is made for: that call cannot wait for it.
TEST_F(FusedRuns, ACompilerThatCallsBackwardOnTheSameGraph) {
  compiler_.instead = [&](const GroupRequest& request) {
    {
      const at::AutoGradMode with_grad(true);
      Net net;
      net.loss.backward();
      EXPECT_TRUE(net.x.grad().defined());
    }
    request.entry->settle(compiler_.plan_for(request));
    return true;
  };
  const Enable on(fused());
  const Stats before = stats();
  for (int i = 0; i < 2; ++i) {
    Net net;
    net.loss.backward();
    EXPECT_TRUE(net.x.grad().defined());
  }
  EXPECT_EQ(compiler_.asked, 1);
  EXPECT_EQ(stats().fused_calls, before.fused_calls + 2);
}

// Blocking calls wait for a plan that another thread makes, and for one that is given back they ask themselves.
TEST_F(FusedRuns, BlockingCallsWaitForAPlanOfAnotherThread) {
  std::atomic<bool> claimed{false};
  std::shared_ptr<const GroupEntry> entry;
  std::shared_ptr<const GroupPlan> plan;
  compiler_.instead = [&](const GroupRequest& request) {
    EXPECT_FALSE(request.wait);
    entry = request.entry;
    plan = compiler_.plan_for(request);
    claimed.store(true);
    return true;
  };
  {
    const Enable on(fused(Mode::kBackground));
    for (int i = 0; i < 3; ++i) {
      Net net;
      net.loss.backward();
    }
  }
  ASSERT_TRUE(claimed.load());
  std::jthread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    entry->settle(plan);
  });
  const Stats before = stats();
  const Enable on(fused());
  Net net;
  net.loss.backward();
  EXPECT_EQ(stats().fused_calls, before.fused_calls + 1);
  EXPECT_EQ(compiler_.asked, 1);
}

// --- Calls in calls ---

TEST_F(FusedRuns, NestedCallsBetweenGroups) {
  expect_as_stock([](Record& record) {
    Net net;
    const at::Tensor shared = leaf(5);
    net.b.register_hook([&](const at::Tensor& g) {
      const at::AutoGradMode with_grad(true);
      const at::Tensor inner = ((shared * 2).neg() * shared).sum();
      log_leaf(record, "inner", shared);
      inner.backward();
      return g * shared.grad();
    });
    net.loss.backward();
    for (const at::Tensor& t : {net.x, net.w1, net.w2, shared}) record.tensor("grad", t.grad());
  });
}

TEST_F(FusedRuns, TheSameGraphNestedInItself) {
  const std::function<void(Record&, int)> run = [&run](Record& record, int depth) {
    Net net;
    net.b.register_hook([&](const at::Tensor& g) {
      record.tensor(c10::str("b at ", depth), g);
      if (depth < 5) {
        const at::AutoGradMode with_grad(true);
        run(record, depth + 1);
      }
    });
    log_leaf(record, c10::str("x at ", depth), net.x);
    net.loss.backward();
    record.tensor("w1", net.w1.grad());
  };
  expect_as_stock([&](Record& record) { run(record, 0); });
  EXPECT_EQ(fused_groups_, 6U);
}

// In the stock engine, nested calls change how ties among the outer call's leaves are broken.
TEST_F(FusedRuns, OrderOfLeavesAfterNestedCalls) {
  expect_as_stock([](Record& record) {
    std::vector<at::Tensor> leaves;
    at::Tensor total;
    for (int i = 0; i < 6; ++i) {
      leaves.push_back(leaf(i));
      log_leaf(record, c10::str("leaf ", i), leaves.back());
      const at::Tensor part = (leaves.back() * 2).neg();
      total = total.defined() ? total + part : part;
    }
    total.register_hook([&](const at::Tensor&) {
      const at::AutoGradMode with_grad(true);
      const at::Tensor y = leaf(), z = leaf();
      log_leaf(record, "y", y);
      log_leaf(record, "z", z);
      ((y * 2).neg() + z.neg()).sum().backward();
    });
    leaves[3].register_hook([&](const at::Tensor&) {
      const at::AutoGradMode with_grad(true);
      const at::Tensor y = leaf(), z = leaf();
      log_leaf(record, "y", y);
      log_leaf(record, "z", z);
      ((y * 2).neg() + z.neg()).sum().backward();
    });
    total.sum().backward();
  });
}

// --- Hooks that change what is to come ---

TEST_F(FusedRuns, AHookMayAddHooksToNodesOfLaterGroups) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = leaf();
    const at::Tensor a = (x * x).neg();
    const at::Tensor b = (a * x).neg();
    const at::Tensor loss = (b * x).neg().sum();
    b.register_hook([&](const at::Tensor&) {
      record.line("b");
      if (a.grad_fn()->tensor_pre_hooks().empty()) {
        a.register_hook([&](const at::Tensor& g) {
          record.tensor("a, added late", g);
          return g * 2;
        });
      }
    });
    loss.backward();
    record.tensor("x", x.grad());
  });
}

TEST_F(FusedRuns, AHookMayRetainGradientsOfLaterGroups) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = leaf();
    const at::Tensor a = (x * x).neg();
    const at::Tensor b = (a * x).neg();
    b.register_hook([&](const at::Tensor&) { a.retain_grad(); });
    (b * x).neg().sum().backward();
    record.tensor("a", a.grad());
    record.tensor("x", x.grad());
  });
}

TEST_F(FusedRuns, AHookMayAddPostHooksToLaterGroups) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = leaf();
    const at::Tensor a = (x * x).neg();
    const at::Tensor b = (a * x).neg();
    b.register_hook([&](const at::Tensor&) {
      add_post_hook(a.grad_fn(), [&](const variable_list& outputs, const variable_list&) {
        record.tensor("post", outputs[0]);
        return variable_list{outputs[0] * 3};
      });
    });
    (b * x).neg().sum().backward();
    record.tensor("x", x.grad());
  });
}

// --- Starvation ---

// A post-hook returns fewer gradients than its node has edges: what they lead to never comes.
TEST_F(FusedRuns, PostHooksThatReturnFewerGradients) {
  for (int keep = 0; keep < 2; ++keep) {
    for (int where = 0; where < 3; ++where) {
      SCOPED_TRACE(c10::str(keep, " at ", where));
      expect_as_stock([=](Record& record) {
        const at::Tensor x = leaf(), y = leaf(2), z = leaf(3);
        const at::Tensor a = (x.neg() * y).neg();
        const at::Tensor b = (z.neg() * y).neg();
        const at::Tensor c = a.neg() + b.neg();
        const at::Tensor d = c.neg() * z.neg();
        const std::vector<at::Tensor> at{c, d, a};
        const auto node = where == 2 ? a.grad_fn()->next_edge(0).function : at[static_cast<size_t>(where)].grad_fn();
        add_post_hook(node, [keep](const variable_list& outputs, const variable_list&) {
          return variable_list(outputs.begin(), outputs.begin() + keep);
        });
        for (const auto& [name, t] : {std::pair("x", x), std::pair("y", y), std::pair("z", z)}) {
          log_hook(record, name, t);
          log_leaf(record, name, t);
        }
        record.attempt([&] { d.neg().sum().backward(); });
      });
    }
  }
}

TEST_F(FusedRuns, StarvationOfWholeParts) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = leaf(), y = leaf(2);
    const at::Tensor a = (x * 2).neg();
    const at::Tensor b = (y * 2).neg();
    const at::Tensor c = a * b;
    add_post_hook(c.grad_fn(), [](const variable_list& outputs, const variable_list&) {
      return variable_list{outputs[0]};  // b's part never comes, and nothing else leads there
    });
    for (const auto& [name, t] : {std::pair("x", x), std::pair("y", y)}) {
      log_hook(record, name, t);
      log_leaf(record, name, t);
    }
    record.attempt([&] { c.neg().sum().backward(); });
  });
}

// --- Kinds of tensors ---

TEST_F(FusedRuns, OddGradientsRunByNodes) {
  expect_as_stock([](Record& record) {
    const at::Tensor x = leaf(), z = at::ones({2}, at::kComplexDouble).requires_grad_();
    const at::Tensor y = (x.neg() * 2).neg();
    y.backward(small({1, 2, 3, 4}).to_sparse());
    record.tensor("x", x.grad().to_dense());
    const at::Tensor w = (z.neg() * 2).neg();
    w.backward(at::full({2}, c10::complex<double>(1, 2), at::kComplexDouble).conj());
    record.tensor("z", z.grad());
  });
  EXPECT_EQ(fused_groups_, 0U);
}

class LambdaSavedHooks final : public torch::autograd::SavedVariableHooks {
 public:
  explicit LambdaSavedHooks(std::function<void()> on_unpack) : on_unpack_(std::move(on_unpack)) {}
  void call_pack_hook(const at::Tensor& tensor) override { packed_ = tensor.detach().clone(); }
  at::Tensor call_unpack_hook() override {
    on_unpack_();
    return packed_;
  }
  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> retrieve_unpack_hook_data() const override {
    return std::pair(c10::SafePyObject(nullptr, nullptr), c10::SafePyObject(nullptr, nullptr));
  }

 private:
  std::function<void()> on_unpack_;
  at::Tensor packed_;
};

// Unpacked when the node's own turn comes; from the second call on, the node is in no group.
TEST_F(FusedRuns, SavedTensorHooks) {
  expect_as_stock([](Record& record) {
    Net net;
    log_leaf(record, "w1", net.w1);
    log_leaf(record, "w2", net.w2);
    for (const auto& t : {net.a, net.c}) {
      auto& node = dynamic_cast<MulBackward0&>(*t.grad_fn());
      const auto hook = [&record] { record.line("unpacked for ", current_node()->name()); };
      node.self_.register_hooks(std::make_unique<LambdaSavedHooks>(hook));
      node.other_.register_hooks(std::make_unique<LambdaSavedHooks>(hook));
    }
    net.loss.backward();
    record.tensor("x", net.x.grad());
  });
  EXPECT_GE(fused_groups_, 1U);
  EXPECT_EQ(unfused_groups_, 0U);
}

TEST_F(FusedRuns, CreateGraphRunsOnTheSchedule) {
  const Stats before = stats();
  expect_as_stock([](Record& record) {
    Net net;
    net.loss.backward({}, false, /*create_graph=*/true);
    record.tensor("x", net.x.grad());
    // With their graphs they would keep the leaves, and themselves, for ever.
    for (const at::Tensor& leaf : {net.x, net.w1, net.w2}) leaf.mutable_grad() = at::Tensor();
  });
  EXPECT_EQ(fallbacks(stats(), ScheduleReason::kCreateGraph) - fallbacks(before, ScheduleReason::kCreateGraph), 3U);
  EXPECT_EQ(compiler_.asked, 0);
}

TEST_F(FusedRuns, NothingToFuse) {
  const Stats before = stats();
  expect_as_stock([](Record& record) {
    const at::Tensor x = leaf();
    x.sum().backward();
    record.tensor("x", x.grad());
  });
  EXPECT_EQ(fallbacks(stats(), ScheduleReason::kNotFusable) - fallbacks(before, ScheduleReason::kNotFusable), 3U);
}

// --- Keys, sizes and versions ---

TEST_F(FusedRuns, ConstantsThatKeepChanging) {
  const Stats before = stats();
  expect_as_stock(
      [](Record& record) {
        for (int i = 2; i < 14; ++i) {
          const at::Tensor x = leaf();
          x.neg().pow(i).neg().sum().backward();
          record.tensor("x", x.grad());
        }
      },
      2);
  EXPECT_EQ(compiler_.asked, 8);
  EXPECT_EQ(fused_groups_, 8U);
  EXPECT_EQ(unfused_groups_, 4U);
  EXPECT_EQ(fallbacks(stats(), ScheduleReason::kTooManyKeys) - fallbacks(before, ScheduleReason::kTooManyKeys), 8U);
  EXPECT_EQ(compiler_.changes, (std::vector<TestCompiler::Change>{{"PowBackward0", false}}));
}

TEST_F(FusedRuns, SizesThatKeepChangingTheirKind) {
  expect_as_stock(
      [](Record& record) {
        // A size of one is never left open, so each of these needs a plan of its own.
        for (int64_t i = 0; i < 12; ++i) {
          std::vector<int64_t> sizes(12, 1);
          sizes[static_cast<size_t>(i)] = 2;
          const at::Tensor x = at::ones(sizes, at::kDouble).requires_grad_();
          (x * x).neg().backward(at::ones(sizes, at::kDouble));
          record.tensor("x", x.grad());
        }
      },
      2);
  EXPECT_EQ(compiler_.asked, 8);
  EXPECT_EQ(fused_groups_, 8U);
  ASSERT_EQ(compiler_.changes.size(), 1U);
  EXPECT_TRUE(compiler_.changes[0].sizes);
  EXPECT_EQ(compiler_.changes[0].node, "NegBackward0");
}

TEST(Pause, GrowsUpTo256CallsAndEndsAtOnce) {
  Pause pause;
  int looks = 0;
  for (int call = 0; call < 10000; ++call) {
    if (!pause.is_over()) continue;
    ++looks;
    pause.lengthen(ScheduleReason::kTooManyKeys);
  }
  EXPECT_GE(looks, 10000 / 257);
  EXPECT_LE(looks, 10000 / 257 + 4 + 8 + 1);
  EXPECT_EQ(pause.reason(), ScheduleReason::kTooManyKeys);
  while (!pause.is_over()) {
  }
  pause.end();
  for (int call = 0; call < 4; ++call) {
    EXPECT_TRUE(pause.is_over());
    pause.lengthen(ScheduleReason::kNotFusable);
  }
}

TEST_F(FusedRuns, LookingInVainIsDoneRarelyButGoesOn) {
  bool refuse = true;
  compiler_.instead = [&](const GroupRequest& request) {
    refuse ? request.entry->refuse(-1) : request.entry->settle(compiler_.plan_for(request));
    return true;
  };
  const Enable on(fused(Mode::kBackground));
  const auto run = [](int64_t size) {
    const at::Tensor x = at::ones({size}, at::kDouble).requires_grad_();
    const at::Tensor y = x.neg().neg();
    (y * y).neg().backward(at::ones({size}, at::kDouble));
    EXPECT_TRUE(x.grad().equal(at::full({size}, -2, at::kDouble)));
  };
  cache_clear();
  const Stats before = stats();
  for (int i = 0; i < 30; ++i) run(4);  // the last look was at the 24th, the next is at the 41st
  EXPECT_EQ(compiler_.asked, 1);
  EXPECT_EQ(fallbacks(stats(), ScheduleReason::kNotFusable) - fallbacks(before, ScheduleReason::kNotFusable), 28U);
  refuse = false;
  int calls = 0;
  for (; compiler_.asked == 1 && calls < 1000; ++calls) run(5);
  EXPECT_EQ(calls, 10 + 3) << "a key is hot at its third look";
  ASSERT_EQ(compiler_.asked, 2);
  for (int i = 0; i < 20; ++i) run(5);
  EXPECT_EQ(stats().fused_calls - before.fused_calls, 21U);
}

// While a group is not looked at, its members run one by one; that must not take a hook's turn from it.
TEST_F(FusedRuns, AHookMayAddHooksToAGroupThatIsNotLookedAt) {
  compiler_.instead = [](const GroupRequest& request) {
    request.entry->refuse(-1);
    return true;
  };
  // sin() may run as soon as the sum has, and does when the group runs, for the hook of cos(); its turn is after that.
  const auto run = [](bool add, int64_t size) {
    Record record;
    const at::Tensor x = at::ones({size}, at::kDouble).requires_grad_();
    const at::Tensor late = x.sin();
    const at::Tensor early = x.cos();
    const at::Tensor sum = early.neg() + late;
    sum.register_hook([&](const at::Tensor&) {
      record.line("sum");
      if (add) log_hook(record, "late", late);
    });
    log_hook(record, "early", early);
    sum.sum().backward();
    record.tensor("x", x.grad());
    return record;
  };
  const auto [plain, added] = [&] {
    const Disable off;
    return std::pair(run(false, 4), run(true, 4));
  }();
  EXPECT_EQ(added.lines().size(), 4U);
  const Enable on(fused(Mode::kBackground));
  cache_clear();
  const Stats before = stats();
  for (int i = 0; i < 30; ++i) EXPECT_EQ(difference(run(false, 4).lines(), plain.lines()), "");
  ASSERT_EQ(compiler_.asked, 1);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(difference(run(true, 4).lines(), added.lines()), "") << i;
  for (int i = 0; i < 4; ++i) run(false, 5);
  EXPECT_EQ(compiler_.asked, 1) << "a key is hot at its third look, so there was none";
  EXPECT_EQ(stats().schedule_calls - before.schedule_calls, 39U);
}

// Hooks that come and go at ever new places would make ever new groups.
TEST_F(FusedRuns, WaysToCutAGraphAreLimited) {
  const Stats before = stats();
  constexpr int kNodes = 40;
  expect_as_stock(
      [](Record& record) {
        for (int hooked = 0; hooked < kNodes; ++hooked) {
          const at::Tensor x = leaf();
          at::Tensor y = x;
          for (int k = 0; k < kNodes; ++k) {
            y = y.neg();
            if (k == hooked) log_hook(record, "hooked", y);
          }
          y.sum().backward();
          record.tensor("x", x.grad());
        }
      },
      1);
  EXPECT_EQ(stats().fused_calls - before.fused_calls, 32U);
  EXPECT_EQ(fallbacks(stats(), ScheduleReason::kTooManyKeys) - fallbacks(before, ScheduleReason::kTooManyKeys), 8U);
}

TEST_F(FusedRuns, OnePlanForSizesThatChange) {
  std::vector<std::vector<bool>> open;
  compiler_.instead = [&](const GroupRequest& request) {
    open.push_back(request.version.open);
    request.entry->settle(compiler_.plan_for(request));
    return true;
  };
  expect_as_stock([](Record& record) {
    for (const int64_t size : {4, 6, 9, 100, 4, 7}) run_of_size(record, size);
  });
  ASSERT_EQ(compiler_.asked, 2);
  EXPECT_TRUE(open[0].empty());
  EXPECT_NE(std::ranges::find(open[1], true), open[1].end());
  EXPECT_EQ(fused_groups_, 6U);
}

TEST_F(FusedRuns, APlanTakesOpenNumbersAsInputs) {
  class Extra final : public GroupPlan {
   public:
    Extra(std::shared_ptr<const GroupPlan> inner, std::vector<int64_t>* seen)
        : GroupPlan(inner->io()), inner_(std::move(inner)), seen_(seen) {}
    variable_list run(variable_list&& inputs) const override {
      for (size_t i = io().inputs.size(); i < inputs.size(); ++i) {
        EXPECT_EQ(inputs[i].size(0), 0);
        seen_->push_back(inputs[i].size(1));
      }
      return inner_->run(std::move(inputs));
    }

   private:
    std::shared_ptr<const GroupPlan> inner_;
    std::vector<int64_t>* seen_;
  };
  std::vector<int64_t> seen;
  compiler_.guards = [](const GroupRequest& request) {
    std::vector<uint32_t> extra;
    for (uint32_t i = 0; i < request.version.open.size(); ++i) {
      if (request.version.is_open(i)) extra.push_back(i);
    }
    extra.resize(2);
    return ShapeGuards({}, {}, extra);
  };
  compiler_.wrap = [&](std::shared_ptr<const GroupPlan> plan) { return std::make_shared<const Extra>(plan, &seen); };
  expect_as_stock(
      [](Record& record) {
        for (const int64_t size : {4, 6, 9}) run_of_size(record, size);
      },
      1);
  EXPECT_EQ(seen, (std::vector<int64_t>{6, 6, 9, 9}));
}

// A plan turns out not to serve even the sizes that it was made from: they get one of their own at the next call.
TEST_F(FusedRuns, GuardsThatDoNotHold) {
  compiler_.guards = [](const GroupRequest&) {
    using G = ShapeGuards;
    return ShapeGuards({0}, {{G::kSymbol, 0, G::kConstant, 8, G::kEq, 0}}, {});
  };
  expect_as_stock(
      [](Record& record) {
        for (const int64_t size : {4, 6, 8, 6, 6, 9, 9}) run_of_size(record, size);
      },
      1);
  // 4: its own; 6: by nodes; 8: open; 6: its own, twice; 9: its own, twice.
  EXPECT_EQ(fused_groups_, 6U);
  EXPECT_EQ(compiler_.asked, 4);
}

TEST_F(FusedRuns, BatchesOfOneAndNone) {
  expect_as_stock([](Record& record) {
    for (const int64_t size : {8, 1, 0, 5, 1, 0, 6}) run_of_size(record, size);
  });
  EXPECT_GE(fused_groups_, 3U);
}

TEST_F(FusedRuns, ManySizesWhereNoneMayBeOpen) {
  compiler_.instead = [this](const GroupRequest& request) {
    if (request.version.open.empty()) {
      request.entry->settle(compiler_.plan_for(request));
    } else {
      request.entry->refuse(-1);
    }
    return true;
  };
  expect_as_stock(
      [](Record& record) {
        for (int round = 0; round < 2; ++round) {
          for (int64_t size = 2; size < 14; ++size) run_of_size(record, size);
        }
      },
      2);
  EXPECT_EQ(compiler_.asked, 8);
  EXPECT_EQ(fused_groups_, 14U);
  EXPECT_EQ(unfused_groups_, 10U);
}

// --- The cache ---

TEST_F(FusedRuns, TheCacheIsClearedWhileInUse) {
  expect_as_stock([](Record& record) {
    Net net;
    net.b.register_hook([](const at::Tensor&) { cache_clear(); });
    net.loss.backward();
    for (const at::Tensor& t : {net.x, net.w1, net.w2}) record.tensor("grad", t.grad());
  });
  compiler_.instead = [this](const GroupRequest& request) {
    cache_clear();
    auto plan = compiler_.plan_for(request);
    cache_clear();
    request.entry->settle(std::move(plan));
    return true;
  };
  cache_clear();
  const Enable on(fused());
  for (int i = 0; i < 3; ++i) {
    Net net;
    net.loss.backward();
    EXPECT_TRUE(net.x.grad().defined());
  }
}

TEST_F(FusedRuns, AnEntryMayBeSettledAfterItsCacheIsGone) {
  std::vector<std::pair<std::shared_ptr<const GroupEntry>, std::shared_ptr<const GroupPlan>>> waiting;
  compiler_.instead = [&](const GroupRequest& request) {
    waiting.emplace_back(request.entry, compiler_.plan_for(request));
    return true;
  };
  const Enable on(fused(Mode::kBackground));
  for (int i = 0; i < 6; ++i) {
    Net net;
    net.loss.backward();
    if (i % 3 == 2) cache_clear();
  }
  Record record;
  run_of_size(record, 3);  // lets go of recent plans
  ASSERT_EQ(waiting.size(), 2U);
  for (auto& [entry, plan] : waiting) entry->settle(std::move(plan));
}

// --- Threads ---

TEST_F(FusedRuns, ManyThreadsOnOneShapeOfGraph) {
  Record expected;
  const auto program = [](Record& record) {
    Net net;
    net.b.register_hook([](const at::Tensor& g) { return g * 2; });
    net.loss.backward();
    for (const at::Tensor& t : {net.x, net.w1, net.w2}) record.tensor("grad", t.grad());
  };
  program(expected);
  // Plans come from a thread of their own, sometimes late, sometimes never.
  std::mutex mutex;
  std::condition_variable more;
  std::deque<std::pair<std::shared_ptr<const GroupEntry>, std::shared_ptr<const GroupPlan>>> waiting;
  bool stop = false;
  std::thread worker([&] {
    std::unique_lock lock(mutex);
    while (true) {
      more.wait(lock, [&] { return stop || !waiting.empty(); });
      if (waiting.empty()) return;
      auto [entry, plan] = std::move(waiting.front());
      waiting.pop_front();
      lock.unlock();
      std::this_thread::yield();
      entry->settle(std::move(plan));
      lock.lock();
    }
  });
  std::atomic<int> asked{0};
  compiler_.instead = [&](const GroupRequest& request) {
    const int n = asked.fetch_add(1);
    if (n % 5 == 1) {
      request.entry->give_back();
      return n % 2 == 0;
    }
    auto plan = compiler_.plan_for(request);
    if (n % 3 == 0) {
      request.entry->settle(std::move(plan));
      return true;
    }
    const std::lock_guard lock(mutex);
    waiting.emplace_back(request.entry, std::move(plan));
    more.notify_one();
    return true;
  };
  const Stats before = stats();
  for (int round = 0; round < 20; ++round) {
    cache_clear();
    run_together(4, [&](int thread) {
      const Enable on(fused(thread % 2 == 0 ? Mode::kBlocking : Mode::kBackground));
      for (int i = 0; i < 25; ++i) {
        Record got;
        program(got);
        EXPECT_EQ(difference(got.lines(), expected.lines()), "");
        if (thread == 3 && i % 10 == 9) cache_clear();
      }
    });
  }
  {
    const std::lock_guard lock(mutex);
    stop = true;
  }
  more.notify_one();
  worker.join();
  const Stats after = stats();
  EXPECT_GT(after.fused_calls, before.fused_calls + 100);
  EXPECT_EQ(after.fused_calls + after.schedule_calls, before.fused_calls + before.schedule_calls + 2000);
}

// Threads that share a graph, kept by all of them. It was recorded before.
TEST_F(FusedRuns, ManyThreadsOnOneKeptGraph) {
  Net net;
  {
    const Enable on(fused());
    torch::autograd::grad({net.loss}, {net.x}, {}, /*retain_graph=*/true);
  }
  ASSERT_EQ(compiler_.asked, 1);
  const std::string expected = describe(torch::autograd::grad({net.loss}, {net.x}, {}, true)[0]);
  run_together(4, [&](int) {
    const Enable on(fused());
    for (int i = 0; i < 200; ++i)
      EXPECT_EQ(describe(torch::autograd::grad({net.loss}, {net.x}, {}, true)[0]), expected);
  });
  EXPECT_EQ(compiler_.asked, 1);
  EXPECT_EQ(compiler_.runs, 801);
}

// --- Random graphs ---

// Sums and products of whole numbers, so that any order of addition gives the same bits.
void random_program(uint32_t seed, Record& record) {
  std::mt19937 random(seed);
  const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  std::vector<at::Tensor> leaves, values, inner;
  const size_t num_leaves = 1 + below(4);
  for (size_t i = 0; i < num_leaves; ++i) {
    leaves.push_back(small({static_cast<double>(1 + i % 2), -1, 2, 1}).requires_grad_());
    values.push_back(leaves.back());
    if (below(2) == 0) log_leaf(record, c10::str("leaf ", i), leaves.back());
    if (below(4) == 0) log_hook(record, c10::str("hook of leaf ", i), leaves.back());
  }
  const size_t count = 3 + below(18);
  const size_t hooks = 2 + below(8);
  for (size_t i = 0; i < count; ++i) {
    const at::Tensor a = values[below(3) == 0 ? below(values.size()) : values.size() - 1];
    const at::Tensor b = values[below(values.size())];
    at::Tensor made;
    switch (below(8)) {
      case 0:
        made = a + b;
        break;
      case 1:
        made = a - b;
        break;
      case 2:
        made = a.neg();
        break;
      case 3:
        made = a * leaves[below(leaves.size())];
        break;
      case 4:
        made = a * small({1, -1, 2, 1});
        break;
      case 5: {
        made = a * 1;
        at::Tensor part = made.narrow(0, static_cast<int64_t>(below(3)), 2);
        if (below(2) == 0) {
          part.neg_();
        } else {
          part.mul_(leaves[below(leaves.size())].narrow(0, 1, 2));
        }
        break;
      }
      case 6: {
        const auto parts = a.unbind();
        made = at::stack({parts[0], parts[2], parts[2], parts[1]});
        break;
      }
      default:
        made = Blocks::apply(a) + a;
        break;
    }
    if (below(hooks) == 0) log_hook(record, c10::str("hook ", i), made);
    if (below(hooks * 2) == 0) made.register_hook([](const at::Tensor& g) { return g * 2; });
    if (below(hooks * 3) == 0) made.retain_grad();
    if (below(hooks * 3) == 0) {  // a hook that adds one to what comes later
      made.register_hook([a](const at::Tensor&) { a.register_hook([](const at::Tensor& g) { return g * 2; }); });
    }
    values.push_back(made);
    inner.push_back(made);
  }
  variable_list roots{values.back()}, gradients{small({1, 2, 3, 4})};
  if (below(3) == 0) {
    roots.push_back(inner[below(inner.size())]);
    gradients.push_back(small({-1, 1, 2, 1}));
  }
  for (int call = 0; call < 2; ++call) {
    const bool keep = call == 0;
    record.attempt([&] {
      const size_t kind = below(4);
      if (kind == 0) {
        variable_list wanted{leaves[below(leaves.size())], inner[below(inner.size())]};
        for (const at::Tensor& g : torch::autograd::grad(roots, wanted, gradients, keep, false, true)) {
          record.tensor("captured", g);
        }
      } else if (kind == 1) {
        torch::autograd::backward(roots, gradients, keep, false, {leaves[below(leaves.size())]});
      } else {
        torch::autograd::backward(roots, gradients, keep);
      }
    });
  }
  for (const at::Tensor& t : leaves) record.tensor("grad", t.grad());
  for (const at::Tensor& t : inner) {
    if (t.retains_grad()) record.tensor("retained", t.grad());
  }
}

TEST_F(FusedRuns, RandomGraphs) {
  uint64_t groups = 0;
  for (uint32_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(c10::str("seed ", seed));
    expect_as_stock([seed](Record& record) { random_program(seed, record); }, 2);
    groups += fused_groups_;
    if (HasFailure()) break;
  }
  EXPECT_GT(groups, 400U);
}

}  // namespace
}  // namespace retrograd::test
