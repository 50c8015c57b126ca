#include "engine/group_plan.h"

#include <algorithm>
#include <utility>

#include <ATen/DynamicLibrary.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>
#ifdef RETROGRAD_CUDA
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cuda.h>
#endif

#include "cache/perturb.h"

namespace retrograd {

// One model in a container of its own, used by one thread at a time: its internal locks are never contended.
class LibraryPlan::Runner {
 public:
  Runner() = default;
  virtual ~Runner() = default;
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;

  virtual variable_list run(variable_list&& inputs) = 0;
  virtual size_t num_inputs() const = 0;
  virtual size_t num_outputs() const = 0;

  static std::unique_ptr<Runner> load(const std::string& library, c10::Device device);

 private:
  template <class Container>
  class Of;
};

// By libtorch's own class for the device, plus what a model in a library says of itself.
template <class Container>
class LibraryPlan::Runner::Of final : public Runner, private Container {
 public:
  template <class... Args>
  explicit Of(Args&&... args) : Container(std::forward<Args>(args)...) {}

  variable_list run(variable_list&& inputs) override { return this->boxed_run(std::move(inputs)); }
  size_t num_inputs() const override {
    const auto get = reinterpret_cast<decltype(&AOTInductorModelContainerGetNumInputs)>(
        this->model_so_->sym("AOTInductorModelContainerGetNumInputs"));
    return ask(get);
  }
  size_t num_outputs() const override { return ask(this->get_num_outputs_func_); }

 private:
  template <class Get>
  size_t ask(Get get) const {
    size_t number = 0;
    TORCH_CHECK(get(this->container_handle_, &number) == AOTI_RUNTIME_SUCCESS, "a plan's library does not answer.");
    return number;
  }
};

std::unique_ptr<LibraryPlan::Runner> LibraryPlan::Runner::load(const std::string& library, c10::Device device) {
#ifdef RETROGRAD_CUDA
  if (device.is_cuda()) {
    return std::make_unique<Of<torch::inductor::AOTIModelContainerRunnerCuda>>(
        library, /*num_models=*/1, device.str(), /*cubin_dir=*/"", /*run_single_threaded=*/true);
  }
#endif
  TORCH_CHECK(device.is_cpu(), "there is nothing here that runs plans on ", device, ".");
  return std::make_unique<Of<torch::inductor::AOTIModelContainerRunnerCpu>>(library, /*num_models=*/1,
                                                                            /*run_single_threaded=*/true);
}

bool runs_plans_on(c10::DeviceType type) noexcept {
#ifdef RETROGRAD_CUDA
  if (type == c10::kCUDA) return true;
#endif
  return type == c10::kCPU;
}

LibraryPlan::LibraryPlan(std::string library, Io io, c10::Device device)
    : GroupPlan(std::move(io)), library_(std::move(library)), device_(device) {
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
  return Runner::load(library_, device_);
}

variable_list LibraryPlan::run(variable_list&& inputs) const {
  auto runner = take();
  cache::perturb("library.taken");
  variable_list results = runner->run(std::move(inputs));
  // Not reached when it throws: an instance that failed in the middle is let go.
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(runner));
  return results;
}

}  // namespace retrograd
