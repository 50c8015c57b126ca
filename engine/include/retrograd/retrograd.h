// The C++ interface of retrograd: a backward engine for PyTorch that finds the plan of a backward graph in a
// concurrent cache and runs it, from any number of threads and at any reentrant depth.
//
// Every function here may be called from any thread. Nothing here touches Python; a program without Python in
// the process may use all of it. Functions throw nothing but std::bad_alloc unless they say so.
//
//   retrograd::install();
//   {
//     retrograd::Enable on;          // this thread, until the end of the block
//     loss.backward();
//   }
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace retrograd {

// What runs a backward graph.
enum class Backend : uint8_t {
  // The graph's own nodes in the stock engine's order, from a precomputed plan. Any node type, bit-identical.
  kSchedule = 0,
  // Groups of nodes fused and compiled by AOTInductor; what cannot be compiled, or is not yet, runs as on the schedule.
  kInductor = 1,
};

// When a backend that compiles does so.
enum class Mode : uint8_t {
  kBackground = 0,  // a graph runs on the schedule until it is hot and its plans are there
  kBlocking = 1,    // at first sight, while the call waits
};

// How a thread wants its backward calls to run. A value type; setters return *this so that they chain.
class Options {
 public:
  constexpr Options& backend(Backend value) noexcept {
    backend_ = value;
    return *this;
  }
  constexpr Backend backend() const noexcept { return backend_; }

  constexpr Options& mode(Mode value) noexcept {
    mode_ = value;
    return *this;
  }
  constexpr Mode mode() const noexcept { return mode_; }

  // Whether independent branches of a graph may run at the same time, on this thread and on the process's oneTBB
  // threads. For graphs that run on the schedule, on the CPU, where it turns out to be faster. Hooks and custom
  // functions run on the calling thread, in the stock engine's order, and results are the same bit for bit.
  constexpr Options& parallel(bool value) noexcept {
    parallel_ = value;
    return *this;
  }
  constexpr bool parallel() const noexcept { return parallel_; }

  // A compiler function in Python, by the number that the Python package gave it; 0: none, backend() counts. With
  // `dynamic`, every size that it sees is symbolic from the start; else only those that were seen to change.
  constexpr Options& compiler(uint32_t number, bool dynamic) noexcept {
    compiler_ = number;
    dynamic_ = dynamic;
    return *this;
  }
  constexpr uint32_t compiler() const noexcept { return compiler_; }
  constexpr bool dynamic() const noexcept { return dynamic_; }

 private:
  uint32_t compiler_ = 0;
  Backend backend_ = Backend::kSchedule;
  Mode mode_ = Mode::kBackground;
  bool dynamic_ = false;
  bool parallel_ = false;
};

// Puts retrograd's engine in front of the process's autograd engine. Idempotent. Until a thread opts in with
// Enable, or set_default() says otherwise, every call still runs on the engine that was there before.
// Safe while other threads are inside backward.
void install();

// Puts the previous engine back. Idempotent, and safe while other threads are inside backward: a call that has
// begun finishes on the engine it began on.
void uninstall();

bool is_installed() noexcept;

namespace detail {
// A thread's or the process's choice. Trivially copyable and small.
struct Setting {
  enum class Mode : uint8_t { kInherit, kDisabled, kEnabled };
  Mode mode = Mode::kInherit;
  Options options;
};
}  // namespace detail

// Makes this thread's backward calls run on retrograd until the object dies. Nests; must be destroyed on the
// thread that made it, innermost first. The choice follows work that autograd moves to another thread.
// The constructor throws std::logic_error when retrograd is not installed.
class Enable {
 public:
  explicit Enable(Options options = {});
  ~Enable();
  Enable(const Enable&) = delete;
  Enable& operator=(const Enable&) = delete;

 private:
  detail::Setting outer_;
};

// Makes this thread's backward calls run on the previous engine until the object dies. Nests like Enable.
class Disable {
 public:
  Disable();
  ~Disable();
  Disable(const Disable&) = delete;
  Disable& operator=(const Disable&) = delete;

 private:
  detail::Setting outer_;
};

// What threads that set nothing do: run with `options`, or, for nullopt (the state at start), on the previous
// engine. Takes effect at each thread's next backward call. Has no effect while retrograd is not installed.
void set_default(std::optional<Options> options) noexcept;

// Why a call ran on the previous engine.
enum class PreviousReason : uint8_t {
  kNotEnabled,        // the thread did not opt in
  kAnomalyMode,       // torch.autograd.detect_anomaly
  kDispatchMode,      // an active TorchDispatchMode
  kFunctorch,         // inside torch.func.grad, vmap, ..., or batched gradients
  kCompiledAutograd,  // torch's own compiled autograd is on
  kIrregularCall,     // no roots, a null root, an undefined gradient: the previous engine reports it
  kCount
};
// The name of a reason as stats() in Python gives it, such as "not_enabled".
std::string_view name(PreviousReason reason) noexcept;

// Why a call of a thread that asked for compiled plans or for a compiler function ran on the schedule.
enum class ScheduleReason : uint8_t {
  kCreateGraph,        // create_graph=True: a captured graph cannot be differentiated again
  kCaptureInProgress,  // another thread is capturing or compiling this very graph
  kGraphInUse,         // a retained graph, which other threads may be using, must not be captured now
  kInsideCapture,      // called by code that runs while this call chain captures
  kNoCompiler,         // the compiler function is gone: its block, or the default that named it, ended meanwhile; or
                       // nothing in this process can compile
  kNotCapturable,      // torch's captures cannot express it: a leaf whose grad_dtype is not its own dtype
  kWarmingUp,          // in background mode: not called often enough yet
  kCompiling,          // in background mode: its plans are not ready yet
  kNotFusable,         // no two nodes of it can be compiled together
  kTooManyKeys,        // its shapes or constants keep changing
  kStreams,            // it runs on accelerator streams
  kCount
};
// The name of a reason as stats() in Python gives it, such as "create_graph".
std::string_view name(ScheduleReason reason) noexcept;

// Totals over all threads since the start or the last reset_stats(). Calls in flight are counted when they start;
// times when they end.
struct Stats {
  uint64_t schedule_calls = 0;
  uint64_t callable_calls = 0;    // ran what a compiler function made
  uint64_t fused_calls = 0;       // ran at least one compiled group
  uint64_t fused_groups = 0;      // groups that ran compiled
  uint64_t unfused_groups = 0;    // groups that ran node by node, in calls that looked for compiled ones
  uint64_t recordings = 0;        // groups recorded from a live graph
  uint64_t plans = 0;             // plans compiled
  uint64_t plans_from_store = 0;  // plans found in the plan store
  std::array<uint64_t, static_cast<size_t>(PreviousReason::kCount)> previous_calls{};
  std::array<uint64_t, static_cast<size_t>(ScheduleReason::kCount)> schedule_reasons{};  // part of schedule_calls
  uint64_t parallel_calls = 0;  // part of schedule_calls: ran independent branches at the same time
  uint64_t helped_steps = 0;    // nodes of such calls that ran on another thread than the caller's
  uint64_t captures = 0;        // graphs captured for compiler functions, failed attempts included
  uint64_t hits = 0;            // calls that found their plan
  uint64_t misses = 0;          // calls that had to make it
  uint64_t nested_calls = 0;    // calls made from inside another retrograd call
  uint64_t max_depth = 0;       // 1: nothing nested; 0: no call yet
  double walk_seconds = 0;      // finding the order and structure of graphs
  double lookup_seconds = 0;    // finding or making plans
  double run_seconds = 0;       // running plans, nested calls included
  uint64_t cache_leaves = 0;    // state of the cache now, not since the reset
  uint64_t cache_nodes = 0;
  uint64_t cache_evictions = 0;

  uint64_t previous_total() const noexcept {
    uint64_t total = 0;
    for (uint64_t n : previous_calls) total += n;
    return total;
  }
};
Stats stats();
void reset_stats() noexcept;

// Forgets all plans. Safe at any moment: calls in flight keep what they use.
void cache_clear();

}  // namespace retrograd
