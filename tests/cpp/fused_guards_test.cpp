// Conditions on a call's sizes and strides.
#include <cmath>
#include <limits>
#include <random>

#include "engine/shape_guards.h"
#include "engine_test_util.h"

namespace retrograd::test {
namespace {

using G = ShapeGuards;
using Program = ShapeGuards::Program;
constexpr int64_t kLowest = std::numeric_limits<int64_t>::min();
constexpr int64_t kHighest = std::numeric_limits<int64_t>::max();

bool holds(const Program& program, const std::vector<int64_t>& numbers = {}) {
  return ShapeGuards({}, {program}, {}).hold(numbers);
}

// Whether `a op b` has this value: it does, and has no other.
testing::AssertionResult value_is(G::Op op, int64_t a, int64_t b, int64_t expected) {
  const auto equals = [&](int64_t value) {
    return holds({G::kConstant, a, G::kConstant, b, op, 0, G::kConstant, value, G::kEq, 0});
  };
  if (!equals(expected)) return testing::AssertionFailure() << a << " op " << op << ' ' << b << " is not " << expected;
  if (equals(expected == kHighest ? 0 : expected + 1)) return testing::AssertionFailure() << "equals anything";
  return testing::AssertionSuccess();
}

bool has_no_value(G::Op op, int64_t a, int64_t b) {
  // True whatever the value were.
  return !holds({G::kConstant, a, G::kConstant, b, op, 0, G::kConstant, 0, G::kMul, 0, G::kConstant, 0, G::kEq, 0});
}

TEST(ShapeGuards, NoneHoldAlways) {
  EXPECT_TRUE(ShapeGuards().hold({}));
  EXPECT_TRUE(ShapeGuards().hold(std::vector<int64_t>{1, 2}));
  EXPECT_TRUE(ShapeGuards().extra().empty());
}

TEST(ShapeGuards, AllConditionsMustHold) {
  const Program yes{G::kConstant, 1}, no{G::kConstant, 0};
  EXPECT_TRUE(ShapeGuards({}, {yes, yes}, {}).hold({}));
  EXPECT_FALSE(ShapeGuards({}, {yes, no}, {}).hold({}));
  EXPECT_FALSE(ShapeGuards({}, {no, yes}, {}).hold({}));
  EXPECT_TRUE(holds({G::kConstant, -5})) << "anything but 0 is true";
}

TEST(ShapeGuards, ValuesComeFromConstantsSymbolsAndNumbers) {
  const std::vector<int64_t> numbers{10, 20, 30};
  EXPECT_TRUE(holds({G::kNumber, 1, G::kConstant, 20, G::kEq, 0}, numbers));
  EXPECT_FALSE(holds({G::kNumber, 2, G::kConstant, 20, G::kEq, 0}, numbers));
  const ShapeGuards guards(
      {2, 0}, {{G::kSymbol, 0, G::kConstant, 30, G::kEq, 0}, {G::kSymbol, 1, G::kNumber, 0, G::kEq, 0}}, {1});
  EXPECT_TRUE(guards.hold(numbers));
  EXPECT_FALSE(guards.hold(std::vector<int64_t>{10, 20, 31}));
  EXPECT_TRUE(guards.hold(std::vector<int64_t>{11, 20, 30})) << "symbol 1 and number 0 are the same";
  EXPECT_EQ(guards.extra(), std::vector<uint32_t>{1});
}

TEST(ShapeGuards, TooFewNumbersHoldNothing) {
  const std::vector<int64_t> two{1, 1}, three{1, 1, 1};
  for (const ShapeGuards& guards :
       {ShapeGuards({2}, {}, {}), ShapeGuards({}, {}, {2}), ShapeGuards({}, {{G::kNumber, 2}}, {})}) {
    EXPECT_FALSE(guards.hold({}));
    EXPECT_FALSE(guards.hold(two));
    EXPECT_TRUE(guards.hold(three));
  }
}

TEST(ShapeGuards, ArithmeticOfSmallNumbers) {
  for (int64_t a = -7; a <= 7; ++a) {
    for (int64_t b = -7; b <= 7; ++b) {
      EXPECT_TRUE(value_is(G::kAdd, a, b, a + b));
      EXPECT_TRUE(value_is(G::kMul, a, b, a * b));
      EXPECT_TRUE(value_is(G::kMin, a, b, std::min(a, b)));
      EXPECT_TRUE(value_is(G::kMax, a, b, std::max(a, b)));
      EXPECT_TRUE(value_is(G::kEq, a, b, a == b ? 1 : 0));
      EXPECT_TRUE(value_is(G::kNe, a, b, a != b ? 1 : 0));
      EXPECT_TRUE(value_is(G::kLt, a, b, a < b ? 1 : 0));
      EXPECT_TRUE(value_is(G::kLe, a, b, a <= b ? 1 : 0));
      EXPECT_TRUE(value_is(G::kAnd, a, b, a != 0 && b != 0 ? 1 : 0));
      EXPECT_TRUE(value_is(G::kOr, a, b, a != 0 || b != 0 ? 1 : 0));
      if (b == 0 || b == -1) continue;
      const auto down = static_cast<int64_t>(std::floor(static_cast<double>(a) / static_cast<double>(b)));
      EXPECT_TRUE(value_is(G::kFloorDiv, a, b, down));
      EXPECT_TRUE(value_is(G::kMod, a, b, a - down * b));
    }
    EXPECT_EQ(holds({G::kConstant, a, G::kNot, 0}), a == 0);
    EXPECT_TRUE(holds({G::kConstant, a, G::kNot, 0, G::kConstant, a == 0 ? 1 : 0, G::kEq, 0})) << "1 or 0";
  }
}

TEST(ShapeGuards, DivisionByZeroHasNoValue) {
  for (const int64_t a : {kLowest, int64_t{-1}, int64_t{0}, int64_t{5}, kHighest}) {
    EXPECT_TRUE(has_no_value(G::kFloorDiv, a, 0));
    EXPECT_TRUE(has_no_value(G::kMod, a, 0));
  }
  // Not even where nobody would look at it.
  EXPECT_FALSE(holds({G::kConstant, 1, G::kConstant, 1, G::kConstant, 0, G::kMod, 0, G::kOr, 0}));
}

TEST(ShapeGuards, OverflowHasNoValue) {
  EXPECT_TRUE(has_no_value(G::kAdd, kHighest, 1));
  EXPECT_TRUE(has_no_value(G::kAdd, kLowest, -1));
  EXPECT_TRUE(has_no_value(G::kMul, kHighest, 2));
  EXPECT_TRUE(has_no_value(G::kMul, kLowest, -1));
  EXPECT_TRUE(has_no_value(G::kFloorDiv, kLowest, -1));
  EXPECT_TRUE(has_no_value(G::kMod, kLowest, -1));
  EXPECT_TRUE(value_is(G::kAdd, kHighest, kLowest, -1));
  EXPECT_TRUE(value_is(G::kMul, kLowest, 1, kLowest));
}

TEST(ShapeGuards, ExtremesAreDividedWithoutOverflow) {
  EXPECT_TRUE(value_is(G::kFloorDiv, kLowest, kHighest, -2));
  EXPECT_TRUE(value_is(G::kMod, kLowest, kHighest, kHighest - 1));
  EXPECT_TRUE(value_is(G::kFloorDiv, kHighest, kLowest, -1));
  EXPECT_TRUE(value_is(G::kMod, kHighest, kLowest, -1));
  EXPECT_TRUE(value_is(G::kMod, kLowest, kLowest, 0));
  EXPECT_TRUE(value_is(G::kFloorDiv, kLowest, 2, kLowest / 2));
  EXPECT_TRUE(value_is(G::kMod, kLowest + 1, 2, 1));
  EXPECT_TRUE(value_is(G::kMod, -1, kHighest, kHighest - 1));
  EXPECT_TRUE(value_is(G::kLt, kLowest, kHighest, 1));
}

TEST(ShapeGuards, WhatIsNoProgramIsRefused) {
  const auto refused = [](const Program& program, std::vector<uint32_t> symbols = {}) {
    try {
      const ShapeGuards guards(std::move(symbols), {program}, {});
      return false;
    } catch (const std::invalid_argument&) {
      return true;
    }
  };
  EXPECT_TRUE(refused({})) << "no value";
  EXPECT_TRUE(refused({G::kConstant})) << "no operand";
  EXPECT_TRUE(refused({G::kConstant, 1, G::kConstant, 2})) << "two values";
  EXPECT_TRUE(refused({G::kAdd, 0}));
  EXPECT_TRUE(refused({G::kConstant, 1, G::kAdd, 0})) << "of two, given one";
  EXPECT_TRUE(refused({G::kNot, 0}));
  EXPECT_TRUE(refused({G::kNot + 1, 0}));
  EXPECT_TRUE(refused({G::kConstant, 1, G::kNot + 1, 0}));
  EXPECT_TRUE(refused({-1, 0}));
  EXPECT_TRUE(refused({kHighest, 0}));
  EXPECT_TRUE(refused({G::kSymbol, 0})) << "no such symbol";
  EXPECT_TRUE(refused({G::kSymbol, 1}, {0}));
  EXPECT_TRUE(refused({G::kSymbol, -1}, {0}));
  EXPECT_FALSE(refused({G::kSymbol, 0}, {0}));
  EXPECT_TRUE(refused({G::kNumber, -1}));
  EXPECT_TRUE(refused({G::kNumber, kHighest}));
  EXPECT_TRUE(refused({G::kNumber, int64_t{1} << 32U}));
  EXPECT_FALSE(refused({G::kNumber, 7}));
  // One that goes below the bottom and comes up again.
  EXPECT_TRUE(refused({G::kConstant, 1, G::kAdd, 0, G::kConstant, 1, G::kConstant, 1}));
}

TEST(ShapeGuards, PlacesThatDoNotExistAreRefused) {
  constexpr uint32_t kFar = std::numeric_limits<uint32_t>::max();
  EXPECT_THROW(ShapeGuards({kFar}, {{G::kSymbol, 0}}, {}), std::invalid_argument);
  EXPECT_THROW(ShapeGuards({}, {}, {kFar}), std::invalid_argument);
}

TEST(ShapeGuards, ProgramsHaveLimits) {
  const auto deep = [](size_t depth) {
    Program program;
    for (size_t i = 0; i < depth; ++i) program.insert(program.end(), {G::kConstant, 1});
    for (size_t i = 1; i < depth; ++i) program.insert(program.end(), {G::kAdd, 0});
    program.insert(program.end(), {G::kConstant, static_cast<int64_t>(depth), G::kEq, 0});
    return program;
  };
  EXPECT_TRUE(holds(deep(2)));
  EXPECT_TRUE(holds(deep(64)));
  EXPECT_THROW(holds(deep(65)), std::invalid_argument);
  std::vector<uint32_t> symbols(64, 0);
  EXPECT_TRUE(ShapeGuards(symbols, {{G::kSymbol, 63}}, {}).hold(std::vector<int64_t>{3}));
  symbols.push_back(0);
  EXPECT_THROW(ShapeGuards(symbols, {}, {}), std::invalid_argument);
}

// Random expressions, computed with more bits.
TEST(ShapeGuards, RandomPrograms) {
  __extension__ using Wide = __int128;
  std::mt19937_64 random(5);
  const auto below = [&](uint64_t n) { return static_cast<int64_t>(random() % n); };
  const std::vector<int64_t> interesting{kLowest, kLowest + 1,       -3,           -1,      0, 1, 2, 3,
                                         64,      int64_t{1} << 32U, kHighest - 1, kHighest};
  size_t with_value = 0, without = 0;
  for (int round = 0; round < 20000; ++round) {
    std::vector<int64_t> numbers;
    for (int i = 0; i < 4; ++i) {
      numbers.push_back(below(3) == 0 ? interesting[static_cast<size_t>(below(interesting.size()))] : below(40) - 5);
    }
    const std::vector<uint32_t> symbols{3, 1};
    Program program;
    std::vector<Wide> stack;
    bool defined = true;
    for (int length = 1 + static_cast<int>(below(12)); length > 0 || stack.size() != 1; --length) {
      if (stack.size() < 2 || (length > 0 && stack.size() < 10 && below(2) == 0)) {
        const int64_t kind = below(3);
        const int64_t operand = kind == 0 ? below(30) - 6 : kind == 1 ? below(2) : below(4);
        program.insert(program.end(), {kind, operand});
        stack.push_back(kind == 0   ? operand
                        : kind == 1 ? numbers[symbols[static_cast<size_t>(operand)]]
                                    : numbers[static_cast<size_t>(operand)]);
        continue;
      }
      const int64_t op = G::kAdd + below(G::kNot - G::kAdd + 1);
      program.insert(program.end(), {op, 0});
      if (op == G::kNot) {
        stack.back() = stack.back() == 0 ? 1 : 0;
        continue;
      }
      const Wide b = stack.back();
      stack.pop_back();
      const Wide a = stack.back();
      Wide r = 0;
      switch (op) {
        case G::kAdd:
          r = a + b;
          break;
        case G::kMul:
          r = a * b;
          break;
        case G::kFloorDiv:
        case G::kMod: {
          if (b == 0 || b == -1) {
            defined = false;
            break;
          }
          Wide down = a / b;
          if (a % b != 0 && (a < 0) != (b < 0)) --down;
          r = op == G::kFloorDiv ? down : a - down * b;
          break;
        }
        case G::kMin:
          r = std::min(a, b);
          break;
        case G::kMax:
          r = std::max(a, b);
          break;
        case G::kEq:
          r = a == b ? 1 : 0;
          break;
        case G::kNe:
          r = a != b ? 1 : 0;
          break;
        case G::kLt:
          r = a < b ? 1 : 0;
          break;
        case G::kLe:
          r = a <= b ? 1 : 0;
          break;
        case G::kAnd:
          r = a != 0 && b != 0 ? 1 : 0;
          break;
        default:
          r = a != 0 || b != 0 ? 1 : 0;
          break;
      }
      if (r < kLowest || r > kHighest) defined = false;
      if (!defined) r = 0;
      stack.back() = r;
    }
    const bool expected = defined && stack[0] != 0;
    EXPECT_EQ(ShapeGuards(symbols, {program}, {}).hold(numbers), expected) << c10::str(program);
    (defined ? with_value : without) += 1;
    if (HasFailure()) break;
  }
  EXPECT_GT(with_value, 5000U);
  EXPECT_GT(without, 1000U);
}

}  // namespace
}  // namespace retrograd::test
