// What the plan store needs of the file system: open files, its own folders, whole reads and writes, checksums. Only
// its sources include this.
#pragma once

#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>
#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "cache/plan_store.h"

namespace retrograd::cache::files {

std::string with_errno(const std::string& what, int error);

// An owned file descriptor.
class File {
 public:
  File() = default;
  explicit File(int fd) noexcept : fd_(fd) {}
  File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  File& operator=(File&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~File() {
    if (fd_ >= 0) {
      const int error = errno;
      close(fd_);
      errno = error;
    }
  }

  explicit operator bool() const noexcept { return fd_ >= 0; }
  int get() const noexcept { return fd_; }
  int release() noexcept { return std::exchange(fd_, -1); }

 private:
  int fd_ = -1;
};

// By a name in an open folder, made with mode 0600. Links are not followed, and nothing in a file's place is waited
// for.
File open_at(int folder, const std::string& name, int flags);
File open_folder_at(int folder, const std::string& name);

// Whether the file behind `fd` is (still) the one of this name.
bool is_at(int fd, int folder, const std::string& name);

std::chrono::system_clock::time_point time_of(const timespec& time);

// Whether nobody else can write to it.
bool only_ours(const struct stat& status);

// The names in a folder that `wanted` says yes to.
std::vector<std::string> names_in(int folder, bool (*wanted)(std::string_view));

class Hasher {
 public:
  Hasher() { XXH3_128bits_reset(&state_); }
  void add(const void* data, size_t size) {
    if (size > 0) {
      XXH3_128bits_update(&state_, data, size);
    }
  }
  PlanStore::Digest digest() const {
    const XXH128_hash_t hash = XXH3_128bits_digest(&state_);
    return {hash.high64, hash.low64};
  }

 private:
  XXH3_state_t state_;
};

inline bool same(PlanStore::Digest a, PlanStore::Digest b) { return a.high == b.high && a.low == b.low; }

// What a file is to contain.
struct Content {
  uint64_t size = 0;
  PlanStore::Digest sum;
};

// Reads from where `fd` stands to the end, in pieces that stay in the processor's cache. A map would be no faster and
// would kill the process when someone truncates the file meanwhile.
template <class Use>
bool read_pieces(int fd, Use use) {
  constexpr size_t kPiece = size_t{128} << 10U;
  const auto piece = std::make_unique_for_overwrite<std::array<std::byte, kPiece>>();
  while (true) {
    const ssize_t got = read(fd, piece->data(), kPiece);
    if (got == 0) {
      return true;
    }
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0 || !use(piece->data(), static_cast<size_t>(got))) {
      return false;
    }
  }
}

bool write_all(int fd, const void* data, size_t size);

// The store's folder and the one of its plans, both looked at: see PlanStore for what is refused.
struct Opened {
  File root, plans;
  std::string problem;  // empty and no plans: there is no folder yet
};
Opened open_store(const std::filesystem::path& folder, bool make);

// Another folder in the store's, looked at likewise.
File open_part(int root, const std::filesystem::path& folder, const char* name, bool make, std::string& problem);

}  // namespace retrograd::cache::files
