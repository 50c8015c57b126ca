// Cutting schedules into groups.
#include <map>
#include <random>
#include <set>
#include <sstream>

#include "engine/partition.h"
#include "engine_test_util.h"

namespace retrograd::test {
namespace {

using To = GroupEdge::To;

// Steps in engine order; each with its edges as (step, input) and as many inputs as edges need.
GraphShape shape_of(const std::vector<std::vector<EdgeShape>>& edges, uint32_t root_input = 0) {
  GraphShape shape;
  shape.root_input = root_input;
  std::vector<uint32_t> inputs(edges.size(), 1);
  inputs[0] = root_input + 1;
  for (const auto& of_step : edges) {
    for (const EdgeShape& edge : of_step) {
      if (edge.step != kNoStep) inputs[edge.step] = std::max(inputs[edge.step], edge.input_nr + 1);
    }
  }
  for (size_t k = 0; k < edges.size(); ++k) {
    shape.steps.push_back({.type = &typeid(TestNode),
                           .num_inputs = inputs[k],
                           .first_edge = static_cast<uint32_t>(shape.edges.size()),
                           .num_edges = static_cast<uint32_t>(edges[k].size()),
                           .first_capture = 0,
                           .num_captures = 0,
                           .needed = true});
    shape.edges.insert(shape.edges.end(), edges[k].begin(), edges[k].end());
  }
  return shape;
}

std::string text(const Partition& cut) {
  std::ostringstream out;
  for (const auto& item : cut.items) {
    if (!item.is_group) {
      out << item.index << ' ';
      continue;
    }
    out << "[ ";
    for (const uint32_t k : cut.groups[item.index].steps) out << k << ' ';
    out << "] ";
  }
  return out.str();
}

// The stated rule, said in another way: before a step that still waits for something, all that can run by now and may
// be in groups is one group; cut where it is too large.
std::string expected_text(const GraphShape& shape, const std::vector<bool>& fusable, size_t min_members,
                          size_t max_members) {
  std::ostringstream out;
  const auto count = static_cast<uint32_t>(shape.steps.size());
  std::vector<std::set<uint32_t>> sources(count);
  for (uint32_t k = 0; k < count; ++k) {
    for (const EdgeShape& edge : shape.edges_of(shape.steps[k])) {
      if (edge.step != kNoStep) sources[edge.step].insert(k);
    }
  }
  std::set<uint32_t> done;
  const auto can_run = [&](uint32_t k) {
    return std::ranges::all_of(sources[k], [&](uint32_t source) { return done.contains(source); });
  };
  const auto flush = [&] {
    std::set<uint32_t> group;
    const auto end_group = [&] {
      const bool is_group = !group.empty() && group.size() >= min_members;
      if (is_group) out << "[ ";
      for (const uint32_t k : group) out << k << ' ';
      if (is_group) out << "] ";
      group.clear();
    };
    for (uint32_t k = 0; k < count;) {
      if (!fusable[k] || done.contains(k) || !can_run(k)) {
        ++k;
        continue;
      }
      group.insert(k);
      done.insert(k);
      if (group.size() == max_members) end_group();
      k = 0;  // the first that can run now
    }
    end_group();
  };
  for (uint32_t k = 0; k < count; ++k) {
    if (fusable[k]) continue;
    if (!can_run(k)) flush();
    out << k << ' ';
    done.insert(k);
  }
  flush();
  return out.str();
}

void expect_consistent(const GraphShape& shape, const Partition& cut) {
  for (const Group& group : cut.groups) {
    EXPECT_TRUE(std::ranges::is_sorted(group.steps));
    std::map<uint32_t, uint32_t> members;
    for (uint32_t m = 0; m < group.steps.size(); ++m) members[group.steps[m]] = m;
    EXPECT_EQ(members.size(), group.steps.size());

    // Edges say what the shape says; outputs are numbered as they come.
    ASSERT_EQ(group.first_edge.size(), group.steps.size() + 1);
    std::vector<std::pair<uint32_t, uint32_t>> outputs;
    std::vector<GroupEdge> edges;
    for (size_t m = 0; m < group.steps.size(); ++m) {
      EXPECT_EQ(group.first_edge[m], edges.size());
      for (const EdgeShape& edge : shape.edges_of(shape.steps[group.steps[m]])) {
        if (edge.step == kNoStep) {
          edges.push_back({To::kNowhere, 0, 0});
        } else if (members.contains(edge.step)) {
          EXPECT_GT(members[edge.step], m);
          edges.push_back({To::kMember, members[edge.step], edge.input_nr});
        } else {
          const std::pair slot(edge.step, edge.input_nr);
          auto place = std::ranges::find(outputs, slot);
          if (place == outputs.end()) place = outputs.insert(outputs.end(), slot);
          edges.push_back({To::kOutside, static_cast<uint32_t>(place - outputs.begin()), 0});
        }
      }
    }
    EXPECT_EQ(group.first_edge.back(), edges.size());
    EXPECT_EQ(group.edges, edges);
    ASSERT_EQ(group.outputs.size(), outputs.size());
    for (size_t i = 0; i < outputs.size(); ++i) {
      EXPECT_EQ(group.outputs[i].step, outputs[i].first);
      EXPECT_EQ(group.outputs[i].input_nr, outputs[i].second);
    }

    std::set<std::pair<uint32_t, uint32_t>> inputs;
    if (members.contains(0)) inputs.emplace(members[0], shape.root_input);
    for (uint32_t k = 0; k < shape.steps.size(); ++k) {
      for (const EdgeShape& edge : shape.edges_of(shape.steps[k])) {
        if (edge.step == kNoStep || !members.contains(edge.step) || members.contains(k)) continue;
        inputs.emplace(members[edge.step], edge.input_nr);
      }
    }
    std::vector<GroupInput> expected;
    for (const auto& [member, input_nr] : inputs) expected.push_back({member, input_nr});
    EXPECT_EQ(group.inputs, expected);
  }
}

TEST(Partition, AllOfAChainIsOneGroup) {
  const GraphShape shape = shape_of({{{1, 0}}, {{2, 0}}, {}});
  const Partition cut = make_partition(shape, {true, true, true}, 2);
  EXPECT_EQ(text(cut), "[ 0 1 2 ] ");
  expect_consistent(shape, cut);
  ASSERT_EQ(cut.groups.size(), 1U);
  EXPECT_EQ(cut.groups[0].inputs, (std::vector<GroupInput>{{0, 0}}));
  EXPECT_TRUE(cut.groups[0].outputs.empty());
}

TEST(Partition, NothingToFuse) {
  const Partition cut = make_partition(shape_of({{{1, 0}}, {{2, 0}}, {}}), {false, false, false}, 2);
  EXPECT_EQ(text(cut), "0 1 2 ");
  EXPECT_TRUE(cut.groups.empty());
}

TEST(Partition, OneStep) {
  EXPECT_EQ(text(make_partition(shape_of({{}}), {true}, 1)), "[ 0 ] ");
  EXPECT_EQ(text(make_partition(shape_of({{}}), {true}, 2)), "0 ");
  EXPECT_EQ(text(make_partition(shape_of({{}}), {false}, 1)), "0 ");
}

TEST(Partition, AStepThatMayNotJoinCutsItsChain) {
  const GraphShape shape = shape_of({{{1, 0}}, {{2, 1}}, {{3, 0}}, {{4, 0}}, {}});
  const Partition cut = make_partition(shape, {true, true, false, true, true}, 2);
  EXPECT_EQ(text(cut), "[ 0 1 ] 2 [ 3 4 ] ");
  expect_consistent(shape, cut);
  EXPECT_EQ(cut.groups[0].edges, (std::vector<GroupEdge>{{To::kMember, 1, 0}, {To::kOutside, 0, 0}}));
  EXPECT_EQ(cut.groups[0].outputs.at(0).step, 2U);
  EXPECT_EQ(cut.groups[0].outputs.at(0).input_nr, 1U);
  EXPECT_EQ(cut.groups[1].inputs, (std::vector<GroupInput>{{0, 0}}));
}

// A leaf early in the engine's order does not cut what need not be done before it.
TEST(Partition, GroupsRunAsLateAsTheirUsersAllow) {
  // 0 -> 1 (a leaf), 2; 2 -> 3, 4 (a leaf); 3 -> 5 (a leaf)
  const GraphShape shape = shape_of({{{1, 0}, {2, 0}}, {}, {{3, 0}, {4, 0}}, {{5, 0}}, {}, {}});
  EXPECT_EQ(text(make_partition(shape, {true, false, true, true, false, false}, 2)), "[ 0 2 3 ] 1 4 5 ");
  EXPECT_EQ(text(make_partition(shape, {false, false, true, true, false, false}, 2)), "0 1 [ 2 3 ] 4 5 ");
}

TEST(Partition, SmallGroupsAreDissolvedWhereTheyStood) {
  // 0 -> 1 -> 2 -> 3; 1 and 3 alone
  const GraphShape shape = shape_of({{{1, 0}}, {{2, 0}}, {{3, 0}}, {}});
  EXPECT_EQ(text(make_partition(shape, {false, true, false, true}, 2)), "0 1 2 3 ");
  // 0 -> 1, 3; 1 -> 2 (a leaf); 3 -> 4 (a leaf): two are enough, for three they are not
  const GraphShape wide = shape_of({{{1, 0}, {3, 0}}, {{2, 0}}, {}, {{4, 0}}, {}});
  const Partition cut = make_partition(wide, {false, true, false, true, false}, 2);
  EXPECT_EQ(text(cut), "0 [ 1 3 ] 2 4 ");
  expect_consistent(wide, cut);
  EXPECT_EQ(text(make_partition(wide, {false, true, false, true, false}, 3)), "0 1 3 2 4 ");
}

TEST(Partition, LargeGroupsAreCutInEngineOrder) {
  const GraphShape chain = shape_of({{{1, 0}, {3, 0}}, {{2, 0}}, {{4, 0}}, {{4, 0}}, {{5, 0}}, {}});
  const std::vector<bool> all(6, true);
  EXPECT_EQ(text(make_partition(chain, all, 2, 4)), "[ 0 1 2 3 ] [ 4 5 ] ");
  EXPECT_EQ(text(make_partition(chain, all, 2, 5)), "[ 0 1 2 3 4 ] 5 ");
  expect_consistent(chain, make_partition(chain, all, 2, 4));
  std::vector<std::vector<EdgeShape>> edges(kMaxMembers + 5);
  for (uint32_t k = 0; k + 1 < edges.size(); ++k) edges[k] = {{k + 1, 0}};
  const Partition cut = make_partition(shape_of(edges), std::vector<bool>(edges.size(), true), 2);
  ASSERT_EQ(cut.groups.size(), 2U);
  EXPECT_EQ(cut.groups[0].steps.size(), kMaxMembers);
}

TEST(Partition, SlotsAreNamedOnce) {
  // Both outputs of 0 into one slot of 1; both members into one slot of 3; 4 by two ways; one edge to nowhere.
  const GraphShape shape =
      shape_of({{{1, 1}, {1, 1}, {2, 0}}, {{3, 2}, {4, 0}}, {{3, 2}, {4, 1}, {kNoStep, 0}}, {}, {}});
  const Partition cut = make_partition(shape, {false, true, true, false, false}, 2);
  EXPECT_EQ(text(cut), "0 [ 1 2 ] 3 4 ");
  expect_consistent(shape, cut);
  EXPECT_EQ(cut.groups[0].inputs, (std::vector<GroupInput>{{0, 1}, {1, 0}}));
  ASSERT_EQ(cut.groups[0].outputs.size(), 3U);
  EXPECT_EQ(cut.groups[0].edges, (std::vector<GroupEdge>{{To::kOutside, 0, 0},
                                                         {To::kOutside, 1, 0},
                                                         {To::kOutside, 0, 0},
                                                         {To::kOutside, 2, 0},
                                                         {To::kNowhere, 0, 0}}));
}

TEST(Partition, TheCallsGradientEntersAtTheRootsInput) {
  const GraphShape shape = shape_of({{{1, 0}}, {}}, /*root_input=*/3);
  const Partition cut = make_partition(shape, {true, true}, 2);
  expect_consistent(shape, cut);
  EXPECT_EQ(cut.groups.at(0).inputs, (std::vector<GroupInput>{{0, 3}}));
}

TEST(Partition, RandomGraphs) {
  size_t groups = 0, dissolved = 0;
  for (uint32_t seed = 0; seed < 3000; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto below = [&](size_t n) { return static_cast<uint32_t>(random() % n); };
    const uint32_t count = 1 + below(seed % 10 == 0 ? 60 : 14);
    std::vector<std::vector<EdgeShape>> edges(count);
    for (uint32_t k = 1; k < count; ++k) {
      edges[random() % 3 == 0 ? k - 1 : below(k)].push_back({k, below(3)});  // every step is reached
    }
    for (uint32_t k = 0; k < count; ++k) {
      for (uint32_t e = below(4); e > 0; --e) {
        if (below(6) == 0 || k + 1 == count) {
          edges[k].push_back({kNoStep, 0});
        } else {
          edges[k].push_back({k + 1 + below(count - k - 1), below(3)});
        }
      }
      std::shuffle(edges[k].begin(), edges[k].end(), random);
    }
    const GraphShape shape = shape_of(edges, below(2));
    std::vector<bool> fusable(count);
    const uint32_t density = 1 + below(5);
    for (uint32_t k = 0; k < count; ++k) fusable[k] = below(5) < density;
    const size_t min_members = 1 + below(3);

    const size_t max_members = below(2) == 0 ? kMaxMembers : 3 + below(4);

    const Partition cut = make_partition(shape, fusable, min_members, max_members);
    EXPECT_EQ(text(cut), expected_text(shape, fusable, min_members, max_members));
    expect_consistent(shape, cut);

    // Every step once; after all that it waits for; steps that may not join in engine order.
    std::vector<size_t> at(count, SIZE_MAX);
    std::vector<uint32_t> alone;
    std::set<uint32_t> used_groups;
    for (size_t i = 0; i < cut.items.size(); ++i) {
      const auto& item = cut.items[i];
      const std::vector<uint32_t> one{item.index};
      if (item.is_group) {
        EXPECT_TRUE(used_groups.insert(item.index).second);
        EXPECT_GE(cut.groups.at(item.index).steps.size(), min_members);
        EXPECT_LE(cut.groups.at(item.index).steps.size(), max_members);
      }
      for (const uint32_t k : item.is_group ? cut.groups.at(item.index).steps : one) {
        EXPECT_EQ(at.at(k), SIZE_MAX);
        at[k] = i;
        if (item.is_group) {
          EXPECT_TRUE(fusable[k]);
        } else {
          dissolved += static_cast<size_t>(fusable[k]);
        }
        if (!fusable[k]) alone.push_back(k);
      }
    }
    EXPECT_EQ(used_groups.size(), cut.groups.size());
    EXPECT_TRUE(std::ranges::find(at, SIZE_MAX) == at.end());
    EXPECT_TRUE(std::ranges::is_sorted(alone));
    for (uint32_t k = 0; k < count; ++k) {
      for (const EdgeShape& edge : shape.edges_of(shape.steps[k])) {
        if (edge.step == kNoStep) continue;
        EXPECT_LE(at[k], at[edge.step]);
        if (at[k] == at[edge.step]) {
          EXPECT_TRUE(cut.items[at[k]].is_group);
        }
      }
    }
    groups += cut.groups.size();
    if (HasFailure()) break;
  }
  EXPECT_GT(groups, 3000U);
  EXPECT_GT(dissolved, 300U);
}

}  // namespace
}  // namespace retrograd::test
