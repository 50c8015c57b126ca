// What would run a backward call, without running it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/variable.h>

#include "engine/fused_graph.h"
#include "retrograd/retrograd.h"

namespace retrograd {

inline constexpr uint32_t kNoGroup = UINT32_MAX;

struct StepReport {
  std::string node;
  Fusable fusable = Fusable::kYes;
  uint32_t group = kNoGroup;  // fusable nodes with too few neighbours are in none
};

struct GroupReport {
  size_t ready = 0;       // plans
  size_t ready_open = 0;  // of these, plans that leave some sizes open
  size_t making = 0;
  size_t cold = 0;     // keys that were not seen often enough
  size_t refused = 0;  // keys for which there can be no plan
};

struct Explanation {
  PreviousReason previous = PreviousReason::kCount;  // kCount: not the previous engine
  detail::Setting setting;
  bool known = false;             // the graph's schedule was in the cache
  std::vector<StepReport> steps;  // in the order in which the stock engine runs them
  // Only for the fused backend. The cut that a call would use at this moment.
  std::vector<GroupReport> groups;
};

// For the calling thread and `tensors`, of which the call is to be made; `inputs` as in backward(), empty for all
// leaves. Runs no node and no hook; puts the schedule into the cache, as the call would.
Explanation explain(const torch::autograd::variable_list& tensors, const torch::autograd::edge_list& inputs);

}  // namespace retrograd
