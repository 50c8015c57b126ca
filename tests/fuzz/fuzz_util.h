// What the libFuzzer programs share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

namespace retrograd::fuzz {

inline void require(bool holds, const char* what) {
  if (!holds) {
    std::fprintf(stderr, "%s\n", what);
    std::abort();
  }
}

// The fuzzer's input, read from the front as decisions. After its end every decision is zero.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : rest_(reinterpret_cast<const char*>(data), size) {}

  bool at_end() const { return rest_.empty(); }
  std::string_view rest() const { return rest_; }
  uint8_t byte() {
    if (rest_.empty()) {
      return 0;
    }
    const auto first = static_cast<uint8_t>(rest_.front());
    rest_.remove_prefix(1);
    return first;
  }
  size_t below(size_t n) { return byte() % n; }
  std::string_view bytes(size_t count) {
    const std::string_view taken = rest_.substr(0, count);
    rest_.remove_prefix(taken.size());
    return taken;
  }
  // The first part becomes an input of its own.
  Input split(size_t count) {
    const std::string_view taken = bytes(count);
    return {reinterpret_cast<const uint8_t*>(taken.data()), taken.size()};
  }

 private:
  std::string_view rest_;
};

}  // namespace retrograd::fuzz
