#include "engine/plan_text.h"

#include <charconv>
#include <cstdint>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace retrograd {
namespace {

void require(bool holds) {
  if (!holds) throw std::invalid_argument("this is not a stored plan's metadata.");
}

template <class Values>
void write_line(std::string& out, const char* what, const Values& values) {
  out += what;
  for (const auto value : values) {
    out += ' ';
    out += std::to_string(static_cast<int64_t>(value));
  }
  out += '\n';
}

// Takes lines off the front of a text.
class Reader {
 public:
  explicit Reader(std::string_view text) : rest_(text) {}

  bool at_end() const { return rest_.empty(); }

  // What stands behind `what` in the next line, which must begin with it.
  std::string_view line(std::string_view what) {
    require(rest_.starts_with(what));
    const size_t end = rest_.find('\n');
    require(end != std::string_view::npos);
    const std::string_view line = rest_.substr(what.size(), end - what.size());
    rest_.remove_prefix(end + 1);
    return line;
  }

  // Values from `lowest` on that fit their type.
  template <class T>
  std::vector<T> values(std::string_view what, int64_t lowest) {
    std::string_view left = line(what);
    std::vector<T> result;
    while (!left.empty()) {
      require(left.front() == ' ');
      left.remove_prefix(1);
      int64_t value = 0;
      const auto [end, error] = std::from_chars(left.data(), left.data() + left.size(), value);
      require(error == std::errc() && value >= lowest && std::in_range<T>(value));
      result.push_back(static_cast<T>(value));
      left.remove_prefix(static_cast<size_t>(end - left.data()));
    }
    return result;
  }

 private:
  std::string_view rest_;
};

}  // namespace

bool PlanText::serves(std::span<const int64_t> actual) const noexcept {
  if (numbers.size() != actual.size()) return false;
  for (size_t i = 0; i < actual.size(); ++i) {
    if ((open.empty() || !open[i]) && actual[i] != numbers[i]) return false;
  }
  return guards.hold(actual);  // where nothing is open: that there are as many numbers as they speak of
}

std::string to_text(const PlanText& plan) {
  std::string out = "name " + plan.name + '\n';
  write_line(out, "inputs", plan.inputs);
  write_line(out, "outputs", plan.outputs);
  write_line(out, "numbers", plan.numbers);
  write_line(out, "open", plan.open);
  write_line(out, "symbols", plan.guards.symbols());
  write_line(out, "extra", plan.guards.extra());
  for (const auto& condition : plan.guards.conditions()) write_line(out, "condition", condition);
  return out;
}

PlanText parse_plan_text(std::string_view text) {
  Reader reader(text);
  PlanText plan;
  plan.name = reader.line("name ");
  plan.inputs = reader.values<uint32_t>("inputs", 0);
  plan.outputs = reader.values<int32_t>("outputs", -1);
  plan.numbers = reader.values<int64_t>("numbers", INT64_MIN);
  for (const uint8_t open : reader.values<uint8_t>("open", 0)) {
    require(open <= 1);
    plan.open.push_back(open != 0);
  }
  require(plan.open.empty() || plan.open.size() == plan.numbers.size());
  auto symbols = reader.values<uint32_t>("symbols", 0);
  auto extra = reader.values<uint32_t>("extra", 0);
  std::vector<ShapeGuards::Program> conditions;
  while (!reader.at_end()) conditions.push_back(reader.values<int64_t>("condition", INT64_MIN));
  plan.guards = ShapeGuards(std::move(symbols), std::move(conditions), std::move(extra));
  return plan;
}

}  // namespace retrograd
