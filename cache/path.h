// A path: the sequence of opaque keys that names one leaf of the trie, one key per node of a
// backward graph. Owned and used by one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <stdexcept>
#include <type_traits>
#include <vector>

namespace retrograd::cache {

using KeyView = std::span<const std::byte>;

// Types whose equal values have equal bytes. Padding would put indeterminate bytes into a key, and
// a path would then miss the leaf that it made itself.
template <class T>
concept KeyPart = std::is_trivially_copyable_v<T> && (std::has_unique_object_representations_v<T> ||
                                                      std::is_same_v<T, float> || std::is_same_v<T, double>);

// Keys lie one after another in one buffer, which clear() keeps: a path that is reused allocates
// only while it still grows. A key has at most 2^32 - 1 bytes; a longer one throws
// std::length_error and leaves the finished keys as they were.
class Path {
 public:
  static constexpr size_t kMaxKeyBytes = std::numeric_limits<uint32_t>::max();

  void clear() noexcept {
    ends_.clear();
    written_ = 0;
  }

  void append(KeyView key) {
    begin_key();
    put_bytes(key);
    end_key();
  }

  // A key in pieces. begin_key() drops what an unfinished key left behind (an exception between
  // begin and end, say); only end_key() makes the key part of the path.
  void begin_key() noexcept { written_ = finished_bytes(); }
  template <KeyPart T>
  void put(const T& value) {
    std::memcpy(grow(sizeof(T)), &value, sizeof(T));
  }
  void put_bytes(KeyView bytes) {
    if (!bytes.empty()) {
      std::memcpy(grow(bytes.size()), bytes.data(), bytes.size());
    }
  }
  void end_key() { ends_.push_back(written_); }
  // Of the key in pieces, so far.
  size_t bytes_put() const noexcept { return written_ - finished_bytes(); }

  size_t size() const noexcept { return ends_.size(); }
  bool empty() const noexcept { return ends_.empty(); }
  KeyView operator[](size_t i) const noexcept {
    const size_t begin = i == 0 ? 0 : ends_[i - 1];
    return {storage_.data() + begin, ends_[i] - begin};
  }

  // The same keys in the same order; unfinished keys do not count.
  friend bool operator==(const Path& a, const Path& b) noexcept {
    return a.ends_.size() == b.ends_.size() && a.finished_bytes() == b.finished_bytes() &&
           (a.ends_.empty() || std::memcmp(a.ends_.data(), b.ends_.data(), a.ends_.size() * sizeof(size_t)) == 0) &&
           (a.finished_bytes() == 0 || std::memcmp(a.storage_.data(), b.storage_.data(), a.finished_bytes()) == 0);
  }

 private:
  size_t finished_bytes() const noexcept { return ends_.empty() ? 0 : ends_.back(); }

  // Room for `count` more bytes of the key in progress.
  std::byte* grow(size_t count) {
    const size_t begin = written_;
    if (count > kMaxKeyBytes - (begin - finished_bytes())) {
      throw std::length_error("a key of the trie may have at most 2^32 - 1 bytes");
    }
    if (begin + count > storage_.size()) {
      enlarge(begin + count);
    }
    written_ = begin + count;
    return storage_.data() + begin;
  }

  void enlarge(size_t needed) {
    constexpr size_t kFirst = 4096;
    storage_.resize(needed < kFirst ? kFirst : needed + needed / 2);
  }

  std::vector<std::byte> storage_;  // its first `written_` bytes are keys, the rest is spare
  std::vector<size_t> ends_;        // where each finished key ends
  size_t written_ = 0;
};

}  // namespace retrograd::cache
