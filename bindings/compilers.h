// The compiler functions that threads asked for, and the objects that stand for them in settings and in the cache.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <torch/extension.h>

#include "bindings/py_ref.h"

namespace retrograd::bindings {

// What was made for a compiler function and is of no use without it.
class Kept {
 public:
  virtual ~Kept() = default;
  virtual void let_go() noexcept = 0;
};

// One compiler function. Alive as long as an open block, a default or a call in flight needs it, while the program
// holds the function, or while it is among the functions used last; a program that makes a new one at every step must
// not fill memory with their graphs. When it goes, so does what is kept for it.
class Compiler {
 public:
  Compiler(PyRef key, PyRef factory) : key_(std::move(key)), factory_(std::move(factory)) {}
  ~Compiler();
  Compiler(const Compiler&) = delete;
  Compiler& operator=(const Compiler&) = delete;

  uint32_t number() const { return number_; }   // never given twice
  PyObject* key() const { return key_.get(); }  // equal keys: the same compiler
  PyObject* factory() const {
    return factory_.get();
  }  // factory() makes what captures one graph, such as torch's
     // AutogradCompilerInstance
  // A weak reference to the function that was last found to be equal; null: none. Under the GIL.
  PyObject* latest() const { return latest_.get(); }
  void keep(const std::shared_ptr<Kept>& kept);

 private:
  friend std::shared_ptr<Compiler> intern_compiler(const pybind11::object& key, const pybind11::object& factory);

  uint32_t number_ = 0;
  PyRef key_, factory_, latest_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<Kept>> kept_;  // guarded by mutex_
};

// The compiler with this key, made of `factory` where there is none. Under the GIL, one caller at a time (comparing
// keys may run Python code, which lets other threads in).
std::shared_ptr<Compiler> intern_compiler(const pybind11::object& key, const pybind11::object& factory);

// Forgets which compilers were used last. Under the GIL.
void forget_recent_compilers();

// For fork(): between the two no other thread holds a lock of the registry's.
void compilers_before_fork();
void compilers_after_fork();

// The compiler with this number; null when it is gone. Needs no GIL.
std::shared_ptr<Compiler> find_compiler(uint32_t number);
// The same for one that is going to be used. Under the GIL.
std::shared_ptr<Compiler> use_compiler(uint32_t number);

}  // namespace retrograd::bindings
