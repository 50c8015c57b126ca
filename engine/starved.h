// Steps that never come because a post-hook returned fewer gradients than its node has edges.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "engine/walk.h"

namespace retrograd {

// Empty, and of no cost, in all but the strangest calls. Belongs to one call.
class StarvedSteps {
 public:
  explicit StarvedSteps(const GraphShape& shape) : shape_(shape) {}

  bool any() const { return !starved_.empty(); }
  bool contains(uint32_t step) const { return any() && starved_[step]; }

  // `step` followed only the first `count` of its edges. Of no effect for a step whose node did not run: it follows no
  // edge, and none leads to a step because of it alone.
  void cut(uint32_t step, size_t count) {
    if (count == shape_.steps[step].num_edges || !shape_.steps[step].needed) return;
    cut_.emplace_back(step, count);
    starved_.resize(shape_.steps.size(), false);
    starve(shape_.edges_of(shape_.steps[step]).subspan(count), starved_);
  }

  // The starved `step`, whose turn it would be, passes nothing on either.
  void pass_on(uint32_t step) { starve(shape_.edges_of(shape_.steps[step]), starved_); }

  // The edges that `step` followed, given that it ran.
  std::span<const EdgeShape> followed_edges(uint32_t step) const;

  // After the last step: throws the stock engine's error if a step that never came had been sent something.
  void check_end() const;

 private:
  static void starve(std::span<const EdgeShape> edges, std::vector<bool>& starved) {
    for (const EdgeShape& edge : edges) {
      if (edge.step != kNoStep) starved[edge.step] = true;
    }
  }

  const GraphShape& shape_;
  std::vector<std::pair<uint32_t, size_t>> cut_;  // steps that followed fewer edges than they have, and how many
  std::vector<bool> starved_;                     // by step; empty: none
};

}  // namespace retrograd
