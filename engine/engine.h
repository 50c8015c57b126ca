// The engine that stands in front of the process's autograd engine.
#pragma once

#include <atomic>

#include <torch/csrc/autograd/engine.h>

#include "engine/stats.h"
#include "retrograd/retrograd.h"

namespace retrograd {

// Takes calls of threads that opted in; hands all others, and calls that must not be compiled, to the engine that was
// there before, untouched. There is one, made at the first install() and never destroyed.
class ReentrantEngine final : public torch::autograd::Engine {
 public:
  static ReentrantEngine& get();

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& gradients, bool keep_graph,
                                         bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override;

  // The rest is the previous engine's business.
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& graph_task, c10::intrusive_ptr<torch::autograd::Node> root,
      torch::autograd::InputBuffer&& inputs) override;
  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override;
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override;

  void install();
  void uninstall();
  bool is_installed() const noexcept { return installed_.load(std::memory_order_acquire); }

  // Whether the calling thread's backward calls come here at all, and if not, why. Cheap: asked at every call, of
  // every thread. kCount: they do.
  PreviousReason reason_for_previous() const;

 private:
  ReentrantEngine() = default;

  torch::autograd::variable_list run(const torch::autograd::edge_list& roots,
                                     const torch::autograd::variable_list& gradients, bool keep_graph,
                                     bool create_graph, bool accumulate_grad,
                                     const torch::autograd::edge_list& outputs);

  torch::autograd::Engine& previous() const { return *previous_.load(std::memory_order_acquire); }

  std::atomic<torch::autograd::Engine*> previous_{nullptr};  // set by the first install(), then never null
  std::atomic<bool> installed_{false};
};

// Tells the engine that torch's own compiled autograd was switched on or off: it hangs itself in front of every
// engine, so calls must reach it with their real graph.
void set_stock_compiled_autograd_active(bool active) noexcept;

}  // namespace retrograd
