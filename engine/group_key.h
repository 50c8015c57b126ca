// What a compiled group needs of the live graph at each call: its inputs, and a key of all that its plan bakes in.
#pragma once

#include <optional>
#include <span>

#include <torch/csrc/dynamo/compiled_autograd.h>

#include "cache/path.h"
#include "engine/partition.h"

namespace retrograd {

// A group's inputs in one call. `gradients` come from outside the group, by Group::inputs (undefined where none came);
// the tensors that the members saved are in libtorch's own form.
struct GroupInputs {
  variable_list gradients;
  torch::dynamo::autograd::AutogradCompilerCall call{torch::dynamo::autograd::SizeInput::STATIC};

  const variable_list& tensors() const { return call.tensor_args.inputs; }
};

// Why a group could not be collected.
enum class GroupObstacle : uint8_t {
  kNone,
  kSavedTensorHooks,  // `member` saved a tensor with hooks: it must be unpacked when the node's own turn comes
  kUntraceable,       // `member` has no compiled_args
  kTensorKind,        // an input is sparse, quantized, nested, a subclass, ...: only this call
  kError,             // `member` reported an error that its own run should report: freed or overwritten tensors
};
struct Collecting {
  GroupObstacle obstacle = GroupObstacle::kNone;
  uint32_t member = 0;
};

// The state outside the graph that a plan bakes in: intra-op threads, numerics switches, dispatch keys in force.
// False where something is in force that a plan would not see, such as autocast: it is traced without it.
bool append_environment(cache::Path& path);

// What a plan depends on, apart: `fixed` has one key of all that every plan bakes in; `numbers` has the sizes and
// strides, which a plan may leave open.
struct GroupKey {
  cache::Path fixed;
  std::vector<int64_t> numbers;
};

// Where in a key the numbers of what are (of a tensor first its sizes, then its strides), and what is whose.
struct NumberPlaces {
  std::vector<std::vector<uint32_t>> member_inputs;  // by member and slot: the shape that the slot expects
  std::vector<uint32_t> targets;                     // by output: the shape that the slot expects
  std::vector<uint32_t> leaves;                      // by output: the variable of a leaf; of no meaning for others
  std::vector<uint32_t> inputs;                      // gradients, then tensors
  uint32_t sizes = 0;                                // the first size that a member saved as such
  std::vector<uint32_t> member_numbers;              // by member, the first of its own; one more where the last ends
  std::vector<uint32_t> member_keys;                 // the same, of bytes of the fixed key
};

// What stands for a type in a key: its address, or its name.
enum class KeyForm : uint8_t { kFast, kPortable };

// Collects `nodes`, the members of `group`, into `inputs`, whose gradients are there already, and makes the key.
// Equal keys mean that one plan serves both. Fast keys are good in this
// process only. Does not throw for what the graph holds; the graph is never changed.
Collecting collect_group(const Group& group, std::span<Node* const> nodes, std::span<Node* const> targets,
                         GroupInputs& inputs, GroupKey& key, KeyForm form = KeyForm::kFast,
                         NumberPlaces* places = nullptr);

// Whether the node may be in a group at all, told from its type and what it wraps; hooks and captures are not looked
// at.
bool may_be_fused(Node& node);

// Whether collecting it shows that it may not: it saved a tensor with hooks, or has no compiled_args.
bool must_run_alone(Node& node);

}  // namespace retrograd
