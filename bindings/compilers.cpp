#include "bindings/compilers.h"

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
};
Registry& registry() {
  static auto* const instance = std::make_unique<Registry>().release();
  return *instance;
}

void forget(uint32_t number) {
  const std::lock_guard lock(registry().mutex);
  registry().by_number.erase(number);
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
    if (py::handle(compiler->key.get()).equal(key)) return compiler;
  }
  std::shared_ptr<Compiler> made(
      std::make_unique<Compiler>(Compiler{0, PyRef::borrow(key.ptr()), PyRef::borrow(factory.ptr())}).release(),
      [](Compiler* compiler) {
        forget(compiler->number);
        const std::unique_ptr<Compiler> last(compiler);
      });
  {
    const std::lock_guard lock(all.mutex);
    made->number = ++all.last_number;
    all.by_number.emplace(made->number, made);
  }
  all.by_key.emplace(hash, made);
  // Entries of compilers that are gone pile up under hashes that never come again.
  if (all.by_key.size() > 64 && all.by_key.size() > 2 * all.by_number.size()) {
    std::erase_if(all.by_key, [](const auto& entry) { return entry.second.expired(); });
  }
  return made;
}

std::shared_ptr<Compiler> find_compiler(uint32_t number) {
  const std::lock_guard lock(registry().mutex);
  const auto found = registry().by_number.find(number);
  return found == registry().by_number.end() ? nullptr : found->second.lock();
}

}  // namespace retrograd::bindings
