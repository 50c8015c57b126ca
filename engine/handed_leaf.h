// Leaves whose gradient a plan hands to the real AccumulateGrad node when it is done.
//
// A captured graph reads a leaf's .grad when it starts and writes it when it is done. Whatever another thread, or a
// backward call nested in this one, adds in between would be lost. So for a leaf that nobody watches, the graph works
// on a stand-in that has no .grad, and what it leaves there is added to the real leaf under the node's own lock.
#pragma once

#include <mutex>

#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include "engine/walk.h"

namespace retrograd {

struct HandedLeaf {
  torch::autograd::AccumulateGrad* node;
  // The place of the stand-in among Collected::call.tensor_args.inputs. Mostly the variable's own; but a function of
  // the user's that saved the variable must get the variable itself, and then the stand-in is an input more.
  uint32_t input;
};

// The lock under which AccumulateGrad::apply() reads and writes .grad.
std::mutex& node_mutex(Node& node);

// Whether the node has hooks of its own, which may look at .grad; tensor hooks, which run before, do not count.
bool may_look_at_grad(torch::autograd::AccumulateGrad& leaf);

// A leaf with the same data and no .grad. Under the GIL for a variable of a Python subclass.
at::Tensor make_stand_in(const at::Tensor& variable);

// Makes `gradient` the leaf's .grad, or adds it to the one there is. Without the GIL: the lock's holder may wait for
// it. What is no longer needed is left in `gradient`, so that the caller may let go of it under the GIL.
void hand_over(torch::autograd::AccumulateGrad& leaf, at::Tensor& gradient);

}  // namespace retrograd
