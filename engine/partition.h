// Cutting a schedule into groups of nodes that run as one compiled plan, and steps that run their own node.
//
// Nodes in a group run together, so they leave the stock engine's order. Nobody can see that: they are libtorch's own
// functions without hooks. All other steps (Python functions, nodes with hooks, AccumulateGrad, captures) keep the
// order that they have among each other, and a group runs as late as the steps that need it allow, which makes groups
// as large as the dependencies allow.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/walk.h"

namespace retrograd {

// Where one output of a node in a group goes.
struct GroupEdge {
  enum class To : uint8_t { kNowhere, kMember, kOutside };
  To to = To::kNowhere;
  uint32_t index = 0;     // kMember: which member; kOutside: which output of the group
  uint32_t input_nr = 0;  // kMember only

  bool operator==(const GroupEdge&) const = default;
};

// A slot of a member that may get a gradient from outside the group.
struct GroupInput {
  uint32_t member;
  uint32_t input_nr;

  bool operator==(const GroupInput&) const = default;
};

struct Group {
  std::vector<uint32_t> steps;       // the members, in engine order
  std::vector<uint32_t> first_edge;  // by member, into edges; one more at the end
  std::vector<GroupEdge> edges;      // of all members, in edge order
  std::vector<GroupInput> inputs;    // by member, then by slot
  std::vector<EdgeShape> outputs;    // slots outside that get a gradient, in the order of first use
};

struct Partition {
  struct Item {
    bool is_group;
    uint32_t index;  // into groups, or a step
  };
  std::vector<Item> items;  // in running order; every step is in exactly one
  std::vector<Group> groups;
};

inline constexpr size_t kMaxMembers = 200;

// `fusable` says by step which nodes may be in a group. Groups of fewer than `min_members` nodes are dissolved into
// single steps, in engine order, where they stood; larger ones than `max_members` are cut, in engine order: compiling
// takes time and memory out of proportion for large graphs.
Partition make_partition(const GraphShape& shape, const std::vector<bool>& fusable, size_t min_members,
                         size_t max_members = kMaxMembers);

}  // namespace retrograd
