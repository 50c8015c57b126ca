// The plan store, as far as a C++ program has to do with it.
//
// Compiled plans are kept on disk, in $RETROGRAD_CACHE_DIR, else in $XDG_CACHE_HOME/retrograd, else in
// ~/.cache/retrograd; RETROGRAD_CACHE=0 does without. The environment is read once, when the store is first asked.
// Compiling needs Python, so a program without Python runs the plans that Python programs of the same user have put
// there: same graph, sizes, number of intra-op threads, processor and version of torch. What has no plan runs node by
// node; stats().plans_from_store counts what was found.
#pragma once

#include <string>

namespace retrograd {

// Whether there is a plan store that can be used. If not, `why_not` gets the reason, in one sentence with the way out;
// it is empty where there shall be none. May be called from any thread; makes the folder where it is missing.
bool has_plan_store(std::string* why_not = nullptr);

}  // namespace retrograd
