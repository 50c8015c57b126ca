#include "bindings/recording.h"

#include <ATen/Parallel.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "bindings/compiler_interface.h"
#include "bindings/functional_op.h"

namespace retrograd::bindings {

namespace py = pybind11;
using torch::autograd::InputMetadata;
using torch::dynamo::autograd::PyCompilerInterface;
using torch::dynamo::autograd::SwapSavedVariables;
using torch::dynamo::autograd::TraceState;

namespace {

py::object ops() { return py::module_::import("torch._dynamo.compiled_autograd").attr("ops"); }

// A leaf like `tensor` that shares nothing with it and has no memory.
at::Tensor without_memory(const at::Tensor& tensor) {
  at::Tensor alias = tensor.detach();
  c10::TensorImpl& impl = *alias.unsafeGetTensorImpl();
  impl.set_storage_keep_dtype(
      c10::Storage(c10::Storage::use_byte_size_t(), 0, at::DataPtr(nullptr, tensor.device()), nullptr, false));
  alias.set_requires_grad(tensor.requires_grad());  // some nodes look (LinalgSolveExBackward)
  return alias;
}

at::Tensor laid_out_as(const at::Tensor& tensor, const at::TensorGeometry& layout) {
  auto copy = at::empty_strided_symint(layout.sym_sizes(), layout.sym_strides(), tensor.options());
  copy.copy_(tensor);
  return copy;
}

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
}

// Stands for an open number in a record. Nodes only pass sizes on; the few that compute with them as they are visited
// (the number of elements of a geometry) get something that nobody may look at.
class OpenNumber final : public c10::SymNodeImpl {
 public:
  explicit OpenNumber(int64_t place) : place_(place) {}
  static constexpr int64_t kComputed = -1;
  int64_t place() const { return place_; }

  bool is_int() override { return true; }
  bool is_float() override { return false; }
  bool is_bool() override { return false; }
  bool has_hint() override { return false; }
  std::string str() override { return "an open size"; }
  c10::SymNode wrap_int(int64_t) override { return computed(); }
  c10::SymNode mul(const c10::SymNode&) override { return computed(); }
  c10::SymNode add(const c10::SymNode&) override { return computed(); }
  c10::SymNode clone() override { return c10::make_intrusive<OpenNumber>(place_); }

 private:
  static c10::SymNode computed() { return c10::make_intrusive<OpenNumber>(kComputed); }
  int64_t place_;
};

c10::SymInt filled_in_size(const c10::SymInt& size, const Recording::Symbols& symbols) {
  if (!size.is_heap_allocated()) return size;
  const auto* const open = dynamic_cast<const OpenNumber*>(size.toSymNodeImplUnowned());
  TORCH_CHECK_NOT_IMPLEMENTED(open != nullptr && open->place() != OpenNumber::kComputed, "a size that was computed");
  return symbols.at(static_cast<uint32_t>(open->place()));
}

// What libtorch handed over that torch's front end has yet to get. Under the GIL; never destroyed.
struct Bound {
  std::string name;
  torch::autograd::functional_apply_t function;
  std::vector<at::TypePtr> schema;
  bool is_custom_function, is_traceable;
};
std::vector<Bound>& bound() {
  static auto* const list = std::make_unique<std::vector<Bound>>().release();
  return *list;
}

}  // namespace

void forward_bound_functions() {
  const py::dict modules = py::module_::import("sys").attr("modules");
  const py::str dynamo("torch._dynamo");
  // Not while Dynamo is being imported, of which the front end is an early part.
  if (!modules.contains(dynamo) || !py::hasattr(modules[dynamo], "allow_in_graph")) return;
  for (Bound& b : std::exchange(bound(), {})) {
    ops().attr("add")(b.name, make_functional_op(std::move(b.function), std::move(b.schema)), b.is_custom_function,
                      b.is_traceable);
  }
}

// libtorch's interface, answered by writing down what is asked.
class Recording::Recorder final : public PyCompilerInterface {
 public:
  explicit Recorder(std::shared_ptr<Member*> current, at::Tensor any)
      : current_(std::move(current)), any_(std::move(any)) {}

  std::string bind_function(PyObject*, const std::string& name, torch::autograd::functional_apply_t function,
                            std::vector<at::TypePtr> schema, bool is_custom_function,
                            bool is_traceable) const override {
    remember_function(name, function);
    // torch's own front end must find it too: libtorch hands it over only once. It is not imported for that, which
    // would take a second.
    const py::gil_scoped_acquire gil;
    bound().push_back({name, std::move(function), std::move(schema), is_custom_function, is_traceable});
    forward_bound_functions();
    return name;
  }

  variable_list call_function(PyObject*, const char* method, const std::string& name, const variable_list&,
                              const torch::autograd::ivalue_list& arguments,
                              const c10::IValue& output_metadata) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(std::string_view(method) == "apply_functional", "cannot record ", method);
    Member& member = **current_;
    TORCH_CHECK_NOT_IMPLEMENTED(!member.called, "a node that calls two functions cannot be recorded");
    member.called = true;
    member.function = name;
    member.arguments = arguments;
    return variable_list(output_metadata.toListRef().size());
  }

  variable_list call_copy_slices_prologue(PyObject*, const variable_list&, const at::TensorGeometry& base,
                                          const at::TensorGeometry& view) const override {
    (*current_)->slices = SlicesGeometry{base, view, {}};
    return {any_, any_, any_};
  }
  variable_list call_copy_slices_epilogue(PyObject*, const std::vector<bool>& needs_input_grad, const at::Tensor&,
                                          const variable_list&, const at::Tensor&) const override {
    (*current_)->slices->needs_input_grad = needs_input_grad;
    return variable_list(needs_input_grad.size());
  }
  at::Tensor call_unpack(PyObject*, std::optional<size_t>, size_t) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "a tensor saved with hooks cannot be recorded");
  }

 private:
  std::shared_ptr<Member*> current_;
  at::Tensor any_;
};

std::shared_ptr<Recording> Recording::make(const GroupRequest& request, int32_t& failed) {
  failed = -1;
  auto recording = std::make_shared<Recording>();
  Recording& r = *recording;
  r.group_ = request.group;
  r.threads_ = at::get_num_threads();
  r.num_outputs_ = request.group.outputs.size();

  auto& call = request.inputs.call;
  for (const at::Tensor& gradient : request.inputs.gradients) {
    r.inputs_.push_back(gradient.defined() ? without_memory(gradient) : at::Tensor());
  }
  for (const at::Tensor& tensor : request.inputs.tensors()) {
    r.inputs_.push_back(without_memory(tensor));
    call.tensor_args.lookup(tensor).proxy_tensor = r.inputs_.back();
    r.index_of_.emplace(r.inputs_.back().unsafeGetTensorImpl(), r.inputs_.size() - 1);
  }
  for (auto& argument : call.lifted_ivalue_args.args) argument.proxy = *argument.actual_ptr;
  for (Node* target : request.targets) {
    auto& layout = r.leaf_layouts_.emplace_back();
    if (typeid(*target) != typeid(torch::autograd::AccumulateGrad)) continue;
    const at::Tensor& variable = static_cast<const torch::autograd::AccumulateGrad&>(*target).variable;
    if (variable.is_non_overlapping_and_dense()) layout.emplace(variable);
  }

  // The same key again, with names for addresses; and the places of its numbers.
  {
    GroupInputs again;
    again.gradients = request.inputs.gradients;
    const Collecting collecting =
        collect_group(request.group, request.nodes, request.targets, again, r.key_, KeyForm::kPortable, &r.places_);
    if (collecting.obstacle != GroupObstacle::kNone || r.numbers().size() != request.version.numbers.size()) return {};
    r.open_ = request.version.open;
  }

  // Sizes that are not open stay as they are: constants of the plan.
  std::vector<std::optional<c10::SymInt>> sizes(call.all_size_inputs.size());
  for (size_t i = 0; i < sizes.size(); ++i) {
    const uint32_t place = r.places_.sizes + static_cast<uint32_t>(i);
    if (r.is_open(place)) sizes[i] = c10::SymInt(c10::SymNode(c10::make_intrusive<OpenNumber>(place)));
  }
  TraceState state(std::move(sizes), 0);
  const at::Tensor any = at::empty({0});
  const auto current = std::make_shared<Member*>(nullptr);
  const InterfaceGuard guard(std::make_unique<Recorder>(current, any));
  r.members_.resize(request.nodes.size());
  for (size_t m = 0; m < request.nodes.size(); ++m) {
    Node& node = *request.nodes[m];
    Member& member = r.members_[m];
    *current = &member;
    member.num_inputs = node.num_inputs();
    // Nobody gets what goes nowhere, so nothing is expected of it.
    for (uint32_t i = 0; i < node.num_outputs(); ++i) {
      const GroupEdge& edge = r.group_.edges[r.group_.first_edge[m] + i];
      const bool goes = edge.to != GroupEdge::To::kNowhere;
      const Edge& next = node.next_edge(i);
      member.next.push_back(goes ? std::optional(next.function->input_metadata(next.input_nr)) : std::nullopt);
      member.next_places.push_back(edge.to == GroupEdge::To::kMember
                                       ? r.places_.member_inputs[edge.index][edge.input_nr]
                                   : goes ? r.places_.targets[edge.index]
                                          : 0);
    }
    const torch::dynamo::autograd::NodeCall node_call(static_cast<uint32_t>(m), node.getptr());
    SwapSavedVariables saved(call, state, nullptr, node_call);
    try {
      node.apply_with_saved(variable_list(member.num_inputs, any), saved);
    } catch (...) {
      put_back_node(saved, /*tensors=*/true);
      failed = static_cast<int32_t>(m);
      return nullptr;
    }
    if (!member.called) {
      failed = static_cast<int32_t>(m);
      return nullptr;
    }
  }

  return recording;
}

std::string Recording::content() const {
  std::string text(reinterpret_cast<const char*>(key_.fixed[0].data()), key_.fixed[0].size());
  for (size_t i = 0; i < numbers().size(); ++i) text += c10::str(is_open(i) ? '?' : '=', numbers()[i], ';');
  return text;
}

std::string Recording::name() const {
  return members_.size() == 1 ? members_[0].function
                              : c10::str(members_.front().function, " .. ", members_.back().function);
}

c10::IValue Recording::filled_in(const c10::IValue& value, const Values& values) const {
  const auto fake_of = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    const auto found = index_of_.find(tensor.unsafeGetTensorImpl());
    TORCH_CHECK_NOT_IMPLEMENTED(found != index_of_.end(), "a tensor that the node did not say it saved");
    return values.fakes[found->second];
  };
  if (value.isSymInt()) return filled_in_size(value.toSymInt(), values.symbols);
  if (value.isTensor()) return fake_of(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(fake_of(tensor));
    return list;
  }
  if (value.isTuple()) {
    std::vector<c10::IValue> elements;
    for (const auto& element : value.toTupleRef().elements()) elements.push_back(filled_in(element, values));
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  if (value.isList()) {
    const auto old = value.toList();
    c10::impl::GenericList list(old.elementType());
    for (const c10::IValue& element : old) list.push_back(filled_in(element, values));
    return list;
  }
  return value;
}

at::TensorGeometry Recording::filled_in(const at::TensorGeometry& geometry, const Values& values) const {
  std::vector<c10::SymInt> sizes, strides;
  for (const c10::SymInt& size : geometry.sym_sizes()) sizes.push_back(filled_in_size(size, values.symbols));
  for (const c10::SymInt& stride : geometry.sym_strides()) strides.push_back(filled_in_size(stride, values.symbols));
  return at::TensorGeometry(sizes, strides, filled_in_size(geometry.sym_storage_offset(), values.symbols));
}

std::vector<std::optional<InputMetadata>> Recording::next_of(const Member& member, const Values& values) const {
  auto next = member.next;
  for (size_t i = 0; i < next.size(); ++i) {
    if (!next[i] || next[i]->was_default_constructed()) continue;
    auto& shape = next[i]->mutable_shape_as_dim_vector();
    for (size_t d = 0; d < shape.size(); ++d) {
      const auto place = member.next_places[i] + static_cast<uint32_t>(d);
      if (is_open(place)) shape[d] = values.symbols.at(place);
    }
  }
  return next;
}

variable_list Recording::call(const Member& member, const variable_list& gradients, const Values& values) const {
  torch::autograd::ivalue_list arguments;
  for (const auto& argument : member.arguments) arguments.push_back(filled_in(argument, values));
  if (const auto function = find_function(member.function)) return function(gradients, arguments);
  // libtorch gave it to torch's own front end, which keeps it as a Python object.
  py::list given;
  given.append(to_python_list(gradients));
  for (const auto& argument : arguments) given.append(torch::jit::toPyObject(argument));
  return to_variable_list(ops().attr(member.function.c_str())(*given));
}

variable_list Recording::trace(const variable_list& fakes, const Symbols& symbols, int32_t& failed) const {
  const Values values{fakes, symbols};
  failed = -1;
  std::vector<variable_list> waiting;
  for (const Member& member : members_) waiting.emplace_back(member.num_inputs);
  for (size_t i = 0; i < group_.inputs.size(); ++i) {
    waiting[group_.inputs[i].member][group_.inputs[i].input_nr] = fakes[i];
  }
  variable_list results(group_.outputs.size());
  const auto add = [](at::Tensor& sum, const at::Tensor& gradient) { sum = sum.defined() ? sum + gradient : gradient; };
  for (size_t m = 0; m < members_.size(); ++m) {
    failed = static_cast<int32_t>(m);
    const Member& member = members_[m];
    const variable_list gradients = std::move(waiting[m]);
    variable_list outputs;
    if (!member.slices) {
      outputs = call(member, gradients, values);
    } else if (gradients[0].defined()) {
      // The gradient of a tensor that was written to through a view: where the view is, what the wrapped node makes of
      // it; elsewhere, as it came.
      const at::TensorGeometry base = filled_in(member.slices->base, values);
      const at::TensorGeometry view = filled_in(member.slices->view, values);
      const auto& needs = member.slices->needs_input_grad;
      const auto offset = view.sym_storage_offset() - base.sym_storage_offset();
      const at::Tensor whole = laid_out_as(gradients[0], base);
      const at::Tensor part = whole.as_strided_symint(view.sym_sizes(), view.sym_strides(), offset);
      outputs = call(member, {part.clone(at::MemoryFormat::Contiguous)}, values);
      for (size_t i = 0; i < outputs.size(); ++i) {
        if (!needs[i]) outputs[i] = at::Tensor();
      }
      if (!outputs.empty() && outputs[0].defined()) {
        outputs[0] = at::as_strided_scatter_symint(whole, outputs[0], view.sym_sizes(), view.sym_strides(), offset);
      }
    } else {
      outputs.resize(member.next.size());
    }
    for (const at::Tensor& output : outputs) {
      TORCH_CHECK_NOT_IMPLEMENTED(!output.defined() || output.layout() == c10::kStrided,
                                  "a gradient that is not strided");
    }
    torch::autograd::validate_outputs(next_of(member, values), outputs,
                                      [](const std::string& message) { return message; });
    const size_t first = group_.first_edge[m];
    for (size_t i = 0; i < outputs.size() && first + i < group_.first_edge[m + 1]; ++i) {
      if (!outputs[i].defined()) continue;
      const GroupEdge& edge = group_.edges[first + i];
      if (edge.to == GroupEdge::To::kMember) add(waiting[edge.index][edge.input_nr], outputs[i]);
      if (edge.to == GroupEdge::To::kOutside) add(results[edge.index], outputs[i]);
    }
  }
  failed = -1;
  for (size_t k = 0; k < results.size(); ++k) {
    at::Tensor& result = results[k];
    if (!result.defined()) continue;
    if (const auto& layout = leaf_layouts_[k]; layout && result.sym_strides() != layout->sym_strides()) {
      result = laid_out_as(result, *layout);
    }
    // Whoever takes a result over counts on its memory being its own.
    const auto shared = [&result](const at::Tensor& other) { return other.defined() && same_memory(result, other); };
    if (std::ranges::any_of(fakes, shared) || std::ranges::any_of(std::span(results).first(k), shared)) {
      result = result.clone();
    }
  }
  return results;
}

}  // namespace retrograd::bindings
