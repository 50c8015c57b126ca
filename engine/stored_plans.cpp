#include "engine/stored_plans.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <sstream>
#include <utility>

#include <c10/util/ConstexprCrc.h>
#include <torch/version.h>
#ifdef RETROGRAD_CUDA
#include <ATen/cuda/CUDAContext.h>
#endif

#include "engine/plan_text.h"
#include "retrograd/plan_store.h"

namespace retrograd {
namespace {

constexpr int kFormat = 1;
// Plans with open numbers that are kept for one key: what one does not admit, another may.
constexpr int kMaxOpen = 4;

// Everything that a library for the CPU depends on and a key does not say.
const std::string& host_environment() {
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

std::string environment(c10::Device device) {
  std::string text = host_environment();
#ifdef RETROGRAD_CUDA
  if (device.is_cuda()) {
    const cudaDeviceProp& properties = *at::cuda::getDeviceProperties(device.index());
    text += c10::str(properties.name, " ", properties.major, ".", properties.minor, "\n");
  }
#endif
  (void)device;
  return text;
}

const cache::PlanStore* store() {
  static const cache::PlanStore* const instance = []() -> const cache::PlanStore* {
    const auto folder = cache::PlanStore::default_folder();
    if (!folder) return nullptr;
    return std::make_unique<const cache::PlanStore>(*folder, cache::PlanStore::default_limits()).release();
  }();
  return instance;
}

// All inputs of a group are on one device (collect_group), but for single numbers, which may be on the host.
c10::Device device_of(const StoredQuery& query) {
  for (const at::Tensor& input : query.inputs) {
    if (input.defined() && !input.is_cpu()) return input.device();
  }
  return c10::kCPU;
}

// Whether all that the plan speaks of is there: it is used without further looks.
bool fits(const GroupPlan::Io& io, const StoredQuery& query) {
  const auto is_there = [&](uint32_t input) { return input < query.inputs.size() && query.inputs[input].defined(); };
  if (!std::ranges::all_of(io.inputs, is_there) || io.outputs.size() != query.outputs) return false;
  std::vector<int32_t> results;
  std::ranges::copy_if(io.outputs, std::back_inserter(results), [](int32_t result) { return result != -1; });
  std::ranges::sort(results);
  for (size_t i = 0; i < results.size(); ++i) {
    if (results[i] != static_cast<int32_t>(i)) return false;
  }
  return true;
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

// For the right to make a plan: equal where one plan will do for all.
std::vector<std::byte> reservation_key(const GroupKey& key, const std::vector<bool>& open) {
  if (open.empty()) return exact_key(key);
  GroupKey closed{key.fixed, key.numbers};
  std::vector<std::byte> mask;
  for (size_t i = 0; i < open.size(); ++i) {
    if (open[i]) closed.numbers[i] = 0;
    mask.push_back(open[i] ? std::byte{1} : std::byte{0});
  }
  std::vector<std::byte> bytes = exact_key(closed);
  bytes.insert(bytes.end(), mask.begin(), mask.end());
  bytes.push_back(std::byte{'!'});
  return bytes;
}

std::optional<StoredVersion> load(const cache::StoredPlan& stored, const StoredQuery& query,
                                  const std::vector<bool>* open) {
  try {
    PlanText text = parse_plan_text(stored.metadata);
    if (!text.serves(query.key.numbers) || (open != nullptr && text.open != *open)) return std::nullopt;
    GroupPlan::Io io{std::move(text.inputs), std::move(text.outputs), std::move(text.guards)};
    if (!fits(io, query)) return std::nullopt;
    return StoredVersion{std::make_shared<const LibraryPlan>(stored.library.string(), std::move(io), device_of(query)),
                         std::move(text.numbers), std::move(text.open)};
  } catch (const std::exception&) {  // from another world, though it says otherwise
    return std::nullopt;
  }
}

}  // namespace

std::optional<StoredVersion> find_stored(const StoredQuery& query, const std::vector<bool>* open) {
  if (store() == nullptr) return std::nullopt;
  if (open == nullptr || open->empty()) {
    if (const auto found = store()->find(exact_key(query.key), environment(device_of(query))); found.plan) {
      if (auto version = load(*found.plan, query, open)) return version;
    }
  }
  for (int which = 0; which < kMaxOpen; ++which) {
    if (open != nullptr && open->empty()) break;
    const auto found = store()->find(open_key(query.key, which), environment(device_of(query)));
    if (!found.plan) break;
    if (auto version = load(*found.plan, query, open)) return version;
  }
  return std::nullopt;
}

std::optional<cache::Reservation> reserve_stored(const StoredQuery& query, const std::vector<bool>& open) {
  if (store() == nullptr) return std::nullopt;
  return store()->reserve(reservation_key(query.key, open), environment(device_of(query)));
}

std::shared_ptr<const GroupPlan> store_and_load(const StoredQuery& query, const std::vector<bool>& open,
                                                const std::string& library, GroupPlan::Io io, const std::string& name) {
  if (store() != nullptr) {
    const std::string text = to_text({name, io.inputs, io.outputs, io.guards, query.key.numbers, open});
    for (int which = 0; which < kMaxOpen; ++which) {
      const auto key = open.empty() ? exact_key(query.key) : open_key(query.key, which);
      const auto stored = store()->publish(key, environment(device_of(query)), library, text);
      if (!stored.plan) break;
      if (stored.added) {
        return std::make_shared<const LibraryPlan>(stored.plan->library.string(), std::move(io), device_of(query));
      }
      // Another process was first. Its plan does as well if it leaves open the same; whoever asked for this one takes
      // it for good for all that is open in it.
      if (auto version = load(*stored.plan, query, &open)) return version->plan;
      if (open.empty()) break;
    }
  }
  return std::make_shared<const LibraryPlan>(library, std::move(io), device_of(query));
}

bool has_plan_store(std::string* why_not) {
  std::string problem = store() != nullptr ? store()->problem() : "";
  const bool works = store() != nullptr && problem.empty();
  if (why_not != nullptr) *why_not = std::move(problem);
  return works;
}

}  // namespace retrograd
