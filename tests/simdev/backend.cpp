// The simulated accelerator as PyTorch's PrivateUse1 device: allocator, device guard, accelerator hooks.
#include "simdev/backend.h"

#include <memory>

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace simdev {
namespace {

void release_block(void* context) {
  const std::unique_ptr<BlockPtr> block(static_cast<BlockPtr*>(context));
  Runtime::get().release(*block);
}

// The accelerator's allocator must be a DeviceAllocator: Tensor.record_stream() asks for one.
class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    auto block = std::make_unique<BlockPtr>(Runtime::get().allocate(size));
    void* const data = (*block)->data;
    const auto device = static_cast<c10::DeviceIndex>(Runtime::current_device());
    return {data, block.release(), &release_block, c10::Device(kSim, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Runtime::get().record_stream(*block_of(data), Runtime::get().stream(stream.device_index(), stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};

Allocator& instance() {
  static Allocator allocator;
  return allocator;
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kSim; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Device getDevice() const override { return device(Runtime::current_device()); }
  void setDevice(c10::Device to) const override {
    TORCH_CHECK(to.index() < kDevices, "simdev: there is no device ", to);
    uncheckedSetDevice(to);
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    if (to.has_index()) Runtime::set_current_device(to.index());
  }
  c10::Device exchangeDevice(c10::Device to) const override {
    const c10::Device before = getDevice();
    setDevice(to);
    return before;
  }

  c10::Stream getStream(c10::Device of) const override {
    return stream(index(of), Runtime::current_stream_id(index(of)));
  }
  c10::Stream getDefaultStream(c10::Device of) const override { return stream(index(of), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override {
    return stream(index(of), Runtime::get().next_stream(index(of)).id());
  }
  c10::Stream getNewStream(c10::Device of, int) const override { return getStreamFromGlobalPool(of, false); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    const c10::Stream before = getStream(to.device());
    Runtime::set_current_stream_id(to.device_index(), to.id());
    return before;
  }
  bool queryStream(const c10::Stream& which) const override { return get(which).is_idle(); }
  void synchronizeStream(const c10::Stream& which) const override { Runtime::get().synchronize(get(which)); }
  void synchronizeDevice(const c10::DeviceIndex which) const override {
    for (Stream* stream : Runtime::get().streams_of(which)) Runtime::get().synchronize(*stream);
  }

  // An event is made when it is first recorded.
  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = std::make_unique<EventPtr>(std::make_shared<Event>()).release();
    Runtime::get().record(get(*event), get(on));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    const std::unique_ptr<EventPtr> destroyed(static_cast<EventPtr*>(event));
  }
  void block(void* event, const c10::Stream& which) const override {
    if (event != nullptr) Runtime::get().wait(get(event), get(which));
  }
  bool queryEvent(void* event) const override { return event == nullptr || Runtime::get().is_reached(get(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) Runtime::get().synchronize(get(event));
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    constexpr double kNanosecondsPerMillisecond = 1e6;
    return static_cast<double>(get(to)->reached_ns - get(from)->reached_ns) / kNanosecondsPerMillisecond;
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& on) const override {
    instance().recordStream(data, on);
  }

 private:
  static c10::Device device(int index) { return {kSim, static_cast<c10::DeviceIndex>(index)}; }
  static int index(c10::Device of) { return of.has_index() ? of.index() : Runtime::current_device(); }
  static c10::Stream stream(int index, int64_t id) { return c10::Stream(c10::Stream::UNSAFE, device(index), id); }
  static Stream& get(const c10::Stream& which) { return Runtime::get().stream(which.device_index(), which.id()); }
  static const EventPtr& get(void* event) { return *static_cast<EventPtr*>(event); }
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  // Where this is false, the stock engine does not make the caller's stream wait at the end.
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(Runtime::current_device());
  }
  void setCurrentDevice(c10::DeviceIndex to) const override { Guard().setDevice({kSim, to}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex to) const override {
    return Guard().exchangeDevice({kSim, to}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex to) const override { return exchangeDevice(to); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
};

}  // namespace

c10::Allocator& allocator() { return instance(); }

const BlockPtr& block_of(const c10::DataPtr& data) {
  TORCH_CHECK(data.get_deleter() == &release_block, "simdev: memory of another allocator");
  return *static_cast<BlockPtr*>(data.get_context());
}

void register_device() {
  static const Guard guard;
  c10::impl::registerDeviceGuard(kSim, &guard);
  c10::SetAllocator(kSim, &instance());
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

}  // namespace simdev
