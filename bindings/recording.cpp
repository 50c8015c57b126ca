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

// A tensor like `tensor` that shares nothing with it and has no memory.
at::Tensor without_memory(const at::Tensor& tensor) {
  at::Tensor alias = tensor.detach();
  c10::TensorImpl& impl = *alias.unsafeGetTensorImpl();
  impl.set_storage_keep_dtype(
      c10::Storage(c10::Storage::use_byte_size_t(), 0, at::DataPtr(nullptr, tensor.device()), nullptr, false));
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

}  // namespace

// libtorch's interface, answered by writing down what is asked.
class Recording::Recorder final : public PyCompilerInterface {
 public:
  explicit Recorder(std::shared_ptr<Member*> current, at::Tensor any) : current_(std::move(current)), any_(std::move(any)) {}

  std::string bind_function(PyObject*, const std::string& name, torch::autograd::functional_apply_t function,
                            std::vector<at::TypePtr> schema, bool is_custom_function,
                            bool is_traceable) const override {
    remember_function(name, function);
    // torch's own front end must find it too: libtorch hands it over only once.
    const py::gil_scoped_acquire gil;
    return ops()
        .attr("add")(name, make_functional_op(std::move(function), std::move(schema)), is_custom_function, is_traceable)
        .cast<std::string>();
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

  // Sizes stay as they are: all of them are constants of the plan.
  TraceState state(std::vector<std::optional<c10::SymInt>>(call.all_size_inputs.size()), 0);
  const at::Tensor any = at::empty({0});
  const auto current = std::make_shared<Member*>(nullptr);
  const InterfaceGuard guard(std::make_unique<Recorder>(current, any));
  r.members_.resize(request.nodes.size());
  for (size_t m = 0; m < request.nodes.size(); ++m) {
    Node& node = *request.nodes[m];
    Member& member = r.members_[m];
    *current = &member;
    member.num_inputs = node.num_inputs();
    for (const Edge& edge : node.next_edges()) {
      member.next.push_back(edge.is_valid() ? std::optional(edge.function->input_metadata(edge.input_nr))
                                            : std::nullopt);
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

  // The same again with names for addresses, after the nodes are themselves again.
  GroupInputs again;
  again.gradients = request.inputs.gradients;
  cache::Path path;
  const Collecting collecting =
      collect_group(request.group, request.nodes, request.targets, again, path, KeyForm::kPortable);
  if (collecting.obstacle != GroupObstacle::kNone) return nullptr;
  r.content_.assign(reinterpret_cast<const char*>(path[0].data()), path[0].size());
  return recording;
}

std::string Recording::name() const {
  return members_.size() == 1 ? members_[0].function
                              : c10::str(members_.front().function, " .. ", members_.back().function);
}

c10::IValue Recording::with_fakes(const c10::IValue& value, const variable_list& fakes) const {
  const auto fake_of = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    const auto found = index_of_.find(tensor.unsafeGetTensorImpl());
    return found != index_of_.end() ? fakes[found->second] : tensor;
  };
  if (value.isTensor()) return fake_of(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(fake_of(tensor));
    return list;
  }
  if (value.isTuple()) {
    std::vector<c10::IValue> elements;
    for (const auto& element : value.toTupleRef().elements()) elements.push_back(with_fakes(element, fakes));
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  if (value.isList()) {
    const auto old = value.toList();
    c10::impl::GenericList list(old.elementType());
    for (const c10::IValue& element : old) list.push_back(with_fakes(element, fakes));
    return list;
  }
  return value;
}

variable_list Recording::call(const Member& member, const variable_list& gradients,
                              const variable_list& fakes) const {
  torch::autograd::ivalue_list arguments;
  for (const auto& argument : member.arguments) arguments.push_back(with_fakes(argument, fakes));
  if (const auto function = find_function(member.function)) return function(gradients, arguments);
  // libtorch gave it to torch's own front end, which keeps it as a Python object.
  py::list given;
  given.append(to_python_list(gradients));
  for (const auto& argument : arguments) given.append(torch::jit::toPyObject(argument));
  return to_variable_list(ops().attr(member.function.c_str())(*given));
}

variable_list Recording::trace(const variable_list& fakes, int32_t& failed) const {
  failed = -1;
  std::vector<variable_list> waiting;
  for (const Member& member : members_) waiting.emplace_back(member.num_inputs);
  for (size_t i = 0; i < group_.inputs.size(); ++i) {
    waiting[group_.inputs[i].member][group_.inputs[i].input_nr] = fakes[i];
  }
  variable_list results(group_.outputs.size());
  const auto add = [](at::Tensor& sum, const at::Tensor& gradient) {
    sum = sum.defined() ? sum + gradient : gradient;
  };
  for (size_t m = 0; m < members_.size(); ++m) {
    failed = static_cast<int32_t>(m);
    const Member& member = members_[m];
    const variable_list gradients = std::move(waiting[m]);
    variable_list outputs;
    if (!member.slices) {
      outputs = call(member, gradients, fakes);
    } else if (gradients[0].defined()) {
      // The gradient of a tensor that was written to through a view: where the view is, what the wrapped node makes of
      // it; elsewhere, as it came.
      const auto& [base, view, needs] = *member.slices;
      const auto offset = view.sym_storage_offset() - base.sym_storage_offset();
      const at::Tensor whole = laid_out_as(gradients[0], base);
      const at::Tensor part = whole.as_strided_symint(view.sym_sizes(), view.sym_strides(), offset);
      outputs = call(member, {part.clone(at::MemoryFormat::Contiguous)}, fakes);
      for (size_t i = 0; i < outputs.size(); ++i) {
        if (!needs[i]) outputs[i] = at::Tensor();
      }
      if (!outputs.empty() && outputs[0].defined()) {
        outputs[0] = at::as_strided_scatter_symint(whole, outputs[0], view.sym_sizes(), view.sym_strides(), offset);
      }
    } else {
      outputs.resize(member.next.size());
    }
    torch::autograd::validate_outputs(member.next, outputs, [](const std::string& message) { return message; });
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
