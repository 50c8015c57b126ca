#include "simdev/runtime.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <utility>

namespace simdev {
namespace {

constexpr size_t kAlignment = 64;
constexpr int kPoison = 0xff;  // NaN in every floating-point type

thread_local int t_device = 0;
thread_local std::array<int64_t, kDevices> t_streams{};

int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

void poison(const Block& block) {
  if (block.size > 0) std::memset(block.data, kPoison, block.size);
}

}  // namespace

void Clock::join(const Clock& other) {
  for (size_t i = 0; i < done.size(); ++i) done[i] = std::max(done[i], other.done[i]);
}

Block::Block(size_t size, uint64_t number, int stream) : size(size), number(number), stream(stream) {
  if (size > 0) data = std::aligned_alloc(kAlignment, (size + kAlignment - 1) / kAlignment * kAlignment);
  poison(*this);
}
Block::~Block() { std::free(data); }

// --- Streams ---

Stream::Stream(int number) : number_(number) {
  std::thread([this] { serve(); }).detach();
}

void Stream::push(std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  queue_.push_back(std::move(work));
  ++pushed_;
  pushed_changed_.notify_one();
}

void Stream::serve() {
  for (;;) {
    std::function<void()> work;
    {
      std::unique_lock lock(mutex_);
      pushed_changed_.wait(lock, [&] { return !queue_.empty(); });
      work = std::move(queue_.front());
      queue_.pop_front();
    }
    work();
    work = nullptr;  // lets go of memory before it counts as done
    const std::lock_guard lock(mutex_);
    ++done_;
    done_changed_.notify_all();
  }
}

void Stream::wait_until_idle() {
  std::unique_lock lock(mutex_);
  done_changed_.wait(lock, [this, until = pushed_] { return done_ >= until; });
}

bool Stream::is_idle() {
  const std::lock_guard lock(mutex_);
  return done_ == pushed_;
}

// --- Runtime ---

Runtime& Runtime::get() {
  static auto* const runtime = std::unique_ptr<Runtime>(new Runtime()).release();  // its threads never end
  return *runtime;
}

Runtime::Runtime() {
  for (int number = 0; number < kStreams; ++number) streams_.push_back(std::make_unique<Stream>(number));
}

Stream& Runtime::stream(int device, int64_t id) {
  const int64_t number = id == 0 ? device * kStreamsPerDevice : id;
  if (number < 0 || number >= kStreams || streams_[static_cast<size_t>(number)]->device() != device) {
    throw std::out_of_range("simdev: no stream " + std::to_string(id) + " on device " + std::to_string(device));
  }
  return *streams_[static_cast<size_t>(number)];
}

Stream& Runtime::next_stream(int device) {
  const uint64_t turn = handed_out_.at(static_cast<size_t>(device))++;
  return stream(device, device * kStreamsPerDevice + 1 + static_cast<int64_t>(turn % (kStreamsPerDevice - 1)));
}

std::vector<Stream*> Runtime::streams_of(int device) {
  std::vector<Stream*> streams;
  for (const auto& stream : streams_) {
    if (stream->device() == device) streams.push_back(stream.get());
  }
  return streams;
}

int Runtime::current_device() { return t_device; }
void Runtime::set_current_device(int device) { t_device = device; }
int64_t Runtime::current_stream_id(int device) { return t_streams.at(static_cast<size_t>(device)); }
void Runtime::set_current_stream_id(int device, int64_t id) { t_streams.at(static_cast<size_t>(device)) = id; }

BlockPtr Runtime::allocate(size_t size) {
  const Stream& owner = current(current_device());
  const std::lock_guard lock(mutex_);
  auto block = std::make_shared<Block>(size, ++blocks_, owner.number());
  // The owner's earlier work may still be using the memory, so an allocation counts as a write after it.
  block->last_write = {owner.number(), owner.clock.done[static_cast<size_t>(owner.number())], "allocation"};
  return block;
}

void Runtime::release(const BlockPtr& block) {
  Stream& owner = *streams_[static_cast<size_t>(block->stream)];
  const std::lock_guard lock(mutex_);
  Clock now = owner.clock;
  now.join(host_);
  for (const auto& [number, use] : block->last_uses) {
    if (number == block->stream || block->recorded[static_cast<size_t>(number)] || use.before(now)) continue;
    report("free", *block, use, "reuse on " + owner.name() + ", as record_stream() was not called,");
  }
  // As the next user of the memory would write to it.
  if (block->recorded.none()) owner.push([block] { poison(*block); });
}

void Runtime::record_stream(Block& block, const Stream& stream) {
  const std::lock_guard lock(mutex_);
  block.recorded.set(static_cast<size_t>(stream.number()));
}

void Runtime::launch(Stream& stream, const std::string& name, std::vector<BlockPtr> reads, std::vector<BlockPtr> writes,
                     std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    Clock& clock = stream.clock;
    clock.join(host_);
    const int number = stream.number();
    const Access access{number, ++clock.done[static_cast<size_t>(number)], name};
    const std::string what = name + " on " + stream.name();
    for (const BlockPtr& block : reads) {
      if (!block->last_write.before(clock)) report("read after write", *block, block->last_write, what);
    }
    for (const BlockPtr& block : writes) {
      if (!block->last_write.before(clock)) report("write after write", *block, block->last_write, what);
      for (const auto& [reader, read] : block->reads) {
        if (!read.before(clock)) report("write after read", *block, read, what);
      }
    }
    for (const BlockPtr& block : reads) block->reads[number] = block->last_uses[number] = access;
    for (const BlockPtr& block : writes) {
      block->reads.clear();
      block->last_write = block->last_uses[number] = access;
    }
    stream.push([this, &stream, name, delay = stream.delay_us.load(), reads = std::move(reads),
                 writes = std::move(writes), work = std::move(work)] {
      const int64_t begin = now_ns();
      if (delay > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay));
      std::string error;
      try {
        work();
      } catch (const std::exception& thrown) {
        error = thrown.what();
      }
      const std::lock_guard lock(mutex_);
      if (error_.empty()) error_ = error;
      seen_.kernels.push_back({name, stream.device(), stream.id(), begin, now_ns()});
    });
  }
  if (synchronous) stream.wait_until_idle();
}

void Runtime::record(const EventPtr& event, Stream& stream) {
  const std::lock_guard lock(mutex_);
  stream.clock.join(host_);
  event->clock = stream.clock;
  event->stream = stream.number();
  stream.push([event, recording = ++event->recorded] {
    const std::lock_guard lock(event->mutex);
    event->reached = std::max(event->reached, recording);
    event->reached_ns = now_ns();
    event->changed.notify_all();
  });
}

void Runtime::wait(const EventPtr& event, Stream& stream, Wait kind) {
  const std::lock_guard lock(mutex_);
  if (kind == Wait::kCounted) {
    seen_.waits.push_back(stream.name() + " for " + streams_[static_cast<size_t>(event->stream)]->name());
    if (drop_ >= 0 && drop_-- == 0) return;
  }
  stream.clock.join(event->clock);
  stream.push([event, recording = event->recorded] {
    std::unique_lock lock(event->mutex);
    event->changed.wait(lock, [&] { return event->reached >= recording; });
  });
}

bool Runtime::is_reached(const EventPtr& event) {
  const std::lock_guard lock(mutex_);
  const std::lock_guard event_lock(event->mutex);
  return event->reached >= event->recorded;
}

void Runtime::joined_by_host(const Clock& clock) {
  const std::lock_guard lock(mutex_);
  ++seen_.host_syncs;
  host_.join(clock);
  if (!error_.empty()) throw std::runtime_error("simdev: a kernel failed: " + std::exchange(error_, {}));
}

void Runtime::synchronize(Stream& stream) {
  Clock clock;
  {
    const std::lock_guard lock(mutex_);
    clock = stream.clock;
  }
  stream.wait_until_idle();
  joined_by_host(clock);
}

void Runtime::synchronize(const EventPtr& event) {
  Clock clock;
  uint64_t recording;
  {
    const std::lock_guard lock(mutex_);
    clock = event->clock;
    recording = event->recorded;
  }
  {
    std::unique_lock lock(event->mutex);
    event->changed.wait(lock, [&] { return event->reached >= recording; });
  }
  joined_by_host(clock);
}

void Runtime::synchronize_all() {
  for (const auto& stream : streams_) synchronize(*stream);
}

void Runtime::drop_wait(int64_t n) {
  const std::lock_guard lock(mutex_);
  drop_ = n;
}

Runtime::Seen Runtime::seen() {
  const std::lock_guard lock(mutex_);
  return seen_;
}

void Runtime::reset() {
  const std::lock_guard lock(mutex_);
  seen_ = {};
  drop_ = -1;
}

void Runtime::report(const char* kind, const Block& block, const Access& earlier, const std::string& what) {
  seen_.reports.push_back(std::string(kind) + ": " + what + " does not wait for " + earlier.kernel + " on " +
                          streams_[static_cast<size_t>(earlier.stream)]->name() + " (block " +
                          std::to_string(block.number) + ")");
}

}  // namespace simdev
