#include "engine/shape_guards.h"

#include <algorithm>
#include <array>
#include <stdexcept>

namespace retrograd {
namespace {

constexpr size_t kMaxStack = 64;
constexpr size_t kMaxSymbols = 64;

bool rounds_down(int64_t a, int64_t b) { return a % b != 0 && (a < 0) != (b < 0); }

// False where the value does not exist.
bool apply(int64_t op, int64_t a, int64_t b, int64_t& result) {
  switch (op) {
    case ShapeGuards::kAdd:
      return !__builtin_add_overflow(a, b, &result);
    case ShapeGuards::kMul:
      return !__builtin_mul_overflow(a, b, &result);
    case ShapeGuards::kFloorDiv:
    case ShapeGuards::kMod:
      if (b == 0 || b == -1) return false;
      result = op == ShapeGuards::kFloorDiv ? a / b - static_cast<int64_t>(rounds_down(a, b))
                                            : a % b + (rounds_down(a, b) ? b : 0);
      return true;
    case ShapeGuards::kMin:
      result = std::min(a, b);
      return true;
    case ShapeGuards::kMax:
      result = std::max(a, b);
      return true;
    case ShapeGuards::kEq:
      result = static_cast<int64_t>(a == b);
      return true;
    case ShapeGuards::kNe:
      result = static_cast<int64_t>(a != b);
      return true;
    case ShapeGuards::kLt:
      result = static_cast<int64_t>(a < b);
      return true;
    case ShapeGuards::kLe:
      result = static_cast<int64_t>(a <= b);
      return true;
    case ShapeGuards::kAnd:
      result = static_cast<int64_t>(a != 0 && b != 0);
      return true;
    case ShapeGuards::kOr:
      result = static_cast<int64_t>(a != 0 || b != 0);
      return true;
    default:
      return false;
  }
}

}  // namespace

ShapeGuards::ShapeGuards(std::vector<uint32_t> symbols, std::vector<Program> conditions, std::vector<uint32_t> extra)
    : symbols_(std::move(symbols)), conditions_(std::move(conditions)), extra_(std::move(extra)) {
  const auto require = [](bool holds) {
    if (!holds) throw std::invalid_argument("a guard of a plan is not a program.");
  };
  require(symbols_.size() <= kMaxSymbols);
  const auto use = [&](uint32_t place) {
    require(place < INT32_MAX);
    places_ = std::max(places_, place + 1);
  };
  for (const uint32_t place : symbols_) use(place);
  for (const uint32_t place : extra_) use(place);
  for (const Program& program : conditions_) {
    require(program.size() % 2 == 0);
    size_t depth = 0;
    for (size_t i = 0; i < program.size(); i += 2) {
      const int64_t op = program[i];
      const int64_t operand = program[i + 1];
      require(op >= kConstant && op <= kNot);
      if (op <= kNumber) {
        if (op == kSymbol) require(operand >= 0 && static_cast<size_t>(operand) < symbols_.size());
        if (op == kNumber) {
          require(operand >= 0 && operand < INT32_MAX);
          use(static_cast<uint32_t>(operand));
        }
        require(++depth <= kMaxStack);
      } else if (op == kNot) {
        require(depth >= 1);
      } else {
        require(depth >= 2);
        --depth;
      }
    }
    require(depth == 1);
  }
}

bool ShapeGuards::hold(std::span<const int64_t> numbers) const noexcept {
  if (numbers.size() < places_) return false;
  std::array<int64_t, kMaxStack> stack;  // NOLINT(cppcoreguidelines-pro-type-member-init): written before it is read
  for (const Program& program : conditions_) {
    size_t depth = 0;
    for (size_t i = 0; i < program.size(); i += 2) {
      const int64_t op = program[i];
      const int64_t operand = program[i + 1];
      if (op == kConstant) {
        stack[depth++] = operand;
      } else if (op == kSymbol) {
        stack[depth++] = numbers[symbols_[static_cast<size_t>(operand)]];
      } else if (op == kNumber) {
        stack[depth++] = numbers[static_cast<size_t>(operand)];
      } else if (op == kNot) {
        stack[depth - 1] = static_cast<int64_t>(stack[depth - 1] == 0);
      } else {
        --depth;
        if (!apply(op, stack[depth - 1], stack[depth], stack[depth - 1])) return false;
      }
    }
    if (stack[0] == 0) return false;
  }
  return true;
}

}  // namespace retrograd
