#include "bindings/compilers.h"

#include <algorithm>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "cache/perturb.h"

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

// How many are kept, used or not: of those that nobody else holds, and of all. The second is for functions that only
// seem to be held, by what they made or by themselves.
constexpr size_t kRecent = 32;
constexpr size_t kHeld = 128;

// --- Whether a compiler function is still held by anyone but its Compiler. Under the GIL. ---

// A weak reference would not tell: what is kept for a function has references to it. They are counted.
struct References {
  PyObject* target;
  Py_ssize_t count = 0;

  static int visit(PyObject* object, void* self) {
    auto& references = *static_cast<References*>(self);
    if (object == references.target) {
      ++references.count;
    } else if (is_part(object)) {
      Py_TYPE(object)->tp_traverse(object, &visit, self);
    }
    return 0;
  }
  static bool is_part(PyObject* object) {
    const auto& types = part_types();
    return PyObject_IS_GC(object) && std::find(types.begin(), types.end(), Py_TYPE(object)) != types.end();
  }
  // What keys and factories are made of (bindings/retrograd/_compilers.py).
  static const std::vector<PyTypeObject*>& part_types() {
    static auto* const types = std::make_unique<std::vector<PyTypeObject*>>().release();
    if (!types->empty()) return *types;
    const py::object partial = py::module_::import("functools").attr("partial");
    std::vector<PyTypeObject*> found{&PyTuple_Type, &PyMethod_Type, reinterpret_cast<PyTypeObject*>(partial.ptr())};
    const py::str name("retrograd._compilers");
    for (const auto& [_, value] : py::dict(py::module_::import("retrograd._compilers").attr("__dict__"))) {
      if (!PyType_Check(value.ptr()) || !py::object(value.attr("__module__")).equal(name)) continue;
      found.push_back(reinterpret_cast<PyTypeObject*>(py::reinterpret_borrow<py::object>(value).release().ptr()));
    }
    *types = std::move(found);
    return *types;
  }
};

bool is_partial(py::handle object) { return Py_TYPE(object.ptr()) == References::part_types()[2]; }

bool has_other_holders(PyObject* object, PyObject* maker) {
  References::part_types();  // made now, not inside tp_traverse
  References references{.target = object};
  References::visit(maker, &references);
  return Py_REFCNT(object) > references.count;
}

// The compiler function that a key and factory are made for; borrowed.
PyObject* function_of(py::handle maker) {
  py::object factory = py::getattr(maker, "factory", maker);
  if (is_partial(factory)) {  // torch's front end, bound to it
    const py::tuple args = factory.attr("args");
    if (args.size() == 1) return PyTuple_GET_ITEM(args.ptr(), 0);
  }
  return factory.ptr();  // held by `maker`
}

bool is_held(const Compiler& compiler) {
  PyObject* const function = function_of(compiler.factory());
  if (has_other_holders(function, compiler.factory())) return true;
  if (PyMethod_Check(function) && has_other_holders(PyMethod_GET_SELF(function), compiler.factory())) return true;
  PyObject* const latest = compiler.latest() != nullptr ? PyWeakref_GetObject(compiler.latest()) : Py_None;
  return latest != Py_None && latest != function;
}

void note_use(const std::shared_ptr<Compiler>& compiler) {
  auto& recent = registry().recent;
  if (!recent.empty() && recent.front() == compiler) return;
  std::shared_ptr<Compiler> oldest;  // goes when the list is whole again: that may run any code
  const auto before = std::find(recent.begin(), recent.end(), compiler);
  if (before != recent.end()) recent.erase(before);
  recent.push_front(compiler);
  if (recent.size() <= kRecent) return;
  auto last = recent.end();
  while (last != recent.begin() + kRecent && is_held(**std::prev(last))) --last;
  if (last == recent.begin() + kRecent) {
    if (recent.size() <= kHeld) return;
    last = recent.end();
  }
  oldest = std::move(*--last);
  recent.erase(last);
}

}  // namespace

namespace {

// To the function that it is made for; null where there can be none.
PyRef weak_reference_to(py::handle maker) {
  const auto reference = py::reinterpret_steal<py::object>(PyWeakref_NewRef(function_of(maker), nullptr));
  if (!reference) PyErr_Clear();
  return PyRef::borrow(reference.ptr());
}

}  // namespace

std::shared_ptr<Compiler> use_compiler(uint32_t number) {
  auto compiler = find_compiler(number);
  if (compiler != nullptr) note_use(compiler);
  return compiler;
}

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
    compiler->latest_ = weak_reference_to(key);
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
  cache::perturb("compiler.finding");
  const auto found = registry().by_number.find(number);
  return found == registry().by_number.end() ? nullptr : found->second.lock();
}

}  // namespace retrograd::bindings
