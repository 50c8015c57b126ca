#include "engine/partition.h"

#include <algorithm>
#include <functional>
#include <map>
#include <queue>

namespace retrograd {
namespace {

class Partitioner {
 public:
  Partitioner(const GraphShape& shape, const std::vector<bool>& fusable, size_t min_members, size_t max_members)
      : shape_(shape),
        fusable_(fusable),
        min_members_(min_members),
        max_members_(max_members),
        waits_for_(shape.steps.size(), 0) {
    for (const EdgeShape& edge : shape.edges) {
      if (edge.step != kNoStep) ++waits_for_[edge.step];
    }
  }

  Partition run() {
    const auto count = static_cast<uint32_t>(shape_.steps.size());
    if (fusable_[0]) ready_.push(0);
    for (uint32_t k = 0; k < count; ++k) {
      if (fusable_[k]) continue;
      // Steps run in engine order, so what this one still waits for is in groups: of all that can run by now.
      if (waits_for_[k] != 0) flush();
      result_.items.push_back({false, k});
      follow(k);
    }
    flush();
    return std::move(result_);
  }

 private:
  void follow(uint32_t k) {
    for (const EdgeShape& edge : shape_.edges_of(shape_.steps[k])) {
      if (edge.step != kNoStep && --waits_for_[edge.step] == 0 && fusable_[edge.step]) ready_.push(edge.step);
    }
  }

  // Makes a group of the fusable steps that can run, and of those that they make able to run.
  void flush() {
    while (!ready_.empty()) make_group();
  }

  void make_group() {
    Group group;
    while (!ready_.empty() && group.steps.size() < max_members_) {
      const uint32_t k = ready_.top();
      ready_.pop();
      group.steps.push_back(k);
      follow(k);
    }
    std::sort(group.steps.begin(), group.steps.end());
    if (group.steps.size() < min_members_) {
      for (const uint32_t k : group.steps) result_.items.push_back({false, k});
      return;
    }
    connect(group);
    result_.items.push_back({true, static_cast<uint32_t>(result_.groups.size())});
    result_.groups.push_back(std::move(group));
  }

  void connect(Group& group) const {
    std::map<uint32_t, uint32_t> members;  // by step
    for (uint32_t m = 0; m < group.steps.size(); ++m) members.emplace(group.steps[m], m);
    std::map<std::pair<uint32_t, uint32_t>, uint32_t> outputs;
    for (const uint32_t k : group.steps) {
      group.first_edge.push_back(static_cast<uint32_t>(group.edges.size()));
      for (const EdgeShape& edge : shape_.edges_of(shape_.steps[k])) {
        if (edge.step == kNoStep) {
          group.edges.emplace_back();
        } else if (const auto member = members.find(edge.step); member != members.end()) {
          group.edges.push_back({GroupEdge::To::kMember, member->second, edge.input_nr});
        } else {
          const auto [output, is_new] =
              outputs.try_emplace({edge.step, edge.input_nr}, static_cast<uint32_t>(group.outputs.size()));
          if (is_new) group.outputs.push_back(edge);
          group.edges.push_back({GroupEdge::To::kOutside, output->second, 0});
        }
      }
    }
    group.first_edge.push_back(static_cast<uint32_t>(group.edges.size()));

    // Slots with an edge from outside; and the one that gets the call's own gradient.
    std::vector<GroupInput> inputs;
    if (const auto root = members.find(0); root != members.end()) inputs.push_back({root->second, shape_.root_input});
    for (uint32_t k = 0; k < shape_.steps.size(); ++k) {
      if (members.contains(k)) continue;
      for (const EdgeShape& edge : shape_.edges_of(shape_.steps[k])) {
        if (const auto member = members.find(edge.step); edge.step != kNoStep && member != members.end()) {
          inputs.push_back({member->second, edge.input_nr});
        }
      }
    }
    const auto place = [](const GroupInput& i) { return std::pair(i.member, i.input_nr); };
    std::ranges::sort(inputs, {}, place);
    inputs.erase(std::unique(inputs.begin(), inputs.end()), inputs.end());
    group.inputs = std::move(inputs);
  }

  const GraphShape& shape_;
  const std::vector<bool>& fusable_;
  const size_t min_members_, max_members_;
  std::vector<uint32_t> waits_for_;  // by step: edges that have yet to be followed
  // Fusable steps that can run, the first in engine order on top.
  std::priority_queue<uint32_t, std::vector<uint32_t>, std::greater<>> ready_;
  Partition result_;
};

}  // namespace

Partition make_partition(const GraphShape& shape, const std::vector<bool>& fusable, size_t min_members,
                         size_t max_members) {
  return Partitioner(shape, fusable, min_members, max_members).run();
}

}  // namespace retrograd
