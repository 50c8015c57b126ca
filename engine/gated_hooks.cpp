#include "engine/gated_hooks.h"

#include <atomic>

#include "engine/context.h"

namespace retrograd {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::SavedVariableHooks;

std::atomic<const PythonGate*> python_gate{nullptr};
std::atomic<bool> ungated_hooks{false};
std::atomic<int64_t> gated_hooks{0};  // alive. Whoever runs a graph was handed it, with what counted its hooks
constinit thread_local const std::function<void()>* watch = nullptr;

// What SavedVariable keeps for its hooks is private; access does not apply to explicit instantiations.
using HooksOfSavedVariable = std::unique_ptr<SavedVariableHooks>;
template <auto kHooks, auto kGradFn, auto kIsOutput, auto kIsLeaf, auto kRequiresGrad>
struct SavedVariableAccess {
  friend HooksOfSavedVariable& hooks_of(SavedVariable& variable) { return variable.*kHooks; }
  friend bool requires_grad_of(const SavedVariable& variable) {  // the last is set for leaves only
    return variable.*kGradFn || (variable.*kIsOutput && !(variable.*kIsLeaf)) || variable.*kRequiresGrad;
  }
};
HooksOfSavedVariable& hooks_of(SavedVariable& variable);
bool requires_grad_of(const SavedVariable& variable);
template struct SavedVariableAccess<&SavedVariable::hooks_, &SavedVariable::grad_fn_, &SavedVariable::is_output_,
                                    &SavedVariable::is_leaf_, &SavedVariable::requires_grad_>;

class GatedHooks final : public SavedVariableHooks {
 public:
  explicit GatedHooks(std::unique_ptr<SavedVariableHooks> inner) : inner_(std::move(inner)) {
    gated_hooks.fetch_add(1, std::memory_order_relaxed);
  }
  ~GatedHooks() override { gated_hooks.fetch_sub(1, std::memory_order_relaxed); }
  GatedHooks(const GatedHooks&) = delete;
  GatedHooks& operator=(const GatedHooks&) = delete;
  // Both take the GIL themselves.
  void call_pack_hook(const at::Tensor& tensor) override { inner_->call_pack_hook(tensor); }
  at::Tensor call_unpack_hook() override {
    ++thread_context().unpack_hooks;
    return inner_->call_unpack_hook();
  }

  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> retrieve_unpack_hook_data() const override {
    if (watch != nullptr) (*watch)();
    PythonGateLock lock;
    return inner_->retrieve_unpack_hook_data();
  }

 private:
  std::unique_ptr<SavedVariableHooks> inner_;
};

}  // namespace

void set_python_gate(const PythonGate* gate) noexcept { python_gate.store(gate, std::memory_order_release); }

PythonGateLock::PythonGateLock(bool take) {
  if (!take) return;
  gate_ = python_gate.load(std::memory_order_acquire);
  if (gate_ != nullptr) state_ = gate_->acquire();
}

PythonGateLock::~PythonGateLock() {
  if (gate_ != nullptr) gate_->release(state_);
}

std::unique_ptr<torch::autograd::SavedVariableHooks> gate_hooks(
    std::unique_ptr<torch::autograd::SavedVariableHooks> hooks) {
  if (hooks == nullptr) return hooks;
  if (python_gate.load(std::memory_order_acquire) == nullptr) {
    note_ungated_hooks();
    return hooks;
  }
  return std::make_unique<GatedHooks>(std::move(hooks));
}

GatedHooksWatch::GatedHooksWatch(std::function<void()> visit)
    : visit_(std::move(visit)), outer_(std::exchange(watch, &visit_)) {}
GatedHooksWatch::~GatedHooksWatch() { watch = outer_; }

bool packed_requires_grad(const SavedVariable& variable) { return requires_grad_of(variable); }

bool has_gated_hooks(const SavedVariable& variable) {
  const SavedVariableHooks& hooks = *hooks_of(const_cast<SavedVariable&>(variable));
  return typeid(hooks) == typeid(GatedHooks);
}

void gate_hooks_of(SavedVariable& variable) {
  HooksOfSavedVariable& hooks = hooks_of(variable);
  hooks = gate_hooks(std::move(hooks));
}

void note_ungated_hooks() noexcept { ungated_hooks.store(true, std::memory_order_relaxed); }
bool saved_tensor_hooks_exist() noexcept {
  return gated_hooks.load(std::memory_order_relaxed) != 0 || ungated_hooks_exist();
}
bool ungated_hooks_exist() noexcept { return ungated_hooks.load(std::memory_order_relaxed); }

}  // namespace retrograd
