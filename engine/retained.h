// Calls that keep their graph, and captures of such graphs.
//
// A capture swaps what a node saved, in the live node, for symbolic values, and puts it back a little later. A call
// that frees its graph is the graph's only user, so nobody sees that. A retained graph may have other users on other
// threads, also such that never opted in. So every call that retains its graph is counted at both entries; a retained
// graph is captured only while no other thread is inside such a call, and one that arrives meanwhile waits until the
// capture is over, holding nothing.
#pragma once

#include <c10/util/FunctionRef.h>

#include "engine/context.h"

namespace retrograd {

// A call at an entry, from its begin to its end. Does nothing for a call that frees its graph.
class RetainedCall {
 public:
  // Calls `outside(wait)` when it must wait: a caller that holds the GIL lets go of it around wait().
  using Wait = c10::function_ref<void()>;
  explicit RetainedCall(bool keep_graph, c10::function_ref<void(Wait)> outside = [](Wait wait) { wait(); });
  ~RetainedCall();
  RetainedCall(const RetainedCall&) = delete;
  RetainedCall& operator=(const RetainedCall&) = delete;

 private:
  bool counted_;
};

// The right to capture the graph of the call that `frame` belongs to, for as long as the object lives. One at a time:
// the caller holds the capture lock.
class CaptureRight {
 public:
  CaptureRight(bool keep_graph, const CallFrame& frame);
  ~CaptureRight();
  CaptureRight(const CaptureRight&) = delete;
  CaptureRight& operator=(const CaptureRight&) = delete;

  bool granted() const noexcept { return granted_; }

 private:
  bool retained_;
  bool granted_ = true;
};

}  // namespace retrograd
