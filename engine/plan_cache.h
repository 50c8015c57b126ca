// The process's one trie of plans.
#pragma once

#include "cache/trie.h"

namespace retrograd {

// Never destroyed: threads may run backward while static destructors run.
cache::Trie& plan_trie();

}  // namespace retrograd
