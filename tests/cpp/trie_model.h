// What a trie has to do, in few words: a map from the sequence of keys, with the order of uses beside it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cache/trie.h"

namespace retrograd::cache {

class TrieModel {
 public:
  using Keys = std::vector<std::string>;
  explicit TrieModel(Trie::Limits limits) : limits_(limits) {}

  // Each counts as a use; null: there is no such leaf.
  std::shared_ptr<Leaf> find(const Keys& keys) {
    const auto found = uses_.find(keys);
    if (found == uses_.end()) {
      return nullptr;
    }
    found->second.stamp = epoch_;
    return found->second.leaf;
  }
  bool touch(const std::shared_ptr<Leaf>& leaf) {
    const auto found = std::ranges::find_if(uses_, [&](const auto& entry) { return entry.second.leaf == leaf; });
    return found != uses_.end() && find(found->first) != nullptr;
  }

  void insert(const Keys& keys, std::shared_ptr<Leaf> leaf) {
    uses_[keys] = {std::move(leaf), epoch_ + 1, ++inserts_};
    epoch_ += 2;
    shrink();
  }
  void clear() { uses_.clear(); }
  void set_limits(Trie::Limits limits) {
    limits_ = limits;
    shrink();
  }

  Trie::Stats stats() const { return {uses_.size(), prefixes().size(), evictions_, inserts_}; }

  // How many of the keys are there one after the other.
  size_t depth(const Keys& keys) const {
    const std::set<Keys> there = prefixes();
    size_t depth = 0;
    while (depth < keys.size() && there.contains(first(keys, depth + 1))) ++depth;
    return depth;
  }

 private:
  struct Use {
    std::shared_ptr<Leaf> leaf;
    uint64_t stamp = 0;
    uint64_t serial = 0;
  };

  static Keys first(const Keys& keys, size_t count) {
    return {keys.begin(), keys.begin() + static_cast<ptrdiff_t>(count)};
  }
  std::set<Keys> prefixes() const {
    std::set<Keys> result;
    for (const auto& [keys, use] : uses_) {
      for (size_t count = 1; count <= keys.size(); ++count) result.insert(first(keys, count));
    }
    return result;
  }
  void shrink() {
    while (uses_.size() > limits_.max_leaves || (uses_.size() > 1 && prefixes().size() > limits_.max_nodes)) {
      uses_.erase(std::ranges::min_element(
          uses_, {}, [](const auto& entry) { return std::pair(entry.second.stamp, entry.second.serial); }));
      ++evictions_;
    }
  }

  Trie::Limits limits_;
  std::map<Keys, Use> uses_;
  uint64_t epoch_ = 0;
  uint64_t inserts_ = 0;
  uint64_t evictions_ = 0;
};

}  // namespace retrograd::cache
