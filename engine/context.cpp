#include "engine/context.h"

#include <atomic>
#include <stdexcept>

#include "engine/region.h"

namespace retrograd {
namespace {

using detail::Setting;

std::atomic<Setting> process_default{Setting{Setting::Mode::kDisabled, Options{}}};
static_assert(std::atomic<Setting>::is_always_lock_free);

}  // namespace

ThreadContext& thread_context() noexcept {
  static constinit thread_local ThreadContext context;
  return context;
}

Setting ThreadContext::in_force() const noexcept {
  return setting.mode == Setting::Mode::kInherit ? process_default.load(std::memory_order_relaxed) : setting;
}

c10::intrusive_ptr<torch::autograd::Node> current_node() {
  auto node = torch::autograd::get_current_node();
  const CallFrame* frame = thread_context().frame;
  // libtorch's answer is a region exactly while one of our calls is the innermost one. If a call that went to the
  // previous engine is nested in ours, libtorch's answer is that call's own node and is right as it stands.
  if (frame == nullptr || frame->current_node == nullptr || !is_region(node.get())) return node;
  return frame->current_node->getptr();
}

Enable::Enable(Options options) : outer_(thread_context().setting) {
  if (!is_installed()) {
    throw std::logic_error("retrograd is not installed; call retrograd::install() first.");
  }
  thread_context().setting = Setting{Setting::Mode::kEnabled, options};
}
Enable::~Enable() { thread_context().setting = outer_; }

Disable::Disable() : outer_(thread_context().setting) {
  thread_context().setting = Setting{Setting::Mode::kDisabled, Options{}};
}
Disable::~Disable() { thread_context().setting = outer_; }

void set_default(std::optional<Options> options) noexcept {
  process_default.store(options ? Setting{Setting::Mode::kEnabled, *options}
                                : Setting{Setting::Mode::kDisabled, Options{}},
                        std::memory_order_relaxed);
}

}  // namespace retrograd
