// From a live graph to its plan: the thread's recent plans first, then a walk and the trie.
#pragma once

#include <memory>

#include "cache/trie.h"
#include "engine/region.h"
#include "engine/stats.h"

namespace retrograd {

struct FoundPlan {
  // Keeps the plan alive for the call, whatever happens to the cache meanwhile.
  std::shared_ptr<cache::Leaf> leaf;
  const Schedule* schedule = nullptr;  // null: a graph for the previous engine
  bool hit = false;                    // it was there already
};

// Fills call.nodes and call.not_running, and counts the time for walk and look-up.
FoundPlan find_plan(Node& root, PreparedCall& call, ThreadStats& stats);

}  // namespace retrograd
