#include "engine/walk.h"

#include <algorithm>
#include <bit>

namespace retrograd {
namespace {

// A node on the simulated ready heap. The comparison is the stock engine's for tasks of one call.
struct Ready {
  uint64_t sequence_nr;
  uint32_t number;
  bool operator<(const Ready& other) const { return sequence_nr < other.sequence_nr; }
};

// A walk's working memory: parallel arrays by node number, in order of discovery. Kept by each thread from call to
// call; released when a call was much larger than usual.
struct Scratch {
  NodeTable table;
  std::vector<Node*> nodes;
  std::vector<uint32_t> dependencies;  // edges that lead to the node
  std::vector<uint32_t> first_edge;    // into targets; kNoStep: not expanded
  std::vector<uint32_t> targets;       // node numbers, kNoStep for an empty edge, in edge order
  std::vector<uint32_t> stack;
  std::vector<Ready> heap;
  std::vector<uint32_t> order;    // node numbers in engine order
  std::vector<uint32_t> step_of;  // by node number; kNoStep: does not run
  // Only for pruned graphs.
  std::vector<uint8_t> needed, visited;
  std::vector<std::pair<uint32_t, CaptureShape>> captures;  // by node number, sorted stably
  std::vector<std::pair<uint32_t, uint32_t>> frames;        // depth-first search: node number, next edge

  void begin(size_t expected) {
    table.reset(expected);
    nodes.clear();
    dependencies.clear();
    first_edge.clear();
    targets.clear();
    order.clear();
    captures.clear();
  }
  uint32_t number(Node* node, bool& is_new) {
    auto [n, inserted] = table.insert(node, static_cast<uint32_t>(nodes.size()));
    is_new = inserted;
    if (inserted) {
      nodes.push_back(node);
      dependencies.push_back(0);
      first_edge.push_back(kNoStep);
    }
    return n;
  }
  std::span<const uint32_t> targets_of(uint32_t n) const {
    if (first_edge[n] == kNoStep) return {};
    return {targets.data() + first_edge[n], nodes[n]->next_edges().size()};
  }
};

constexpr size_t kKeepScratchNodes = size_t{1} << 16;

uint64_t min_topological_nr(const edge_list& outputs) {
  uint64_t least = outputs.empty() ? 0 : std::numeric_limits<uint64_t>::max();
  for (const Edge& edge : outputs) least = std::min(least, edge.function->topological_nr());
  return least;
}

// Numbers all reachable nodes and counts the edges into each. Nodes below every output cannot lead to one, so a
// pruned walk does not look past them.
bool discover(Node& root, const edge_list& outputs, Scratch& s) {
  const uint64_t least = min_topological_nr(outputs);
  bool is_new = false;
  s.number(&root, is_new);
  s.stack.assign(1, 0);
  while (!s.stack.empty()) {
    const uint32_t n = s.stack.back();
    s.stack.pop_back();
    Node& node = *s.nodes[n];
    if (least != 0 && node.topological_nr() < least) continue;
    s.first_edge[n] = static_cast<uint32_t>(s.targets.size());
    for (const Edge& edge : node.next_edges()) {
      if (!edge.is_valid()) {
        s.targets.push_back(kNoStep);
        continue;
      }
      if (edge.input_nr >= edge.function->num_inputs()) return false;
      const uint32_t target = s.number(edge.function.get(), is_new);
      s.targets.push_back(target);
      ++s.dependencies[target];
      if (is_new) s.stack.push_back(target);
    }
  }
  return true;
}

// Marks the nodes from which an output can be reached, and records what is captured where.
void prune(bool accumulate, const edge_list& outputs, Scratch& s) {
  s.needed.assign(s.nodes.size(), 0);
  for (size_t i = 0; i < outputs.size(); ++i) {
    const uint32_t n = s.table.find(outputs[i].function.get());
    if (n == kNoStep) continue;  // not in this graph: its gradient stays undefined
    if (accumulate) {
      s.needed[n] = 1;
    } else {
      s.captures.push_back({n, {outputs[i].input_nr, static_cast<uint32_t>(i)}});
    }
  }
  std::stable_sort(s.captures.begin(), s.captures.end(), [](auto& a, auto& b) { return a.first < b.first; });
  const auto runs = [&](uint32_t n) {
    return s.needed[n] != 0 || std::binary_search(s.captures.begin(), s.captures.end(), std::pair{n, CaptureShape{}},
                                                  [](auto& a, auto& b) { return a.first < b.first; });
  };
  // Depth first, children before parents.
  s.visited.assign(s.nodes.size(), 0);
  s.visited[0] = 1;
  s.frames.assign(1, {0, 0});
  while (!s.frames.empty()) {
    auto& [n, next] = s.frames.back();
    const auto targets = s.targets_of(n);
    if (next == targets.size()) {
      for (uint32_t t : targets) {
        if (t != kNoStep && runs(t)) s.needed[n] = 1;
      }
      s.frames.pop_back();
      continue;
    }
    const uint32_t t = targets[next++];
    if (t != kNoStep && s.visited[t] == 0) {
      s.visited[t] = 1;
      s.frames.emplace_back(t, 0);
    }
  }
}

// Runs the stock engine's ready heap without running nodes.
template <class Runs, class Expands>
void simulate(Scratch& s, const Runs& runs, const Expands& expands) {
  s.step_of.assign(s.nodes.size(), kNoStep);
  s.heap.assign(1, {s.nodes[0]->sequence_nr(), 0});
  while (!s.heap.empty()) {
    std::pop_heap(s.heap.begin(), s.heap.end());
    const uint32_t n = s.heap.back().number;
    s.heap.pop_back();
    s.step_of[n] = static_cast<uint32_t>(s.order.size());
    s.order.push_back(n);
    if (!expands(n)) continue;
    for (uint32_t t : s.targets_of(n)) {
      if (t == kNoStep || --s.dependencies[t] != 0 || !runs(t)) continue;
      s.heap.push_back({s.nodes[t]->sequence_nr(), t});
      std::push_heap(s.heap.begin(), s.heap.end());
    }
  }
}

}  // namespace

void NodeTable::reset(size_t expected) {
  const size_t wanted = std::bit_ceil(std::max<size_t>(64, expected * 2));
  if (slots_.size() < wanted) {
    slots_.assign(wanted, {});
    generation_ = 0;
    shift_ = 64 - std::countr_zero(wanted);
  }
  if (++generation_ == 0) {  // wrapped: old marks could look current
    std::fill(slots_.begin(), slots_.end(), Slot{});
    generation_ = 1;
  }
  used_ = 0;
}

size_t NodeTable::slot_of(const Node* node) const {
  // Fibonacci hashing: the multiplication spreads the address, whose low bits are always zero, into the top bits.
  return (reinterpret_cast<uintptr_t>(node) * 0x9E3779B97F4A7C15ULL) >> shift_;
}

std::pair<uint32_t, bool> NodeTable::insert(const Node* node, uint32_t next) {
  if (used_ * 2 >= slots_.size()) grow();
  for (size_t i = slot_of(node);; i = (i + 1) & (slots_.size() - 1)) {
    Slot& slot = slots_[i];
    if (slot.generation != generation_) {
      slot = {node, next, generation_};
      ++used_;
      return {next, true};
    }
    if (slot.node == node) return {slot.number, false};
  }
}

uint32_t NodeTable::find(const Node* node) const {
  for (size_t i = slot_of(node);; i = (i + 1) & (slots_.size() - 1)) {
    const Slot& slot = slots_[i];
    if (slot.generation != generation_) return kNoStep;
    if (slot.node == node) return slot.number;
  }
}

void NodeTable::grow() {
  std::vector<Slot> old(slots_.size() * 2);
  old.swap(slots_);
  shift_ -= 1;
  used_ = 0;
  const uint32_t current = generation_;
  generation_ = 1;
  for (const Slot& slot : old) {
    if (slot.generation == current) insert(slot.node, slot.number);
  }
}

bool walk(Node& root, bool accumulate, const edge_list& outputs, GraphShape& shape, WalkedGraph& graph) {
  thread_local Scratch scratch;
  Scratch& s = scratch;
  s.begin(s.nodes.size());
  if (!discover(root, outputs, s)) return false;

  shape.pruned = !outputs.empty();
  if (shape.pruned) {
    prune(accumulate, outputs, s);
    std::vector<uint8_t> captured(s.nodes.size(), 0);
    for (const auto& [n, capture] : s.captures) captured[n] = 1;
    simulate(
        s, [&](uint32_t n) { return s.needed[n] != 0 || captured[n] != 0; },
        [&](uint32_t n) { return s.needed[n] != 0; });
  } else {
    simulate(s, [](uint32_t) { return true; }, [](uint32_t) { return true; });
  }

  shape.steps.clear();
  shape.edges.clear();
  shape.captures.clear();
  shape.steps.reserve(s.order.size());
  shape.edges.reserve(s.targets.size());
  graph.nodes.clear();
  graph.nodes.reserve(s.order.size());
  graph.not_running.clear();
  for (uint32_t n : s.order) {
    Node& node = *s.nodes[n];
    graph.nodes.push_back(&node);
    StepShape step{};
    step.type = &typeid(node);
    step.num_inputs = node.num_inputs();
    step.needed = !shape.pruned || s.needed[n] != 0;
    step.first_edge = static_cast<uint32_t>(shape.edges.size());
    step.num_edges = static_cast<uint32_t>(node.next_edges().size());
    const auto targets = s.targets_of(n);
    for (size_t i = 0; i < step.num_edges; ++i) {
      const uint32_t t = targets.empty() ? kNoStep : targets[i];
      shape.edges.push_back({t == kNoStep ? kNoStep : s.step_of[t], node.next_edge(i).input_nr});
    }
    step.first_capture = static_cast<uint32_t>(shape.captures.size());
    if (!s.captures.empty()) {
      auto [begin, end] = std::equal_range(s.captures.begin(), s.captures.end(), std::pair{n, CaptureShape{}},
                                           [](auto& a, auto& b) { return a.first < b.first; });
      for (; begin != end; ++begin) shape.captures.push_back(begin->second);
    }
    step.num_captures = static_cast<uint32_t>(shape.captures.size()) - step.first_capture;
    shape.steps.push_back(step);
  }
  if (shape.pruned) {
    for (size_t n = 0; n < s.nodes.size(); ++n) {
      if (s.step_of[n] == kNoStep) graph.not_running.push_back(s.nodes[n]);
    }
  }
  if (s.nodes.size() > kKeepScratchNodes) scratch = Scratch{};
  return true;
}

}  // namespace retrograd
