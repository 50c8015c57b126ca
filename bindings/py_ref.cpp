#include "bindings/py_ref.h"

#include <memory>
#include <mutex>
#include <vector>

#include "cache/perturb.h"

namespace retrograd::bindings {
namespace {

// Never destroyed: references may be dropped while static destructors run. The lock is held for a push or a swap only.
struct Deferred {
  std::mutex mutex;
  std::vector<PyObject*> objects;
};
Deferred& deferred() {
  static auto* const instance = std::make_unique<Deferred>().release();
  return *instance;
}

bool interpreter_alive() noexcept { return Py_IsInitialized() != 0 && _Py_IsFinalizing() == 0; }

}  // namespace

void drop(PyObject* object) noexcept {
  if (object == nullptr || !interpreter_alive()) return;
  if (PyGILState_Check() != 0) {
    Py_DECREF(object);
    return;
  }
  try {
    const std::lock_guard lock(deferred().mutex);
    cache::perturb("deferred.pushing");
    deferred().objects.push_back(object);
  } catch (...) {  // out of memory: it leaks
    return;
  }
  // The interpreter calls it between two instructions of the main thread; a full queue is no loss, the next capture or
  // clear empties the list too.
  Py_AddPendingCall(
      [](void*) {
        drop_deferred();
        return 0;
      },
      nullptr);
}

void deferred_before_fork() { deferred().mutex.lock(); }
void deferred_after_fork() { deferred().mutex.unlock(); }

void drop_deferred() noexcept {
  std::vector<PyObject*> objects;
  {
    const std::lock_guard lock(deferred().mutex);
    objects.swap(deferred().objects);
  }
  for (PyObject* object : objects) Py_DECREF(object);
}

}  // namespace retrograd::bindings
