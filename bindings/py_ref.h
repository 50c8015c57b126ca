// Owning references to Python objects for C++ objects that may be let go of anywhere: without the GIL, by a thread that
// is ending, after the interpreter is gone.
#pragma once

#include <utility>

#include <torch/csrc/python_headers.h>

namespace retrograd::bindings {

// Lets go of a reference. Never waits for the GIL: without it, the object goes to a list that the next holder of the
// GIL empties; after the interpreter's end it is left alone.
void drop(PyObject* object) noexcept;

// Empties that list. The caller holds the GIL.
void drop_deferred() noexcept;

// For fork(): between the two no other thread holds the list's lock.
void deferred_before_fork();
void deferred_after_fork();

class PyRef {
 public:
  PyRef() = default;
  static PyRef borrow(PyObject* object) noexcept {  // under the GIL
    Py_XINCREF(object);
    return PyRef(object);
  }
  PyRef(PyRef&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  PyRef& operator=(PyRef&& other) noexcept {
    if (this != &other) drop(std::exchange(object_, std::exchange(other.object_, nullptr)));
    return *this;
  }
  PyRef(const PyRef&) = delete;
  PyRef& operator=(const PyRef&) = delete;
  ~PyRef() { drop(object_); }

  PyObject* get() const noexcept { return object_; }
  explicit operator bool() const noexcept { return object_ != nullptr; }

 private:
  explicit PyRef(PyObject* object) noexcept : object_(object) {}
  PyObject* object_ = nullptr;
};

}  // namespace retrograd::bindings
