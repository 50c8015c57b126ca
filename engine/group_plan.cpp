#include "engine/group_plan.h"

#include <algorithm>

#include <ATen/DynamicLibrary.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>

#include "cache/perturb.h"

namespace retrograd {

// Adds what a model in a library says of itself.
class LibraryPlan::Runner final : public torch::inductor::AOTIModelContainerRunnerCpu {
 public:
  // One model in a container of its own, used by one thread at a time: its internal locks are never contended.
  explicit Runner(const std::string& library)
      : AOTIModelContainerRunnerCpu(library, /*num_models=*/1, /*run_single_threaded=*/true) {}

  size_t num_inputs() const {
    const auto get = reinterpret_cast<decltype(&AOTInductorModelContainerGetNumInputs)>(
        model_so_->sym("AOTInductorModelContainerGetNumInputs"));
    return ask(get);
  }
  size_t num_outputs() const { return ask(get_num_outputs_func_); }

 private:
  template <class Get>
  size_t ask(Get get) const {
    size_t number = 0;
    TORCH_CHECK(get(container_handle_, &number) == AOTI_RUNTIME_SUCCESS, "a plan's library does not answer.");
    return number;
  }
};

LibraryPlan::LibraryPlan(std::string library, Io io) : GroupPlan(std::move(io)), library_(std::move(library)) {
  idle_.push_back(take());
  const auto& outputs = this->io().outputs;
  const size_t results = outputs.size() - static_cast<size_t>(std::ranges::count(outputs, -1));
  TORCH_CHECK(idle_[0]->num_inputs() == this->io().inputs.size() + this->io().guards.extra().size() &&
                  idle_[0]->num_outputs() == results,
              "a plan's library takes or gives something else than the plan says.");
}

LibraryPlan::~LibraryPlan() = default;

std::unique_ptr<LibraryPlan::Runner> LibraryPlan::take() const {
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      auto runner = std::move(idle_.back());
      idle_.pop_back();
      return runner;
    }
  }
  return std::make_unique<Runner>(library_);
}

variable_list LibraryPlan::run(variable_list&& inputs) const {
  auto runner = take();
  cache::perturb("library.taken");
  variable_list results = runner->boxed_run(std::move(inputs));
  // Not reached when it throws: an instance that failed in the middle is let go.
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(runner));
  return results;
}

}  // namespace retrograd
