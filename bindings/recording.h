// Recording: what a group of nodes would do, taken from the live graph in about a millisecond, to be traced later.
//
// Each node is asked once, with its saved tensors swapped for placeholders, which function it would call with which
// arguments; then it is as before. The record refers to nothing of the graph and holds no memory of its tensors.
// Tracing calls the recorded functions on fake tensors, on any thread, at any time.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include <torch/extension.h>

#include "engine/group_site.h"

namespace retrograd::bindings {

// Gives torch's own front end, once it is imported, the functions that libtorch handed over to recordings. Under the
// GIL.
void forward_bound_functions();

class Recording {
 public:
  // From the live graph. Under the capture lock, without the GIL. The graph is as before, however it ends. `failed` is
  // the member that cannot be recorded; the recording is then null.
  static std::shared_ptr<Recording> make(const GroupRequest& request, int32_t& failed);

  // Stand-ins for the inputs, gradients first, with their geometry, dtype and device but no memory; undefined where
  // the group gets no gradient.
  const variable_list& inputs() const { return inputs_; }
  int threads() const { return threads_; }
  std::string content() const;  // equal for groups that one plan serves, in any process
  size_t num_outputs() const { return num_outputs_; }
  std::string name() const;

  // The group's sizes and strides, which of them the plan may leave open, and the places of each input's.
  const GroupKey& key() const { return key_; }  // portable
  const std::vector<int64_t>& numbers() const { return key_.numbers; }
  const std::vector<bool>& open() const { return open_; }
  const std::vector<uint32_t>& input_places() const { return places_.inputs; }

  // Calls what was recorded on `fakes`, one for each of inputs(), under whatever modes are in force: the group's
  // outputs, undefined where it gives none. No two of them share memory with each other or with an input. `symbols` has
  // a symbolic size for each open number that is not a size or stride of an input. Under the GIL. An exception leaves
  // `failed` at the member that raised it, or at -1.
  using Symbols = std::map<uint32_t, c10::SymInt>;
  variable_list trace(const variable_list& fakes, const Symbols& symbols, int32_t& failed) const;

 private:
  struct SlicesGeometry {  // of a node that wraps another one (CopySlices)
    at::TensorGeometry base, view;
    std::vector<bool> needs_input_grad;
  };
  struct Member {
    std::string function;
    torch::autograd::ivalue_list arguments;
    std::optional<SlicesGeometry> slices;
    std::vector<std::optional<torch::autograd::InputMetadata>> next;  // by edge
    std::vector<uint32_t> next_places;                                // by edge: of the shape in `next`
    size_t num_inputs = 0;
    bool called = false;
  };
  class Recorder;

  bool is_open(size_t place) const { return !open_.empty() && open_[place]; }
  struct Values {
    const variable_list& fakes;
    const Symbols& symbols;
  };
  variable_list call(const Member& member, const variable_list& gradients, const Values& values) const;
  c10::IValue filled_in(const c10::IValue& value, const Values& values) const;
  at::TensorGeometry filled_in(const at::TensorGeometry& geometry, const Values& values) const;
  std::vector<std::optional<torch::autograd::InputMetadata>> next_of(const Member& member, const Values& values) const;

  Group group_;
  std::vector<Member> members_;
  variable_list inputs_;
  std::unordered_map<const c10::TensorImpl*, size_t> index_of_;  // of the placeholders in arguments
  std::vector<std::optional<at::TensorGeometry>> leaf_layouts_;  // by output
  NumberPlaces places_;
  GroupKey key_;
  std::vector<bool> open_;  // by place; empty: none
  int threads_ = 1;
  size_t num_outputs_ = 0;
};

}  // namespace retrograd::bindings
