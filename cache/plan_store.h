// The plan store: compiled plans on disk, shared by all processes of one user. See plan_store.cpp for the files.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cache/file_lock.h"
#include "cache/path.h"

namespace retrograd::cache {

// A plan in the store. While the lease is held, nobody takes the plan's files away: hold it until the library is
// loaded. It costs a file descriptor and keeps the plan from being evicted, so let it go then; on Linux a library that
// is loaded stays whole when its file is removed.
struct StoredPlan {
  std::filesystem::path library;  // a side file, if there is one, lies next to it with the ending .json
  std::string metadata;
  FileLock lease;
};

// The right to make one plan, held by one caller in all processes, until it goes or its process ends. Moves; owned by
// one thread at a time.
class Reservation {
 public:
  Reservation(Reservation&&) noexcept = default;
  Reservation& operator=(Reservation&&) noexcept;
  ~Reservation() { release(); }

  bool held() const noexcept { return lock_.held(); }
  // Why not: empty where another caller kept the reservation for all of the time that the caller would wait. Anything
  // else says why the store cannot tell; then make the plan without it.
  const std::string& reason() const noexcept { return reason_; }
  void release() noexcept;

 private:
  friend class PlanStore;
  explicit Reservation(std::string reason) : reason_(std::move(reason)) {}
  Reservation(FileLock lock, std::filesystem::path path) : lock_(std::move(lock)), path_(std::move(path)) {}

  FileLock lock_;
  std::filesystem::path path_;
  std::string reason_;
};

// Plans by key (opaque bytes) and environment (a text that names everything else a plan depends on: versions, the
// processor, options). A plan is a shared library, sometimes with a side file, and metadata for its user.
//
// The object holds no state but the folder's name: everything is on disk, so any number of threads and processes may
// use one folder at once through any number of objects. Whatever is wrong with the folder or a file in it is a miss or
// a failure with a reason, never an exception and never a plan that was not published whole: lengths and checksums of
// all of a plan's files, and its key and environment byte for byte, are compared before its path is given out. The
// folder and what is missing in it is made when needed. It may be removed at any time.
//
// Checksums find damage, not malice: a plan is code, so nothing is read from or written to a folder that belongs to
// someone else, that others may write to or can exchange for another one, or from which no code can be loaded.
// Members of a group that may write to a folder *above* it are trusted.
class PlanStore {
 public:
  // The plan that was published last and those that are leased are kept in any case.
  struct Limits {
    uint64_t max_bytes = uint64_t{2} << 30U;
    size_t max_plans = 2000;
  };

  // The usual ones, with max_bytes from $RETROGRAD_CACHE_LIMIT where that is set: a number of bytes, or one with K, M
  // or G after it for thousands, millions or billions ("500M"). `problem` gets a sentence where it is none of these,
  // and then the usual limit counts.
  static Limits default_limits(std::string* problem = nullptr);

  struct Digest {
    uint64_t high = 0;
    uint64_t low = 0;
  };
  // Names a plan's folder. Digests that collide cost a miss and a failed publish.
  using DigestFunction = Digest (*)(KeyView key, std::string_view environment);
  static Digest digest(KeyView key, std::string_view environment);

  // $RETROGRAD_CACHE_DIR, else $XDG_CACHE_HOME/retrograd, else ~/.cache/retrograd. None where RETROGRAD_CACHE=0 says
  // that there shall be no store, or the user has no home.
  static std::optional<std::filesystem::path> default_folder();

  // Does not touch the disk. A relative folder is taken from the current one, now. Where the folder is a symbolic link
  // now, its target is used from then on.
  explicit PlanStore(const std::filesystem::path& folder) : PlanStore(folder, Limits()) {}
  PlanStore(const std::filesystem::path& folder, Limits limits, DigestFunction digest = &PlanStore::digest);

  const std::filesystem::path& folder() const noexcept { return folder_; }
  const Limits& limits() const noexcept { return limits_; }

  // Why this folder cannot be used, in one sentence with the way out; empty: it can. Makes it where it is missing.
  std::string problem() const noexcept;

  struct Result {
    std::optional<StoredPlan> plan;
    bool added = false;  // by this call
    std::string reason;  // why there is no plan; empty where it simply is not there
  };

  // Counts as a use of the plan, to the minute.
  Result find(KeyView key, std::string_view environment) const noexcept;

  // Copies `library` and, if there is one, the file next to it with the same stem and the ending .json. They are left
  // as they are, so that a failed publish leaves the caller a library to load. Where a plan is there already, also one
  // that another process published meanwhile, that one is the result; a damaged one is replaced. Evicts the least
  // recently used plans that exceed the limits. Some milliseconds.
  Result publish(KeyView key, std::string_view environment, const std::filesystem::path& library,
                 std::string_view metadata) const noexcept;

  // For one that wants to make a plan which was not found. Waits at most `timeout` for another maker. Whoever has the
  // reservation looks once more with find(), since the plan may have come meanwhile, and publishes before letting go.
  Reservation reserve(KeyView key, std::string_view environment,
                      std::chrono::milliseconds timeout = std::chrono::milliseconds(0)) const noexcept;

  // The rest is for people and tools, and may throw std::bad_alloc.

  struct Entry {
    std::string name;  // of the plan's folder
    uint64_t bytes = 0;
    std::chrono::system_clock::time_point last_use;
    std::string environment;
    std::string metadata;
    std::string problem;  // why find() would not return it, as far as that shows without reading the library
  };
  struct Listing {
    std::vector<Entry> entries;  // last used first
    std::string reason;          // why nothing could be looked at
  };
  Listing list() const;

  struct Cleared {
    size_t plans = 0;
    uint64_t bytes = 0;
    size_t leased = 0;  // these are left
    std::string reason;
  };
  // Removes the plans that are not leased, and what killed processes left behind. Never a file that has another name
  // than the store gives.
  Cleared clear() const;

  struct BadEntry {
    std::string name;
    std::string reason;
    bool removed = false;
  };
  struct Verified {
    size_t good = 0;
    std::vector<BadEntry> bad;
    std::string reason;  // why some or all could not be looked at
  };
  Verified verify(bool remove) const;

 private:
  std::filesystem::path folder_;
  Limits limits_;
  DigestFunction digest_;
};

}  // namespace retrograd::cache
