// Group plans in the plan store: how they are named, written and found again.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "cache/plan_store.h"
#include "engine/group_key.h"
#include "engine/group_plan.h"

namespace retrograd {

// A plan from the store, and what it was made for (GroupShapes::Version).
struct StoredVersion {
  std::shared_ptr<const GroupPlan> plan;
  std::vector<int64_t> numbers;
  std::vector<bool> open;  // by place; empty: none
};

// What is asked of the store: a plan for the group with this portable key. `inputs` are the group's, gradients first;
// of them only counts which are defined. `outputs`: how many the group has.
struct StoredQuery {
  const GroupKey& key;
  const variable_list& inputs;
  size_t outputs;
};

// The plan, if the store has one that serves the key's numbers; with `open`, only one that leaves open exactly these
// places. Damaged and foreign files, and plans that speak of what the group does not have, are as if they were not
// there.
std::optional<StoredVersion> find_stored(const StoredQuery& query, const std::vector<bool>* open = nullptr);

// The right to make a plan that leaves `open` open, among all processes that use the store. Does not wait. Nothing
// where there is no store. Whoever holds it calls find_stored() once more, and keeps it until the plan is stored.
std::optional<cache::Reservation> reserve_stored(const StoredQuery& query, const std::vector<bool>& open);

// Puts a compiled library into the store and loads it from there; from where it is if the store cannot have it.
// Throws c10::Error for a library that cannot be loaded. `name` is for people.
std::shared_ptr<const GroupPlan> store_and_load(const StoredQuery& query, const std::vector<bool>& open,
                                                const std::string& library, GroupPlan::Io io, const std::string& name);

}  // namespace retrograd
