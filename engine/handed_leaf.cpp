#include "engine/handed_leaf.h"

namespace retrograd {
namespace {

using torch::autograd::AccumulateGrad;

// The lock is a protected member; access does not apply to explicit instantiations.
template <auto kMutex>
struct NodeMutexAccess {
  friend std::mutex& node_mutex_of(Node& node) { return node.*kMutex; }
};
std::mutex& node_mutex_of(Node& node);
template struct NodeMutexAccess<&Node::mutex_>;

}  // namespace

std::mutex& node_mutex(Node& node) { return node_mutex_of(node); }

bool may_look_at_grad(AccumulateGrad& leaf) {
  return leaf.tensor_post_acc_grad_hooks() != nullptr || !leaf.post_hooks().empty();
}

at::Tensor make_stand_in(const at::Tensor& variable) {
  const c10::TensorImpl* const impl = variable.unsafeGetTensorImpl();
  // detach(), without the way through the dispatcher where nobody listens on it.
  at::Tensor stand_in = impl->key_set().has_any(c10::python_ks)
                            ? variable.detach()
                            : at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(),
                                                                       /*allow_tensor_metadata_change=*/false));
  stand_in.set_requires_grad(true);
  return stand_in;
}

void hand_over(AccumulateGrad& leaf, at::Tensor& gradient) {
  at::Tensor former;  // goes after the lock
  const std::lock_guard lock(node_mutex(leaf));
  if (!leaf.variable.defined()) return;
  at::Tensor& grad = leaf.variable.mutable_grad();
  if (!grad.defined()) {
    // The graph has given it the leaf's layout and made sure that it is nobody else's, as for torch's own .grad.
    grad = std::move(gradient);
    return;
  }
  AccumulateGrad::accumulateGrad(leaf.variable, grad, gradient, /*num_expected_refs=*/1,
                                 [&](at::Tensor&& sum) { former = std::exchange(grad, std::move(sum)); });
}

}  // namespace retrograd
