#include "engine/gated_hooks.h"

#include <atomic>

#include "engine/context.h"

namespace retrograd {
namespace {

std::atomic<const PythonGate*> python_gate{nullptr};
std::atomic<bool> ungated_hooks{false};
std::atomic<bool> saved_tensor_hooks{false};

class GatedHooks final : public torch::autograd::SavedVariableHooks {
 public:
  explicit GatedHooks(std::unique_ptr<SavedVariableHooks> inner) : inner_(std::move(inner)) {}
  // Both take the GIL themselves.
  void call_pack_hook(const at::Tensor& tensor) override { inner_->call_pack_hook(tensor); }
  at::Tensor call_unpack_hook() override {
    ++thread_context().unpack_hooks;
    return inner_->call_unpack_hook();
  }

  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> retrieve_unpack_hook_data() const override {
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
  saved_tensor_hooks.store(true, std::memory_order_relaxed);
  if (python_gate.load(std::memory_order_acquire) == nullptr) return hooks;
  return std::make_unique<GatedHooks>(std::move(hooks));
}

void note_ungated_hooks() noexcept {
  ungated_hooks.store(true, std::memory_order_relaxed);
  saved_tensor_hooks.store(true, std::memory_order_relaxed);
}
bool saved_tensor_hooks_exist() noexcept { return saved_tensor_hooks.load(std::memory_order_relaxed); }
bool ungated_hooks_exist() noexcept { return ungated_hooks.load(std::memory_order_relaxed); }

}  // namespace retrograd
