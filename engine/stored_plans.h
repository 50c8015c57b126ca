// Group plans in the plan store: how they are named, written and found again.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "engine/group_key.h"
#include "engine/group_plan.h"

namespace retrograd {

// A plan from the store, and what it was made for (GroupShapes::Version).
struct StoredVersion {
  std::shared_ptr<const GroupPlan> plan;
  std::vector<int64_t> numbers;
  std::vector<bool> open;  // by place; empty: none
};

// The plan for a group with this portable key, if the store has one that serves its numbers. Damaged and foreign files
// are as if they were not there.
std::optional<StoredVersion> find_stored(const GroupKey& key);

// Puts a compiled library into the store and loads it from there; from where it is if the store cannot have it.
// Throws c10::Error for a library that cannot be loaded. `name` is for people.
std::shared_ptr<const GroupPlan> store_and_load(const GroupKey& key, const std::vector<bool>& open,
                                                const std::string& library, GroupPlan::Io io, const std::string& name);

// Whether there is a store that works; if not, why, in one sentence (empty where it was switched off).
bool has_plan_store(std::string* why_not = nullptr);

}  // namespace retrograd
