// The node that is running, for C++ hooks. Apart from retrograd.h because it needs libtorch's headers.
#pragma once

#include <torch/csrc/autograd/node.h>

namespace retrograd {

// The node that is running on this thread, as the user sees it: inside a call that retrograd runs, the step's own node,
// where torch::autograd::get_current_node() says "BackwardRegion"; everywhere else what that function says (null
// outside backward).
c10::intrusive_ptr<torch::autograd::Node> current_node();

}  // namespace retrograd
