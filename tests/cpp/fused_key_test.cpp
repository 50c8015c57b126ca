// Keys of groups: what one plan serves, and what keeps a group from having one.
#include <algorithm>
#include <set>
#include <span>

#include <ATen/Context.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include "engine/group_key.h"
#include "fused_test_util.h"

namespace retrograd::test {
namespace {

// The one group of a graph, and its key.
struct Keyed {
  Collecting collecting;
  GroupKey key;
  NumberPlaces places;
  GroupInputs inputs;
  Group group;
  std::vector<Node*> nodes;

  std::string name(uint32_t member) const { return nodes.at(member)->name(); }
};

// All nodes that may be fused and have no hooks are the group. `gradient` is what the root gets.
std::unique_ptr<Keyed> keyed(const at::Tensor& root, const at::Tensor& gradient, KeyForm form = KeyForm::kFast) {
  auto k = std::make_unique<Keyed>();
  const Walked w = walked(*root.grad_fn());
  std::vector<bool> fusable;
  for (Node* node : w.graph.nodes) fusable.push_back(may_be_fused(*node) && node->tensor_pre_hooks().empty());
  Partition cut = make_partition(w.shape, fusable, 1);
  EXPECT_EQ(cut.groups.size(), 1U);
  k->group = std::move(cut.groups.at(0));
  std::vector<Node*> targets;
  for (const uint32_t step : k->group.steps) k->nodes.push_back(w.graph.nodes[step]);
  for (const EdgeShape& output : k->group.outputs) targets.push_back(w.graph.nodes[output.step]);
  k->inputs.gradients.resize(k->group.inputs.size());
  k->inputs.gradients.at(0) = gradient;
  k->collecting = collect_group(k->group, k->nodes, targets, k->inputs, k->key, form, &k->places);
  return k;
}
std::unique_ptr<Keyed> keyed(const at::Tensor& root, KeyForm form = KeyForm::kFast) {
  return keyed(root, at::ones_like(root.detach()), form);
}

std::string bytes(const cache::Path& path) {
  EXPECT_EQ(path.size(), 1U);
  const auto view = path[0];
  return {reinterpret_cast<const char*>(view.data()), view.size()};
}
std::string fixed(const at::Tensor& root, KeyForm form = KeyForm::kFast) {
  const auto k = keyed(root, form);
  EXPECT_EQ(k->collecting.obstacle, GroupObstacle::kNone);
  return bytes(k->key.fixed);
}
std::vector<int64_t> numbers(const at::Tensor& root) { return keyed(root)->key.numbers; }

at::Tensor leaf(at::IntArrayRef sizes = {3, 4}, at::ScalarType type = at::kDouble) {
  return at::rand(sizes, type).requires_grad_();
}
at::Tensor net(const at::Tensor& x) { return (x.sin() * x).exp().pow(3); }

class GroupKeys : public testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }
};

TEST_F(GroupKeys, EqualGraphsHaveEqualKeys) {
  for (const KeyForm form : {KeyForm::kFast, KeyForm::kPortable}) {
    const at::Tensor x = leaf(), y = leaf();
    const auto a = keyed(net(x), form), b = keyed(net(y), form);
    EXPECT_EQ(bytes(a->key.fixed), bytes(b->key.fixed));
    EXPECT_EQ(a->key.numbers, b->key.numbers);
    EXPECT_EQ(a->collecting.obstacle, GroupObstacle::kNone);
  }
}

// The key object is used again from call to call.
TEST_F(GroupKeys, NothingIsLeftOfTheKeyBefore) {
  const at::Tensor x = leaf();
  GroupKey key;
  for (const at::Tensor& root : {net(net(net(x))), x.tanh()}) {
    const auto fresh = keyed(root);
    const Walked w = walked(*root.grad_fn());
    std::vector<Node*> targets;
    for (const EdgeShape& output : fresh->group.outputs) targets.push_back(w.graph.nodes[output.step]);
    GroupInputs inputs;
    inputs.gradients = fresh->inputs.gradients;
    collect_group(fresh->group, fresh->nodes, targets, inputs, key);
    EXPECT_EQ(key.fixed, fresh->key.fixed);
    EXPECT_EQ(key.numbers, fresh->key.numbers);
  }
}

TEST_F(GroupKeys, TypesOfNodes) {
  const at::Tensor x = leaf();
  for (const KeyForm form : {KeyForm::kFast, KeyForm::kPortable}) {
    EXPECT_NE(fixed(x.tanh(), form), fixed(x.sigmoid(), form));
  }
}

TEST_F(GroupKeys, ConstantsOfNodes) {
  const at::Tensor x = leaf();
  EXPECT_NE(fixed(x.pow(2)), fixed(x.pow(3)));
  EXPECT_NE(fixed(at::leaky_relu(x, 0.1)), fixed(at::leaky_relu(x, 0.2)));
  EXPECT_EQ(fixed(x.pow(3)), fixed(x.pow(3)));
  EXPECT_NE(fixed(x.sum(0)), fixed(x.sum(1)));
}

TEST_F(GroupKeys, DtypesOfWhatIsSaved) {
  EXPECT_NE(fixed(net(leaf({3, 4}, at::kDouble))), fixed(net(leaf({3, 4}, at::kFloat))));
}

// Neither the group's own nodes nor what they saved tell the dtype here.
TEST_F(GroupKeys, DtypesOfGradientsAndOfWhatIsExpected) {
  const at::Tensor x = leaf({3}, at::kDouble), y = leaf({3}, at::kFloat);
  EXPECT_NE(fixed(x.neg()), fixed(y.neg()));
  const at::Tensor root = x.neg();
  EXPECT_NE(bytes(keyed(root, at::ones({3}, at::kDouble))->key.fixed),
            bytes(keyed(root, at::ones({3}, at::kFloat))->key.fixed));
}

// Nothing but what the nodes expect tells the dtype here: no tensor, no leaf.
TEST_F(GroupKeys, DtypesThatAreExpected) {
  const auto key = [](at::ScalarType type) {
    const at::Tensor inner = leaf({3}, type).sin();
    inner.register_hook([](const at::Tensor&) {});
    return bytes(keyed(inner.neg(), at::Tensor())->key.fixed);
  };
  EXPECT_NE(key(at::kDouble), key(at::kFloat));
}

TEST_F(GroupKeys, DtypesOfGradientsThatLeavesWant) {
  const at::Tensor x = leaf({3}, at::kFloat), y = leaf({3}, at::kFloat);
  y.set_grad_dtype(at::kDouble);
  EXPECT_NE(fixed(x.neg()), fixed(y.neg()));
}

TEST_F(GroupKeys, UndefinedGradients) {
  const at::Tensor x = leaf();
  const at::Tensor root = net(x);
  EXPECT_NE(bytes(keyed(root, at::ones({3, 4}, at::kDouble))->key.fixed), bytes(keyed(root, at::Tensor())->key.fixed));
}

TEST_F(GroupKeys, SizesAndStridesAreApart) {
  const auto of = [](at::IntArrayRef sizes) { return net(leaf(sizes)); };
  EXPECT_EQ(fixed(of({3, 4})), fixed(of({5, 7})));
  EXPECT_NE(numbers(of({3, 4})), numbers(of({5, 7})));
  EXPECT_NE(fixed(of({3, 4})), fixed(of({3, 4, 1}))) << "how many there are is not";
  const at::Tensor x = leaf({4, 4}), transposed = at::rand({4, 4}, at::kDouble).t().requires_grad_();
  EXPECT_EQ(fixed(net(x)), fixed(net(transposed)));
  EXPECT_NE(numbers(net(x)), numbers(net(transposed)));
  const at::Tensor root = x.neg();
  EXPECT_NE(keyed(root, at::ones({4, 4}, at::kDouble))->key.numbers,
            keyed(root, at::ones({1}, at::kDouble).expand({4, 4}))->key.numbers);
}

// A leaf takes a gradient over without a copy only if it comes in the leaf's own layout.
TEST_F(GroupKeys, LayoutsOfLeaves) {
  const at::Tensor x = leaf({4, 4}), transposed = at::rand({4, 4}, at::kDouble).t().requires_grad_();
  const auto a = keyed(x.neg(), at::ones({4, 4}, at::kDouble));
  const auto b = keyed(transposed.neg(), at::ones({4, 4}, at::kDouble));
  EXPECT_EQ(bytes(a->key.fixed), bytes(b->key.fixed));
  EXPECT_NE(a->key.numbers, b->key.numbers);
}

TEST_F(GroupKeys, LeavesAndOtherTargets) {
  const at::Tensor x = leaf();
  const at::Tensor inner = x.sin();
  inner.register_hook([](const at::Tensor&) {});
  EXPECT_NE(fixed(inner.neg()), fixed(x.neg()));
}

TEST_F(GroupKeys, WhetherWhatIsSavedRequiresAGradient) {
  // The group's edges and types are the same: both ways the saved factor is an input of the product alone.
  const at::Tensor x = leaf(), factor = at::rand({3, 4}, at::kDouble);
  const at::Tensor without = x * factor;
  const at::Tensor with = x * leaf();
  EXPECT_NE(fixed(without), fixed(with));
}

TEST_F(GroupKeys, WhichSavedTensorsAreOne) {
  const at::Tensor x = leaf(), a = at::rand({3, 4}, at::kDouble), b = at::rand({3, 4}, at::kDouble);
  EXPECT_EQ(fixed((x * a) * b), fixed((x * b) * a));
  EXPECT_NE(fixed((x * a) * b), fixed((x * a) * a));
}

// Wrapped functions of views that were written to.
TEST_F(GroupKeys, InnerTypesOfInPlaceViews) {
  const at::Tensor x = leaf();
  const auto written = [&](auto write) {
    at::Tensor base = x.clone();
    at::Tensor part = base[0];
    write(part);
    return base;
  };
  const at::Tensor a = written([](at::Tensor& t) { t.tanh_(); });
  const at::Tensor b = written([](at::Tensor& t) { t.sigmoid_(); });
  ASSERT_EQ(a.grad_fn()->name(), "torch::autograd::CopySlices");
  for (const KeyForm form : {KeyForm::kFast, KeyForm::kPortable}) {
    EXPECT_NE(fixed(a, form), fixed(b, form));
    EXPECT_EQ(fixed(a, form), fixed(written([](at::Tensor& t) { t.tanh_(); }), form));
  }
}

TEST_F(GroupKeys, TheEnvironment) {
  const at::Tensor root = net(leaf());
  const std::string before = fixed(root);
  auto& context = at::globalContext();
  const auto expect_other = [&](const char* what) { EXPECT_NE(fixed(root), before) << what; };

  at::set_num_threads(2);
  expect_other("threads");
  at::set_num_threads(1);

  context.setDeterministicAlgorithms(true, /*warn_only=*/false);
  expect_other("deterministic");
  context.setDeterministicAlgorithms(false, false);

  const bool fill = context.deterministicFillUninitializedMemory();
  context.setDeterministicFillUninitializedMemory(!fill);
  expect_other("fill");
  context.setDeterministicFillUninitializedMemory(fill);

  const bool mkldnn = context.userEnabledMkldnn();
  context.setUserEnabledMkldnn(!mkldnn);
  expect_other("mkldnn");
  context.setUserEnabledMkldnn(mkldnn);

  c10::set_default_dtype(caffe2::TypeMeta::Make<double>());
  expect_other("default dtype");
  c10::set_default_dtype(caffe2::TypeMeta::Make<float>());

  context.setFloat32MatmulPrecision("medium");
  expect_other("matmul precision");
  context.setFloat32MatmulPrecision("highest");

  EXPECT_EQ(fixed(root), before);
}

// Plans are traced without such keys.
TEST_F(GroupKeys, DispatchKeysInForce) {
  const at::Tensor root = net(leaf());
  EXPECT_EQ(keyed(root, at::Tensor())->collecting.obstacle, GroupObstacle::kNone);
  {
    const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::TESTING_ONLY_GenericMode);
    EXPECT_EQ(keyed(root, at::Tensor())->collecting.obstacle, GroupObstacle::kTensorKind);
  }
  {
    const c10::impl::IncludeDispatchKeyGuard guard(c10::DispatchKey::AutocastCPU);
    EXPECT_EQ(keyed(root, at::Tensor())->collecting.obstacle, GroupObstacle::kTensorKind);
  }
}

// The nodes are the same, and so is what they saved (nothing); only how they hang together differs.
TEST_F(GroupKeys, StructureIsPartOfPortableKeysOnly) {
  const at::Tensor x = leaf(), y = leaf();
  const at::Tensor a = x.neg().neg();
  const at::Tensor left = a + y.neg();
  const at::Tensor b = y.neg().neg();
  const at::Tensor right = x.neg() + b;
  EXPECT_EQ(fixed(left, KeyForm::kFast), fixed(right, KeyForm::kFast));
  EXPECT_NE(fixed(left, KeyForm::kPortable), fixed(right, KeyForm::kPortable));
}

TEST_F(GroupKeys, PortableKeysSayWhichSlotsGetAGradientFromOutside) {
  const at::Tensor x = leaf();
  const at::Tensor root = net(x);
  const auto k = keyed(root, KeyForm::kPortable);
  const Walked w = walked(*root.grad_fn());
  std::vector<Node*> targets;
  for (const EdgeShape& output : k->group.outputs) targets.push_back(w.graph.nodes[output.step]);
  Group other = k->group;
  ASSERT_EQ(other.inputs.size(), 1U);
  other.inputs[0].member = 1;
  GroupInputs inputs;
  inputs.gradients = k->inputs.gradients;
  GroupKey key;
  collect_group(other, k->nodes, targets, inputs, key, KeyForm::kPortable);
  EXPECT_NE(key.fixed, k->key.fixed);
}

TEST_F(GroupKeys, PortableKeysHoldNamesAndNoAddresses) {
  const at::Tensor x = leaf();
  at::Tensor base = net(x);
  at::Tensor part = base[0];
  part.tanh_();
  const auto k = keyed(base, KeyForm::kPortable);
  const std::string fast = fixed(base, KeyForm::kFast), portable = bytes(k->key.fixed);
  const auto contains = [](const std::string& text, const void* address) {
    return text.find(std::string(reinterpret_cast<const char*>(&address), sizeof(address))) != std::string::npos;
  };
  EXPECT_GE(k->nodes.size(), 3U);
  std::vector<const void*> addresses{x.unsafeGetTensorImpl()};
  for (Node* node : k->nodes) {
    const auto& type = typeid(*node);
    EXPECT_NE(portable.find(type.name()), std::string::npos);
    EXPECT_TRUE(contains(fast, &type));
    addresses.push_back(&type);
    addresses.push_back(type.name());
    addresses.push_back(node);
  }
  for (const at::Tensor& tensor : k->inputs.tensors()) addresses.push_back(tensor.unsafeGetTensorImpl());
  for (const void* address : addresses) EXPECT_FALSE(contains(portable, address));
  EXPECT_NE(portable.find(typeid(torch::autograd::generated::TanhBackward0).name()), std::string::npos);
}

TEST_F(GroupKeys, PlacesOfNumbers) {
  const at::Tensor x = at::rand({5, 3}, at::kDouble).t().requires_grad_();
  const at::Tensor root = x.sin().expand({2, 3, 5});  // saves sizes
  const auto k = keyed(root, at::ones({2, 3, 5}, at::kDouble));
  ASSERT_EQ(k->collecting.obstacle, GroupObstacle::kNone);
  ASSERT_EQ(k->name(0), "ExpandBackward0");
  ASSERT_EQ(k->name(1), "SinBackward0");
  const auto at = [&](uint32_t place, size_t count) {
    return std::vector<int64_t>(k->key.numbers.begin() + place, k->key.numbers.begin() + place + count);
  };
  using Numbers = std::vector<int64_t>;
  EXPECT_EQ(at(k->places.member_inputs.at(0).at(0), 3), (Numbers{2, 3, 5}));
  EXPECT_EQ(at(k->places.member_inputs.at(1).at(0), 2), (Numbers{3, 5}));
  EXPECT_EQ(at(k->places.targets.at(0), 2), (Numbers{3, 5}));
  EXPECT_EQ(at(k->places.leaves.at(0), 4), (Numbers{3, 5, 1, 3}));
  ASSERT_EQ(k->places.inputs.size(), 2U);
  EXPECT_EQ(at(k->places.inputs[0], 6), (Numbers{2, 3, 5, 15, 5, 1}));  // the gradient
  EXPECT_EQ(at(k->places.inputs[1], 4), (Numbers{3, 5, 1, 3}));         // what sin saved
  EXPECT_EQ(at(k->places.sizes, 2), (Numbers{3, 5}));                   // what expand saved
  EXPECT_EQ(k->places.sizes + 2, k->key.numbers.size());
}

// --- Obstacles ---

TEST_F(GroupKeys, FreedNodes) {
  const at::Tensor x = leaf();
  const at::Tensor inner = x.exp();
  const at::Tensor root = inner.neg();
  inner.backward(at::ones({3, 4}, at::kDouble));
  const auto k = keyed(root);
  EXPECT_EQ(k->collecting.obstacle, GroupObstacle::kError);
  EXPECT_EQ(k->name(k->collecting.member), "ExpBackward0");
}

TEST_F(GroupKeys, OverwrittenTensors) {
  const at::Tensor x = leaf(), y = at::rand({3, 4}, at::kDouble);
  const at::Tensor root = (x * y).neg();
  y.add_(1);
  const auto k = keyed(root);
  EXPECT_EQ(k->collecting.obstacle, GroupObstacle::kError);
  EXPECT_EQ(k->name(k->collecting.member), "MulBackward0");
}

// A node whose place in the cut graph was another one's: an in-place view that wraps what may be in no group.
TEST_F(GroupKeys, InPlaceViewsOfOtherFunctions) {
  const at::Tensor x = leaf();
  at::Tensor base = x.clone();
  at::Tensor part = base[0];
  part.tanh_();
  const auto before = keyed(base);
  auto& slices = dynamic_cast<torch::autograd::CopySlices&>(*base.grad_fn());
  slices.fn = make_node(1, 1);
  const Walked w = walked(*base.grad_fn());
  std::vector<Node*> targets;
  for (const EdgeShape& output : before->group.outputs) targets.push_back(w.graph.nodes[output.step]);
  GroupInputs inputs;
  inputs.gradients = before->inputs.gradients;
  GroupKey key;
  const Collecting collecting = collect_group(before->group, before->nodes, targets, inputs, key);
  EXPECT_EQ(collecting.obstacle, GroupObstacle::kError);
  EXPECT_EQ(collecting.member, 0U);
}

class NoHooks final : public torch::autograd::SavedVariableHooks {
 public:
  explicit NoHooks(bool with_data) : with_data_(with_data) {}
  void call_pack_hook(const at::Tensor& tensor) override { packed_ = tensor.detach(); }
  at::Tensor call_unpack_hook() override {
    ADD_FAILURE() << "unpacked";
    return packed_;
  }
  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> retrieve_unpack_hook_data() const override {
    if (!with_data_) return SavedVariableHooks::retrieve_unpack_hook_data();
    return std::pair(c10::SafePyObject(nullptr, nullptr), c10::SafePyObject(nullptr, nullptr));
  }

 private:
  bool with_data_;
  at::Tensor packed_;
};

TEST_F(GroupKeys, TensorsSavedWithHooksAreNotUnpacked) {
  for (const bool python : {true, false}) {
    const at::Tensor x = leaf(), y = at::rand({3, 4}, at::kDouble);
    const at::Tensor product = x * y;
    const at::Tensor root = product.exp();
    auto& node = dynamic_cast<torch::autograd::generated::MulBackward0&>(*product.grad_fn());
    node.other_.register_hooks(std::make_unique<NoHooks>(python));
    const auto k = keyed(root);
    // Hooks of C++ code give nothing that a plan could call: they are left to the node's own run.
    EXPECT_EQ(k->collecting.obstacle, python ? GroupObstacle::kSavedTensorHooks : GroupObstacle::kError);
    EXPECT_EQ(k->name(k->collecting.member), "MulBackward0");
  }
}

TEST_F(GroupKeys, InputsThatNoPlanServes) {
  const at::Tensor x = leaf({3}), z = leaf({3}, at::kComplexDouble);
  const auto obstacle = [](const at::Tensor& root, const at::Tensor& gradient) {
    return keyed(root, gradient)->collecting.obstacle;
  };
  const at::Tensor dense = at::ones({3}, at::kDouble), complex = at::ones({3}, at::kComplexDouble);
  EXPECT_EQ(obstacle(x.neg(), dense), GroupObstacle::kNone);
  EXPECT_EQ(obstacle(x.neg(), dense.to_sparse()), GroupObstacle::kTensorKind);
  EXPECT_EQ(obstacle(z.neg(), complex), GroupObstacle::kNone);
  EXPECT_EQ(obstacle(z.neg(), complex.conj()), GroupObstacle::kTensorKind);
  EXPECT_EQ(obstacle(x.neg(), at::imag(complex.conj())), GroupObstacle::kTensorKind) << "negative bit";
  EXPECT_EQ(obstacle(x.neg(), at::_efficientzerotensor({3}, at::kDouble)), GroupObstacle::kTensorKind);
  EXPECT_EQ(obstacle(z * complex.conj(), complex), GroupObstacle::kTensorKind) << "a saved one";
  const at::Tensor quantized = at::quantize_per_tensor(at::ones({3}), 0.1, 0, at::kQInt8);
  EXPECT_EQ(obstacle(x.neg(), quantized), GroupObstacle::kTensorKind);
}

// What follows the odd one is collected all the same: only this call is affected, and no member is to blame.
TEST_F(GroupKeys, AnOddInputBlamesNoMember) {
  const at::Tensor x = leaf({3});
  const auto k = keyed(x.neg().exp(), at::ones({3}, at::kDouble).to_sparse());
  EXPECT_EQ(k->collecting.obstacle, GroupObstacle::kTensorKind);
  EXPECT_EQ(k->inputs.tensors().size(), 1U);
}

TEST_F(GroupKeys, NodesThatCannotSayWhatTheySaved) {
  const auto node = make_node(5, 1);
  Group group;
  group.steps = {0};
  group.first_edge = {0, 0};
  Node* const nodes[] = {node.get()};
  GroupInputs inputs;
  GroupKey key;
  const Collecting collecting = collect_group(group, nodes, {}, inputs, key);
  EXPECT_EQ(collecting.obstacle, GroupObstacle::kUntraceable);
  EXPECT_EQ(collecting.member, 0U);
}

TEST_F(GroupKeys, CollectingLeavesTheGraphAsItWas) {
  const at::Tensor x = leaf();
  at::Tensor base = net(x);
  at::Tensor part = base[0];
  part.tanh_();
  const at::Tensor ones = at::ones({3, 4}, at::kDouble);
  const auto expected = torch::autograd::grad({base}, {x}, {ones}, /*retain_graph=*/true);
  for (const KeyForm form : {KeyForm::kFast, KeyForm::kPortable}) keyed(base, form);
  const auto got = torch::autograd::grad({base}, {x}, {ones});
  EXPECT_EQ(describe(got[0]), describe(expected[0]));
}

// --- May it be fused at all ---

TEST_F(GroupKeys, WideNodesAreNotFused) {
  for (const int64_t width : {64, 65}) {
    const std::vector<at::Tensor> parts(static_cast<size_t>(width), leaf({2}));
    EXPECT_EQ(may_be_fused(*at::cat(parts).grad_fn()), width == 64);
    EXPECT_EQ(may_be_fused(*leaf({width}).unbind()[0].grad_fn()), width == 64);
  }
}

TEST_F(GroupKeys, OnlyGeneratedNodesAreFused) {
  const at::Tensor x = leaf();
  EXPECT_TRUE(may_be_fused(*x.sin().grad_fn()));
  EXPECT_FALSE(may_be_fused(*torch::autograd::impl::grad_accumulator(x)));
  EXPECT_FALSE(may_be_fused(*make_node(1, 1)));
}

struct SameView final : torch::autograd::ViewFunc {
  at::Tensor operator()(const at::Tensor& base) const override { return base; }
  std::unique_ptr<ViewFunc> clone_and_set(std::optional<std::vector<c10::SymInt>>,
                                          std::optional<std::vector<at::Tensor>>) const override {
    return std::make_unique<SameView>();
  }
};

TEST_F(GroupKeys, InPlaceViewsAreFusedForTheFunctionTheyWrap) {
  const at::Tensor x = leaf();
  at::Tensor base = x.clone();
  at::Tensor part = base[0];
  part.tanh_();
  auto& slices = dynamic_cast<torch::autograd::CopySlices&>(*base.grad_fn());
  EXPECT_TRUE(may_be_fused(slices));
  auto inner = slices.fn;
  slices.fn = make_node(1, 1);
  EXPECT_FALSE(may_be_fused(slices));
  slices.fn = base.grad_fn();
  EXPECT_FALSE(may_be_fused(slices));
  slices.fn = nullptr;
  EXPECT_FALSE(may_be_fused(slices)) << "freed";
  slices.fn = std::move(inner);
  EXPECT_TRUE(may_be_fused(slices));
  slices.view_fn = std::make_unique<SameView>();  // as of a backend that has no strides
  EXPECT_FALSE(may_be_fused(slices));
}

}  // namespace
}  // namespace retrograd::test
