// A compiled group: what runs a group's nodes as one.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "engine/shape_guards.h"
#include "engine/walk.h"

namespace retrograd {

// Immutable. Any number of threads may run it at a time.
class GroupPlan {
 public:
  struct Io {
    // The plan's inputs, as indices into the group's gradients followed by its tensors. Inputs that the graph turned
    // out not to need are left out.
    std::vector<uint32_t> inputs;
    // By output of the group: which of the plan's results it is, or -1 where the group gives no gradient. No two are
    // the same result.
    std::vector<int32_t> outputs;
    // What must hold of the group's numbers beyond those that the plan was made for exactly.
    ShapeGuards guards{};
  };

  explicit GroupPlan(Io io) : io_(std::move(io)) {}
  virtual ~GroupPlan() = default;
  GroupPlan(const GroupPlan&) = delete;
  GroupPlan& operator=(const GroupPlan&) = delete;

  const Io& io() const { return io_; }

  // Runs on the calling thread. Takes the inputs over: each is let go of when it was used for the last time. Throws
  // what the kernels throw (out of memory).
  virtual variable_list run(variable_list&& inputs) const = 0;

 private:
  const Io io_;
};

// Whether compiled groups can run on devices of this kind: the CPU, and CUDA where libtorch has it.
bool runs_plans_on(c10::DeviceType type) noexcept;

// A shared library that AOTInductor made, and instances of the model in it. Runs without Python. A thread that finds no
// free instance makes one (about a millisecond), so none ever waits for another.
class LibraryPlan final : public GroupPlan {
 public:
  // Loads the library, whose inputs are on `device`; on CUDA it runs on the stream that is current. Throws c10::Error
  // for one that cannot be loaded or has other numbers of inputs and results.
  LibraryPlan(std::string library, Io io, c10::Device device = c10::kCPU);
  ~LibraryPlan() override;

  variable_list run(variable_list&& inputs) const override;

 private:
  class Runner;
  std::unique_ptr<Runner> take() const;

  const std::string library_;
  const c10::Device device_;
  mutable std::mutex mutex_;  // held for a push or pop only
  mutable std::vector<std::unique_ptr<Runner>> idle_;
};

}  // namespace retrograd
