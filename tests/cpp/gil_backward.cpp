// For tests/python/alone_gil.py: backward calls on a thread that Python knows nothing of, while the caller waits for
// it. Called through ctypes.PyDLL the caller holds the GIL all the time, called through ctypes.CDLL it does not.
#include <chrono>
#include <exception>
#include <future>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/autograd/autograd.h>
#include <torch/types.h>

#include "retrograd/retrograd.h"

namespace {

using at::Tensor;

enum class Engine : int { kStock = 0, kSchedule = 1, kFused = 2 };

std::future<void> running;
std::string error;

struct Choice {
  explicit Choice(Engine engine) {
    using namespace retrograd;
    if (engine == Engine::kStock) {
      off.emplace();
    } else if (engine == Engine::kSchedule) {
      on.emplace(Options().backend(Backend::kSchedule));
    } else {
      on.emplace(Options().backend(Backend::kInductor).mode(Mode::kBlocking));
    }
  }

  std::optional<retrograd::Enable> on;
  std::optional<retrograd::Disable> off;
};

// An MLP of two layers. Its tensors never met Python.
struct Mlp {
  std::vector<Tensor> parameters;

  Mlp() {
    const auto options = at::TensorOptions().requires_grad(true);
    for (int i = 0; i < 2; ++i) {
      parameters.push_back(torch::ones({8, 8}, options));
      parameters.push_back(torch::linspace(-1, 1, 8, options));
    }
  }
  Tensor loss(const Tensor& x) const {
    Tensor y = x;
    for (size_t i = 0; i < parameters.size(); i += 2) y = at::addmm(parameters[i + 1], y, parameters[i]).tanh();
    return y.sum();
  }
};

void train_and_compare(Engine engine, int calls) {
  const Mlp mlp, twin;
  const Tensor x = torch::linspace(-1, 1, 40).reshape({5, 8});
  for (int i = 0; i < calls; ++i) {
    {
      const Choice choice(engine);
      mlp.loss(x).backward();
    }
    const Choice choice(Engine::kStock);
    twin.loss(x).backward();
  }
  for (size_t i = 0; i < mlp.parameters.size(); ++i) {
    TORCH_CHECK(at::allclose(mlp.parameters[i].grad(), twin.parameters[i].grad()), "gradient ", i, " is wrong");
  }
}

// 1: ended well, -1: with an error (last_error()), 0: not yet.
int outcome(double seconds) {
  if (running.wait_for(std::chrono::duration<double>(seconds)) != std::future_status::ready) return 0;
  try {
    running.get();
    return 1;
  } catch (const std::exception& e) {
    error = e.what();
    return -1;
  }
}

}  // namespace

extern "C" {

const char* last_error() { return error.c_str(); }

// `calls` training steps of a model that is made in the new thread.
int backward_of_own_graph(int engine, int calls, double seconds) {
  running = std::async(std::launch::async, train_and_compare, static_cast<Engine>(engine), calls);
  return outcome(seconds);
}

// One call on the graph that made a tensor: `impl` is Tensor._cdata.
int backward_of(void* impl, int engine, double seconds) {
  const Tensor loss(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(static_cast<c10::TensorImpl*>(impl)));
  running = std::async(std::launch::async, [loss, engine] {
    const Choice choice(static_cast<Engine>(engine));
    loss.backward();
  });
  return outcome(seconds);
}

// For a thread that had not ended in time.
int wait_again(double seconds) { return outcome(seconds); }

}  // extern "C"
