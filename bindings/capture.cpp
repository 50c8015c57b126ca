#include "bindings/capture.h"

#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "bindings/compiler_interface.h"
#include "bindings/functional_op.h"
#include "engine/node_kind.h"

namespace retrograd::bindings {
namespace {

namespace py = pybind11;
using namespace py::literals;
using torch::autograd::functional_apply_t;
using torch::autograd::InputMetadata;
using torch::dynamo::autograd::AutogradCompilerCall;
using torch::dynamo::autograd::NodeCall;
using torch::dynamo::autograd::PyCompilerInterface;
using torch::dynamo::autograd::SizeInput;
using torch::dynamo::autograd::SwapSavedVariables;
using torch::dynamo::autograd::TraceState;

constexpr const char* kValidateOutputs = "validate_outputs";

// --- What nodes call while they are captured: our answers to libtorch's interface, each a method of the front end ---

class FrontEnd : public PyCompilerInterface {
 public:
  std::string bind_function(PyObject* py_compiler, const std::string& fn_name, functional_apply_t fn,
                            std::vector<at::TypePtr> packed_args_schema, bool is_custom_function,
                            bool is_traceable) const override {
    auto name = py::handle(py_compiler)
                    .attr("bind_function")(fn_name, make_functional_op(fn, std::move(packed_args_schema)),
                                           is_custom_function, is_traceable)
                    .cast<std::string>();
    remember_function(name, std::move(fn));
    return name;
  }

  variable_list call_function(PyObject* py_compiler, const char* method_name, const std::string& fn_name,
                              const variable_list& inputs, const torch::autograd::ivalue_list& packed_args,
                              const c10::IValue& output_metadata) const override {
    py::tuple arguments(packed_args.size());
    for (size_t i = 0; i < packed_args.size(); ++i) arguments[i] = torch::jit::toPyObject(packed_args[i]);
    return to_variable_list(
        py::handle(py_compiler)
            .attr(method_name)(fn_name, to_python_list(inputs), arguments, torch::jit::toPyObject(output_metadata)));
  }

  variable_list call_copy_slices_prologue(PyObject* py_compiler, const variable_list& inputs,
                                          const at::TensorGeometry& base,
                                          const at::TensorGeometry& view) const override {
    return to_variable_list(py::handle(py_compiler)
                                .attr("call_copy_slices_prologue")(to_python_list(inputs), base.sym_sizes(),
                                                                   base.sym_strides(), base.sym_storage_offset(),
                                                                   view.sym_sizes(), view.sym_strides(),
                                                                   view.sym_storage_offset()));
  }

  variable_list call_copy_slices_epilogue(PyObject* py_compiler, const std::vector<bool>& needs_input_grad,
                                          const at::Tensor& result, const variable_list& res,
                                          const at::Tensor& grad_slice) const override {
    return to_variable_list(
        py::handle(py_compiler)
            .attr("call_copy_slices_epilogue")(needs_input_grad, result, to_python_list(res), grad_slice));
  }

  at::Tensor call_unpack(PyObject* py_compiler, std::optional<size_t> hook_id, size_t hook_input_id) const override {
    return py::handle(py_compiler).attr("unpack_hook")(hook_id, hook_input_id).cast<at::Tensor>();
  }

  at::Tensor call_accumulate_grad(PyObject* py_compiler, const at::Tensor& variable, const at::Tensor& variable_grad,
                                  const at::Tensor& grad, bool has_post_hooks) const override {
    return py::handle(py_compiler)
        .attr("accumulate_grad")(variable, variable_grad, grad, has_post_hooks)
        .cast<at::Tensor>();
  }
};

// --- The front end, open from begin_capture() to end_capture(), closed on every way out ---

class OpenFrontEnd {
 public:
  explicit OpenFrontEnd(py::object instance) : instance_(std::move(instance)) {
    if (!py::hasattr(instance_, kAfterAccumulation)) return;
    // libtorch never lets go of the list that this returns, nor of the tensors in it.
    instance_.attr(kAfterAccumulation) =
        py::cpp_function([this, inner = py::object(instance_.attr(kAfterAccumulation))](const py::args& arguments) {
          py::object result = inner(*arguments);
          if (py::isinstance<py::list>(result)) lost_.append(result);
          return result;
        });
  }
  ~OpenFrontEnd() {
    PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
    PyErr_Fetch(&type, &value, &traceback);
    call_quietly([&] {
      for (const py::handle list : lost_) list.attr("clear")();
      // It refers to the instance, in a way that Python's garbage collector does not see.
      if (py::hasattr(instance_, kAfterAccumulation)) py::delattr(instance_, kAfterAccumulation);
    });
    // Before close(): torch enters it first, and leaves it only in end_capture().
    if (!ended_) call_quietly([&] { leave_compile_context(); });
    call_quietly([&] { instance_.attr("close")(); });
    PyErr_Restore(type, value, traceback);
  }
  OpenFrontEnd(const OpenFrontEnd&) = delete;
  OpenFrontEnd& operator=(const OpenFrontEnd&) = delete;

  py::handle get() const { return instance_; }
  void mark_ended() { ended_ = true; }

 private:
  template <class F>
  void call_quietly(const F& function) {
    try {
      function();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable(instance_);
    }
  }
  void leave_compile_context() {
    if (!py::hasattr(instance_, "compile_context")) return;
    const py::none none;
    instance_.attr("compile_context").attr("__exit__")(none, none, none);
  }

  static constexpr const char* kAfterAccumulation = "post_acc_grad_hook";

  py::object instance_;
  py::list lost_;
  bool ended_ = false;
};

py::list origins_of(const std::vector<uint32_t>& origins, const CaptureRequest& request) {
  py::list list;
  for (uint32_t k : origins) list.append(py::make_tuple(k, request.nodes[k]->name()));
  return list;
}

TraceState begin_capture(py::handle front_end, const CaptureRequest& request) {
  AutogradCompilerCall& call = request.collected.call;
  const py::tuple given_sizes = symbolic_sizes(request.sizes, request.sizes);
  std::vector<uint32_t> size_origins;
  for (size_t i = 0; i < call.size_input_origins.size(); ++i) {
    if (request.sizes[i].dyn_type == SizeInput::DYNAMIC) size_origins.push_back(call.size_input_origins[i]);
  }
  py::list origins;
  origins.append(origins_of(call.tensor_args.input_origins, request));
  origins.append(origins_of(size_origins, request));
  origins.append(origins_of(call.lifted_ivalue_args.args_origins, request));

  const auto answer =
      py::tuple(front_end.attr("begin_capture")(to_python_list(call.tensor_args.inputs), given_sizes, scalars_of(call),
                                                origins, request.accumulate, request.check_nans));
  TORCH_CHECK(answer.size() == 4, "begin_capture must return four values.");

  const variable_list proxies = to_variable_list(answer[1]);
  TORCH_CHECK(proxies.size() == call.tensor_args.inputs.size(), "begin_capture must return a tensor for every input.");
  for (size_t i = 0; i < proxies.size(); ++i) {
    call.tensor_args.lookup(call.tensor_args.inputs[i]).proxy_tensor = proxies[i];
  }

  const auto scalars = py::list(answer[3]);
  TORCH_CHECK(scalars.size() == call.lifted_ivalue_args.args.size(),
              "begin_capture must return a scalar for every scalar.");
  for (size_t i = 0; i < scalars.size(); ++i) {
    auto& argument = call.lifted_ivalue_args.args[i];
    if (argument.actual_ptr->isInt() || argument.actual_ptr->isSymInt()) {
      argument.proxy = scalars[i].cast<c10::SymInt>();
    } else {
      argument.proxy = scalars[i].cast<c10::SymFloat>();
    }
  }

  if (!request.compile_reason.empty()) {
    request.compile_reasons->push_back(py::str(answer[0]).cast<std::string>() + ": " + request.compile_reason);
    front_end.attr("log_compile_reasons")(*request.compile_reasons);
  }

  const auto sizes = py::list(answer[2]);
  TORCH_CHECK(sizes.size() == given_sizes.size(), "begin_capture must return a size for every symbolic size.");
  std::vector<std::optional<c10::SymInt>> sym_sizes;
  size_t next = 0;
  for (const SizeInput& size : request.sizes) {
    if (size.dyn_type == SizeInput::DYNAMIC) {
      sym_sizes.emplace_back(sizes[next++].cast<c10::SymInt>());
    } else {
      sym_sizes.emplace_back();
    }
  }
  return {std::move(sym_sizes), request.num_outputs};
}

// torch's name space of bound functions.
py::object ops() { return py::module_::import("torch._dynamo.compiled_autograd").attr("ops"); }

// --- One node ---

void set_node_origin(py::handle front_end, const Node& node, size_t k) {
  py::object python_node = py::none();
  if (is_python_node(typeid(node))) {
    auto* const object = static_cast<const torch::autograd::PyNode&>(node).pyobj();
    if (object != nullptr) python_node = py::reinterpret_borrow<py::object>(object);
  }
  front_end.attr("set_node_origin")(node.name(), k, python_node);
}

// libtorch hands over AccumulateGrad's function, which captured graphs call for every leaf, when the first such node is
// captured by its own method. Handed leaves are not; so a leaf of no graph is, by an interface that does nothing else.
void ensure_accumulate_grad(PyObject* front_end) {
  class BindOnly final : public FrontEnd {
   public:
    at::Tensor call_accumulate_grad(PyObject*, const at::Tensor&, const at::Tensor&, const at::Tensor& grad,
                                    bool) const override {
      return grad;
    }
  };
  if (py::hasattr(ops(), "AccumulateGrad")) return;
  const at::Tensor variable = at::zeros({1}).set_requires_grad(true);
  const auto leaf = c10::make_intrusive<torch::autograd::AccumulateGrad>(variable);
  AutogradCompilerCall call(SizeInput::STATIC);
  call.tensor_args.add(variable).proxy_tensor = variable;
  TraceState state({}, 0);
  const NodeCall node_call(0, leaf);
  SwapSavedVariables saved(call, state, front_end, node_call);
  const InterfaceGuard guard(std::make_unique<BindOnly>());
  leaf->apply_with_saved({at::zeros({1})}, saved);
}

variable_list capture_handed_leaf(at::Tensor variable, const variable_list& inputs, SwapSavedVariables& saved,
                                  PyObject* front_end) {
  if (!inputs[0].defined()) return {};
  saved.before(variable);
  const FrontEnd interface;
  interface.call_accumulate_grad(front_end, variable, {}, inputs[0], /*has_post_hooks=*/false);
  saved.after(variable);
  return {};
}

// Ours while it is in torch's name space, and what was there before. Guarded by the capture lock; never destroyed, as
// both are Python objects.
struct ValidateOutputs {
  bool in_place = false;
  py::object torchs;  // null: there was none
};
ValidateOutputs& validate_outputs_op() {
  static auto* const instance = std::make_unique<ValidateOutputs>().release();
  return *instance;
}

void ensure_validate_outputs(py::handle front_end) {
  ValidateOutputs& op = validate_outputs_op();
  if (op.in_place) return;
  if (py::hasattr(ops(), kValidateOutputs)) {
    op.torchs = ops().attr(kValidateOutputs);
    py::delattr(ops(), kValidateOutputs);
  }
  front_end.attr("bind_function")(kValidateOutputs, make_validate_outputs_op(), /*is_custom_function=*/false,
                                  /*is_traceable=*/true);
  op.in_place = true;
}

// The front end drops calls whose result nothing uses, and does not know that hooks from C++ have effects of their own:
// the one of retain_grad() fills `.grad`.
void keep_hooks_of_cpp() {
  const py::object hooks =
      py::module_::import("torch._C").attr("_dynamo").attr("compiled_autograd").attr("call_cpp_tensor_pre_hooks");
  py::module_::import("torch.fx.node").attr("has_side_effect")(hooks);
}

// What the node's outputs must look like, where they go. Copies, because the nodes that they go to may be in other
// graphs too: every thread that trains one model has its AccumulateGrad nodes. One copy for each input of a next node,
// as several outputs may go to the same one.
class NextMetadata {
 public:
  explicit NextMetadata(const Node& node) : edges_(node.next_edges()) {
    for (const Edge& edge : edges_) {
      if (edge.is_valid()) copies_.try_emplace(key(edge), edge.function->input_metadata(edge.input_nr));
    }
  }
  template <class F>
  void for_each_edge(const F& visit) {
    for (const Edge& edge : edges_) {
      if (edge.is_valid()) visit(copies_.at(key(edge)));
    }
  }
  std::vector<std::optional<InputMetadata>> list() const {
    std::vector<std::optional<InputMetadata>> list;
    for (const Edge& edge : edges_) {
      list.push_back(edge.is_valid() ? std::optional(copies_.at(key(edge))) : std::nullopt);
    }
    return list;
  }

 private:
  using Key = std::pair<const Node*, uint32_t>;
  static Key key(const Edge& edge) { return {edge.function.get(), edge.input_nr}; }

  const edge_list& edges_;
  std::map<Key, InputMetadata> copies_;
};

variable_list validate_outputs(py::handle front_end, const Node& node, const NextMetadata& next,
                               variable_list outputs) {
  const auto metadata = next.list();
  TORCH_CHECK(metadata.size() == outputs.size(), node.name(), " returned ", outputs.size(), " gradients for ",
              metadata.size(), " inputs.");
  // The graph of an AOT backward gives its outputs the right form itself, and a check behind it would keep the front
  // end from moving accumulations forward.
  if (node.is_aot_backward()) return outputs;
  ensure_validate_outputs(front_end);
  torch::dynamo::autograd::PackedArgs arguments;
  arguments.pack(metadata);
  const c10::IValue packed = arguments.vec()[0];
  return FrontEnd().call_function(front_end.ptr(), kValidateOutputs, kValidateOutputs, outputs, {packed}, packed);
}

// Proxies a call to every hook of one kind; each takes and returns a list of gradients.
template <class Hooks, class Call>
variable_list through_hooks(const Hooks& hooks, variable_list gradients, const Call& call) {
  if (hooks.empty()) return gradients;
  py::object list = to_python_list(gradients);
  for (const auto& hook : hooks) list = call(list, hook);
  return to_variable_list(list);
}

// The gradients that a node got so far.
struct InputBuffer {
  explicit InputBuffer(size_t size) : sums(size), sparse(size, false) {}
  variable_list sums;
  std::vector<bool> sparse;  // whether the sum will be a sparse tensor, which its stand-in does not tell
};
using InputBuffers = std::unordered_map<Node*, InputBuffer>;

void add_gradient(py::handle front_end, InputBuffers& buffers, const Edge& edge, const at::Tensor& gradient,
                  bool sparse) {
  auto& buffer = buffers.try_emplace(edge.function.get(), edge.function->num_inputs()).first->second;
  at::Tensor& sum = buffer.sums[edge.input_nr];
  const bool sum_is_sparse = buffer.sparse[edge.input_nr];
  buffer.sparse[edge.input_nr] = sparse && (sum_is_sparse || !sum.defined());
  if (!sum.defined()) {
    sum = gradient;
    return;
  }
  // The graph adds with add(), which takes a sparse tensor on the right of a dense one only.
  const bool swap = sum_is_sparse && !sparse;
  sum = front_end.attr("accumulate")(swap ? gradient : sum, swap ? sum : gradient).cast<at::Tensor>();
}

using HandedInputs = std::unordered_map<const Node*, uint32_t>;  // HandedLeaf::input

void capture_node(py::handle front_end, const CaptureRequest& request, size_t k, TraceState& state,
                  InputBuffers& buffers, const HandedInputs& handed) {
  Node& node = *request.nodes[k];
  NodeCall& call = request.collected.call.node_calls.lookup(node.getptr());
  set_node_origin(front_end, node, k);

  variable_list inputs(node.num_inputs());
  if (auto buffer = buffers.extract(&node)) inputs = std::move(buffer.mapped().sums);
  using Indexed = std::pair<int, int>;
  inputs = through_hooks(call.tensor_pre_hooks, std::move(inputs), [&](const py::object& list, const Indexed& hook) {
    return front_end.attr("tensor_pre_hook")(list, hook.first, hook.second);
  });
  inputs =
      through_hooks(call.cpp_tensor_pre_hooks, std::move(inputs), [&](const py::object& list, const Indexed& hook) {
        return front_end.attr("cpp_tensor_pre_hook")(list, hook.first, hook.second);
      });
  for (const auto& [input_nr, output] : call.graph_output) {
    state.outputs[static_cast<size_t>(output)] = inputs[static_cast<size_t>(input_nr)];
  }
  if (!call.needed) return;
  inputs = through_hooks(call.pre_hooks, std::move(inputs),
                         [&](const py::object& list, int hook) { return front_end.attr("pre_hook")(list, hook); });

  SwapSavedVariables saved(request.collected.call, state, front_end.ptr(), call);
  const bool is_leaf = typeid(node) == typeid(torch::autograd::AccumulateGrad);
  variable_list outputs;
  NextMetadata next(node);
  try {
    const auto leaf = handed.find(&node);
    outputs = leaf != handed.end() ? capture_handed_leaf(request.collected.call.tensor_args.inputs[leaf->second],
                                                         inputs, saved, front_end.ptr())
                                   : node.apply_with_saved(inputs, saved);
    saved.debug_asserts();
    next.for_each_edge([&](InputMetadata& metadata) { saved.before(metadata); });
    outputs = validate_outputs(front_end, node, next, std::move(outputs));
    next.for_each_edge([&](InputMetadata& metadata) { saved.after(metadata); });
    saved.debug_asserts();
  } catch (...) {
    put_back_node(saved, !is_leaf);
    throw;
  }

  outputs = through_hooks(call.post_hooks, std::move(outputs), [&](const py::object& list, int hook) {
    return front_end.attr("post_hook")(list, to_python_list(inputs), hook);
  });
  const bool sparse = makes_sparse_gradients(node);
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Edge& edge = node.next_edge(i);
    if (edge.is_valid() && outputs[i].defined()) add_gradient(front_end, buffers, edge, outputs[i], sparse);
  }
}

}  // namespace

py::list scalars_of(const AutogradCompilerCall& call) {
  py::list list;
  for (const auto& argument : call.lifted_ivalue_args.args) {
    const c10::IValue& value = *argument.actual_ptr;
    if (value.isInt() || value.isSymInt()) {
      list.append(value.toInt());
    } else {
      list.append(value.toDouble());
    }
  }
  return list;
}

py::tuple symbolic_sizes(std::span<const SizeInput> which, std::span<const SizeInput> values) {
  py::list sizes;
  for (size_t i = 0; i < which.size(); ++i) {
    if (which[i].dyn_type == SizeInput::DYNAMIC) sizes.append(values[i].value);
  }
  return py::tuple(sizes);
}

Captured capture(const CaptureRequest& request) {
  OpenFrontEnd front_end(py::reinterpret_borrow<py::object>(request.compiler.factory())());
  Captured captured;
  // torch's front end hands the graph to the compiler function at its end. That must not happen here, under the lock.
  const py::handle instance = front_end.get();
  if (py::hasattr(instance, "compiler_fn")) {
    captured.compiler_fn = instance.attr("compiler_fn");
    instance.attr("compiler_fn") = py::cpp_function([](py::object graph) { return graph; });
  }

  keep_hooks_of_cpp();
  if (!request.handed.empty()) ensure_accumulate_grad(instance.ptr());
  const InterfaceGuard guard(std::make_unique<FrontEnd>());
  HandedInputs handed;
  for (const HandedLeaf& leaf : request.handed) handed.emplace(leaf.node, leaf.input);
  TraceState state = begin_capture(instance, request);
  InputBuffers buffers;
  for (size_t k = 0; k < request.nodes.size(); ++k) capture_node(instance, request, k, state, buffers, handed);
  state.debug_asserts();

  const py::object result = instance.attr("end_capture")(to_python_list(state.outputs));
  front_end.mark_ended();
  TORCH_CHECK(py::isinstance<py::tuple>(result), "Expected end_capture to return tuple");
  const auto pair = py::tuple(result);
  TORCH_CHECK(pair.size() == 2, "Expected end_capture to return tuple of size 2");
  captured.runtime_wrapper = pair[0];
  captured.graph = pair[1];
  TORCH_CHECK(PyCallable_Check(captured.runtime_wrapper.ptr()) != 0, "Expected end_capture to return runtime_wrapper");
  return captured;
}

void restore_validate_outputs() {
  ValidateOutputs& op = validate_outputs_op();
  if (!op.in_place) return;
  if (op.torchs) {
    py::setattr(ops(), kValidateOutputs, op.torchs);
  } else {
    py::delattr(ops(), kValidateOutputs);
  }
  op.torchs = py::object();
  op.in_place = false;
}

}  // namespace retrograd::bindings
