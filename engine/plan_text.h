// The metadata of a group plan in the plan store: how it is called and what it was made for. No torch here, so that the
// fuzzers run on it alone.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/shape_guards.h"

namespace retrograd {

// GroupPlan::Io and GroupShapes::Version say what the parts are.
struct PlanText {
  std::string name;  // for people; one line
  std::vector<uint32_t> inputs;
  std::vector<int32_t> outputs;
  ShapeGuards guards{};
  std::vector<int64_t> numbers;
  std::vector<bool> open;  // by number; empty: none

  // Whether the plan may be used for a group with these numbers.
  bool serves(std::span<const int64_t> actual) const noexcept;
};

std::string to_text(const PlanText& plan);

// Throws std::invalid_argument for a text that to_text() does not write: one that is cut short, or another version's.
PlanText parse_plan_text(std::string_view text);

}  // namespace retrograd
