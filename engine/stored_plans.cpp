#include "engine/stored_plans.h"

#include <fstream>
#include <sstream>

#include <c10/util/ConstexprCrc.h>
#include <torch/version.h>

#include "cache/plan_store.h"

namespace retrograd {
namespace {

constexpr int kFormat = 1;
// Plans with open numbers that are kept for one key: what one does not admit, another may.
constexpr int kMaxOpen = 4;

// Everything that a library depends on and a key does not say.
const std::string& environment() {
  static const auto* const text = [] {
    std::ostringstream out;
    out << "format " << kFormat << "\ntorch " << TORCH_VERSION << "\n";
    std::ifstream cpu("/proc/cpuinfo");
    for (std::string line; std::getline(cpu, line);) {
      if (line.starts_with("model name")) out << line.substr(line.find(':') + 2) << "\n";
      if (line.starts_with("flags") || line.starts_with("Features")) {
        out << "features " << std::hex << c10::util::crc64(line.data(), line.size()).checksum() << std::dec << "\n";
      } else if (line.empty()) {
        break;  // the first processor speaks for all
      }
    }
    return std::make_unique<const std::string>(out.str()).release();
  }();
  return *text;
}

const cache::PlanStore* store() {
  static const cache::PlanStore* const instance = []() -> const cache::PlanStore* {
    const auto folder = cache::PlanStore::default_folder();
    return folder ? std::make_unique<const cache::PlanStore>(*folder).release() : nullptr;
  }();
  return instance;
}

template <class Values>
void write_line(std::ostream& out, const char* what, const Values& values) {
  out << what;
  for (const auto value : values) out << ' ' << static_cast<int64_t>(value);
  out << '\n';
}

std::string to_text(const GroupPlan::Io& io, const GroupKey& key, const std::vector<bool>& open,
                    const std::string& name) {
  std::ostringstream out;
  out << "name " << name << '\n';
  write_line(out, "inputs", io.inputs);
  write_line(out, "outputs", io.outputs);
  write_line(out, "numbers", key.numbers);
  write_line(out, "open", open);
  write_line(out, "symbols", io.guards.symbols());
  write_line(out, "extra", io.guards.extra());
  for (const auto& condition : io.guards.conditions()) write_line(out, "condition", condition);
  return out.str();
}

template <class T>
std::vector<T> read_values(std::istream& in) {
  std::vector<T> values;
  for (int64_t value = 0; in >> value;) values.push_back(static_cast<T>(value));
  return values;
}

struct Parsed {
  GroupPlan::Io io;
  std::vector<int64_t> numbers;
  std::vector<bool> open;
};
// Throws std::invalid_argument for guards that are none.
Parsed from_text(const std::string& text) {
  Parsed p;
  std::vector<uint32_t> symbols;
  std::vector<uint32_t> extra;
  std::vector<ShapeGuards::Program> conditions;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream in(line);
    std::string what;
    in >> what;
    if (what == "inputs") p.io.inputs = read_values<uint32_t>(in);
    if (what == "outputs") p.io.outputs = read_values<int32_t>(in);
    if (what == "numbers") p.numbers = read_values<int64_t>(in);
    if (what == "open") p.open = read_values<bool>(in);
    if (what == "symbols") symbols = read_values<uint32_t>(in);
    if (what == "extra") extra = read_values<uint32_t>(in);
    if (what == "condition") conditions.push_back(read_values<int64_t>(in));
  }
  p.io.guards = ShapeGuards(std::move(symbols), std::move(conditions), std::move(extra));
  return p;
}

std::vector<std::byte> exact_key(const GroupKey& key) {
  const auto fixed = key.fixed[0];
  std::vector<std::byte> bytes(fixed.begin(), fixed.end());
  const auto numbers = std::as_bytes(std::span(key.numbers));
  bytes.insert(bytes.end(), numbers.begin(), numbers.end());
  bytes.push_back(std::byte{'='});
  return bytes;
}
std::vector<std::byte> open_key(const GroupKey& key, int which) {
  const auto fixed = key.fixed[0];
  std::vector<std::byte> bytes(fixed.begin(), fixed.end());
  bytes.push_back(static_cast<std::byte>(which));
  bytes.push_back(std::byte{'?'});
  return bytes;
}

bool serves(const Parsed& p, std::span<const int64_t> numbers) {
  if (p.numbers.size() != numbers.size()) return false;
  if (p.open.empty()) return std::ranges::equal(p.numbers, numbers);
  if (p.open.size() != numbers.size()) return false;
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (!p.open[i] && numbers[i] != p.numbers[i]) return false;
  }
  return p.io.guards.hold(numbers);
}

std::optional<StoredVersion> load(const cache::StoredPlan& stored, std::span<const int64_t> numbers) {
  try {
    Parsed p = from_text(stored.metadata);
    if (!serves(p, numbers)) return std::nullopt;
    return StoredVersion{std::make_shared<const LibraryPlan>(stored.library.string(), std::move(p.io)),
                         std::move(p.numbers), std::move(p.open)};
  } catch (const std::exception&) {  // from another world, though it says otherwise
    return std::nullopt;
  }
}

}  // namespace

std::optional<StoredVersion> find_stored(const GroupKey& key) {
  if (store() == nullptr) return std::nullopt;
  if (const auto found = store()->find(exact_key(key), environment()); found.plan) {
    if (auto version = load(*found.plan, key.numbers)) return version;
  }
  for (int which = 0; which < kMaxOpen; ++which) {
    const auto found = store()->find(open_key(key, which), environment());
    if (!found.plan) return std::nullopt;
    if (auto version = load(*found.plan, key.numbers)) return version;
  }
  return std::nullopt;
}

std::shared_ptr<const GroupPlan> store_and_load(const GroupKey& key, const std::vector<bool>& open,
                                                const std::string& library, GroupPlan::Io io, const std::string& name) {
  if (store() != nullptr) {
    const std::string text = to_text(io, key, open, name);
    for (int which = 0; which < kMaxOpen; ++which) {
      const auto stored =
          store()->publish(open.empty() ? exact_key(key) : open_key(key, which), environment(), library, text);
      if (!stored.plan) break;
      if (stored.added) return std::make_shared<const LibraryPlan>(stored.plan->library.string(), std::move(io));
      // Another process was first. Its plan does as well if it leaves open the same; whoever asked for this one takes
      // it for good for all that is open in it.
      if (auto version = load(*stored.plan, key.numbers); version && version->open == open) return version->plan;
      if (open.empty()) break;
    }
  }
  return std::make_shared<const LibraryPlan>(library, std::move(io));
}

bool has_plan_store(std::string* why_not) {
  if (store() == nullptr) return false;
  std::string problem = store()->problem();
  const bool works = problem.empty();
  if (why_not != nullptr) *why_not = std::move(problem);
  return works;
}

}  // namespace retrograd
