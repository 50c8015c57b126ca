// The process's one trie of plans.
#pragma once

#include "cache/trie.h"

namespace retrograd {

// Always the same one, but in a forked child.
cache::Trie& plan_trie();

}  // namespace retrograd
