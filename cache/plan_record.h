// The record of a stored plan: its key, environment and metadata, and what its files have to contain. Only the plan
// store's sources include this.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "cache/path.h"
#include "cache/plan_store.h"
#include "cache/store_files.h"

namespace retrograd::cache::files {

constexpr uint32_t kFormat = 1;
constexpr std::array<char, 8> kMagic = {'r', 'g', 'p', 'l', 'a', 'n', '\r', '\n'};
constexpr uint64_t kMaxRecord = uint64_t{64} << 20U;  // a damaged length must not allocate more

// Native byte order: a plan of a machine with another one has another format number.
struct Header {
  std::array<char, 8> magic = kMagic;
  uint32_t format = kFormat;
  uint32_t has_side = 0;
  uint64_t key_size = 0;
  uint64_t environment_size = 0;
  uint64_t metadata_size = 0;
  Content library;
  Content side;
  PlanStore::Digest sum;  // of the header up to here and all that follows it: key, environment, metadata
};
static_assert(std::has_unique_object_representations_v<Header>);
constexpr size_t kSummed = offsetof(Header, sum);

struct Record {
  Header header;
  std::string body;

  KeyView key() const { return std::as_bytes(std::span(body.data(), header.key_size)); }
  std::string_view environment() const {
    return std::string_view(body).substr(header.key_size, header.environment_size);
  }
  std::string_view metadata() const { return std::string_view(body).substr(header.key_size + header.environment_size); }
  PlanStore::Digest sum() const {
    Hasher hasher;
    hasher.add(&header, kSummed);
    hasher.add(body.data(), body.size());
    return hasher.digest();
  }
};

// What is wrong with a plan, if anything is.
struct Flaw {
  Flaw() = default;
  // NOLINTNEXTLINE(google-explicit-constructor)
  Flaw(std::string what) : reason(std::move(what)) {}
  Flaw(const char* what) : reason(what) {}
  // A failed system call. One that failed for want of something in this process says nothing about the plan.
  Flaw(const std::string& what, int error)
      : reason(with_errno(what, error)),
        is_ours(error == EMFILE || error == ENFILE || error == ENOMEM || error == ENOLCK) {}

  explicit operator bool() const { return !reason.empty(); }

  std::string reason;
  bool is_ours = false;
};

// Whether the open file is a record that this version can use, which is in `record` then.
Flaw read_record(int fd, Record& record);

enum class Depth { kLengths, kAll };

// Whether the file of a plan's folder is what was published.
Flaw check_file(int folder, const char* name, const Content& expected, Depth depth);

}  // namespace retrograd::cache::files
