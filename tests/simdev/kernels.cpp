// The device's kernels. Nearly all operators go through one boxed fallback: their Meta kernel, run at once, gives the
// shapes of the results, and their CPU kernel, run when the stream comes to it, computes them in place.
#include <algorithm>
#include <cstring>
#include <optional>
#include <unordered_map>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "simdev/backend.h"

namespace simdev {
namespace {

using at::Tensor;
using torch::jit::Stack;

// Kernels of other backends are called below autograd, on stream threads too.
using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

bool on_device(const Tensor& t) { return t.defined() && t.device().type() == kSim; }
int device_index(const Tensor& t) { return t.device().index(); }
const BlockPtr& block_of(const Tensor& t) { return simdev::block_of(t.storage().data_ptr()); }

// A CPU tensor over the same memory, for kernels. Holds the memory only as long as the kernel, which has the block.
Tensor on_host(const Tensor& t) {
  char* const data = static_cast<char*>(block_of(t)->data) + t.storage_offset() * static_cast<int64_t>(t.itemsize());
  Tensor host = at::from_blob(data, t.sizes(), t.strides(), at::TensorOptions(t.dtype()).device(at::kCPU));
  if (t.is_conj()) host._set_conj(true);
  if (t.is_neg()) host._set_neg(true);
  return host;
}

Tensor on_meta(const Tensor& t) { return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta)); }

// --- Making and copying ---

int index_of(std::optional<c10::Device> device) {
  return device && device->has_index() ? device->index() : Runtime::current_device();
}

Tensor empty_strided_on(int device, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  const c10::DeviceGuard guard({kSim, static_cast<c10::DeviceIndex>(device)});
  return at::detail::empty_strided_generic(sizes, strides, &allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard({kSim, static_cast<c10::DeviceIndex>(index_of(device))});
  return at::detail::empty_generic(sizes, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  return empty_strided_on(index_of(device), sizes, strides, c10::dtype_or_default(dtype));
}

// Everything that stream `before` has been given comes before what `after` is given from now on.
void order(Stream& before, Stream& after) {
  const auto event = std::make_shared<Event>();
  Runtime::get().record(event, before);
  Runtime::get().wait(event, after, Runtime::Wait::kOfKernel);
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  Runtime& runtime = Runtime::get();
  const Tensor from = self.sizes() == to.sizes() ? self : self.expand(to.sizes());
  const auto copy = [](Tensor host_to, Tensor host_from) {
    return [to = std::move(host_to), from = std::move(host_from)] {
      const BelowAutograd below;
      to.copy_(from);
    };
  };
  if (!on_device(from)) {
    Tensor staged;  // the host may change its tensor right after
    {
      const BelowAutograd below;
      staged = from.clone();
    }
    runtime.launch(runtime.current(device_index(to)), "copy from host", {}, {block_of(to)}, copy(on_host(to), staged));
    return to;
  }
  Stream& source = runtime.current(device_index(from));
  if (!on_device(to)) {
    runtime.launch(source, "copy to host", {block_of(from)}, {}, copy(to, on_host(from)));
    if (!non_blocking) runtime.synchronize(source);
    return to;
  }
  // As CUDA does it: on the source's stream, and in order with the other device's in both directions.
  Stream& target = runtime.current(device_index(to));
  if (&source != &target) order(target, source);
  runtime.launch(source, "copy", {block_of(from)}, {block_of(to)}, copy(on_host(to), on_host(from)));
  if (&source != &target) order(source, target);
  return to;
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  const size_t size = at::detail::computeStorageNbytesContiguous(sizes, self.itemsize(), self.storage_offset());
  const c10::Storage& storage = self.storage();
  if (size > storage.nbytes()) {
    const c10::DeviceGuard guard(self.device());
    c10::DataPtr grown = allocator().allocate(size);
    const BlockPtr from = block_of(self), to = simdev::block_of(grown);
    Runtime& runtime = Runtime::get();
    runtime.launch(runtime.current(device_index(self)), "resize_", {from}, {to}, [from, to] {
      if (from->size > 0) std::memcpy(to->data, from->data, from->size);
    });
    storage.set_data_ptr_noswap(std::move(grown));
    storage.set_nbytes(size);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  resize_(to, self.sizes(), std::nullopt);
  return copy_from(self, to, /*non_blocking=*/false);
}

at::Scalar local_scalar_dense(const Tensor& self) { return self.to(at::kCPU).item(); }

void record_stream(Tensor& self, c10::Stream stream) {
  Runtime::get().record_stream(*block_of(self), Runtime::get().stream(stream.device_index(), stream.id()));
}

// --- All other operators ---

template <class Map>
c10::IValue map_tensors(const c10::IValue& value, const Map& map) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> mapped;
    for (const Tensor& t : value.toTensorVector()) mapped.push_back(map(t));
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> mapped;
    for (const std::optional<Tensor>& t : value.toOptionalTensorVector()) {
      mapped.push_back(t ? std::optional<Tensor>(map(*t)) : std::nullopt);
    }
    return mapped;
  }
  return value;
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

bool holds_tensors(const c10::Argument& argument) {
  return argument.type()->isSubtypeOf(*c10::TensorType::get()) ||
         argument.type()->isSubtypeOf(*c10::ListType::ofTensors());
}

// One call of an operator, from its arguments to the kernel on the stream.
class BoxedCall {
 public:
  BoxedCall(const c10::OperatorHandle& op, const Stack& stack)
      : op_(op), schema_(op.schema()), arguments_(stack.end() - static_cast<ptrdiff_t>(count()), stack.end()) {}

  // Whether it can run on a stream: then results() has what it returns. Else the host has to wait for its data.
  bool run() {
    if (!std::ranges::all_of(schema_.returns(), holds_tensors) || !find_memory() || !infer()) return false;
    make_results();
    Runtime& runtime = Runtime::get();
    runtime.launch(runtime.current(device_), op_.operator_name().name.substr(sizeof("aten::") - 1), reads_, writes_,
                   [op = op_, arguments = on_host_, copies = std::move(copies_)]() mutable {
                     const BelowAutograd below;
                     op.callBoxed(&arguments);
                     for (const Copy& copy : copies) {
                       const c10::IValue& value = arguments[copy.value];
                       copy.to.copy_(value.isTensor() ? value.toTensor() : value.toTensorVector()[copy.element]);
                     }
                   });
    return true;
  }

  size_t count() const { return schema_.arguments().size(); }
  const std::vector<c10::IValue>& results() const { return results_; }

 private:
  struct Copy {  // of what the CPU kernel returned into the result's memory
    size_t value, element;
    Tensor to;
  };

  // The device, and the memory that the operator reads and writes; false if there is no tensor on a device.
  bool find_memory() {
    for (size_t i = 0; i < count(); ++i) {
      const c10::Argument& argument = schema_.arguments()[i];
      map_tensors(arguments_[i], [&](const Tensor& t) {
        if (on_device(t)) {
          if (device_ < 0) device_ = device_index(t);
          TORCH_CHECK(device_ == device_index(t), "simdev: ", op_.operator_name(), ": tensors on several devices");
          (is_written(argument) ? writes_ : reads_).push_back(block_of(t));
        } else {
          TORCH_CHECK(!t.defined() || t.dim() == 0, "simdev: ", op_.operator_name(), ": a tensor is not on the device");
        }
        return t;
      });
      if (device_ < 0 && arguments_[i].isDevice() && arguments_[i].toDevice().type() == kSim) {
        device_ = index_of(arguments_[i].toDevice());
      }
    }
    return device_ >= 0;
  }

  // Runs the Meta kernel; false if it fails, be it that there is none or that the arguments are wrong.
  bool infer() {
    for (const c10::IValue& argument : arguments_) {
      if (argument.isDevice()) {
        on_meta_.emplace_back(c10::Device(at::kMeta));
        continue;
      }
      on_meta_.push_back(map_tensors(argument, [&](const Tensor& t) {
        if (!on_device(t)) return t;
        Tensor& meta = metas_[t.unsafeGetTensorImpl()];
        if (!meta.defined()) meta = on_meta(t);
        return meta;
      }));
    }
    try {
      const BelowAutograd below;
      op_.callBoxed(&on_meta_);
    } catch (const std::exception&) {
      return false;
    }
    return true;
  }

  void make_results() {
    for (const c10::IValue& argument : arguments_) {
      if (argument.isDevice()) {
        on_host_.emplace_back(c10::Device(at::kCPU));
        continue;
      }
      on_host_.push_back(map_tensors(argument, [&](const Tensor& t) {
        if (!t.defined()) return t;
        if (!on_device(t)) return t.clone();  // a scalar, which the host may change
        const Tensor& meta = metas_.at(t.unsafeGetTensorImpl());
        if (meta.sizes() != t.sizes()) resize_(t, meta.sizes(), std::nullopt);  // out= of another size
        return on_host(t);
      }));
    }
    for (size_t r = 0; r < schema_.returns().size(); ++r) {
      if (const c10::AliasInfo* alias = schema_.returns()[r].alias_info()) {
        results_.push_back(argument_of(*alias));
        continue;
      }
      size_t element = 0;
      results_.push_back(map_tensors(on_meta_[r], [&](const Tensor& meta) {
        Tensor result;
        if (meta.defined()) {
          result = empty_strided_on(device_, meta.sizes(), meta.strides(), meta.scalar_type());
          writes_.push_back(block_of(result));
          copies_.push_back({r, element, on_host(result)});
        }
        ++element;
        return result;
      }));
    }
  }

  const c10::IValue& argument_of(const c10::AliasInfo& alias) const {
    for (size_t i = 0; i < count(); ++i) {
      const c10::Argument& argument = schema_.arguments()[i];
      if (is_written(argument) && argument.alias_info()->beforeSets() == alias.beforeSets()) return arguments_[i];
    }
    TORCH_CHECK(false, "simdev: ", op_.operator_name(), " makes a view and has no kernel of its own");
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const std::vector<c10::IValue> arguments_;
  int device_ = -1;
  std::vector<BlockPtr> reads_, writes_;
  std::unordered_map<const c10::TensorImpl*, Tensor> metas_;
  Stack on_meta_;  // the arguments, then the results
  Stack on_host_;
  std::vector<Copy> copies_;
  std::vector<c10::IValue> results_;
};

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  BoxedCall call(op, *stack);
  if (!call.run()) {
    at::native::cpu_fallback(op, stack);
    return;
  }
  stack->erase(stack->end() - static_cast<ptrdiff_t>(call.count()), stack->end());
  stack->insert(stack->end(), call.results().begin(), call.results().end());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("resize_", &resize_);
  m.impl("record_stream", &record_stream);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
}

}  // namespace
}  // namespace simdev
