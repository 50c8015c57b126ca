#include "engine/parallel.h"

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <queue>
#include <string_view>

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <oneapi/tbb/info.h>
#include <oneapi/tbb/task_arena.h>

#include "cache/perturb.h"
#include "engine/buffers.h"
#include "engine/fork.h"
#include "engine/starved.h"
#include "engine/stats.h"
#include "engine/step_runner.h"

namespace retrograd {
namespace {

class ParallelRun;

// The threads that help. They belong to the process, are started when first needed and sleep in between.
class Helpers {
 public:
  static Helpers& get() {
    // Never destroyed: a call may be in progress while static destructors run.
    static auto* const helpers = std::make_unique<Helpers>().release();
    return *helpers;
  }

  // How many may help one call. None in a forked child, which has only the thread that forked; there get() could wait
  // for ever, as another thread of the parent may have been making the helpers.
  static uint32_t count() { return forked_.load(std::memory_order_relaxed) ? 0 : get().count_; }

  // Has some thread help `run`, soon. The runs wait in a queue of ours, not in oneTBB's tasks: ThreadSanitizer sees
  // what is handed over under our lock, and nothing of what happens inside libtbb.
  void ask_for(std::shared_ptr<ParallelRun> run) {
    {
      const std::lock_guard lock(mutex_);
      cache::perturb("parallel.asking");
      waiting_.push_back(std::move(run));
    }
    arena_.enqueue([] { get().help_next(); });
  }

  static void after_fork_in_child() { forked_.store(true, std::memory_order_relaxed); }

 private:
  void help_next();

  static inline std::atomic<bool> forked_{false};
  const uint32_t count_ = static_cast<uint32_t>(std::max(1, oneapi::tbb::info::default_concurrency() - 1));
  oneapi::tbb::task_arena arena_{static_cast<int>(count_), /*reserved_for_masters=*/0};
  std::mutex mutex_;  // held for a push or pop only
  std::deque<std::shared_ptr<ParallelRun>> waiting_;
};

// Gradients by the edge they go along, until the step that takes them runs. No two threads touch the same edge at a
// time: the producer's step is over, and ParallelRun's mutex was handed on, before the consumer's begins.
class StagedBuffers {
 public:
  StagedBuffers(const GraphShape& shape, const Joints& joints, const ScheduleRun& call)
      : shape_(shape), joints_(joints), call_(call), staged_(shape.edges.size()) {}

  using Placement = HostBuffers::Placement;
  static Placement enter(size_t, Node&) { return {}; }

  variable_list take(uint32_t step) {
    variable_list inputs(shape_.steps[step].num_inputs);
    if (step == 0 && call_.root_gradients != nullptr) inputs[shape_.root_input] = call_.root_gradients->front();
    for (const uint32_t edge : joints_.edges_into(step)) {
      if (!staged_[edge].defined()) continue;
      HostBuffers::accumulate(inputs, shape_.edges[edge].input_nr, std::move(staged_[edge]), *call_.nodes[step]);
    }
    return inputs;
  }

  void add(const EdgeShape& edge, at::Tensor&& gradient, const Placement&, Node&) {
    staged_[static_cast<size_t>(&edge - shape_.edges.data())] = std::move(gradient);
  }

  void clear() { staged_.clear(); }

 private:
  const GraphShape& shape_;
  const Joints& joints_;
  const ScheduleRun& call_;
  std::vector<at::Tensor> staged_;  // by edge
};

// One call. Shared with the tasks given to the arena, which may only begin when the call is long over; they then find
// it closed and touch nothing that the references below refer to.
class ParallelRun : public std::enable_shared_from_this<ParallelRun> {
 public:
  ParallelRun(const Schedule& schedule, const Joints& joints, const ScheduleRun& call)
      : schedule_(schedule),
        shape_(schedule.shape()),
        call_(call),
        max_helpers_(Helpers::count()),
        buffers_(shape_, joints, call),
        steps_(schedule, call, buffers_),
        waiting_for_(shape_.steps.size()),
        started_(shape_.steps.size(), false),
        done_(shape_.steps.size(), false),
        has_side_effects_(shape_.steps.size()),
        starved_(shape_) {
    for (uint32_t k = 0; k < shape_.steps.size(); ++k) {
      waiting_for_[k] = joints.waits_for(k);
      const NodeKind kind = schedule.kind(k);
      has_side_effects_[k] = kind != NodeKind::kPlain || runs_user_code(*call_.nodes[k], kind);
    }
    if (!has_side_effects_[0]) ready_.push(0);
  }
  ParallelRun(const ParallelRun&) = delete;
  ParallelRun& operator=(const ParallelRun&) = delete;

  // On the calling thread.
  void run() {
    std::unique_lock lock(mutex_);
    const Closing closing(*this, lock);
    for (;;) {
      advance();
      if (next_ == shape_.steps.size()) break;
      if (next_ == failed_) std::rethrow_exception(error_);
      if (cache::is_perturbed()) {  // or the caller is done with small graphs before a helper is awake
        lock.unlock();
        cache::perturb("parallel.caller");
        lock.lock();
        advance();
        if (next_ == shape_.steps.size() || next_ == failed_) continue;
      }
      if (has_side_effects_[next_]) {
        run_with_side_effects(next_, lock);
      } else if (const uint32_t k = take(); k != kNoStep) {
        run_plain(k, lock);
        steps_.restore_if_changed();
      } else {
        caller_waits_ = true;
        changed_.wait(lock);
        caller_waits_ = false;
      }
    }
    starved_.check_end();
  }

 private:
  // Ends the call for its helpers, whatever way it ends, and waits for those that are in the middle of a step.
  class Closing {
   public:
    Closing(ParallelRun& run, std::unique_lock<std::mutex>& lock) : run_(run), lock_(lock) {}
    ~Closing() {
      if (!lock_.owns_lock()) lock_.lock();
      run_.open_ = false;
      run_.changed_.wait(lock_, [this] { return run_.helpers_ == 0; });
      lock_.unlock();
      run_.call_.frame.current_node = nullptr;
      run_.buffers_.clear();  // here and now: the object may live on in a task that has yet to begin
      run_.error_ = nullptr;
    }
    Closing(const Closing&) = delete;
    Closing& operator=(const Closing&) = delete;

   private:
    ParallelRun& run_;
    std::unique_lock<std::mutex>& lock_;
  };

  // Past the steps that are over: the next one whose turn it would be on the stock engine.
  void advance() {
    for (; next_ < shape_.steps.size(); ++next_) {
      if (starved_.contains(next_)) {
        starved_.pass_on(next_);
      } else if (!done_[next_]) {
        return;
      }
    }
  }

  // The first step that may run ahead of its turn; kNoStep if there is none.
  uint32_t take() {
    while (!ready_.empty()) {
      const uint32_t k = ready_.top();
      if (k > failed_) return kNoStep;
      ready_.pop();
      if (has_side_effects_[k]) continue;  // by now; it comes when its turn does
      started_[k] = true;
      return k;
    }
    return kNoStep;
  }

  void run_with_side_effects(uint32_t k, std::unique_lock<std::mutex>& lock) {
    lock.unlock();
    size_t sent = 0;
    const bool is_user_code = runs_user_code(*call_.nodes[k], schedule_.kind(k));
    steps_.run(k, [&](size_t count) { sent = count; });
    // Hooks that it put on nodes which have not started. Helpers never look at hooks, so nobody reads what user code,
    // which runs on this thread only, may be writing.
    std::vector<uint32_t> hooked;
    if (is_user_code) {
      for (uint32_t later = k + 1; later < shape_.steps.size(); ++later) {
        if (runs_user_code(*call_.nodes[later], NodeKind::kPlain)) hooked.push_back(later);
      }
    }
    lock.lock();
    for (const uint32_t later : hooked) {
      if (!started_[later]) has_side_effects_[later] = true;
    }
    starved_.cut(k, sent);
    finish(k, shape_.edges_of(shape_.steps[k]).first(sent), /*spare=*/0);
  }

  void run_plain(uint32_t k, std::unique_lock<std::mutex>& lock) {
    const auto edges = shape_.edges_of(shape_.steps[k]);
    lock.unlock();
    try {
      Node& fn = *call_.nodes[k];
      RECORD_FUNCTION(c10::str("autograd::engine::evaluate_function: ", fn.name()), c10::ArrayRef<const c10::IValue>());
      variable_list inputs = buffers_.take(k);
      if (!call_.keep_graph) fn.will_release_variables();
      variable_list outputs = fn(std::move(inputs));
      validate(fn, outputs);
      if (!call_.keep_graph) fn.release_variables();
      for (size_t i = 0; i < edges.size(); ++i) {
        if (edges[i].step != kNoStep && outputs[i].defined()) buffers_.add(edges[i], std::move(outputs[i]), {}, fn);
      }
    } catch (...) {
      lock.lock();
      if (k < failed_) {
        failed_ = k;
        error_ = std::current_exception();
      }
      wake_caller(k);
      return;
    }
    cache::perturb("parallel.ran");
    lock.lock();
    finish(k, edges, /*spare=*/1);
  }

  // `spare`: how many of the steps that may run ahead this thread is going to take.
  void finish(uint32_t k, std::span<const EdgeShape> followed, size_t spare) {
    done_[k] = true;
    for (const EdgeShape& edge : followed) {
      if (edge.step == kNoStep || --waiting_for_[edge.step] != 0) continue;
      if (!has_side_effects_[edge.step]) ready_.push(edge.step);
    }
    wake_caller(k);
    while (helpers_ + invited_ < max_helpers_ && invited_ + spare < ready_.size()) invite();
  }

  void wake_caller(uint32_t k) {
    if (caller_waits_ && (k == next_ || !ready_.empty())) changed_.notify_all();
  }

  void invite() {
    ++invited_;
    Helpers::get().ask_for(shared_from_this());
  }

  friend class Helpers;
  // On a thread of the arena.
  void help() {
    std::unique_lock lock(mutex_);
    --invited_;
    if (!open_) return;
    ++helpers_;
    lock.unlock();
    {
      at::init_num_threads();  // what torch.set_num_threads() said, which OpenMP and MKL keep per thread
      const at::ThreadLocalStateGuard state(call_.task.thread_locals_);
      const c10::WarningUtils::WarningHandlerGuard warnings(&call_.task.warning_handler_);
      Baseline baseline(call_.task);
      lock.lock();
      for (uint32_t k = open_ ? take() : kNoStep; k != kNoStep; k = open_ ? take() : kNoStep) {
        run_plain(k, lock);
        thread_stats().helped_steps.add(1);
        baseline.restore_if_changed();
      }
      lock.unlock();
    }
    lock.lock();
    --helpers_;
    if (!open_ && helpers_ == 0) changed_.notify_all();
  }

  const Schedule& schedule_;
  const GraphShape& shape_;
  const ScheduleRun& call_;
  const uint32_t max_helpers_;
  StagedBuffers buffers_;
  StepRunner<StagedBuffers> steps_;  // the calling thread's

  std::mutex mutex_;  // everything below; not held while a step runs
  std::condition_variable changed_;
  std::vector<uint32_t> waiting_for_;  // by step: edges that have yet to be followed
  std::vector<bool> started_, done_;   // by step; started only for those that may run ahead
  std::vector<bool> has_side_effects_;
  std::priority_queue<uint32_t, std::vector<uint32_t>, std::greater<>> ready_;  // may run ahead; the earliest first
  StarvedSteps starved_;
  uint32_t next_ = 0;          // all steps before it are over
  uint32_t failed_ = kNoStep;  // the earliest step that threw
  std::exception_ptr error_;
  uint32_t helpers_ = 0, invited_ = 0;  // at work; asked for and not there yet
  bool caller_waits_ = false;
  bool open_ = true;
};

void Helpers::help_next() {
  std::shared_ptr<ParallelRun> run;
  {
    const std::lock_guard lock(mutex_);
    run = std::move(waiting_.front());
    waiting_.pop_front();
  }
  run->help();
}

}  // namespace

Joints::Joints(const GraphShape& shape) : first_(shape.steps.size() + 1, 0) {
  for (const EdgeShape& edge : shape.edges) {
    if (edge.step != kNoStep) ++first_[edge.step + 1];
  }
  for (size_t k = 0; k < shape.steps.size(); ++k) first_[k + 1] += first_[k];
  edges_.resize(first_.back());
  std::vector<uint32_t> filled(first_.begin(), first_.end() - 1);
  for (const StepShape& step : shape.steps) {
    for (uint32_t i = step.first_edge; i < step.first_edge + step.num_edges; ++i) {
      if (const uint32_t target = shape.edges[i].step; target != kNoStep) edges_[filled[target]++] = i;
    }
  }
}

bool Pace::choose_parallel() noexcept {
  const auto load = [](const auto& value) { return value.load(std::memory_order_relaxed); };
  const auto& [serial, parallel] = sides_;
  if (load(serial.runs) < kTrials) return false;
  if (load(serial.time) < kWorthwhile) return false;
  if (load(parallel.runs) < kTrials) return true;
  const uint32_t calls = load(calls_) + 1;
  calls_.store(calls, std::memory_order_relaxed);
  return (load(parallel.time) < load(serial.time)) != (calls % kLookEvery == 0);
}

void Pace::note(bool parallel, Nanoseconds time) noexcept {
  Side& side = sides_[parallel ? 1 : 0];
  const int64_t before = side.time.load(std::memory_order_relaxed);
  const uint32_t runs = side.runs.load(std::memory_order_relaxed);
  // The first run warms up caches, and threads.
  side.time.store(runs < 2 ? time.count() : before + (time.count() - before) / 4, std::memory_order_relaxed);
  side.runs.store(std::min(runs + 1, kTrials), std::memory_order_relaxed);
}

bool always_parallel() {
  static const bool always = [] {
    const char* const text = std::getenv("RETROGRAD_PARALLEL");  // NOLINT(concurrency-mt-unsafe): read once
    return text != nullptr && std::string_view(text) == "always";
  }();
  return always;
}

void run_parallel(const Schedule& schedule, const Joints& joints, const ScheduleRun& call) {
  std::make_shared<ParallelRun>(schedule, joints, call)->run();
}

void fork_part::helpers_after_in_child() { Helpers::after_fork_in_child(); }

}  // namespace retrograd
