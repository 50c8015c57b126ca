// What the tests of fused plans share: a compiler without Python. It records a group as the bindings do, through
// libtorch's own interface for compiled autograd, and its plans run what was recorded with real kernels.
#pragma once

#include <atomic>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/dynamo/compiled_autograd.h>

#include "engine/group_site.h"
#include "engine_test_util.h"

namespace retrograd::test {

// What libtorch binds for each node type, once in a process.
class BoundFunctions {
 public:
  static BoundFunctions& get() {
    static BoundFunctions instance;
    return instance;
  }
  void add(const std::string& name, torch::autograd::functional_apply_t function) {
    const std::lock_guard lock(mutex_);
    by_name_[name] = std::move(function);
  }
  torch::autograd::functional_apply_t find(const std::string& name) {
    const std::lock_guard lock(mutex_);
    return by_name_.at(name);
  }

 private:
  std::mutex mutex_;
  std::map<std::string, torch::autograd::functional_apply_t> by_name_;
};

struct RecordedMember {
  std::string name;  // of the function
  torch::autograd::functional_apply_t function;
  torch::autograd::ivalue_list arguments;
  struct Slices {
    at::TensorGeometry base, view;
    std::vector<bool> needs_input_grad;
  };
  std::optional<Slices> slices;
  std::vector<std::optional<torch::autograd::InputMetadata>> next;  // by edge
  size_t num_inputs = 0;
};

struct RecordedGroup {
  Group group;
  std::vector<RecordedMember> members;
  std::vector<const c10::TensorImpl*> stand_ins;  // by tensor input
  variable_list keep;                             // owners of the stand-ins
  bool any_size = false;                          // sizes were left open: nothing is checked against those recorded

  variable_list run(const variable_list& gradients, const variable_list& tensors) const;

 private:
  c10::IValue filled_in(const c10::IValue& value, const variable_list& tensors) const;
};

inline c10::IValue RecordedGroup::filled_in(const c10::IValue& value, const variable_list& tensors) const {
  if (value.isTensor()) {
    if (!value.toTensor().defined()) return value;
    const auto found = std::ranges::find(stand_ins, value.toTensor().unsafeGetTensorImpl());
    TORCH_CHECK(found != stand_ins.end(), "a tensor that is none of the group's");
    return tensors.at(static_cast<size_t>(found - stand_ins.begin()));
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(filled_in(tensor, tensors).toTensor());
    return list;
  }
  if (value.isTuple()) {
    std::vector<c10::IValue> elements;
    for (const auto& element : value.toTupleRef().elements()) elements.push_back(filled_in(element, tensors));
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  if (value.isList()) {
    const auto old = value.toList();
    c10::impl::GenericList list(old.elementType());
    for (const c10::IValue& element : old) list.push_back(filled_in(element, tensors));
    return list;
  }
  return value;
}

inline variable_list RecordedGroup::run(const variable_list& gradients, const variable_list& tensors) const {
  std::vector<variable_list> waiting;
  for (const RecordedMember& member : members) waiting.emplace_back(member.num_inputs);
  for (size_t i = 0; i < group.inputs.size(); ++i) {
    waiting[group.inputs[i].member][group.inputs[i].input_nr] = gradients[i];
  }
  variable_list results(group.outputs.size());
  for (size_t m = 0; m < members.size(); ++m) {
    const RecordedMember& member = members[m];
    torch::autograd::ivalue_list arguments;
    for (const auto& argument : member.arguments) arguments.push_back(filled_in(argument, tensors));
    variable_list outputs(member.next.size());
    if (!member.slices) {
      outputs = member.function(waiting[m], arguments);
    } else if (waiting[m][0].defined()) {
      const auto& [base, view, needs] = *member.slices;
      at::Tensor whole = at::empty_strided_symint(base.sym_sizes(), base.sym_strides(), waiting[m][0].options());
      whole.copy_(waiting[m][0]);
      at::Tensor part = whole.as_strided_symint(view.sym_sizes(), view.sym_strides(),
                                                view.sym_storage_offset() - base.sym_storage_offset());
      variable_list inner = member.function({part.clone(at::MemoryFormat::Contiguous)}, arguments);
      for (size_t i = 0; i < inner.size(); ++i) {
        if (!needs[i]) continue;
        if (i > 0) {
          outputs[i] = inner[i];
          continue;
        }
        if (inner[0].defined()) {
          part.copy_(inner[0]);
        } else {
          part.zero_();
        }
        outputs[0] = whole;
      }
    }
    if (!any_size) {
      torch::autograd::validate_outputs(member.next, outputs, [](const std::string& message) { return message; });
    }
    waiting[m].clear();
    for (size_t i = 0; i < outputs.size() && i < member.next.size(); ++i) {
      const GroupEdge& edge = group.edges[group.first_edge[m] + i];
      if (edge.to == GroupEdge::To::kNowhere || !outputs[i].defined()) continue;
      at::Tensor& sum = edge.to == GroupEdge::To::kMember ? waiting[edge.index][edge.input_nr] : results[edge.index];
      sum = sum.defined() ? sum + outputs[i] : outputs[i];
    }
  }
  return results;
}

// libtorch's interface, answered by writing down what is asked.
class GroupRecorder final : public torch::dynamo::autograd::PyCompilerInterface {
 public:
  GroupRecorder(RecordedMember** current, at::Tensor any) : current_(current), any_(std::move(any)) {}

  std::string bind_function(PyObject*, const std::string& name, torch::autograd::functional_apply_t function,
                            std::vector<at::TypePtr>, bool, bool) const override {
    BoundFunctions::get().add(name, std::move(function));
    return name;
  }
  variable_list call_function(PyObject*, const char*, const std::string& name, const variable_list&,
                              const torch::autograd::ivalue_list& arguments,
                              const c10::IValue& output_metadata) const override {
    (*current_)->name = name;
    (*current_)->function = BoundFunctions::get().find(name);
    (*current_)->arguments = arguments;
    return variable_list(output_metadata.toListRef().size());
  }
  variable_list call_copy_slices_prologue(PyObject*, const variable_list&, const at::TensorGeometry& base,
                                          const at::TensorGeometry& view) const override {
    (*current_)->slices = RecordedMember::Slices{base, view, {}};
    return {any_, any_, any_};
  }
  variable_list call_copy_slices_epilogue(PyObject*, const std::vector<bool>& needs_input_grad, const at::Tensor&,
                                          const variable_list&, const at::Tensor&) const override {
    (*current_)->slices->needs_input_grad = needs_input_grad;
    return variable_list(needs_input_grad.size());
  }

 private:
  RecordedMember** current_;
  at::Tensor any_;
};

// One recording at a time in the process; the graph is as before.
inline RecordedGroup record(const GroupRequest& request) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  auto& call = request.inputs.call;
  RecordedGroup recorded;
  recorded.group = request.group;
  recorded.any_size = !request.version.open.empty();
  for (const at::Tensor& tensor : request.inputs.tensors()) {
    at::Tensor alias = tensor.detach();  // without the memory, which is the plan's to let go of
    alias.unsafeGetTensorImpl()->set_storage_keep_dtype(c10::Storage(
        c10::Storage::use_byte_size_t(), 0, at::DataPtr(nullptr, tensor.device()), nullptr, /*resizable=*/false));
    alias.set_requires_grad(tensor.requires_grad());
    call.tensor_args.lookup(tensor).proxy_tensor = alias;
    recorded.stand_ins.push_back(alias.unsafeGetTensorImpl());
    recorded.keep.push_back(std::move(alias));
  }
  for (auto& argument : call.lifted_ivalue_args.args) argument.proxy = *argument.actual_ptr;
  torch::dynamo::autograd::TraceState state(std::vector<std::optional<c10::SymInt>>(call.all_size_inputs.size()), 0);
  RecordedMember* current = nullptr;
  const at::Tensor any = at::empty({0});
  const torch::dynamo::autograd::PyCompilerGuard guard(std::make_unique<GroupRecorder>(&current, any));
  recorded.members.resize(request.nodes.size());
  for (size_t m = 0; m < request.nodes.size(); ++m) {
    Node& node = *request.nodes[m];
    current = &recorded.members[m];
    current->num_inputs = node.num_inputs();
    for (uint32_t i = 0; i < node.num_outputs(); ++i) {
      const bool goes = recorded.group.edges[recorded.group.first_edge[m] + i].to != GroupEdge::To::kNowhere;
      const Edge& next = node.next_edge(i);
      current->next.push_back(goes ? std::optional(next.function->input_metadata(next.input_nr)) : std::nullopt);
    }
    const torch::dynamo::autograd::NodeCall node_call(static_cast<uint32_t>(m), node.getptr());
    torch::dynamo::autograd::SwapSavedVariables saved(call, state, nullptr, node_call);
    node.apply_with_saved(variable_list(current->num_inputs, any), saved);
  }
  return recorded;
}

// Runs a recorded group. Takes its inputs in reverse, without the gradients that were undefined when it was made, and
// gives its results in reverse, so that nothing works by chance.
class ReplayPlan : public GroupPlan {
 public:
  ReplayPlan(RecordedGroup recorded, const GroupInputs& inputs, ShapeGuards guards, std::atomic<int>* runs)
      : GroupPlan(io_of(inputs, recorded.group.outputs.size(), std::move(guards))),
        recorded_(std::move(recorded)),
        num_gradients_(inputs.gradients.size()),
        num_tensors_(inputs.tensors().size()),
        runs_(runs) {}

  variable_list run(variable_list&& given) const override {
    runs_->fetch_add(1);
    variable_list gradients(num_gradients_), tensors(num_tensors_);
    for (size_t i = 0; i < io().inputs.size(); ++i) {
      const size_t k = io().inputs[i];
      (k < num_gradients_ ? gradients[k] : tensors[k - num_gradients_]) = std::move(given[i]);
    }
    TORCH_CHECK(given.size() == io().inputs.size() + io().guards.extra().size());
    given.clear();
    variable_list results = recorded_.run(gradients, tensors);
    std::ranges::reverse(results);
    return results;
  }

 private:
  static Io io_of(const GroupInputs& inputs, size_t outputs, ShapeGuards guards) {
    Io io;
    for (size_t i = inputs.gradients.size() + inputs.tensors().size(); i-- > 0;) {
      const bool is_defined = i >= inputs.gradients.size() || inputs.gradients[i].defined();
      if (is_defined) io.inputs.push_back(static_cast<uint32_t>(i));
    }
    for (size_t i = outputs; i-- > 0;) io.outputs.push_back(static_cast<int32_t>(i));
    io.guards = std::move(guards);
    return io;
  }

  RecordedGroup recorded_;
  size_t num_gradients_, num_tensors_;
  std::atomic<int>* runs_;
};

// What a test's compiler does with a request is up to the test; by default it makes a plan at once.
class TestCompiler final : public GroupCompiler {
 public:
  struct Change {
    std::string node;
    bool sizes;
    bool operator==(const Change&) const = default;
  };
  void report_change(Node* node, bool sizes) noexcept override {
    changes.push_back({node != nullptr ? node->name() : "", sizes});
  }
  std::vector<Change> changes;

  // Set these while no call runs.
  std::function<bool(const GroupRequest&)> instead;  // the whole of make()
  std::function<std::shared_ptr<const GroupPlan>(std::shared_ptr<const GroupPlan>)> wrap;
  std::function<ShapeGuards(const GroupRequest&)> guards;  // of plans that leave sizes open

  std::atomic<int> asked{0};    // calls of make()
  std::atomic<int> runs{0};     // plans run
  std::atomic<int> members{0};  // of the groups recorded, together

  bool make(const GroupRequest& request, const PreparedCall&, CallFrame&) override {
    asked.fetch_add(1);
    if (instead) return instead(request);
    request.entry->settle(plan_for(request));
    return true;
  }

  std::shared_ptr<const GroupPlan> plan_for(const GroupRequest& request) {
    members.fetch_add(static_cast<int>(request.nodes.size()));
    ShapeGuards conditions;
    if (guards && !request.version.open.empty()) conditions = guards(request);
    std::shared_ptr<const GroupPlan> plan =
        std::make_shared<const ReplayPlan>(record(request), request.inputs, std::move(conditions), &runs);
    return wrap ? wrap(std::move(plan)) : plan;
  }
};

inline uint64_t fallbacks(const Stats& s, ScheduleReason reason) {
  return s.schedule_reasons[static_cast<size_t>(reason)];
}

class FusedTest : public EngineTest {
 protected:
  static void SetUpTestSuite() {
    setenv("RETROGRAD_CACHE", "0", 1);  // no plan store: what other processes made would be found
    setenv("RETROGRAD_HOT_AFTER", "3", 1);
  }
  void SetUp() override {
    EngineTest::SetUp();
    set_group_compiler(&compiler_);
  }
  void TearDown() override {
    set_group_compiler(nullptr);
    EngineTest::TearDown();
  }

  static Options fused(Mode mode = Mode::kBlocking) { return Options().backend(Backend::kInductor).mode(mode); }

  // Runs `program` on the stock engine and then `times` times on retrograd with fused plans, and expects all alike.
  // Returns what the stock engine did. Every call, also one that threw, is counted once.
  Record expect_as_stock(const Program& program, int times = 3) {
    Record expected;
    Stats before = stats();
    {
      const Disable off;
      at::manual_seed(7);
      program(expected);
    }
    const uint64_t calls =
        previous_calls(stats(), PreviousReason::kNotEnabled) - previous_calls(before, PreviousReason::kNotEnabled);
    EXPECT_GT(calls, 0U) << "the program called no backward";
    cache_clear();
    for (int i = 0; i < times; ++i) {
      SCOPED_TRACE(c10::str("run ", i, " with fused plans"));
      Record got;
      before = stats();
      {
        const Enable on(fused());
        at::manual_seed(7);
        program(got);
      }
      const Stats after = stats();
      EXPECT_EQ(difference(got.lines(), expected.lines()), "");
      EXPECT_EQ(after.fused_calls + after.schedule_calls - before.fused_calls - before.schedule_calls, calls);
      EXPECT_EQ(after.hits + after.misses - before.hits - before.misses, calls);
      EXPECT_EQ(after.previous_total(), before.previous_total());
      fused_groups_ = after.fused_groups - before.fused_groups;
      unfused_groups_ = after.unfused_groups - before.unfused_groups;
    }
    return expected;
  }

  TestCompiler compiler_;
  uint64_t fused_groups_ = 0, unfused_groups_ = 0;  // in the last run of expect_as_stock()
};

}  // namespace retrograd::test
