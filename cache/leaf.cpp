#include "cache/leaf.h"

#include <algorithm>
#include <cstring>

#include "cache/perturb.h"

namespace retrograd::cache {

namespace {

bool equal(KeyView a, KeyView b) noexcept {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

}  // namespace

struct Leaf::Entry {
  std::vector<std::byte> specialization;
  std::shared_ptr<const void> plan;
  std::unique_ptr<Entry> next;
};

Leaf::~Leaf() {
  // One entry at a time: `next` owns the rest, and letting it go in one piece would recurse.
  std::unique_ptr<Entry> entry(plans_.load(std::memory_order_acquire));
  while (entry != nullptr) {
    entry = std::move(entry->next);
  }
}

const void* Leaf::find(KeyView specialization) const noexcept {
  for (const Entry* entry = plans_.load(std::memory_order_acquire); entry != nullptr; entry = entry->next.get()) {
    if (equal(entry->specialization, specialization)) {
      return entry->plan.get();
    }
  }
  return nullptr;
}

void Leaf::for_each(const std::function<void(KeyView, const void*)>& visit) const {
  for (const Entry* entry = plans_.load(std::memory_order_acquire); entry != nullptr; entry = entry->next.get()) {
    visit(entry->specialization, entry->plan.get());
  }
}

Leaf::Builder* Leaf::builder_of(KeyView specialization) {
  const auto found = std::find_if(builders_.begin(), builders_.end(), [&](const Builder& builder) {
    return equal(builder.specialization, specialization);
  });
  return found == builders_.end() ? nullptr : &*found;
}

bool Leaf::Flight::take_off(Wait wait) {
  perturb("leaf.missed");
  MutexLock lock(leaf_.mutex_);
  for (;;) {
    plan_ = leaf_.find(specialization_);
    if (plan_ != nullptr) {
      return false;
    }
    const Builder* builder = leaf_.builder_of(specialization_);
    if (builder == nullptr) {
      leaf_.builders_.push_back({specialization_, std::this_thread::get_id()});
      flying_ = true;
      return true;
    }
    if (wait == Wait::kNo || builder->thread == std::this_thread::get_id()) {
      return false;
    }
    leaf_.build_ended_.wait(leaf_.mutex_);
  }
}

const void* Leaf::Flight::land(std::shared_ptr<const void> plan) {
  if (plan == nullptr) {
    return nullptr;
  }
  perturb("leaf.built");
  plan_ = plan.get();
  auto entry = std::make_unique<Entry>();
  entry->specialization.assign(specialization_.begin(), specialization_.end());
  entry->plan = std::move(plan);
  MutexLock lock(leaf_.mutex_);
  entry->next.reset(leaf_.plans_.load(std::memory_order_relaxed));
  perturb("leaf.publishing");
  leaf_.plans_.store(entry.release(), std::memory_order_release);
  leaf_.plan_count_.fetch_add(1, std::memory_order_release);
  return plan_;
}

Leaf::Flight::~Flight() {
  if (!flying_) {
    return;
  }
  perturb("leaf.landed");
  {
    MutexLock lock(leaf_.mutex_);
    Builder* builder = leaf_.builder_of(specialization_);
    *builder = leaf_.builders_.back();
    leaf_.builders_.pop_back();
  }
  leaf_.build_ended_.notify_all();
}

}  // namespace retrograd::cache
