// The process's one place for the interface that autograd nodes talk to while they are captured or recorded, and what
// they gave us through it.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <string>

#include <torch/csrc/dynamo/compiled_autograd.h>

namespace retrograd::bindings {

// One capture or recording in the process at a time. Taken without the GIL and before it; held while nodes are swapped
// or traced, never while a compiler function or a compiled one runs.
class CaptureLock {
 public:
  CaptureLock();
  // Gives up after a moment, for callers that can do without: see owns().
  explicit CaptureLock(std::chrono::milliseconds patience);
  ~CaptureLock();
  CaptureLock(const CaptureLock&) = delete;
  CaptureLock& operator=(const CaptureLock&) = delete;

  bool owns() const noexcept { return owns_; }

 private:
  std::timed_mutex& mutex_;
  bool owns_ = true;
};

// Puts an interface in the place, for as long as it lives. Under the capture lock.
class InterfaceGuard {
 public:
  explicit InterfaceGuard(std::unique_ptr<torch::dynamo::autograd::PyCompilerInterface> interface);
  ~InterfaceGuard();
  InterfaceGuard(const InterfaceGuard&) = delete;
  InterfaceGuard& operator=(const InterfaceGuard&) = delete;

 private:
  torch::dynamo::autograd::PyCompilerGuard guard_;
};

// A node that throws while it is captured leaves itself with symbolic values. This puts back what it had. `tensors`:
// tensors too, which are the node's own members but for AccumulateGrad, where they are gone by then.
void put_back_node(torch::dynamo::autograd::SwapSavedVariables& saved, bool tensors);

// libtorch hands over each node type's function once in a process. They are kept here, by the names under which they
// were bound. Any thread.
void remember_function(const std::string& name, torch::autograd::functional_apply_t function);
// Null where it was handed to someone else: torch's own front end, before retrograd came.
torch::autograd::functional_apply_t find_function(const std::string& name);

// In a forked child: a capture that another thread was in is forgotten.
void capture_after_fork_in_child();

}  // namespace retrograd::bindings
