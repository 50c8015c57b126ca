// libFuzzer over conditions on sizes: what is accepted is a program, and its value is that of the expression it stands
// for, computed with more bits.
#include <algorithm>
#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "engine/shape_guards.h"
#include "fuzz_util.h"

namespace {

using retrograd::ShapeGuards;
using retrograd::fuzz::Input;
using retrograd::fuzz::require;

__extension__ using Wide = __int128;
constexpr int64_t kLowest = std::numeric_limits<int64_t>::min();
constexpr int64_t kHighest = std::numeric_limits<int64_t>::max();

int64_t read_value(Input& in) {
  switch (const uint8_t kind = in.byte()) {
    case 250:
      return kLowest;
    case 251:
      return kHighest;
    case 252:
      return kHighest >> (in.byte() % 63);
    case 253:
      return kLowest >> (in.byte() % 63);
    default:
      return kind < 128 ? kind : 128 - kind;
  }
}

struct Case {
  std::vector<uint32_t> symbols;
  std::vector<ShapeGuards::Program> conditions;
  std::vector<uint32_t> extra;
  std::vector<int64_t> numbers;

  explicit Case(Input& in) : numbers(in.below(5)) {
    for (int64_t& number : numbers) number = read_value(in);
    symbols.resize(in.below(3));
    for (uint32_t& place : symbols) place = in.byte() % 6;
    extra.resize(in.below(2), 4);
    while (!in.at_end() && conditions.size() < 4) {
      ShapeGuards::Program& program = conditions.emplace_back();
      for (size_t length = in.byte(); length > 0 && !in.at_end(); --length) {
        program.push_back(static_cast<int64_t>(in.below(18)) - 1);
        program.push_back(read_value(in));
      }
      if (in.below(16) == 15) program.push_back(0);
    }
  }
};

// Evaluates a program from its end, as a tree. Throws std::invalid_argument where it is none.
class Tree {
 public:
  Tree(const Case& given, const ShapeGuards::Program& program) : given_(given), program_(program) {}

  // Nothing: it has no value.
  std::optional<Wide> value() {
    expect(program_.size() % 2 == 0);
    at_ = program_.size();
    const auto result = node();
    expect(at_ == 0);
    return result;
  }

 private:
  static void expect(bool holds) {
    if (!holds) throw std::invalid_argument("no program");
  }

  std::optional<Wide> node() {
    expect(at_ >= 2);
    at_ -= 2;
    const int64_t op = program_[at_];
    const int64_t operand = program_[at_ + 1];
    expect(op >= ShapeGuards::kConstant && op <= ShapeGuards::kNot);
    if (op == ShapeGuards::kConstant) return operand;
    if (op == ShapeGuards::kSymbol) {
      expect(operand >= 0 && operand < static_cast<int64_t>(given_.symbols.size()));
      return number(given_.symbols[static_cast<size_t>(operand)]);
    }
    if (op == ShapeGuards::kNumber) {
      expect(operand >= 0 && operand < std::numeric_limits<int32_t>::max());
      return number(operand);
    }
    const auto b = node();
    if (op == ShapeGuards::kNot) return b ? std::optional<Wide>(*b == 0 ? 1 : 0) : std::nullopt;
    const auto a = node();
    if (!a || !b) return std::nullopt;
    const auto result = apply(op, *a, *b);
    return result && *result >= kLowest && *result <= kHighest ? result : std::nullopt;
  }

  // Zero where it is missing: then nothing is evaluated, only the form checked.
  Wide number(int64_t place) const {
    return place < static_cast<int64_t>(given_.numbers.size()) ? given_.numbers[static_cast<size_t>(place)] : 0;
  }

  static std::optional<Wide> apply(int64_t op, Wide a, Wide b) {
    switch (op) {
      case ShapeGuards::kAdd:
        return a + b;
      case ShapeGuards::kMul:
        return a * b;
      case ShapeGuards::kFloorDiv:
      case ShapeGuards::kMod: {
        if (b == 0 || b == -1) return std::nullopt;
        Wide remainder = a % b;
        if (remainder != 0 && (remainder < 0) != (b < 0)) remainder += b;
        return op == ShapeGuards::kMod ? remainder : (a - remainder) / b;
      }
      case ShapeGuards::kMin:
        return std::min(a, b);
      case ShapeGuards::kMax:
        return std::max(a, b);
      case ShapeGuards::kEq:
        return a == b ? 1 : 0;
      case ShapeGuards::kNe:
        return a != b ? 1 : 0;
      case ShapeGuards::kLt:
        return a < b ? 1 : 0;
      case ShapeGuards::kLe:
        return a <= b ? 1 : 0;
      case ShapeGuards::kAnd:
        return a != 0 && b != 0 ? 1 : 0;
      default:
        return a != 0 || b != 0 ? 1 : 0;
    }
  }

  const Case& given_;
  const ShapeGuards::Program& program_;
  size_t at_ = 0;
};

// How much of the stack the program needs.
size_t stack_of(const ShapeGuards::Program& program) {
  size_t depth = 0, most = 0;
  for (size_t i = 0; i + 1 < program.size(); i += 2) {
    if (program[i] <= ShapeGuards::kNumber) {
      most = std::max(most, ++depth);
    } else if (program[i] != ShapeGuards::kNot && depth > 0) {
      --depth;
    }
  }
  return most;
}

uint32_t places_of(const Case& given) {
  uint32_t places = 0;
  for (const uint32_t place : given.symbols) places = std::max(places, place + 1);
  for (const uint32_t place : given.extra) places = std::max(places, place + 1);
  for (const auto& program : given.conditions) {
    for (size_t i = 0; i + 1 < program.size(); i += 2) {
      if (program[i] == ShapeGuards::kNumber) places = std::max(places, static_cast<uint32_t>(program[i + 1]) + 1);
    }
  }
  return places;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in(data, size);
  const Case given(in);
  bool well_formed = true;
  bool expected = true;
  try {
    for (const auto& program : given.conditions) {
      const auto value = Tree(given, program).value();
      expected = expected && value && *value != 0;
      well_formed = well_formed && stack_of(program) <= 64;
    }
  } catch (const std::invalid_argument&) {
    well_formed = false;
  }
  try {
    const ShapeGuards guards(given.symbols, given.conditions, given.extra);
    require(well_formed, "something that is no program was accepted");
    expected = expected && places_of(given) <= given.numbers.size();
    require(guards.hold(given.numbers) == expected, "a condition has another value");
  } catch (const std::invalid_argument&) {
    require(!well_formed, "a program was refused");
  }
  return 0;
}
