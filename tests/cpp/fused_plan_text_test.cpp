// The metadata of stored group plans. tests/fuzz/fuzz_plan_text.cpp goes over it at length.
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "engine/plan_text.h"

namespace retrograd::test {
namespace {

using G = ShapeGuards;

PlanText plan_with_open_numbers() {
  return {.name = "MmBackward0 .. TBackward0",
          .inputs = {0, 2},
          .outputs = {1, -1, 0},
          .guards = ShapeGuards({0}, {{G::kSymbol, 0, G::kConstant, 64, G::kLe, 0}}, {0}),
          .numbers = {8, 64, -1},
          .open = {true, false, false}};
}

TEST(PlanText, SaysWhatWasWritten) {
  const PlanText read = parse_plan_text(to_text(plan_with_open_numbers()));
  const PlanText written = plan_with_open_numbers();
  EXPECT_EQ(read.name, written.name);
  EXPECT_EQ(read.inputs, written.inputs);
  EXPECT_EQ(read.outputs, written.outputs);
  EXPECT_EQ(read.numbers, written.numbers);
  EXPECT_EQ(read.open, written.open);
  EXPECT_EQ(read.guards.symbols(), written.guards.symbols());
  EXPECT_EQ(read.guards.conditions(), written.guards.conditions());
  EXPECT_EQ(read.guards.extra(), written.guards.extra());
  EXPECT_EQ(to_text(parse_plan_text(to_text(PlanText()))), to_text(PlanText()));
}

TEST(PlanText, ServesWhatIsOpenAndHolds) {
  const PlanText plan = plan_with_open_numbers();
  EXPECT_TRUE(plan.serves(std::vector<int64_t>{8, 64, -1}));
  EXPECT_TRUE(plan.serves(std::vector<int64_t>{64, 64, -1}));
  EXPECT_FALSE(plan.serves(std::vector<int64_t>{65, 64, -1})) << "a condition";
  EXPECT_FALSE(plan.serves(std::vector<int64_t>{8, 63, -1})) << "a number that is not open";
  EXPECT_FALSE(plan.serves(std::vector<int64_t>{8, 64}));
  EXPECT_FALSE(plan.serves(std::vector<int64_t>{8, 64, -1, 0}));
}

TEST(PlanText, RefusesWhatNobodyWrites) {
  const std::string good = to_text(plan_with_open_numbers());
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return text.replace(at, from.size(), to);
  };
  EXPECT_NO_THROW(parse_plan_text(with("inputs 0 2", "inputs 0 4294967295")));
  for (const auto& [from, to] : std::vector<std::pair<std::string, std::string>>{
           {"inputs 0 2", "inputs 0 4294967296"},
           {"inputs 0 2", "inputs 0 -2"},
           {"inputs 0 2", "inputs 0  2"},
           {"inputs 0 2", "inputs 0 2 "},
           {"inputs 0 2", "inputs 0 x 2"},
           {"inputs 0 2", "inputs 0,2"},
           {"inputs 0 2", "inputs0 2"},
           {"outputs 1 -1 0", "outputs 1 -2 0"},
           {"outputs 1 -1 0", "outputs 1 2147483648 0"},
           {"numbers 8", "numbers 9223372036854775808"},
           {"open 1 0 0", "open 1 0"},
           {"open 1 0 0", "open 1 0 2"},
           {"open 1 0 0\n", ""},
           {"symbols", "symbol"},
           {"name ", "title "},
           {"condition", "conditions"},
           {"condition 1 0", "condition 1 9"},
           {"64 12 0\n", "64 12 0"},
           {"64 12 0\n", "64 12\n"},
       }) {
    EXPECT_THROW(parse_plan_text(with(from, to)), std::invalid_argument) << from << " -> " << to;
  }
  EXPECT_THROW(parse_plan_text(""), std::invalid_argument);
  EXPECT_THROW(parse_plan_text(good + "more\n"), std::invalid_argument);
}

}  // namespace
}  // namespace retrograd::test
