// The place of a backend that runs whole calls by what a compiler function made of their graphs. The engine knows no
// Python; the bindings put the one there is in this place.
#pragma once

#include <optional>

#include <c10/util/FunctionRef.h>

#include "engine/region.h"

namespace retrograd {

class CallableBackend {
 public:
  virtual ~CallableBackend() = default;

  // Runs `call` by the compiler function that its setting names, on the thread of its region. A reason, with nothing
  // done to the graph, when the schedule must run instead. Throws what the compiler function, the capture or the
  // compiled function throws. `describe_task` makes the graph task describe the real graph; it is called once, before
  // any code that may ask.
  virtual std::optional<ScheduleReason> run(PreparedCall& call, CallFrame& frame,
                                            c10::function_ref<void()> describe_task) = 0;
};

// Set once; the backend must live for ever. Null: none.
void set_callable_backend(CallableBackend* backend) noexcept;
CallableBackend* callable_backend() noexcept;

}  // namespace retrograd
