// libFuzzer over the metadata of stored group plans: what is accepted means the same when it is written again, and
// serves what it says.
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/plan_text.h"
#include "fuzz_util.h"

namespace {

using retrograd::parse_plan_text;
using retrograd::PlanText;
using retrograd::to_text;
using retrograd::fuzz::require;

bool equal(const PlanText& a, const PlanText& b) {
  return a.name == b.name && a.inputs == b.inputs && a.outputs == b.outputs && a.numbers == b.numbers &&
         a.open == b.open && a.guards.symbols() == b.guards.symbols() &&
         a.guards.conditions() == b.guards.conditions() && a.guards.extra() == b.guards.extra();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  PlanText plan;
  try {
    plan = parse_plan_text({reinterpret_cast<const char*>(data), size});
  } catch (const std::invalid_argument&) {
    return 0;
  }
  const std::string text = to_text(plan);
  require(equal(plan, parse_plan_text(text)), "written and read again it is another plan");
  require(to_text(parse_plan_text(text)) == text, "written twice it is another text");
  require(plan.open.empty() || plan.open.size() == plan.numbers.size(), "open numbers that are not there");
  for (const int32_t output : plan.outputs) require(output >= -1, "an output below -1");

  std::vector<int64_t> numbers = plan.numbers;
  const bool own = plan.serves(numbers);
  require(own == plan.guards.hold(numbers), "whether it serves what it was made for");
  for (size_t i = 0; i < numbers.size(); ++i) {
    numbers[i] ^= 1;
    const bool is_open = !plan.open.empty() && plan.open[i];
    require(plan.serves(numbers) == (is_open && plan.guards.hold(numbers)), "whether it serves another number");
    numbers[i] ^= 1;
  }
  numbers.push_back(2);
  require(!plan.serves(numbers), "it serves one number more");
  // What is cut off is noticed, up to a whole condition.
  if (size > 1 && plan.guards.conditions().empty()) {
    try {
      parse_plan_text({reinterpret_cast<const char*>(data), size - 1});
      require(false, "a text that was cut short was accepted");
    } catch (const std::invalid_argument&) {
    }
  }
  return 0;
}
