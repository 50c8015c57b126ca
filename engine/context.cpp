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

// A setting in one word, so that the process default needs no lock and a carried one no object.
uint64_t pack(Setting setting) noexcept {
  return (uint64_t{setting.options.compiler()} << 32U) | (static_cast<uint64_t>(setting.options.mode()) << 24U) |
         (static_cast<uint64_t>(setting.options.dynamic() ? 1 : 0) << 16U) |
         (static_cast<uint64_t>(setting.options.parallel() ? 1 : 0) << 17U) |
         (static_cast<uint64_t>(setting.options.backend()) << 8U) | static_cast<uint64_t>(setting.mode);
}
Setting unpack(uint64_t word) noexcept {
  Setting setting{static_cast<Setting::Mode>(word & 0xFFU), Options()};
  setting.options.backend(static_cast<Backend>((word >> 8U) & 0xFFU))
      .mode(static_cast<Mode>((word >> 24U) & 0xFFU))
      .parallel(((word >> 17U) & 1U) != 0)
      .compiler(static_cast<uint32_t>(word >> 32U), ((word >> 16U) & 1U) != 0);
  return setting;
}

std::atomic<uint64_t> process_default{static_cast<uint64_t>(Setting::Mode::kDisabled)};

using at::impl::ThreadLocalPythonObjects;

// The name under which a carried setting is found. The object found is none: the pointer itself is the setting, owns
// nothing and is never followed, so that no Python is needed and none is left to let go of when a thread ends.
// Never destroyed: threads may run backward while static destructors run.
const std::string& carried_name() {
  static const auto* const name = std::make_unique<const std::string>("retrograd: setting").release();
  return *name;
}

std::shared_ptr<c10::SafePyObject> as_carried(Setting setting) {
  const auto word = static_cast<uintptr_t>(pack(setting));
  return {std::shared_ptr<void>(), reinterpret_cast<c10::SafePyObject*>(word)};  // NOLINT(performance-no-int-to-ptr)
}

std::optional<Setting> carried_setting() {
  if (torch::autograd::get_current_graph_task_id() < 0) return std::nullopt;  // not working for a backward call
  if (!ThreadLocalPythonObjects::contains(carried_name())) return std::nullopt;
  return unpack(reinterpret_cast<uintptr_t>(ThreadLocalPythonObjects::get(carried_name()).get()));
}

}  // namespace

ThreadContext& thread_context() noexcept {
  static constinit thread_local ThreadContext context;
  return context;
}

Setting ThreadContext::in_force() const {
  if (setting.mode != Setting::Mode::kInherit) return setting;
  if (const auto carried = carried_setting()) return *carried;
  return unpack(process_default.load(std::memory_order_relaxed));
}

SettingCarrier::SettingCarrier() {
  const Setting own = thread_context().setting;
  if (own.mode == Setting::Mode::kInherit) return;
  outer_ = ThreadLocalPythonObjects::get_state();
  ThreadLocalPythonObjects::set(carried_name(), as_carried(own));
}

SettingCarrier::~SettingCarrier() {
  if (outer_) ThreadLocalPythonObjects::set_state(std::move(*outer_));
}

c10::intrusive_ptr<torch::autograd::Node> current_node() {
  auto node = torch::autograd::get_current_node();
  // libtorch's answer is a region exactly while one of our calls is the innermost one. If a call that went to the
  // previous engine is nested in ours, libtorch's answer is that call's own node and is right as it stands.
  if (!is_region(node.get())) return node;
  const CallFrame* frame = thread_context().frame;
  if (frame == nullptr || frame->current_node == nullptr) return {};  // a compiled function runs, no single node
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
      pack(options ? Setting{Setting::Mode::kEnabled, *options} : Setting{Setting::Mode::kDisabled, Options{}}),
      std::memory_order_relaxed);
}

}  // namespace retrograd
