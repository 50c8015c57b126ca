// Python objects that the engine may come across, without linking to Python.
//
// libtorch's compiled_args of Python functions, Python hooks and Python saved-tensor hooks touch reference counts
// without taking the GIL. Code of ours that calls compiled_args therefore takes it where such objects can be reached.
// How to take it is told by the bindings; in a program without Python nobody tells, and there is nothing to take.
#pragma once

#include <functional>
#include <memory>

#include <torch/csrc/autograd/saved_variable.h>

namespace retrograd {

struct PythonGate {
  void* (*acquire)();  // takes the GIL; the result goes to release
  void (*release)(void*);
};

// Set once by the bindings. The gate must live for ever.
void set_python_gate(const PythonGate* gate) noexcept;

// Holds the GIL while alive, if there is a Python; free otherwise.
class PythonGateLock {
 public:
  explicit PythonGateLock(bool take = true);
  ~PythonGateLock();
  PythonGateLock(const PythonGateLock&) = delete;
  PythonGateLock& operator=(const PythonGateLock&) = delete;

 private:
  const PythonGate* gate_ = nullptr;
  void* state_ = nullptr;
};

// The same hooks, but what compiled_args asks of them is answered under the GIL. Null stays null.
std::unique_ptr<torch::autograd::SavedVariableHooks> gate_hooks(
    std::unique_ptr<torch::autograd::SavedVariableHooks> hooks);

// While one lives, gated hooks that are asked for their data on this thread call `visit` first.
class GatedHooksWatch {
 public:
  explicit GatedHooksWatch(std::function<void()> visit);
  ~GatedHooksWatch();
  GatedHooksWatch(const GatedHooksWatch&) = delete;
  GatedHooksWatch& operator=(const GatedHooksWatch&) = delete;

 private:
  std::function<void()> visit_;
  const std::function<void()>* outer_;
};

// Whether what was packed required a gradient, for a variable with hooks.
bool packed_requires_grad(const torch::autograd::SavedVariable& variable);

// Whether the variable's hooks, which it must have, are gated; and gating them, while nobody else uses the variable.
bool has_gated_hooks(const torch::autograd::SavedVariable& variable);
void gate_hooks_of(torch::autograd::SavedVariable& variable);

// SavedTensor.register_hooks puts Python hooks on a saved tensor without asking the engine, so they come ungated;
// from the first such call on, collecting takes the GIL always.
void note_ungated_hooks() noexcept;
bool ungated_hooks_exist() noexcept;

// Whether a saved-tensor hook is alive that was made since retrograd was installed: then even a node of libtorch's own
// may run user code when it unpacks what it saved. Ungated hooks are not counted: from the first one on, true for good.
bool saved_tensor_hooks_exist() noexcept;

}  // namespace retrograd
