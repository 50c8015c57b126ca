// libFuzzer over sequences of operations on a trie: one against a model, or two at once on two threads, where every
// leaf must carry the plan of its own path.
#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "../cpp/trie_model.h"
#include "cache/trie.h"
#include "fuzz_util.h"

namespace {

using namespace retrograd::cache;
using retrograd::fuzz::Input;
using retrograd::fuzz::require;

using Keys = TrieModel::Keys;

// Few and short, so that paths share prefixes, and some that are empty or hold any byte.
Keys read_keys(Input& in) {
  Keys keys(in.below(6));
  for (std::string& key : keys) {
    const size_t kind = in.below(8);
    key = kind < 6 ? std::string(kind / 2, 'x') + std::string(kind % 2, 'y') : std::string(in.bytes(kind - 4));
  }
  return keys;
}

Path path_of(const Keys& keys) {
  Path path;
  for (const std::string& key : keys) {
    path.append(std::as_bytes(std::span(key.data(), key.size())));
  }
  return path;
}

Trie::Limits read_limits(Input& in) {
  const size_t leaves = in.below(12);
  const size_t nodes = in.below(40);
  return {.max_leaves = leaves, .max_nodes = nodes};
}

void check(const Trie& trie, const TrieModel& model) {
  const Trie::Stats a = trie.stats();
  const Trie::Stats b = model.stats();
  require(a.leaves == b.leaves, "leaves");
  require(a.nodes == b.nodes, "nodes");
  require(a.evictions == b.evictions, "evictions");
  require(a.inserts == b.inserts, "inserts");
  require(trie.is_empty() == (b.leaves == 0), "is_empty()");
}

void against_model(Input& in) {
  const Trie::Limits limits = read_limits(in);
  Trie trie(limits);
  TrieModel model(limits);
  std::array<Memo, 2> memos;
  std::shared_ptr<Leaf> kept;
  while (!in.at_end()) {
    const size_t what = in.below(16);
    const size_t which = in.below(3);
    Memo* const memo = which < 2 ? &memos[which] : nullptr;
    if (what < 5) {
      const Keys keys = read_keys(in);
      require(trie.find(path_of(keys), memo) == model.find(keys), "find()");
    } else if (what < 11) {
      const Keys keys = read_keys(in);
      const std::shared_ptr<Leaf> expected = model.find(keys);
      const Trie::Inserted got = trie.find_or_insert(path_of(keys), memo);
      require(got.leaf != nullptr && got.inserted == (expected == nullptr), "find_or_insert()");
      if (got.inserted) {
        model.insert(keys, got.leaf);
      } else {
        require(got.leaf == expected, "another leaf for the same path");
      }
      if (in.below(2) == 0) kept = got.leaf;
    } else if (what == 11) {
      require(kept == nullptr || trie.touch(*kept) == model.touch(kept), "touch()");
    } else if (what == 12) {
      const Keys keys = read_keys(in);
      require(trie.first_miss(path_of(keys)).depth == model.depth(keys), "first_miss()");
    } else if (what == 13) {
      const Trie::Limits changed = read_limits(in);
      trie.set_limits(changed);
      model.set_limits(changed);
    } else if (what == 14) {
      memos[which % 2].clear();
    } else {
      trie.clear();
      model.clear();
    }
    check(trie, model);
  }
}

void one_of_two(Trie& trie, Input in, std::atomic<int>& plans) {
  Memo own;
  while (!in.at_end()) {
    const size_t what = in.below(16);
    Memo* const memo = in.below(2) == 0 ? &own : nullptr;
    if (what == 14) {
      trie.set_limits(read_limits(in));
      continue;
    }
    if (what == 15) {
      trie.clear();
      continue;
    }
    const Keys keys = read_keys(in);
    const std::shared_ptr<Leaf> leaf =
        what < 5 ? trie.find(path_of(keys), memo) : trie.find_or_insert(path_of(keys), memo).leaf;
    if (leaf == nullptr) continue;
    const void* plan = leaf->get_or_build({}, what % 2 == 0 ? Wait::kYes : Wait::kNo, [&] {
      ++plans;
      return std::shared_ptr<const Keys>(new Keys(keys), [&](const Keys* made) {
        --plans;
        delete made;
      });
    });
    require(plan == nullptr || *static_cast<const Keys*>(plan) == keys, "the plan of another path");
  }
}

void on_two_threads(Input& in) {
  Trie trie(read_limits(in));
  std::atomic<int> plans{0};
  const Input first = in.split(in.rest().size() / 2);
  {
    const std::jthread other([&] { one_of_two(trie, first, plans); });
    one_of_two(trie, in, plans);
  }
  require(plans <= static_cast<int>(trie.stats().leaves), "a plan outlived its leaf");
  trie.clear();
  require(trie.stats().nodes == 0 && plans == 0, "something was left behind");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in(data, size);
  if (in.below(4) == 0) {
    on_two_threads(in);
  } else {
    against_model(in);
  }
  return 0;
}
