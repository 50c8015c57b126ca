// Access to the stock engine's current graph task.
//
// libtorch hands out addresses of two members of the current GraphTask, not of the task itself, and its guard
// types are not exported. GraphTask's definition is public, so the task is found from the member. This holds for
// the one libtorch release retrograd is built for (its CMake refuses any other).
#pragma once

#include <cstddef>

#include <torch/csrc/autograd/graph_task.h>

namespace retrograd {

// The graph task that this thread is evaluating. Call only inside a node's apply().
inline torch::autograd::GraphTask& current_graph_task() {
  using torch::autograd::GraphTask;
  const auto* member = torch::autograd::get_current_graph_task_nodes_in_graph();
  TORCH_INTERNAL_ASSERT(member != nullptr, "retrograd: no backward call is in progress on this thread");
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"  // GraphTask is not standard-layout; gcc and clang support it
  constexpr size_t offset = offsetof(GraphTask, nodes_in_graph_);
#pragma GCC diagnostic pop
  auto* bytes = const_cast<std::byte*>(reinterpret_cast<const std::byte*>(member));
  return *reinterpret_cast<GraphTask*>(bytes - offset);
}

}  // namespace retrograd
