// libFuzzer over ways to write keys: a path has the keys that were finished, whatever was begun, left or reused.
#include <array>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "cache/path.h"
#include "fuzz_util.h"

namespace {

using retrograd::cache::KeyView;
using retrograd::cache::Path;
using retrograd::fuzz::Input;
using retrograd::fuzz::require;

KeyView view(std::string_view text) { return std::as_bytes(std::span(text.data(), text.size())); }

// A path, and what it should be.
struct Written {
  Path path;
  std::vector<std::string> keys;
  std::string unfinished;

  template <class T>
  void put(T value) {
    path.put(value);
    unfinished.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  void put_bytes(std::string_view bytes) {
    path.put_bytes(view(bytes));
    unfinished += bytes;
  }

  void check() const {
    require(path.size() == keys.size() && path.empty() == keys.empty(), "keys were lost or made up");
    for (size_t i = 0; i < keys.size(); ++i) {
      const KeyView key = path[i];
      require(key.size() == keys[i].size() && (key.empty() || std::memcmp(key.data(), keys[i].data(), key.size()) == 0),
              "a key is not what was written");
    }
  }
};

void step(Written& written, Input& in) {
  switch (in.below(10)) {
    case 0:
      written.path.clear();
      written.keys.clear();
      written.unfinished.clear();
      break;
    case 1: {
      const std::string_view key = in.bytes(in.byte());
      written.path.append(view(key));
      written.keys.emplace_back(key);
      written.unfinished.clear();
      break;
    }
    case 2:
      written.path.begin_key();
      written.unfinished.clear();
      break;
    case 3:
    case 4:
      written.path.end_key();
      written.keys.push_back(std::exchange(written.unfinished, {}));
      break;
    case 5:
      written.put(in.byte());
      break;
    case 6:
      written.put(static_cast<uint32_t>(in.byte()) << 20U);
      break;
    case 7:
      written.put(static_cast<double>(in.byte()) / 3);
      break;
    case 8:
      written.put_bytes(in.bytes(in.byte()));
      break;
    default:  // past what the buffer begins with
      written.put_bytes(std::string(in.byte() * size_t{64}, 'l'));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in(data, size);
  std::array<Written, 2> paths;
  while (!in.at_end()) {
    const size_t which = in.below(8);
    if (which == 7) {
      paths[1] = paths[0];
    } else {
      step(paths[which % 2], in);
    }
    for (const Written& written : paths) {
      written.check();
    }
    require((paths[0].path == paths[1].path) == (paths[0].keys == paths[1].keys), "paths are compared wrongly");
  }
  return 0;
}
