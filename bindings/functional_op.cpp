#include "bindings/functional_op.h"

#include <structmember.h>

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/object_ptr.h>

namespace retrograd::bindings {
namespace {

namespace py = pybind11;
using torch::autograd::functional_apply_t;
using torch::autograd::InputMetadata;
using torch::autograd::variable_list;

// The items of a list or tuple, borrowed.
std::span<PyObject* const> items_of(PyObject* sequence) {
  if (PyList_Check(sequence)) {
    auto* const list = reinterpret_cast<PyListObject*>(sequence);
    return {list->ob_item, static_cast<size_t>(Py_SIZE(list))};
  }
  if (PyTuple_Check(sequence)) {
    auto* const tuple = reinterpret_cast<PyTupleObject*>(sequence);
    return {tuple->ob_item, static_cast<size_t>(Py_SIZE(tuple))};
  }
  throw py::type_error(c10::str("expected a list or tuple of tensors, got ", Py_TYPE(sequence)->tp_name, "."));
}

at::Tensor to_tensor(PyObject* object) {
  if (object == Py_None) return {};
  if (THPVariable_Check(object)) return THPVariable_Unpack(object);
  throw py::type_error(c10::str("expected a tensor or None, got ", Py_TYPE(object)->tp_name, "."));
}

enum class Form : uint8_t { kTensor, kTensors, kInteger, kBool, kFloat, kIntegers, kOther };

Form form_of(const at::TypePtr& type) {
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
      return Form::kTensor;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return Form::kInteger;
    case c10::TypeKind::BoolType:
      return Form::kBool;
    case c10::TypeKind::FloatType:
      return Form::kFloat;
    case c10::TypeKind::ListType: {
      if (type->isSubtypeOf(*at::ListType::ofTensors())) return Form::kTensors;
      const auto element = type->expectRef<at::ListType>().getElementType()->kind();
      const bool integers = element == c10::TypeKind::IntType || element == c10::TypeKind::SymIntType;
      return integers ? Form::kIntegers : Form::kOther;
    }
    default:
      return Form::kOther;
  }
}

bool all_plain_integers(std::span<PyObject* const> items) {
  return std::all_of(items.begin(), items.end(), [](PyObject* item) { return PyLong_CheckExact(item); });
}

int64_t to_int64(PyObject* integer) {
  const long long value = PyLong_AsLongLong(integer);
  if (value == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value;
}

c10::IValue to_ivalue(PyObject* object, Form form, const at::TypePtr& type) {
  switch (form) {
    case Form::kTensor:
      if (object == Py_None || THPVariable_Check(object)) return to_tensor(object);
      break;
    case Form::kTensors:
      return to_variable_list(object);
    case Form::kInteger:
      if (PyLong_CheckExact(object)) return to_int64(object);
      break;
    case Form::kBool:
      if (PyBool_Check(object)) return object == Py_True;
      break;
    case Form::kFloat:
      if (PyFloat_CheckExact(object)) return PyFloat_AS_DOUBLE(object);
      break;
    case Form::kIntegers:
      if (PyList_CheckExact(object) || PyTuple_CheckExact(object)) {
        const auto items = items_of(object);
        if (!all_plain_integers(items)) break;  // symbolic
        std::vector<int64_t> values;
        values.reserve(items.size());
        for (PyObject* item : items) values.push_back(to_int64(item));
        return values;
      }
      break;
    case Form::kOther:
      break;
  }
  return torch::jit::toIValue(object, type, std::nullopt);
}

// Other threads may run Python while kernels run; under a dispatch mode the kernels are Python themselves.
class ReleaseGilForKernels {
 public:
  ReleaseGilForKernels() {
    if (c10::impl::TorchDispatchModeTLS::stack_len() == 0) released_.emplace();
  }

 private:
  std::optional<py::gil_scoped_release> released_;
};

// --- The type of the callables: the base of two kinds of op ---

class Op {
 public:
  virtual ~Op() = default;
  virtual variable_list call(variable_list gradients, std::span<PyObject* const> arguments) const = 0;
};

class FunctionalOp final : public Op {
 public:
  FunctionalOp(functional_apply_t function, std::vector<at::TypePtr> schema)
      : function_(std::move(function)), schema_(std::move(schema)) {
    for (const auto& type : schema_) forms_.push_back(form_of(type));
  }

  variable_list call(variable_list gradients, std::span<PyObject* const> arguments) const override {
    TORCH_CHECK_TYPE(arguments.size() == schema_.size(), "a backward function takes ", schema_.size(),
                     " arguments after the gradients, but got ", arguments.size(), ".");
    std::vector<c10::IValue> values;
    values.reserve(arguments.size());
    for (size_t i = 0; i < arguments.size(); ++i) values.push_back(to_ivalue(arguments[i], forms_[i], schema_[i]));
    const ReleaseGilForKernels release;
    return function_(gradients, values);
  }

 private:
  functional_apply_t function_;
  std::vector<at::TypePtr> schema_;
  std::vector<Form> forms_;
};

using MetadataList = std::vector<std::optional<InputMetadata>>;

template <class T, class Convert>
std::optional<T> optional_of(PyObject* object, const Convert& convert) {
  if (object == Py_None) return std::nullopt;
  return convert(object);
}

// What IValuePacker<InputMetadata> packs, as plain Python values; nothing for one with symbolic parts.
std::optional<InputMetadata> to_metadata(PyObject* packed) {
  if (!PyTuple_CheckExact(packed) || PyTuple_GET_SIZE(packed) != 4) return std::nullopt;
  const auto fields = items_of(packed);
  if (!PyTuple_CheckExact(fields[0]) || PyTuple_GET_SIZE(fields[0]) != 6) return std::nullopt;
  if (!PyList_CheckExact(fields[1]) && !PyTuple_CheckExact(fields[1])) return std::nullopt;
  const auto sizes = items_of(fields[1]);
  if (!all_plain_integers(sizes) || !PyBool_Check(fields[2])) return std::nullopt;
  const auto o = items_of(fields[0]);  // requires_grad, memory format, device, dtype, layout, pinned
  for (size_t i : {1, 3, 4}) {
    if (o[i] != Py_None && !PyLong_CheckExact(o[i])) return std::nullopt;
  }
  for (size_t i : {0, 5}) {
    if (o[i] != Py_None && !PyBool_Check(o[i])) return std::nullopt;
  }
  if (o[2] != Py_None && !THPDevice_Check(o[2])) return std::nullopt;
  if (fields[3] != Py_None && !PyLong_CheckExact(fields[3])) return std::nullopt;

  const auto truth = [](PyObject* object) { return object == Py_True; };
  const auto dtype = [](PyObject* object) { return static_cast<c10::ScalarType>(to_int64(object)); };
  torch::dynamo::autograd::packed_tensoroptions_t options{
      optional_of<bool>(o[0], truth),
      optional_of<at::MemoryFormat>(o[1], [](PyObject* m) { return static_cast<at::MemoryFormat>(to_int64(m)); }),
      optional_of<at::Device>(o[2], [](PyObject* d) { return reinterpret_cast<THPDevice*>(d)->device; }),
      optional_of<c10::ScalarType>(o[3], dtype),
      optional_of<c10::Layout>(o[4], [](PyObject* l) { return static_cast<c10::Layout>(to_int64(l)); }),
      optional_of<bool>(o[5], truth)};
  torch::autograd::SymIntSmallVec shape;
  for (PyObject* size : sizes) shape.emplace_back(to_int64(size));
  return InputMetadata(torch::dynamo::autograd::unpack_TensorOptions(options), std::move(shape), fields[2] == Py_True,
                       /*is_nested=*/false, optional_of<c10::ScalarType>(fields[3], dtype));
}

class ValidateOutputsOp final : public Op {
 public:
  variable_list call(variable_list gradients, std::span<PyObject* const> arguments) const override {
    TORCH_CHECK_TYPE(arguments.size() == 1, "validate_outputs takes one argument after the gradients.");
    const MetadataList metadata = to_metadata_list(arguments[0]);
    const ReleaseGilForKernels release;
    torch::autograd::validate_outputs(
        metadata, gradients, [](const std::string& message) { return "[Compiled Autograd Tracing:]" + message; });
    return gradients;
  }

 private:
  static MetadataList to_metadata_list(PyObject* packed) {
    MetadataList list;
    if (PyList_CheckExact(packed) || PyTuple_CheckExact(packed)) {
      for (PyObject* item : items_of(packed)) {
        list.push_back(item == Py_None ? std::nullopt : to_metadata(item));
        if (item != Py_None && !list.back()) return by_schema(packed);
      }
      return list;
    }
    return by_schema(packed);
  }
  static MetadataList by_schema(PyObject* packed) {
    using Packer = torch::dynamo::autograd::IValuePacker<MetadataList>;
    return Packer::unpack(torch::jit::toIValue(packed, Packer::packed_type(), std::nullopt));
  }
};

struct OpObject {
  PyObject_HEAD vectorcallfunc vectorcall;
  const Op* op;
};

PyObject* op_vectorcall(PyObject* self, PyObject* const* arguments, size_t nargsf, PyObject* names) {
  HANDLE_TH_ERRORS
  const auto count = static_cast<size_t>(PyVectorcall_NARGS(nargsf));
  TORCH_CHECK_TYPE(names == nullptr || PyTuple_GET_SIZE(names) == 0, "a backward function takes no keyword arguments.");
  TORCH_CHECK_TYPE(count >= 1, "a backward function takes a list of gradients first.");
  const variable_list results =
      reinterpret_cast<OpObject*>(self)->op->call(to_variable_list(arguments[0]), {arguments + 1, count - 1});
  return to_python_list(results).release().ptr();
  END_HANDLE_TH_ERRORS
}

void op_dealloc(PyObject* self) {
  const std::unique_ptr<const Op> last(reinterpret_cast<OpObject*>(self)->op);
  PyTypeObject* const type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyTypeObject* op_type() {
  static PyTypeObject* const type = [] {
    static PyMemberDef members[] = {
        {"__vectorcalloffset__", T_PYSSIZET, offsetof(OpObject, vectorcall), READONLY, nullptr},
        {nullptr, 0, 0, 0, nullptr}};
    static PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                  {Py_tp_dealloc, reinterpret_cast<void*>(op_dealloc)},
                                  {Py_tp_members, members},
                                  {0, nullptr}};
    static PyType_Spec spec{"retrograd._C.FunctionalOp", sizeof(OpObject), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
    auto* const made = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
    if (made == nullptr) throw py::error_already_set();
    return made;
  }();
  return type;
}

py::object make_op(std::unique_ptr<const Op> op) {
  auto object = py::reinterpret_steal<py::object>(op_type()->tp_alloc(op_type(), 0));
  if (!object) throw py::error_already_set();
  auto* const raw = reinterpret_cast<OpObject*>(object.ptr());
  raw->vectorcall = op_vectorcall;
  raw->op = op.release();
  return object;
}

}  // namespace

variable_list to_variable_list(py::handle sequence) {
  const auto items = items_of(sequence.ptr());
  variable_list variables;
  variables.reserve(items.size());
  for (PyObject* item : items) variables.push_back(to_tensor(item));
  return variables;
}

py::list to_python_list(const variable_list& variables) {
  py::list list(variables.size());
  for (size_t i = 0; i < variables.size(); ++i) {
    PyObject* const item = THPVariable_Wrap(variables[i]);  // None for an undefined one
    if (item == nullptr) throw py::error_already_set();
    PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), item);
  }
  return list;
}

py::object make_functional_op(functional_apply_t function, std::vector<at::TypePtr> schema) {
  return make_op(std::make_unique<const FunctionalOp>(std::move(function), std::move(schema)));
}

py::object make_validate_outputs_op() { return make_op(std::make_unique<const ValidateOutputsOp>()); }

}  // namespace retrograd::bindings
