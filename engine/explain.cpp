#include "engine/explain.h"

#include <torch/csrc/autograd/functions/basic_ops.h>

#include "engine/context.h"
#include "engine/engine.h"
#include "engine/find_plan.h"

namespace retrograd {
namespace {

GroupReport report(const cache::Leaf& keys) {
  GroupReport report;
  keys.for_each([&](cache::KeyView, const void* shapes) {
    static_cast<const GroupShapes*>(shapes)->for_each([&](const GroupShapes::Version& version) {
      switch (version.entry->state()) {
        case GroupEntry::State::kReady:
          ++report.ready;
          if (!version.open.empty()) ++report.ready_open;
          break;
        case GroupEntry::State::kMaking:
          ++report.making;
          break;
        case GroupEntry::State::kCold:
          ++report.cold;
          break;
        case GroupEntry::State::kRefused:
          ++report.refused;
          break;
        case GroupEntry::State::kSuperseded:
          break;
      }
    });
  });
  return report;
}

}  // namespace

Explanation explain(const torch::autograd::variable_list& tensors, const torch::autograd::edge_list& inputs) {
  Explanation result;
  result.previous = ReentrantEngine::get().reason_for_previous();
  result.setting = thread_context().in_force();

  torch::autograd::edge_list roots;
  for (const at::Tensor& tensor : tensors) roots.push_back(torch::autograd::impl::gradient_edge(tensor));
  PreparedCall call{.roots = roots,
                    .gradients = tensors,  // of the right number and kind
                    .keep_graph = true,
                    .create_graph = false,
                    .accumulate = true,
                    .outputs = inputs,
                    .setting = result.setting};
  c10::intrusive_ptr<Node> root = roots[0].function;
  if (roots.size() > 1) {
    root = c10::make_intrusive<torch::autograd::GraphRoot>(roots, tensors);
    call.single_root = false;
  }
  const FoundPlan found = find_plan(*root, call, thread_stats());
  if (found.schedule == nullptr) {
    result.previous = PreviousReason::kIrregularCall;
    return result;
  }
  result.known = found.hit;
  const FusedGraph& graph = FusedGraph::of(*found.leaf, *found.schedule);
  for (uint32_t k = 0; k < call.nodes.size(); ++k) {
    result.steps.push_back({.node = call.nodes[k]->name(), .fusable = graph.fusable(k, *call.nodes[k])});
  }
  const CutGraph* const cut = graph.cut(call.nodes);
  if (cut == nullptr) return result;
  for (uint32_t g = 0; g < cut->partition.groups.size(); ++g) {
    for (const uint32_t step : cut->partition.groups[g].steps) result.steps[step].group = g;
    result.groups.push_back(report(cut->sites[g].shapes));
  }
  return result;
}

}  // namespace retrograd
