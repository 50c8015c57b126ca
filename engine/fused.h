// The fused plan: groups of nodes run as compiled plans, all other steps by their nodes.
#pragma once

#include <optional>

#include "engine/region.h"

namespace retrograd {

// Runs `call` with whatever compiled groups there are, and sees to it that missing ones are made. A reason, with
// nothing done, when the plain schedule must run it. Throws what nodes and hooks throw. `run` is what the schedule
// would be given.
std::optional<ScheduleReason> run_fused(PreparedCall& call, const ScheduleRun& run);

}  // namespace retrograd
