// libFuzzer over the files of a stored plan: whatever they contain, find() gives out what was published or nothing.
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>

#include "cache/plan_record.h"
#include "cache/plan_store.h"
#include "fuzz_util.h"

namespace {

namespace fs = std::filesystem;
using retrograd::cache::KeyView;
using retrograd::cache::PlanStore;
using retrograd::cache::files::Header;
using retrograd::cache::files::Record;
using retrograd::fuzz::require;

constexpr std::string_view kKey = "key";
constexpr std::string_view kEnvironment = "environment";
constexpr std::string_view kMetadata = "{}";
constexpr std::string_view kLibrary = "\177ELF, a library";
constexpr std::string_view kSide = "{\"nodes\": []}";

KeyView key() { return std::as_bytes(std::span(kKey.data(), kKey.size())); }

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
void write_file(const fs::path& path, std::string_view text) { std::ofstream(path, std::ios::binary) << text; }

// A record with a right checksum over whatever else is in it, so that what comes after the checksum is met.
std::string with_sum(std::string_view bytes) {
  if (bytes.size() < sizeof(Header)) {
    return std::string(bytes);
  }
  Record record;
  std::memcpy(&record.header, bytes.data(), sizeof(Header));
  record.body = bytes.substr(sizeof(Header));
  record.header.sum = record.sum();
  std::string text(sizeof(Header), '\0');
  std::memcpy(text.data(), &record.header, sizeof(Header));
  return text + record.body;
}

struct Stored {
  Stored() {
    std::string pattern = (fs::temp_directory_path() / "fuzz_plan_store_XXXXXX").string();
    require(mkdtemp(pattern.data()) != nullptr, "no temporary folder");
    folder = pattern;
    write_file(folder / "m.so", kLibrary);
    write_file(folder / "m.json", kSide);
    const PlanStore::Result result =
        PlanStore(folder / "store").publish(key(), kEnvironment, folder / "m.so", kMetadata);
    require(result.plan.has_value(), result.reason.c_str());
    plan = result.plan->library.parent_path();
    record = read_file(plan / "record");
  }
  ~Stored() { fs::remove_all(folder); }
  Stored(const Stored&) = delete;
  Stored& operator=(const Stored&) = delete;

  fs::path folder, plan;
  std::string record;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Stored stored;
  if (size == 0) {
    return -1;
  }
  const std::string_view content(reinterpret_cast<const char*>(data) + 1, size - 1);
  std::string record = stored.record;
  std::string_view library = kLibrary;
  std::string_view side = kSide;
  bool summed = false;
  switch (data[0] % 5) {
    case 0:
      record = content;
      break;
    case 1:
      record = with_sum(content);
      summed = true;
      break;
    case 2:  // the good one, with some bytes changed
      for (size_t i = 0; i < content.size() && i < record.size(); ++i) {
        record[i] = static_cast<char>(record[i] ^ content[i]);
      }
      record = with_sum(record);
      summed = true;
      break;
    case 3:
      library = content;
      break;
    default:
      side = content;
  }
  write_file(stored.plan / "record", record);
  write_file(stored.plan / "plan.so", library);
  write_file(stored.plan / "plan.json", side);

  const PlanStore store(stored.folder / "store");
  const PlanStore::Result found = store.find(key(), kEnvironment);
  const bool untouched = record == stored.record && library == kLibrary && side == kSide;
  require(found.plan.has_value() || !found.reason.empty(), "a plan was lost without a reason");
  require(!untouched || found.plan, "a good plan was not found");
  if (found.plan) {
    require(read_file(found.plan->library) == kLibrary, "a damaged library was given out");
    require(summed || found.plan->metadata == kMetadata, "damaged metadata was given out");
  }
  require(store.list().entries.size() == 1, "list() lost a plan");
  const PlanStore::Verified verified = store.verify(false);
  require(verified.good + verified.bad.size() == 1, "verify() lost a plan");
  require(!found.plan || verified.good == 1, "verify() and find() disagree");
  return 0;
}
