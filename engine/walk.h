// One pass over a backward graph: which nodes run, in the stock engine's order, and how gradients flow between them.
//
// The stock engine counts, for each reachable node, the edges that lead to it; runs the root; and whenever a node's
// count falls to zero pushes it on a binary heap ordered by sequence number, from which the next node is taken. None
// of that depends on gradient values, so the whole order can be found beforehand by the same heap operations on the
// same numbers. Ties (all AccumulateGrad nodes have the largest number) come out alike because the heap algorithm is
// the same.
//
// A walk runs no user code, takes no lock and never needs the GIL.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <typeinfo>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/node.h>

namespace retrograd {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

inline constexpr uint32_t kNoStep = std::numeric_limits<uint32_t>::max();

// Where one output of a step goes: input `input_nr` of step `step`; kNoStep where it goes nowhere, because the
// edge is empty or, in a pruned graph, leads to a node that does not run.
struct EdgeShape {
  uint32_t step;
  uint32_t input_nr;
};

// Gradient `input_nr` of a step is result `output` of the call, as autograd.grad() asks.
struct CaptureShape {
  uint32_t input_nr;
  uint32_t output;
};

struct StepShape {
  const std::type_info* type;
  uint32_t num_inputs;
  uint32_t first_edge, num_edges;        // into GraphShape::edges
  uint32_t first_capture, num_captures;  // into GraphShape::captures
  bool needed;                           // false: the node itself does not run, only its tensor hooks and captures
};

// A graph without its nodes: steps in engine order. Step 0 is the call's root; every other step is reached by an
// edge of an earlier one.
struct GraphShape {
  std::vector<StepShape> steps;
  std::vector<EdgeShape> edges;
  std::vector<CaptureShape> captures;
  uint32_t root_input = 0;  // which input of step 0 gets the call's gradient (a call with one root)
  bool pruned = false;      // the call named inputs: nodes that lead to none of them do not run

  std::span<const EdgeShape> edges_of(const StepShape& s) const { return {edges.data() + s.first_edge, s.num_edges}; }
  std::span<const CaptureShape> captures_of(const StepShape& s) const {
    return {captures.data() + s.first_capture, s.num_captures};
  }
};

// A set or numbering of nodes, made to be filled and emptied once a call without allocating.
class NodeTable {
 public:
  // Empties the table and makes room for `expected` nodes.
  void reset(size_t expected);
  // The number of `node`; `next` is given to a node seen for the first time (second: true).
  std::pair<uint32_t, bool> insert(const Node* node, uint32_t next);
  // The number of `node`, or kNoStep.
  uint32_t find(const Node* node) const;

 private:
  struct Slot {
    const Node* node = nullptr;
    uint32_t number = 0;
    uint32_t generation = 0;  // the slot is empty unless this is the table's
  };
  size_t slot_of(const Node* node) const;
  void grow();

  std::vector<Slot> slots_;
  size_t used_ = 0;
  uint32_t generation_ = 1;
  int shift_ = 64;
};

// What the walk found about the live graph. Pointers are good while the caller keeps the roots alive.
struct WalkedGraph {
  std::vector<Node*> nodes;        // by step
  std::vector<Node*> not_running;  // reachable, but pruned away; in no particular order
};

// Walks from `root`: the only root's function, or a GraphRoot over several roots. `outputs` are the edges the call's
// inputs= names (empty: all leaves), `accumulate` is true for backward() and false for grad(). Returns false, leaving
// `shape` and `graph` unspecified, for a graph that the stock engine would stumble over (an edge into an input that its
// node does not have); the caller lets it.
bool walk(Node& root, bool accumulate, const edge_list& outputs, GraphShape& shape, WalkedGraph& graph);

}  // namespace retrograd
