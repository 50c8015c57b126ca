// Preloaded into a Python process: counts how often the calling thread takes the GIL, whoever asks for it. What a
// thread does that holds it already is not counted, nor is the interpreter's own handing over between two bytecodes.
#include <cstdint>
#include <dlfcn.h>

namespace {

thread_local int64_t takes = 0;    // by code that did not hold it
thread_local int64_t retakes = 0;  // by code that gave it up for a while: PyEval_SaveThread
thread_local bool inside = false;  // one of Python's functions for this may call another

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

class Take {
 public:
  explicit Take(int64_t* counter) : outermost_(!inside) {
    if (outermost_ && counter != nullptr) ++*counter;
    inside = true;
  }
  ~Take() {
    if (outermost_) inside = false;
  }
  Take(const Take&) = delete;
  Take& operator=(const Take&) = delete;

 private:
  const bool outermost_;
};

}  // namespace

extern "C" {

int64_t gil_takes() { return takes; }
int64_t gil_retakes() { return retakes; }

int PyGILState_Ensure() {
  static auto* const check = next<int()>("PyGILState_Check");
  static auto* const ensure = next<int()>("PyGILState_Ensure");
  const Take take(check() == 0 ? &takes : nullptr);
  return ensure();
}

void PyEval_AcquireThread(void* state) {
  static auto* const acquire = next<void(void*)>("PyEval_AcquireThread");
  const Take take(&takes);
  acquire(state);
}

void PyEval_RestoreThread(void* state) {
  static auto* const restore = next<void(void*)>("PyEval_RestoreThread");
  const Take take(&retakes);
  restore(state);
}

}  // extern "C"
