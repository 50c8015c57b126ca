#include "engine/context.h"

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>

#include <torch/csrc/autograd/graph_task.h>

#include "engine/region.h"

namespace retrograd {
namespace {

using detail::Setting;

std::atomic<Setting> process_default{Setting{Setting::Mode::kDisabled, Options{}}};
static_assert(std::atomic<Setting>::is_always_lock_free);

using at::impl::ThreadLocalPythonObjects;

// Names under which a carried setting is found. Only the names are used; the objects are null, so that no Python is
// needed, and none is left to let go of when a thread ends.
// Never destroyed: threads may run backward while static destructors run.
const std::string& carried_name(bool enabled) {
  struct Names {
    std::string disabled = "retrograd: disabled", schedule = "retrograd: schedule";
  };
  static const auto* const names = std::make_unique<const Names>().release();
  return enabled ? names->schedule : names->disabled;
}

std::optional<Setting> carried_setting() {
  if (torch::autograd::get_current_graph_task_id() < 0) return std::nullopt;  // not working for a backward call
  if (ThreadLocalPythonObjects::contains(carried_name(false))) return Setting{Setting::Mode::kDisabled, Options{}};
  if (ThreadLocalPythonObjects::contains(carried_name(true))) return Setting{Setting::Mode::kEnabled, Options{}};
  return std::nullopt;
}

}  // namespace

ThreadContext& thread_context() noexcept {
  static constinit thread_local ThreadContext context;
  return context;
}

Setting ThreadContext::in_force() const {
  if (setting.mode != Setting::Mode::kInherit) return setting;
  if (const auto carried = carried_setting()) return *carried;
  return process_default.load(std::memory_order_relaxed);
}

SettingCarrier::SettingCarrier() {
  const Setting own = thread_context().setting;
  if (own.mode == Setting::Mode::kInherit) return;
  const bool enabled = own.mode == Setting::Mode::kEnabled;
  outer_ = ThreadLocalPythonObjects::get_state();
  ThreadLocalPythonObjects::erase(carried_name(!enabled));
  ThreadLocalPythonObjects::set(carried_name(enabled), nullptr);
}

SettingCarrier::~SettingCarrier() {
  if (outer_) ThreadLocalPythonObjects::set_state(std::move(*outer_));
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
  process_default.store(
      options ? Setting{Setting::Mode::kEnabled, *options} : Setting{Setting::Mode::kDisabled, Options{}},
      std::memory_order_relaxed);
}

}  // namespace retrograd
