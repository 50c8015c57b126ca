#include "engine/starved.h"

#include <c10/util/Exception.h>

namespace retrograd {

std::span<const EdgeShape> StarvedSteps::followed_edges(uint32_t step) const {
  const StepShape& shape = shape_.steps[step];
  const auto edges = shape_.edges_of(shape);
  if (!shape.needed) return {};
  for (const auto& [cut_step, count] : cut_) {
    if (cut_step == step) return edges.first(count);
  }
  return edges;
}

void StarvedSteps::check_end() const {
  if (!any()) return;
  std::vector<bool> starved = starved_;
  for (uint32_t step = 0; step < shape_.steps.size(); ++step) {  // edges lead to later steps only
    if (starved[step]) starve(shape_.edges_of(shape_.steps[step]), starved);
  }
  for (uint32_t step = 0; step < shape_.steps.size(); ++step) {
    if (starved[step]) continue;
    for (const EdgeShape& edge : followed_edges(step)) {
      TORCH_CHECK(edge.step == kNoStep || !starved[edge.step], "could not compute gradients for some functions");
    }
  }
}

}  // namespace retrograd
