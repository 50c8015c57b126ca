// What must hold of a call's sizes and strides for a plan that leaves some of them open.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace retrograd {

// Immutable. Numbers are a group's sizes and strides by place (GroupKey::numbers).
class ShapeGuards {
 public:
  // A condition as a program for a stack machine: pairs of an operator and its operand, in postfix order. Integers are
  // 64 bits wide; truth is 1 or 0; floordiv and mod round towards minus infinity.
  enum Op : int64_t {
    kConstant,  // pushes the operand
    kSymbol,    // pushes the value of the symbol with this index
    kNumber,    // pushes the number at this place
    kAdd,
    kMul,
    kFloorDiv,
    kMod,
    kMin,
    kMax,
    kEq,
    kNe,
    kLt,
    kLe,
    kAnd,
    kOr,   // of two; the operand is 0
    kNot,  // of one
  };
  using Program = std::vector<int64_t>;

  ShapeGuards() = default;
  // `symbols`: by symbol, the place where it is read. `extra`: places whose numbers the plan takes as the second
  // dimension of empty tensors after its other inputs. Throws std::invalid_argument for a program that is not one.
  ShapeGuards(std::vector<uint32_t> symbols, std::vector<Program> conditions, std::vector<uint32_t> extra);

  bool hold(std::span<const int64_t> numbers) const noexcept;
  const std::vector<uint32_t>& symbols() const { return symbols_; }
  const std::vector<Program>& conditions() const { return conditions_; }
  const std::vector<uint32_t>& extra() const { return extra_; }

 private:
  std::vector<uint32_t> symbols_;
  std::vector<Program> conditions_;
  std::vector<uint32_t> extra_;
  uint32_t places_ = 0;  // places are below this
};

}  // namespace retrograd
