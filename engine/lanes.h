// A call whose graph lies on several accelerator devices: each device's steps run on the stock engine's thread of that
// device, and host steps on the calling thread, so that a hook that waits for one device does not keep the others idle.
//
// The steps of each device, in the stock engine's order, are cut into *segments* where gradients come from another
// device or go to one. Each segment is a node, in a graph that the previous engine runs as one call: it counts the
// segments' dependencies, picks their threads, and owns all that a single region leaves to it. No thread ever waits in
// the middle of a segment, so calls that share the devices' threads cannot block each other.
#pragma once

#include "engine/region.h"

namespace retrograd {

// Whether nodes of the call are on more than one accelerator device.
bool is_on_several_devices(const PreparedCall& call);

// As run_in_region(), for a call that runs on the schedule.
void run_in_lanes(torch::autograd::Engine& engine, PreparedCall& call);

bool is_lane(const Node* node);

}  // namespace retrograd
