#include "bindings/compilers.h"

#include <algorithm>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace retrograd::bindings {
namespace {

namespace py = pybind11;

// Never destroyed: threads may look up compilers while static destructors run.
struct Registry {
  std::mutex mutex;  // guards by_number; nothing of Python happens under it
  std::unordered_map<uint32_t, std::weak_ptr<Compiler>> by_number;
  std::unordered_multimap<Py_hash_t, std::weak_ptr<Compiler>> by_key;  // guarded by the caller of intern_compiler()
  uint32_t last_number = 0;
  std::deque<std::shared_ptr<Compiler>> recent;  // latest first; under the GIL
};
Registry& registry() {
  static auto* const instance = std::make_unique<Registry>().release();
  return *instance;
}

constexpr size_t kRecent = 32;

void note_use(const std::shared_ptr<Compiler>& compiler) {
  auto& recent = registry().recent;
  if (!recent.empty() && recent.front() == compiler) return;
  std::shared_ptr<Compiler> oldest;  // goes when the list is whole again: that may run any code
  const auto before = std::find(recent.begin(), recent.end(), compiler);
  if (before != recent.end()) recent.erase(before);
  recent.push_front(compiler);
  if (recent.size() > kRecent) {
    oldest = std::move(recent.back());
    recent.pop_back();
  }
}

}  // namespace

std::shared_ptr<Compiler> intern_compiler(const py::object& key, const py::object& factory) {
  Registry& all = registry();
  const Py_hash_t hash = py::hash(key);
  std::vector<std::shared_ptr<Compiler>> candidates;
  const auto [begin, end] = all.by_key.equal_range(hash);
  for (auto it = begin; it != end;) {
    if (auto compiler = it->second.lock()) {
      candidates.push_back(std::move(compiler));
      ++it;
    } else {
      it = all.by_key.erase(it);
    }
  }
  for (auto& compiler : candidates) {
    if (!py::handle(compiler->key()).equal(key)) continue;
    note_use(compiler);
    return compiler;
  }
  auto made = std::make_shared<Compiler>(PyRef::borrow(key.ptr()), PyRef::borrow(factory.ptr()));
  {
    const std::lock_guard lock(all.mutex);
    made->number_ = ++all.last_number;
    all.by_number.emplace(made->number_, made);
  }
  all.by_key.emplace(hash, made);
  // Entries of compilers that are gone pile up under hashes that never come again.
  if (all.by_key.size() > 64 && all.by_key.size() > 2 * all.by_number.size()) {
    std::erase_if(all.by_key, [](const auto& entry) { return entry.second.expired(); });
  }
  note_use(made);
  return made;
}

void forget_recent_compilers() {
  std::deque<std::shared_ptr<Compiler>> recent;
  recent.swap(registry().recent);
}

void compilers_before_fork() { registry().mutex.lock(); }
void compilers_after_fork() { registry().mutex.unlock(); }

Compiler::~Compiler() {
  {
    const std::lock_guard lock(registry().mutex);
    registry().by_number.erase(number_);
  }
  for (const auto& entry : kept_) {
    if (const auto kept = entry.lock()) kept->let_go();
  }
}

void Compiler::keep(const std::shared_ptr<Kept>& kept) {
  const std::lock_guard lock(mutex_);
  if (kept_.size() == kept_.capacity()) {
    std::erase_if(kept_, [](const auto& entry) { return entry.expired(); });
  }
  kept_.push_back(kept);
}

std::shared_ptr<Compiler> find_compiler(uint32_t number) {
  const std::lock_guard lock(registry().mutex);
  const auto found = registry().by_number.find(number);
  return found == registry().by_number.end() ? nullptr : found->second.lock();
}

}  // namespace retrograd::bindings
