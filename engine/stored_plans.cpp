#include "engine/stored_plans.h"

#include <fstream>
#include <sstream>

#include <c10/util/ConstexprCrc.h>
#include <torch/version.h>

#include "cache/plan_store.h"
#include "engine/plan_text.h"

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

std::optional<StoredVersion> load(const cache::StoredPlan& stored, std::span<const int64_t> numbers) {
  try {
    PlanText text = parse_plan_text(stored.metadata);
    if (!text.serves(numbers)) return std::nullopt;
    GroupPlan::Io io{std::move(text.inputs), std::move(text.outputs), std::move(text.guards)};
    return StoredVersion{std::make_shared<const LibraryPlan>(stored.library.string(), std::move(io)),
                         std::move(text.numbers), std::move(text.open)};
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
    const std::string text = to_text({name, io.inputs, io.outputs, io.guards, key.numbers, open});
    for (int which = 0; which < kMaxOpen; ++which) {
      const auto stored =
          store()->publish(open.empty() ? exact_key(key) : open_key(key, which), environment(), library, text);
      if (!stored.plan) break;
      if (stored.added) return std::make_shared<const LibraryPlan>(stored.plan->library.string(), std::move(io));
      // Another process was first. Its plan does as well if it serves this call.
      if (auto version = load(*stored.plan, key.numbers)) return version->plan;
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
