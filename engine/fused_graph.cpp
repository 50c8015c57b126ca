#include "engine/fused_graph.h"

#include <algorithm>
#include <array>
#include <utility>

#include "engine/node_kind.h"
#include "engine/step_runner.h"

namespace retrograd {
namespace {

constexpr size_t kMinMembers = 2;
constexpr size_t kMaxCuts = 32;

}  // namespace

std::string_view name(Fusable fusable) noexcept {
  static constexpr std::array<std::string_view, static_cast<size_t>(Fusable::kCount)> kNames{
      "fusable", "not_needed", "captured", "user_code", "kind", "found_out"};
  return kNames[static_cast<size_t>(fusable)];
}

std::optional<ChangeFinder::Change> ChangeFinder::look(const GroupKey& key, const NumberPlaces& places) {
  const std::lock_guard lock(mutex_);
  if (is_done()) return std::nullopt;
  if (!before_) {
    before_ = key;
    return std::nullopt;
  }
  // The member that `place` belongs to, given where each member's part begins and where the last one's ends.
  const auto member_at = [](std::span<const uint32_t> bounds, size_t place) -> std::optional<uint32_t> {
    const auto after = std::ranges::upper_bound(bounds, place);
    if (after == bounds.begin() || after == bounds.end()) return std::nullopt;
    return static_cast<uint32_t>(after - bounds.begin() - 1);
  };
  const cache::KeyView was = before_->fixed[0];
  const cache::KeyView is = key.fixed[0];
  const auto [old_byte, new_byte] = std::ranges::mismatch(was, is);
  Change change;
  if (old_byte != was.end() || new_byte != is.end()) {
    change.member = member_at(places.member_keys, static_cast<size_t>(new_byte - is.begin()));
  } else {
    const auto [old_number, new_number] = std::ranges::mismatch(before_->numbers, key.numbers);
    if (old_number == before_->numbers.end() && new_number == key.numbers.end()) return std::nullopt;  // the same again
    change.sizes = true;
    change.member = member_at(places.member_numbers, static_cast<size_t>(new_number - key.numbers.begin()));
  }
  done_.store(true, std::memory_order_relaxed);
  before_.reset();
  return change;
}

const FusedGraph& FusedGraph::of(cache::Leaf& leaf, const Schedule& schedule) {
  constexpr std::byte kKey{'F'};
  const void* const graph = leaf.get_or_build({&kKey, 1}, cache::Wait::kYes, [&]() -> std::shared_ptr<const void> {
    return std::make_shared<const FusedGraph>(schedule);
  });
  return *static_cast<const FusedGraph*>(graph);
}

Fusable FusedGraph::fusable(uint32_t step, Node& node) const {
  const StepShape& shape = schedule_.shape().steps[step];
  if (!shape.needed) return Fusable::kNotNeeded;
  if (shape.num_captures != 0) return Fusable::kCaptured;
  if (runs_user_code(node, NodeKind::kPlain)) return Fusable::kUserCode;
  if (!may_be_fused(node)) return is_custom_function(typeid(node)) ? Fusable::kUserCode : Fusable::kKind;
  return refused_[step].load(std::memory_order_relaxed) ? Fusable::kFoundOut : Fusable::kYes;
}

const CutGraph* FusedGraph::cut(std::span<Node* const> nodes) const {
  const GraphShape& shape = schedule_.shape();
  thread_local std::vector<std::byte> key;
  key.assign(shape.steps.size(), std::byte{0});
  for (uint32_t k = 0; k < nodes.size(); ++k) {
    if (fusable(k, *nodes[k]) == Fusable::kYes) key[k] = std::byte{1};
  }
  const void* cut = cuts_.find(key);
  if (cut == nullptr) {
    if (cuts_.plan_count() >= kMaxCuts) return nullptr;
    // Takes microseconds and runs no user code: threads that want the same one wait.
    cut = cuts_.get_or_build(key, cache::Wait::kYes, [&]() -> std::shared_ptr<const void> {
      std::vector<bool> fusable(key.size());
      for (size_t k = 0; k < key.size(); ++k) fusable[k] = key[k] != std::byte{0};
      return std::make_shared<const CutGraph>(make_partition(shape, fusable, kMinMembers));
    });
  }
  return static_cast<const CutGraph*>(cut);
}

}  // namespace retrograd
