#include "engine/group_plan.h"

#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>

#include "cache/perturb.h"

namespace retrograd {

LibraryPlan::LibraryPlan(std::string library, Io io) : GroupPlan(std::move(io)), library_(std::move(library)) {
  idle_.push_back(take());
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
  // One model in a container of its own, used by one thread at a time: its internal locks are never contended.
  return std::make_unique<torch::inductor::AOTIModelContainerRunnerCpu>(library_, /*num_models=*/1,
                                                                        /*run_single_threaded=*/true);
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
