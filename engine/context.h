// The calling thread's compiler-call context: the options in force and the stack of calls in progress.
//
// A ThreadContext belongs to one thread and is touched by no other. When the stock engine moves a nested call to
// another thread (past 60 levels), the region node carries setting and frame there and ContextScope puts them
// into that thread's context for as long as the region runs. The thread that waits for it does not run meanwhile,
// so a frame is only ever used by one thread at a time.
#pragma once

#include <optional>

#include <ATen/ThreadLocalPythonObjects.h>
#include <torch/csrc/autograd/node.h>

#include "engine/order.h"
#include "retrograd/current_node.h"
#include "retrograd/retrograd.h"

namespace retrograd {

struct ThreadStats;

// One backward call in progress. Lives on the stack of the thread that runs its region.
struct CallFrame {
  CallFrame* parent = nullptr;  // the call this one is nested in; null for an outermost call
  uint64_t depth = 1;           // 1 for an outermost call
  bool nested = false;          // in a backward call, be it this engine's or another's
  // The node whose step is running, as torch._C._current_autograd_node() should report it; null between steps.
  torch::autograd::Node* current_node = nullptr;
  Order* order = nullptr;  // the call's progress while its steps run
  // What the backend keeps for code that its plan calls back into while it runs; null for the schedule.
  void* backend_state = nullptr;
  const ThreadStats* retained_on = nullptr;  // the thread on which the call is counted as retained; null: none
  bool capturing = false;    // this call's graph is being traced: a call from inside must not start another capture
  bool making_plan = false;  // a compiler is at work for this call: a call from inside must not wait for what it makes

  ReadyHeap own_heap{};                                            // used in an outermost call only
  ReadyHeap* heap = parent != nullptr ? parent->heap : &own_heap;  // shared by all calls of the chain
};

// What torch._dynamo.compiled_autograd keeps as process-wide flags; here each thread has its own.
struct FrontEndFlags {
  uint32_t depth = 0;           // open _enable() blocks
  uint32_t verbose_logger = 0;  // the number of the logger of cache misses; 0: none
  bool in_region = false;       // running what a compiler function made
  bool active_disable = false;  // inside _disable(), or inside a region
  bool force_eager = false;     // inside _enable() under Dynamo's stance "force_eager"
};

struct ThreadContext {
  detail::Setting setting;     // kInherit: the process default applies
  CallFrame* frame = nullptr;  // innermost call in progress on this thread
  FrontEndFlags flags;
  uint32_t blocks = 0;        // open enable() and disable() blocks of Python's
  bool makes_plans = false;   // this thread makes the fused plans, so it must not wait for one
  uint64_t unpack_hooks = 0;  // saved-tensor hooks run so far: how a step sees that its node ran user code

  // The setting that counts: the thread's own; else, on a thread that works for another one's backward call, that
  // one's; else the process default. The mode is kDisabled or kEnabled.
  detail::Setting in_force() const;
};

ThreadContext& thread_context() noexcept;

// Puts a call's setting, flags and frame into this thread's context, and the former ones back at the end.
class ContextScope {
 public:
  ContextScope(detail::Setting setting, const FrontEndFlags& flags, CallFrame& frame) noexcept
      : context_(thread_context()), outer_(context_) {
    context_.setting = setting;
    context_.flags = flags;
    context_.frame = &frame;
  }
  ~ContextScope() { context_ = outer_; }
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  ThreadContext& context_;
  ThreadContext outer_;
};

// Makes the thread's own choice follow a call that runs on the previous engine, for as long as the object lives. The
// stock engine gives its threads the caller's thread-local objects; the choice travels as a name among them.
// Does nothing for a thread that chose nothing.
class SettingCarrier {
 public:
  SettingCarrier();
  ~SettingCarrier();
  SettingCarrier(const SettingCarrier&) = delete;
  SettingCarrier& operator=(const SettingCarrier&) = delete;

 private:
  std::optional<at::impl::ThreadLocalPythonObjects> outer_;
};

}  // namespace retrograd
