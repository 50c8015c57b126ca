// A simulated accelerator: devices, streams, events and memory, with a checker for missing synchronization. It knows
// nothing of tensors; backend.cpp and kernels.cpp make a PyTorch device of it.
//
// A stream is a queue that a thread of its own serves, so kernels run late and beside each other as on a real device.
// The checker does not depend on when they run. It works when they are enqueued: every stream has a vector clock, which
// says how much of each stream's work is certain to be done before whatever comes next on this one. Waiting for an
// event joins the clock that the event recorded; a host synchronization joins the stream's clock into the host's, which
// all later work is behind. An access to memory that is not behind the accesses it conflicts with is reported, whatever
// values the kernels happened to read.
//
// Memory is watched by allocation: two streams that write to different parts of one storage are reported too.
//
// All of it may be called from any thread. There is one clock for all host threads, so a synchronization that one
// thread made counts for the others: nothing is reported in error, but what is missing between threads is not found.
#pragma once

#include <array>
#include <atomic>
#include <bitset>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace simdev {

constexpr int kDevices = 3;
constexpr int kStreamsPerDevice = 9;  // the default stream, 0, and a pool that is handed out in turn
constexpr int kStreams = kDevices * kStreamsPerDevice;

// How many pieces of work of each stream, in the order of Stream::number.
struct Clock {
  std::array<uint64_t, kStreams> done{};

  void join(const Clock& other);
};

// One use of a block by a kernel.
struct Access {
  int stream = 0;     // Stream::number
  uint64_t time = 0;  // the kernel's place on its stream; 0 is before all kernels
  std::string kernel;

  bool before(const Clock& clock) const { return clock.done[static_cast<size_t>(stream)] >= time; }
};

// One allocation. Kernels in flight share it, so a premature free is reported and shows in the values, but is safe.
struct Block {
  Block(size_t size, uint64_t number, int stream);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  void* data = nullptr;
  const size_t size;
  const uint64_t number;
  const int stream;  // current when it was allocated: the stream whose later allocations may reuse the memory

  // Guarded by the runtime's mutex.
  Access last_write;
  std::map<int, Access> reads;      // since then, by stream
  std::map<int, Access> last_uses;  // by stream
  std::bitset<kStreams> recorded;   // record_stream(): the memory is not reused before these streams are done with it
};
using BlockPtr = std::shared_ptr<Block>;

class Stream {
 public:
  explicit Stream(int number);

  int number() const { return number_; }
  int device() const { return number_ / kStreamsPerDevice; }
  // 0 for a device's default stream; the others' are different on all devices, as libtorch compares ids alone where it
  // warns of streams that do not match.
  int id() const { return number_ % kStreamsPerDevice == 0 ? 0 : number_; }
  std::string name() const { return "d" + std::to_string(device()) + "s" + std::to_string(id()); }

  void push(std::function<void()> work);
  void wait_until_idle();  // for what was pushed before
  bool is_idle();

  std::atomic<int64_t> delay_us{0};  // before each kernel
  Clock clock;                       // guarded by the runtime's mutex

 private:
  [[noreturn]] void serve();

  const int number_;
  std::mutex mutex_;
  std::condition_variable pushed_changed_, done_changed_;
  std::deque<std::function<void()>> queue_;
  uint64_t pushed_ = 0;
  uint64_t done_ = 0;
};

// Waits name a recording by its number, so an event may be recorded again while streams still wait for it.
struct Event {
  Clock clock;            // of the last recording; guarded by the runtime's mutex
  int stream = 0;         // that made it; likewise
  uint64_t recorded = 0;  // likewise

  std::mutex mutex;
  std::condition_variable changed;
  uint64_t reached = 0;    // guarded by `mutex`, as what follows
  int64_t reached_ns = 0;  // on the steady clock
};
using EventPtr = std::shared_ptr<Event>;

struct Kernel {
  std::string name;
  int device;
  int stream;  // Stream::id
  int64_t begin_ns, end_ns;
};

class Runtime {
 public:
  static Runtime& get();

  Stream& stream(int device, int64_t id);  // throws std::out_of_range
  Stream& next_stream(int device);         // of the pool, in turn
  std::vector<Stream*> streams_of(int device);
  Stream& current(int device) { return stream(device, current_stream_id(device)); }

  // The calling thread's.
  static int current_device();
  static void set_current_device(int device);
  static int64_t current_stream_id(int device);
  static void set_current_stream_id(int device, int64_t id);

  // Memory belongs to the current stream of the current device.
  BlockPtr allocate(size_t size);
  // The framework let go of a block; kernels may still hold it.
  void release(const BlockPtr& block);
  void record_stream(Block& block, const Stream& stream);

  void launch(Stream& stream, const std::string& name, std::vector<BlockPtr> reads, std::vector<BlockPtr> writes,
              std::function<void()> work);
  void record(const EventPtr& event, Stream& stream);

  // Makes `stream` wait for the event. A wait of a kernel's own, as a copy between devices has it, is not counted.
  enum class Wait { kCounted, kOfKernel };
  void wait(const EventPtr& event, Stream& stream, Wait kind = Wait::kCounted);

  bool is_reached(const EventPtr& event);

  // The host waits. Throws what a kernel threw.
  void synchronize(Stream& stream);
  void synchronize(const EventPtr& event);
  void synchronize_all();

  // Every kernel is done when launch() returns; the checker works as ever. Missing synchronization then changes no
  // value, which makes any engine an oracle.
  std::atomic<bool> synchronous{false};

  // The n-th counted wait from now on (0: the next) does not happen; none for a negative number.
  void drop_wait(int64_t n);

  // What was seen since the last reset().
  struct Seen {
    std::vector<std::string> reports;
    std::vector<std::string> waits;  // counted ones, dropped or not: "d0s1 for d0s2"
    std::vector<Kernel> kernels;     // that are finished
    uint64_t host_syncs = 0;
  };
  Seen seen();
  void reset();

 private:
  Runtime();
  void report(const char* kind, const Block& block, const Access& earlier, const std::string& what);
  void joined_by_host(const Clock& clock);

  std::vector<std::unique_ptr<Stream>> streams_;  // by number
  std::array<std::atomic<uint64_t>, kDevices> handed_out_{};

  std::mutex mutex_;  // orders all that is enqueued, and guards the checker's state: what follows, clocks, blocks
  Clock host_;
  Seen seen_;
  int64_t drop_ = -1;
  uint64_t blocks_ = 0;
  std::string error_;  // of the first kernel that threw
};

}  // namespace simdev
