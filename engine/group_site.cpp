#include "engine/group_site.h"

#include <algorithm>

#include "cache/perturb.h"

namespace retrograd {

GroupShapes::~GroupShapes() {
  for (Link* link = first_.load(std::memory_order_acquire); link != nullptr;) {
    const std::unique_ptr<Link> last(link);
    link = last->next.load(std::memory_order_acquire);
  }
}

bool GroupShapes::serves(const Version& version, std::span<const int64_t> numbers) noexcept {
  if (numbers.size() != version.numbers.size()) return false;
  if (version.entry->state() == GroupEntry::State::kSuperseded) return false;
  if (version.open.empty()) return std::ranges::equal(numbers, version.numbers);
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (numbers[i] != version.numbers[i] && !version.open[i]) return false;
  }
  const GroupPlan* const plan = version.entry->plan();
  if (plan != nullptr) return plan->io().guards.hold(numbers);
  // One that could not be made with open numbers must not be in the way of those without.
  return version.entry->state() != GroupEntry::State::kRefused;
}

const GroupShapes::Version* GroupShapes::find(std::span<const int64_t> numbers) const noexcept {
  for (const Link* link = first_.load(std::memory_order_acquire); link != nullptr;
       link = link->next.load(std::memory_order_acquire)) {
    if (serves(link->version, numbers)) return &link->version;
  }
  return nullptr;
}

const GroupShapes::Version* GroupShapes::find_or_add(std::span<const int64_t> numbers) const {
  cache::perturb("shapes.missed");
  const std::lock_guard lock(mutex_);
  if (const Version* found = find(numbers)) return found;
  if (size() >= kMaxVersions) return nullptr;
  auto added = std::make_unique<Link>();
  added->version.numbers.assign(numbers.begin(), numbers.end());
  if (const Link* first = first_.load(std::memory_order_acquire)) {
    // What ever changed, so far and now.
    std::vector<bool> open(numbers.size(), false);
    for (size_t i = 0; i < numbers.size(); ++i) open[i] = numbers[i] != first->version.numbers[i];
    bool known = false;
    for (Link* link = first_.load(std::memory_order_acquire); link != nullptr;
         link = link->next.load(std::memory_order_acquire)) {
      for (size_t i = 0; i < numbers.size(); ++i) open[i] = open[i] || link->version.is_open(i);
      known |= link->version.open == open;
    }
    // Sizes 0 and 1 are special: no plan made from such a call could serve others, so it gets one for itself.
    for (size_t i = 0; i < numbers.size(); ++i) known |= open[i] && numbers[i] < 2;
    if (!known) added->version.open = std::move(open);
  }
  return append(std::move(added));
}

const GroupShapes::Version* GroupShapes::append(std::unique_ptr<Link> link) const {
  std::atomic<Link*>* end = &first_;
  while (Link* const last = end->load(std::memory_order_acquire)) end = &last->next;
  const Version* const version = &link->version;
  cache::perturb("shapes.publishing");
  end->store(link.release(), std::memory_order_release);
  size_.store(size() + 1, std::memory_order_release);
  return version;
}

void GroupShapes::add_ready(std::vector<int64_t> numbers, std::vector<bool> open,
                            std::shared_ptr<const GroupPlan> plan) const {
  auto added = std::make_unique<Link>();
  added->version.numbers = std::move(numbers);
  added->version.open = std::move(open);
  added->version.entry->first_look();
  added->version.entry->settle(std::move(plan));
  const std::lock_guard lock(mutex_);
  append(std::move(added));
}

}  // namespace retrograd
