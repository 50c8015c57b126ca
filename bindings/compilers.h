// The compiler functions that threads asked for, and the objects that stand for them in settings and in the cache.
#pragma once

#include <cstdint>
#include <memory>

#include <torch/extension.h>

#include "bindings/py_ref.h"

namespace retrograd::bindings {

// One compiler function. Alive as long as an open block, a default, a call in flight or a cached graph needs it.
struct Compiler {
  uint32_t number;  // never given twice
  PyRef key;        // equal keys: the same compiler
  PyRef factory;    // factory() makes what captures one graph: an AutogradCompilerInstance of torch's front end
};

// The compiler with this key, made of `factory` where there is none. Under the GIL, one caller at a time (comparing
// keys may run Python code, which lets other threads in).
std::shared_ptr<Compiler> intern_compiler(const pybind11::object& key, const pybind11::object& factory);

// The compiler with this number; null when it is gone. Needs no GIL.
std::shared_ptr<Compiler> find_compiler(uint32_t number);

}  // namespace retrograd::bindings
