#include "bindings/python_engine.h"

#include <optional>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/extension.h>

#include "engine/context.h"
#include "engine/engine.h"
#include "engine/retained.h"

namespace retrograd::bindings {
namespace {

namespace py = pybind11;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::variable_list;

// torch._C._ImperativeEngine.run_backward itself, so that a call for the previous engine costs one C call more.
PyCFunctionWithKeywords stock_run_backward = nullptr;

// The arguments of run_backward in the engine's terms.
struct Arguments {
  edge_list roots;
  variable_list gradients;
  bool keep_graph = false;
  bool create_graph = false;
  edge_list outputs;
  bool has_inputs = false;
  bool allow_unreachable = false;
  bool accumulate_grad = false;
};

bool is_batched(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->key_set().has_any(
      c10::DispatchKeySet({c10::DispatchKey::Batched, c10::DispatchKey::FuncTorchBatched}));
}

// The edge that a GradientEdge names; null function for what the stock engine refuses.
Edge edge_of_gradient_edge(PyObject* object) {
  PyObject* node = PyTuple_GetItem(object, 0);
  PyObject* output_nr = PyTuple_GetItem(object, 1);
  if (node == nullptr || output_nr == nullptr || !PyLong_CheckExact(output_nr)) {
    PyErr_Clear();
    return {};
  }
  const long number = PyLong_AsLong(output_nr);
  if (number < 0) {
    PyErr_Clear();
    return {};
  }
  if (THPFunction_Check(node)) {
    return {reinterpret_cast<THPFunction*>(node)->cdata, static_cast<uint32_t>(number)};
  }
  if (torch::autograd::THPCppFunction_Check(node)) {
    return {reinterpret_cast<torch::autograd::THPCppFunction*>(node)->cdata, static_cast<uint32_t>(number)};
  }
  return {};
}

// Reads the arguments. Nothing for a call that is not plainly in order: the stock engine then reads it itself and
// words the error. Has no effect but retain_grad() on inputs of backward(), which the stock engine would repeat.
std::optional<Arguments> parse(PyObject* args, PyObject* kwargs) {
  PyObject *tensors = nullptr, *grad_tensors = nullptr, *inputs = nullptr;
  unsigned char keep_graph = 0, create_graph = 0, allow_unreachable = 0, accumulate_grad = 0;
  static const char* const names[] = {"tensors", "grad_tensors",      "keep_graph",      "create_graph",
                                      "inputs",  "allow_unreachable", "accumulate_grad", nullptr};
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OObb|Obb", const_cast<char**>(names), &tensors, &grad_tensors,
                                   &keep_graph, &create_graph, &inputs, &allow_unreachable, &accumulate_grad)) {
    PyErr_Clear();
    return std::nullopt;
  }
  if (!PyTuple_Check(tensors) || !PyTuple_Check(grad_tensors)) return std::nullopt;
  const Py_ssize_t count = PyTuple_GET_SIZE(tensors);
  if (count != PyTuple_GET_SIZE(grad_tensors)) return std::nullopt;

  Arguments a;
  a.keep_graph = keep_graph != 0;
  a.create_graph = create_graph != 0;
  a.allow_unreachable = allow_unreachable != 0;
  a.accumulate_grad = accumulate_grad != 0;
  a.has_inputs = inputs != nullptr;
  a.roots.reserve(static_cast<size_t>(count));
  a.gradients.reserve(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* tensor = PyTuple_GET_ITEM(tensors, i);
    Edge root;
    if (THPVariable_Check(tensor)) {
      const at::Tensor& variable = THPVariable_Unpack(tensor);
      if (is_batched(variable) || !variable.requires_grad()) return std::nullopt;
      root = torch::autograd::impl::gradient_edge(variable);
    } else if (PyObject_IsInstance(tensor, THPGradientEdgeClass) == 1) {
      root = edge_of_gradient_edge(tensor);
    }
    if (!root.is_valid()) return std::nullopt;
    PyObject* gradient = PyTuple_GET_ITEM(grad_tensors, i);
    if (!THPVariable_Check(gradient)) return std::nullopt;
    const at::Tensor& variable = THPVariable_Unpack(gradient);
    if (is_batched(variable)) return std::nullopt;
    a.roots.push_back(std::move(root));
    a.gradients.push_back(variable);
  }

  if (inputs == nullptr) return a;
  if (!PyTuple_CheckExact(inputs)) return std::nullopt;
  const Py_ssize_t num_inputs = PyTuple_GET_SIZE(inputs);
  a.outputs.reserve(static_cast<size_t>(num_inputs));
  for (Py_ssize_t i = 0; i < num_inputs; ++i) {
    PyObject* input = PyTuple_GET_ITEM(inputs, i);
    if (THPVariable_Check(input)) {
      const at::Tensor& variable = THPVariable_Unpack(input);
      if (is_batched(variable) || !variable.requires_grad()) return std::nullopt;
      if (a.accumulate_grad) variable.retain_grad();
      auto node = variable.grad_fn();
      if (!node) node = torch::autograd::impl::try_get_grad_accumulator(variable);
      if (node) {
        a.outputs.emplace_back(std::move(node), static_cast<uint32_t>(variable.output_nr()));
      } else {
        // No accumulator: no graph leads to the tensor. Any node outside the graph stands for it.
        a.outputs.emplace_back(c10::make_intrusive<torch::autograd::Identity>(), 0);
      }
    } else if (PyObject_IsInstance(input, THPGradientEdgeClass) == 1) {
      a.outputs.push_back(edge_of_gradient_edge(input));
      if (!a.outputs.back().is_valid()) return std::nullopt;
    } else {
      return std::nullopt;
    }
  }
  return a;
}

PyObject* wrap_results(const variable_list& results, bool allow_unreachable) {
  THPObjectPtr tuple(PyTuple_New(static_cast<Py_ssize_t>(results.size())));
  if (!tuple) throw python_error();
  for (size_t i = 0; i < results.size(); ++i) {
    TORCH_CHECK(allow_unreachable || results[i].defined(), "The differentiated Tensor at index ", i,
                " appears to not have been used in the graph. "
                "Set allow_unused=True if this is the desired behavior.");
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), THPVariable_Wrap(results[i]));
  }
  return tuple.release();
}

// Whether a call that the stock engine will read keeps its graph, as far as its arguments can be understood.
bool may_keep_graph(PyObject* args, PyObject* kwargs) {
  const auto is_true = [&](Py_ssize_t place, const char* name) {
    PyObject* object = nullptr;
    if (PyTuple_GET_SIZE(args) > place) {  // as torch's own callers do
      object = PyTuple_GET_ITEM(args, place);
    } else if (kwargs != nullptr) {
      object = PyDict_GetItemString(kwargs, name);
    }
    return object != nullptr && object != Py_False && object != Py_None;
  };
  return is_true(2, "keep_graph") || is_true(3, "create_graph");
}

PyObject* run_backward(PyObject* self, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  ReentrantEngine& engine = ReentrantEngine::get();
  PreviousReason reason = engine.reason_for_previous();
  std::optional<Arguments> a;
  if (reason == PreviousReason::kCount) {
    a = parse(args, kwargs);
    if (!a) reason = PreviousReason::kIrregularCall;
  }
  if (reason != PreviousReason::kCount) {
    thread_stats().count_previous(reason);
    const SettingCarrier carrier;
    const RetainedCall retained(may_keep_graph(args, kwargs), [](RetainedCall::Wait wait) {
      const py::gil_scoped_release no_gil;
      wait();
    });
    return stock_run_backward(self, args, kwargs);
  }
  variable_list results;
  {
    py::gil_scoped_release no_gil;
    results = engine.execute(a->roots, a->gradients, a->keep_graph, a->create_graph, a->accumulate_grad, a->outputs);
  }
  if (a->accumulate_grad || !a->has_inputs) Py_RETURN_NONE;
  return wrap_results(results, a->allow_unreachable);
  END_HANDLE_TH_ERRORS
}

}  // namespace

void add_engine_type(PyObject* module) {
  const py::object base = py::module_::import("torch._C").attr("_ImperativeEngine");
  const py::object stock_method = base.attr("run_backward");
  if (Py_TYPE(stock_method.ptr()) != &PyMethodDescr_Type) {
    throw py::import_error("torch's engine is not the one retrograd was built for; install torch==2.13.0.");
  }
  const PyMethodDef* definition = reinterpret_cast<PyMethodDescrObject*>(stock_method.ptr())->d_method;
  stock_run_backward = reinterpret_cast<PyCFunctionWithKeywords>(reinterpret_cast<void (*)()>(definition->ml_meth));

  static PyMethodDef methods[] = {
      {"run_backward", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run_backward)),
       METH_VARARGS | METH_KEYWORDS,
       "run_backward(tensors, grad_tensors, keep_graph, create_graph, inputs=(), allow_unreachable=False, "
       "accumulate_grad=False)\n\nAs torch._C._ImperativeEngine.run_backward, on the engine that the calling thread "
       "chose."},
      {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_methods, methods}, {0, nullptr}};
  static PyType_Spec spec{"retrograd._C.Engine", 0, 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};
  const py::tuple bases = py::make_tuple(base);
  const auto type = py::reinterpret_steal<py::object>(PyType_FromSpecWithBases(&spec, bases.ptr()));
  if (!type || PyModule_AddObjectRef(module, "Engine", type.ptr()) != 0) throw py::error_already_set();
}

}  // namespace retrograd::bindings
