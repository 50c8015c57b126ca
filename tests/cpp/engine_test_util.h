// What the engine's tests share. The stock engine is the oracle: a program runs on it first and then, twice, on
// retrograd, and must leave the same gradients, the same log and the same exception behind.
#pragma once

#include <algorithm>
#include <barrier>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/types.h>

#include "engine/schedule.h"
#include "engine/walk.h"
#include "retrograd/retrograd.h"

namespace retrograd::test {

using torch::autograd::FunctionPostHook;
using torch::autograd::FunctionPreHook;
using torch::autograd::PostAccumulateGradHook;

// A tensor down to what a user can tell: values, bits of zeros and NaNs included, and how they lie in memory.
inline std::string describe(const at::Tensor& t) {
  if (!t.defined()) return "undefined";
  std::string text = c10::str(t.toString(), t.sizes(), " requires_grad ", t.requires_grad(), " grad_fn ",
                              t.grad_fn() ? t.grad_fn()->name() : "none");
  if (t.is_sparse()) {
    return text + c10::str(" coalesced ", t.is_coalesced(), " indices {", describe(t._indices()), "} values {",
                           describe(t._values()), "}");
  }
  text += c10::str(" strides ", t.strides());
  const at::Tensor dense = t.detach().resolve_conj().resolve_neg().contiguous().cpu();
  const auto* bytes = static_cast<const unsigned char*>(dense.const_data_ptr());
  uint64_t hash = 14695981039346656037ULL;  // FNV-1a
  for (size_t i = 0; i < dense.nbytes(); ++i) hash = (hash ^ bytes[i]) * 1099511628211ULL;
  return text + c10::str(" bits ", hash, dense.numel() <= 8 ? c10::str(" = ", dense.reshape(-1)) : std::string());
}

// The type and text of the exception in flight, without torch's C++ stack trace.
inline std::string describe_exception(const std::exception& e) {
  const auto* error = dynamic_cast<const c10::Error*>(&e);
  return c10::str(typeid(e).name(), ": ", error != nullptr ? error->what_without_backtrace() : e.what());
}

// What a program does that can be seen from outside, in order.
class Record {
 public:
  template <class... Parts>
  void line(const Parts&... parts) {
    lines_.push_back(c10::str(parts...));
  }
  void tensor(std::string_view name, const at::Tensor& t) { line(name, ": ", describe(t)); }

  template <class Body>
  void attempt(Body&& body) {
    try {
      std::forward<Body>(body)();
      line("returned");
    } catch (const std::exception& e) {
      line("threw ", describe_exception(e));
    }
  }

  const std::vector<std::string>& lines() const { return lines_; }
  bool contains(std::string_view part) const {
    for (const std::string& l : lines_) {
      if (l.find(part) != std::string::npos) return true;
    }
    return false;
  }

 private:
  std::vector<std::string> lines_;
};

// Empty if the two are alike; else where they part.
inline std::string difference(const std::vector<std::string>& got, const std::vector<std::string>& expected) {
  for (size_t i = 0; i < std::max(got.size(), expected.size()); ++i) {
    const std::string a = i < got.size() ? got[i] : "(nothing more)";
    const std::string b = i < expected.size() ? expected[i] : "(nothing more)";
    if (a != b) return c10::str("line ", i, ":\n  got      ", a, "\n  expected ", b);
  }
  return {};
}

// Builds its graphs anew at each run and gets the same seed each time.
using Program = std::function<void(Record&)>;

inline uint64_t previous_calls(const Stats& s, PreviousReason reason) {
  return s.previous_calls[static_cast<size_t>(reason)];
}

// What happened between two moments. Counts only; max_depth is the later one's.
inline Stats operator-(Stats after, const Stats& before) {
  after.schedule_calls -= before.schedule_calls;
  for (size_t i = 0; i < after.previous_calls.size(); ++i) after.previous_calls[i] -= before.previous_calls[i];
  after.hits -= before.hits;
  after.misses -= before.misses;
  after.nested_calls -= before.nested_calls;
  return after;
}

class EngineTest : public testing::Test {
 protected:
  void SetUp() override {
    install();
    set_default(std::nullopt);
    cache_clear();
    at::set_num_threads(1);
  }
  void TearDown() override {
    set_default(std::nullopt);
    install();
    EXPECT_FALSE(enabled_here());
    EXPECT_TRUE(at::GradMode::is_enabled());
  }

  static bool enabled_here() {
    const Stats before = stats();
    const at::Tensor x = at::ones({1}).requires_grad_();
    x.backward(at::ones({1}));
    return (stats() - before).schedule_calls != 0;
  }

  // Runs `program` on the stock engine and twice on retrograd, and expects the three alike: every call ran on the
  // schedule, and every call of the second run found its plan. `refused` calls have gradients that PyTorch refuses.
  // Returns what the stock engine did.
  static Record expect_as_stock(const Program& program, uint64_t refused = 0) {
    Record expected;
    Stats before = stats();
    {
      Disable off;
      at::manual_seed(7);
      program(expected);
    }
    const uint64_t calls = previous_calls(stats() - before, PreviousReason::kNotEnabled) - refused;
    EXPECT_GT(calls, 0U) << "the program called no backward";

    cache_clear();
    for (const char* run : {"first", "second"}) {
      SCOPED_TRACE(std::string(run) + " run on retrograd");
      Record got;
      before = stats();
      {
        Enable on;
        at::manual_seed(7);
        program(got);
      }
      const Stats delta = stats() - before;
      EXPECT_EQ(difference(got.lines(), expected.lines()), "");
      EXPECT_EQ(delta.schedule_calls, calls);
      EXPECT_EQ(delta.previous_total(), refused);
      EXPECT_EQ(previous_calls(delta, PreviousReason::kIrregularCall), refused);
      EXPECT_EQ(delta.hits + delta.misses, calls);
      if (run == std::string_view("second")) {
        EXPECT_EQ(delta.misses, 0U);
      }
    }
    return expected;
  }
};

// --- Hooks from lambdas ---

class PreHook final : public FunctionPreHook {
 public:
  using Body = std::function<variable_list(const variable_list&)>;
  explicit PreHook(Body body) : body_(std::move(body)) {}
  variable_list operator()(const variable_list& grads) override { return body_(grads); }

 private:
  Body body_;
};

class PostHook final : public FunctionPostHook {
 public:
  using Body = std::function<variable_list(const variable_list& outputs, const variable_list& inputs)>;
  explicit PostHook(Body body) : body_(std::move(body)) {}
  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    return body_(outputs, inputs);
  }

 private:
  Body body_;
};

class PostAccumulateHook final : public PostAccumulateGradHook {
 public:
  using Body = std::function<void(const at::Tensor&)>;
  explicit PostAccumulateHook(Body body) : body_(std::move(body)) {}
  void operator()(const at::Tensor& tensor) override { body_(tensor); }

 private:
  Body body_;
};

inline void add_pre_hook(const c10::intrusive_ptr<Node>& node, PreHook::Body body) {
  node->add_pre_hook(std::make_unique<PreHook>(std::move(body)));
}
inline void add_post_hook(const c10::intrusive_ptr<Node>& node, PostHook::Body body) {
  node->add_post_hook(std::make_unique<PostHook>(std::move(body)));
}
inline void add_post_accumulate_hook(const at::Tensor& leaf, PostAccumulateHook::Body body) {
  torch::autograd::impl::set_post_acc_grad_hooks(leaf, std::make_unique<PostAccumulateHook>(std::move(body)));
}

// All nodes under `roots`, each once, in an order that depends on the graph's structure alone.
inline std::vector<c10::intrusive_ptr<Node>> nodes_under(const std::vector<c10::intrusive_ptr<Node>>& roots) {
  std::vector<c10::intrusive_ptr<Node>> found = roots;
  for (size_t i = 0; i < found.size(); ++i) {
    const edge_list edges = found[i]->next_edges();
    for (const Edge& edge : edges) {
      if (!edge.is_valid()) continue;
      bool known = false;
      for (const auto& node : found) known = known || node == edge.function;
      if (!known) found.push_back(edge.function);
    }
  }
  return found;
}

// Writes a line before each node runs; returns the nodes. They are named by their place in the list.
inline std::vector<c10::intrusive_ptr<Node>> record_order(Record& record,
                                                          const std::vector<c10::intrusive_ptr<Node>>& roots) {
  auto nodes = nodes_under(roots);
  for (size_t i = 0; i < nodes.size(); ++i) {
    add_pre_hook(nodes[i], [&record, i, name = nodes[i]->name()](const variable_list& grads) {
      record.line("node ", i, " ", name);
      return grads;
    });
  }
  return nodes;
}

// --- Graphs of our own nodes ---

// A node whose every detail the test decides. Output i is the sum of its inputs times (i + 1.1), or undefined.
class TestNode final : public Node {
 public:
  using Body = std::function<variable_list(variable_list&&)>;
  TestNode(uint64_t sequence_nr, uint32_t inputs, edge_list edges) : Node(sequence_nr, std::move(edges)) {
    for (uint32_t i = 0; i < inputs; ++i) add_input_metadata(at::empty({2}, at::kDouble));
  }
  std::string name() const override { return "TestNode"; }

  Record* record = nullptr;
  size_t id = 0;
  uint64_t undefined_outputs = 0;  // a bit for each output
  Body body;                       // instead of the sums, if set

 private:
  variable_list apply(variable_list&& inputs) override {
    if (record != nullptr) {
      record->line("run ", id);
      for (const at::Tensor& input : inputs) record->tensor("  input", input);
    }
    if (body) return body(std::move(inputs));
    at::Tensor sum;
    for (const at::Tensor& input : inputs) {
      if (input.defined()) sum = sum.defined() ? sum + input : input * 1.0;
    }
    variable_list outputs(num_outputs());
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (sum.defined() && (undefined_outputs >> (i % 64) & 1) == 0) {
        outputs[i] = sum * (static_cast<double>(i) + 1.1);
      }
    }
    return outputs;
  }
};

inline c10::intrusive_ptr<TestNode> make_node(uint64_t sequence_nr, uint32_t inputs, edge_list edges = {}) {
  return c10::make_intrusive<TestNode>(sequence_nr, inputs, std::move(edges));
}

struct RandomGraph {
  std::vector<c10::intrusive_ptr<TestNode>> nodes;  // targets before sources
};

// Up to `size` nodes with fan-in and fan-out above two, parallel and empty edges, undefined gradients, several nodes
// of one sequence number, and sequence numbers that have nothing to do with the order of construction (as those of
// graphs made by several threads).
inline RandomGraph random_graph(uint32_t seed, size_t size, Record* record) {
  std::mt19937 random(seed);
  const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  RandomGraph graph;
  const size_t count = 2 + below(size);
  const size_t leaves = 1 + below(4);
  for (size_t i = 0; i < count; ++i) {
    edge_list edges;
    if (i >= leaves) {
      const size_t fan_out = 1 + below(5);
      for (size_t e = 0; e < fan_out; ++e) {
        if (below(8) == 0) {
          edges.emplace_back();
          continue;
        }
        // Near nodes more often, so that graphs are deep.
        const size_t back = 1 + below(below(2) == 0 ? std::min<size_t>(i, 4) : i);
        const auto& target = graph.nodes[i - back];
        edges.emplace_back(target, static_cast<uint32_t>(below(target->num_inputs())));
      }
    }
    const uint64_t sequence_nr = i < leaves      ? UINT64_MAX
                                 : seed % 3 == 0 ? below(6)
                                 : seed % 3 == 1 ? i
                                                 : below(count) + (below(2) == 0 ? 0 : 1000);
    auto node = make_node(sequence_nr, static_cast<uint32_t>(1 + below(3)), std::move(edges));
    node->record = record;
    node->id = i;
    for (size_t bit = 0; bit < 6; ++bit) node->undefined_outputs |= uint64_t{below(10) == 0} << bit;
    graph.nodes.push_back(std::move(node));
  }
  return graph;
}

// Some edges into nodes of `graph`, now and then one twice, and now and then one into `elsewhere`.
inline edge_list random_outputs(uint32_t seed, const RandomGraph& graph, const RandomGraph& elsewhere) {
  std::mt19937 random(seed);
  edge_list outputs;
  for (size_t i = 0; i < 1 + seed % 4; ++i) {
    const auto& from = random() % 6 == 0 ? elsewhere.nodes : graph.nodes;
    const auto& node = from[random() % from.size()];
    outputs.emplace_back(node, static_cast<uint32_t>(random() % node->num_inputs()));
    if (random() % 4 == 0) outputs.push_back(outputs.back());
  }
  return outputs;
}

// A graph walked, and its schedule.
struct Walked {
  GraphShape shape;
  WalkedGraph graph;
  std::unique_ptr<const Schedule> schedule;
};

inline Walked walked(Node& root, bool accumulate = true, const edge_list& outputs = {}) {
  Walked w;
  EXPECT_TRUE(walk(root, accumulate, outputs, w.shape, w.graph));
  w.schedule = make_schedule(w.shape, w.graph.nodes);
  return w;
}

inline variable_list execute(const edge_list& roots, const variable_list& gradients, bool keep_graph = false,
                             bool accumulate = true, const edge_list& outputs = {}) {
  return torch::autograd::Engine::get_default_engine().execute(roots, gradients, keep_graph, /*create_graph=*/false,
                                                               accumulate, outputs);
}

// Whole numbers, so that sums are exact in any order.
inline at::Tensor whole(double value, at::IntArrayRef sizes = {2}) { return at::full(sizes, value).requires_grad_(); }

// Runs body(thread) on `threads` threads that start together.
inline void run_together(int threads, const std::function<void(int thread)>& body) {
  std::barrier start(threads);
  std::vector<std::jthread> running;
  for (int i = 0; i < threads; ++i) {
    running.emplace_back([&, i] {
      at::init_num_threads();
      start.arrive_and_wait();
      body(i);
    });
  }
}

inline at::Tensor pair_of(double a, double b) { return at::tensor({a, b}, at::kDouble); }

}  // namespace retrograd::test
