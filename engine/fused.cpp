#include "engine/fused.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "cache/perturb.h"
#include "engine/buffers.h"
#include "engine/fused_graph.h"
#include "engine/gated_hooks.h"
#include "engine/group_site.h"
#include "engine/node_kind.h"
#include "engine/partition.h"
#include "engine/starved.h"
#include "engine/stats.h"
#include "engine/step_runner.h"
#include "engine/stored_plans.h"

namespace retrograd {
namespace {

// A group whose constants keep changing is not compiled over and over: past this many keys it runs by its nodes.
constexpr size_t kMaxKeys = 8;

std::atomic<GroupCompiler*> compiler_in_place{nullptr};

// In background mode a graph is compiled from this many calls on.
uint32_t hot_after() {
  static const uint32_t calls = [] {
    const char* const text = std::getenv("RETROGRAD_HOT_AFTER");  // NOLINT(concurrency-mt-unsafe): read once
    const int number = text != nullptr ? std::atoi(text) : 0;
    return number > 0 ? static_cast<uint32_t>(number) : 3U;
  }();
  return calls;
}

// Letting go of the last but one reference to a tensor that has a Python wrapper takes the GIL. The wrapped inputs of a
// call's groups are therefore kept until its end and go together; large ones go when their group is done with them, as
// memory counts for more.
class WrappedTensors {
 public:
  WrappedTensors() = default;
  ~WrappedTensors() {
    // Two references: the wrapper's and this one.
    const bool last = std::ranges::any_of(kept_, [](const at::Tensor& tensor) { return tensor.use_count() <= 2; });
    const PythonGateLock lock(last);
    kept_.clear();
  }
  WrappedTensors(const WrappedTensors&) = delete;
  WrappedTensors& operator=(const WrappedTensors&) = delete;

  void keep_if_wrapped(const at::Tensor& tensor) {
    c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    if (impl.pyobj_slot()->load_pyobj() == nullptr || tensor.nbytes() > room_) return;
    if (tensor.is_leaf() && tensor.requires_grad()) return;  // a parameter: others hold it
    room_ -= tensor.nbytes();
    kept_.push_back(tensor);
  }

 private:
  size_t room_ = size_t{1} << 20U;  // bytes that may be kept
  std::vector<at::Tensor> kept_;
};

// Marks a call as one whose plan is being made, so that calls from inside do not wait for it.
class MakingPlan {
 public:
  explicit MakingPlan(CallFrame& frame) : frame_(frame) { frame_.making_plan = true; }
  ~MakingPlan() { frame_.making_plan = false; }
  MakingPlan(const MakingPlan&) = delete;
  MakingPlan& operator=(const MakingPlan&) = delete;

 private:
  CallFrame& frame_;
};

// Finds all nodes that could be in a group but must run by themselves, in the stock engine's order among all else that
// can be seen. All at once: each call finding one more, and plans made for each new cut, would take as many calls as
// there are such nodes.
void refuse_all(const FusedGraph& graph, std::span<Node* const> nodes) {
  const PythonGateLock lock(ungated_hooks_exist());  // once, not for every node
  for (uint32_t k = 0; k < nodes.size(); ++k) {
    if (graph.fusable(k, *nodes[k]) == Fusable::kYes && must_run_alone(*nodes[k])) graph.refuse(k);
  }
}

// Memory of calls that are over. A call takes it out: compilers and hooks may call backward.
GroupKey& spare_key() {
  thread_local GroupKey key;
  return key;
}

// One call.
class FusedRun {
 public:
  FusedRun(PreparedCall& call, const ScheduleRun& run, const FusedGraph& graph, const CutGraph& cut)
      : call_(call),
        run_(run),
        shape_(call.schedule->shape()),
        graph_(graph),
        cut_(cut),
        buffers_(shape_, run),
        steps_(*call.schedule, run, buffers_),
        done_(shape_.steps.size(), false),
        starved_(shape_) {}
  ~FusedRun() {
    run_.frame.current_node = nullptr;
    spare_key() = std::move(key_);
  }
  FusedRun(const FusedRun&) = delete;
  FusedRun& operator=(const FusedRun&) = delete;

  void run() {
    try {
      run_items();
    } catch (...) {
      count();
      throw;
    }
    count();
    thread_stats().unfused_groups.add(cut_.partition.groups.size() - compiled_groups_);
  }

 private:
  void run_items() {
    for (const Partition::Item& item : cut_.partition.items) {
      if (!item.is_group) {
        run_step(item.index);
      } else if (!run_group(item.index)) {
        run_rest();
        break;
      }
    }
    starved_.check_end();
  }

  void count() const {
    ThreadStats& stats = thread_stats();
    (compiled_groups_ > 0 ? stats.fused_calls : stats.schedule_calls).add(1);
    stats.fused_groups.add(compiled_groups_);
    stats.count_lookup(compiled_groups_ == cut_.partition.groups.size());
    if (compiled_groups_ == 0) stats.count_fallback(reason_);
  }

  void run_step(uint32_t k) {
    done_[k] = true;
    if (C10_UNLIKELY(starved_.contains(k))) {
      starved_.pass_on(k);
      return;
    }
    try {
      steps_.run(k, [&](size_t count) { starved_.cut(k, count); });
    } catch (...) {
      // What the stock engine would have done before: a node that may join a group can be ahead of its turn.
      run_up_to(k);
      throw;
    }
  }

  // In the stock engine's order, as the schedule does.
  void run_rest() { run_up_to(static_cast<uint32_t>(shape_.steps.size())); }
  void run_up_to(uint32_t end) {
    for (uint32_t k = 0; k < end; ++k) {
      if (!done_[k]) run_step(k);
    }
  }

  // False: a node of the group has something to report, or must run by itself; it does so when its turn comes in the
  // stock engine's order.
  bool run_group(uint32_t g) {
    const Group& group = cut_.partition.groups[g];
    GroupSite& site = cut_.sites[g];
    if (starved_.any()) {
      run_members(group);
      return true;
    }
    members_.clear();
    for (const uint32_t k : group.steps) members_.push_back(call_.nodes[k]);
    for (Node* member : members_) {
      if (C10_UNLIKELY(runs_user_code(*member, NodeKind::kPlain))) return false;  // hooks since the graph was cut
    }
    if (!is_blocking() && !site.pause.is_over()) {
      reason_ = site.pause.reason();
      run_members(group);
      return true;
    }
    targets_.clear();
    for (const EdgeShape& output : group.outputs) targets_.push_back(call_.nodes[output.step]);

    inputs_.emplace();
    inputs_->gradients.reserve(group.inputs.size());
    for (const GroupInput& input : group.inputs) {
      inputs_->gradients.push_back(buffers_.peek(group.steps[input.member], input.input_nr));
    }
    const GroupKey& key = key_;
    const Collecting collecting = collect_group(group, members_, targets_, *inputs_, key_);
    Found found;
    switch (collecting.obstacle) {
      case GroupObstacle::kSavedTensorHooks:
      case GroupObstacle::kUntraceable:
        inputs_.reset();
        refuse_all(graph_, call_.nodes);
        return false;
      case GroupObstacle::kError:
        inputs_.reset();
        return false;
      case GroupObstacle::kTensorKind:
        reason_ = ScheduleReason::kNotFusable;
        break;
      case GroupObstacle::kNone:
        found = find_plan(group, site, key);
        break;
    }
    if (found.plan == nullptr || !run_plan(found, group, key.numbers)) {
      if (is_likely_to_last(reason_)) site.pause.lengthen(reason_);
      inputs_.reset();  // before nodes run: what they saved must be theirs alone
      run_members(group);
      if (failure_) withdraw(*found.entry);
    } else {
      site.pause.end();
    }
    return true;
  }

  static bool is_likely_to_last(ScheduleReason reason) {
    return reason == ScheduleReason::kNotFusable || reason == ScheduleReason::kTooManyKeys ||
           reason == ScheduleReason::kNoCompiler;
  }
  bool is_blocking() const { return call_.setting.options.mode() == Mode::kBlocking; }

  void run_members(const Group& group) {
    for (const uint32_t k : group.steps) run_step(k);
  }

  struct Found {
    const GroupEntry* entry = nullptr;
    const GroupPlan* plan = nullptr;  // the entry's
  };
  static Found plan_of(const GroupShapes::Version* version) {
    if (version == nullptr) return {};
    return {version->entry.get(), version->entry->plan()};
  }

  Found find_plan(const Group& group, GroupSite& site, const GroupKey& key) {
    const void* found = site.shapes.find(key.fixed[0]);
    if (found == nullptr) {
      if (site.shapes.plan_count() >= kMaxKeys) {
        keeps_changing(group, site);
        return {};
      }
      found = site.shapes.get_or_build(key.fixed[0], cache::Wait::kYes, []() -> std::shared_ptr<const void> {
        return std::make_shared<const GroupShapes>();
      });
    }
    const auto& shapes = *static_cast<const GroupShapes*>(found);
    const GroupShapes::Version* version = shapes.find(key.numbers);
    if (version != nullptr) {
      if (const Found ready = plan_of(version); ready.plan != nullptr) return ready;
    } else {
      version = shapes.find_or_add(key.numbers);
    }
    if (version == nullptr) {
      keeps_changing(group, site);
      return {};
    }
    cache::perturb("fused.no_plan");
    if (version->entry->first_look()) {
      if (const Found stored = take_stored(group, shapes, *version); stored.plan != nullptr) return stored;
    }
    make_plan(group, *version, key.numbers);
    // What was left open may have got conditions that this call does not meet.
    return shapes.find(key.numbers) == version ? plan_of(version) : Found();
  }

  // No more plans for this group. Says so once, and what it is that changes.
  void keeps_changing(const Group& group, GroupSite& site) {
    reason_ = ScheduleReason::kTooManyKeys;
    GroupCompiler* const compiler = group_compiler();
    if (compiler == nullptr || site.changes.is_done()) return;
    GroupInputs again;
    again.gradients = inputs_->gradients;
    GroupKey key;
    NumberPlaces places;
    if (collect_group(group, members_, targets_, again, key, KeyForm::kFast, &places).obstacle !=
        GroupObstacle::kNone) {
      return;
    }
    if (const auto change = site.changes.look(key, places)) {
      compiler->report_change(change->member ? members_[*change->member] : nullptr, change->sizes);
    }
  }

  // From the plan store, if it has one for the group at hand.
  Found take_stored(const Group& group, const GroupShapes& shapes, const GroupShapes::Version& version) {
    GroupInputs again;
    again.gradients = inputs_->gradients;
    GroupKey key;
    const Collecting collecting = collect_group(group, members_, targets_, again, key, KeyForm::kPortable);
    if (collecting.obstacle != GroupObstacle::kNone) return {};
    variable_list all = again.gradients;
    all.insert(all.end(), again.tensors().begin(), again.tensors().end());
    auto stored = find_stored({key, all, group.outputs.size()});
    if (!stored) return {};
    thread_stats().plans_from_store.add(1);
    if (stored->open.empty()) {
      if (version.entry->claim()) version.entry->settle(std::move(stored->plan));
    } else {
      shapes.add_ready(std::move(stored->numbers), std::move(stored->open), std::move(stored->plan));
      if (version.entry->claim()) version.entry->supersede();
    }
    return plan_of(shapes.find(key.numbers));
  }

  void make_plan(const Group& group, const GroupShapes::Version& version, std::span<const int64_t> numbers) {
    const auto& entry = version.entry;
    reason_ = ScheduleReason::kCompiling;
    const bool blocking = is_blocking();
    const bool waits = blocking && !thread_context().makes_plans;
    using State = GroupEntry::State;
    bool mine = false;
    if (entry->state() == State::kCold) {
      if (!blocking && !entry->is_hot(hot_after())) {
        reason_ = ScheduleReason::kWarmingUp;
        return;
      }
      GroupCompiler* const compiler = group_compiler();
      if (compiler == nullptr) {
        reason_ = ScheduleReason::kNoCompiler;
        return;
      }
      for (size_t i = 0; i < numbers.size(); ++i) {
        if (version.is_open(i) && numbers[i] < 2) return;  // tracing takes such sizes for fixed: another call will do
      }
      // Under inputs=, nodes ask the task which of their outputs are needed. Before the claim: whoever has that makes
      // the plan or gives it back, and this may run out of memory.
      steps_.describe();
      cache::perturb("fused.claiming");
      mine = entry->claim();
      if (mine) {
        const MakingPlan making(run_.frame);
        if (!compiler->make({group, members_, targets_, *inputs_, version, entry, waits}, call_, run_.frame)) {
          reason_ = ScheduleReason::kGraphInUse;
          return;
        }
      }
    }
    bool may_wait = waits && !mine;
    for (const CallFrame* outer = run_.frame.parent; outer != nullptr; outer = outer->parent) {
      may_wait = may_wait && !outer->making_plan;
    }
    // Another thread is at it. Nothing it needs is held here. Compiling takes seconds, so looking now and then is as
    // good as being told.
    while (may_wait && entry->state() == State::kMaking && group_compiler() != nullptr) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      group_compiler()->look_up_from_waiting();
    }
    if (entry->state() == State::kRefused) {
      reason_ = ScheduleReason::kNotFusable;
      if (const int32_t member = entry->refused_member(); member >= 0) {
        graph_.refuse(group.steps[static_cast<size_t>(member)]);
      }
    }
  }

  // False: the plan failed on its very first run, and all is as before. The graph's own nodes say then whose failure it
  // was. Later runs let go of what they take, so a failure is the call's.
  bool run_plan(const Found& found, const Group& group, std::span<const int64_t> numbers) {
    RECORD_FUNCTION("retrograd: fused group", c10::ArrayRef<const c10::IValue>());
    const GroupPlan& plan = *found.plan;
    variable_list given;
    given.reserve(plan.io().inputs.size());
    const size_t num_gradients = inputs_->gradients.size();
    for (const uint32_t i : plan.io().inputs) {
      given.push_back(i < num_gradients ? inputs_->gradients[i] : inputs_->tensors()[i - num_gradients]);
    }
    for (const uint32_t place : plan.io().guards.extra()) given.push_back(at::empty({0, numbers[place]}));
    variable_list results;
    const bool first_run = !found.entry->is_proven();
    if (first_run) {
      try {
        results = plan.run(std::move(given));
      } catch (const c10::OutOfMemoryError&) {
        throw;
      } catch (const c10::Error& error) {
        failure_ = error.what_without_backtrace();
      } catch (const std::runtime_error& error) {
        failure_ = error.what();
      }
      if (failure_) {
        reason_ = ScheduleReason::kNotFusable;
        return false;
      }
      found.entry->prove();
    } else {
      for (const at::Tensor& input : given) wrapped_.keep_if_wrapped(input);
    }
    inputs_.reset();
    for (const uint32_t k : group.steps) {
      done_[k] = true;
      buffers_.take(k);
      if (call_.keep_graph) continue;
      call_.nodes[k]->will_release_variables();
      call_.nodes[k]->release_variables();
    }
    if (!first_run) results = plan.run(std::move(given));  // NOLINT(bugprone-use-after-move): or the first run took it
    for (size_t k = 0; k < group.outputs.size(); ++k) {
      const int32_t result = plan.io().outputs[k];
      if (result < 0) continue;
      const EdgeShape& target = group.outputs[k];
      buffers_.add(target, std::move(results[static_cast<size_t>(result)]), {}, *call_.nodes[target.step]);
    }
    ++compiled_groups_;
    return true;
  }

  // After the nodes did what the plan could not.
  void withdraw(const GroupEntry& entry) {
    entry.withdraw();
    TORCH_WARN(
        "retrograd: a compiled plan failed on its first run and is not used again; its part of the backward graph runs "
        "node by node, as without it. ",
        *std::exchange(failure_, std::nullopt));
  }

  PreparedCall& call_;
  const ScheduleRun& run_;
  const GraphShape& shape_;
  const FusedGraph& graph_;
  const CutGraph& cut_;
  HostBuffers buffers_;
  WrappedTensors wrapped_;
  StepRunner<HostBuffers> steps_;
  std::vector<bool> done_;  // by step
  StarvedSteps starved_;
  std::vector<Node*> members_, targets_;           // of the group at hand
  std::optional<GroupInputs> inputs_;              // of the group at hand
  GroupKey key_ = std::exchange(spare_key(), {});  // of the group at hand
  std::optional<std::string> failure_;             // of the plan of the group at hand
  size_t compiled_groups_ = 0;
  ScheduleReason reason_ = ScheduleReason::kNotFusable;
};

c10::DeviceType accelerator_of(const PreparedCall& call) {
  for (Node* node : call.nodes) {
    if (const auto stream = node->stream()) return stream->device_type();
  }
  return c10::kCPU;
}

}  // namespace

void set_group_compiler(GroupCompiler* compiler) noexcept {
  compiler_in_place.store(compiler, std::memory_order_release);
}
GroupCompiler* group_compiler() noexcept { return compiler_in_place.load(std::memory_order_acquire); }

std::optional<ScheduleReason> run_fused(PreparedCall& call, const ScheduleRun& run) {
  if (call.create_graph) return ScheduleReason::kCreateGraph;
  // A plan runs on the stream that is current. Then there is nothing to wait for, and no gradient to hand between
  // streams.
  if (call.use_streams && (call.other_streams || !runs_plans_on(accelerator_of(call)))) return ScheduleReason::kStreams;
  const FusedGraph& graph = FusedGraph::of(*call.leaf, *call.schedule);
  if (saved_tensor_hooks_exist()) refuse_all(graph, call.nodes);
  const CutGraph* const cut = graph.cut(call.nodes);
  if (cut == nullptr) return ScheduleReason::kTooManyKeys;
  if (cut->partition.groups.empty()) return ScheduleReason::kNotFusable;
  FusedRun(call, run, graph, *cut).run();
  return std::nullopt;
}

}  // namespace retrograd
