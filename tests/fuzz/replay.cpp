// Runs a fuzz program without libFuzzer: over the inputs in a folder, and over variations of them.
//
//   replay_trie tests/fuzz/corpus/fuzz_trie [variations of each input; 20 if not given]
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Bytes = std::vector<uint8_t>;

void run(const Bytes& input) { LLVMFuzzerTestOneInput(input.data(), input.size()); }

// One to four bytes changed, taken out or put in.
Bytes varied(Bytes input, std::mt19937& random) {
  for (uint32_t changes = 1 + random() % 4; changes > 0; --changes) {
    const auto at = input.begin() + static_cast<ptrdiff_t>(random() % (input.size() + 1));
    const auto byte = static_cast<uint8_t>(random());
    if (at == input.end() || random() % 4 == 0) {
      input.insert(at, byte);
    } else if (random() % 3 == 0) {
      input.erase(at);
    } else {
      *at = byte;
    }
  }
  return input;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s <folder> [variations of each input]\n", argv[0]);
    return 2;
  }
  const int variations = argc > 2 ? std::atoi(argv[2]) : 20;
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(argv[1])) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  std::mt19937 random(1);
  size_t inputs = 0;
  for (const auto& path : files) {
    std::ifstream file(path, std::ios::binary);
    const Bytes input{std::istreambuf_iterator<char>(file), {}};
    std::fprintf(stderr, "%s\n", path.filename().c_str());  // the last one is the one that failed
    run(input);
    for (int i = 0; i < variations; ++i) run(varied(input, random));
    inputs += 1 + static_cast<size_t>(variations);
  }
  std::fprintf(stderr, "%zu inputs from %zu files\n", inputs, files.size());
  return inputs == 0 ? 1 : 0;  // a folder without inputs shows nothing
}
