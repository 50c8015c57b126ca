#include "bindings/compiler_interface.h"

#include <chrono>
#include <map>
#include <shared_mutex>

#include "cache/perturb.h"

namespace retrograd::bindings {

using torch::dynamo::autograd::PyCompilerInterface;
using torch::dynamo::autograd::SwapSavedVariables;

namespace {

std::timed_mutex*& capture_mutex() {
  static std::timed_mutex* mutex = std::make_unique<std::timed_mutex>().release();
  return mutex;
}

// Whether our interface is in libtorch's place. Guarded by the capture lock.
bool interface_in_place = false;

// Never destroyed: threads may record while static destructors run.
struct Functions {
  std::shared_mutex mutex;
  std::map<std::string, torch::autograd::functional_apply_t, std::less<>> by_name;  // guarded by mutex
};
Functions& functions() {
  static auto* const instance = std::make_unique<Functions>().release();
  return *instance;
}

template <class Stash>
void put_back(Stash& stash) {
  for (auto& [place, stashed] : stash) {
    using Value = std::remove_const_t<std::remove_pointer_t<std::remove_const_t<decltype(place)>>>;
    *const_cast<Value*>(place) = std::move(stashed.prior_value);
  }
  stash.clear();
}

}  // namespace

// What the node had is in SwapSavedVariables, privately; access does not apply to explicit instantiations.
template <auto kVariables, auto kTensors, auto kSymInts, auto kIValues>
struct StashAccess {
  friend void put_back_all(SwapSavedVariables& saved, bool tensors) {
    put_back(saved.*kVariables);
    if (tensors) put_back(saved.*kTensors);
    put_back(saved.*kSymInts);
    put_back(saved.*kIValues);
  }
};
template struct StashAccess<&SwapSavedVariables::stashed_variables, &SwapSavedVariables::stashed_tensors,
                            &SwapSavedVariables::stashed_symints, &SwapSavedVariables::stashed_ivalues>;

void put_back_all(SwapSavedVariables& saved, bool tensors);
void put_back_node(SwapSavedVariables& saved, bool tensors) { put_back_all(saved, tensors); }

InterfaceGuard::InterfaceGuard(std::unique_ptr<PyCompilerInterface> interface) : guard_(std::move(interface)) {
  interface_in_place = true;
}
InterfaceGuard::~InterfaceGuard() { interface_in_place = false; }

void remember_function(const std::string& name, torch::autograd::functional_apply_t function) {
  const std::unique_lock lock(functions().mutex);
  functions().by_name.insert_or_assign(name, std::move(function));
}

torch::autograd::functional_apply_t find_function(const std::string& name) {
  const std::shared_lock lock(functions().mutex);
  const auto found = functions().by_name.find(name);
  return found != functions().by_name.end() ? found->second : nullptr;
}

CaptureLock::CaptureLock() : mutex_(*capture_mutex()) {
  mutex_.lock();
  cache::perturb("capture.locked");
}
CaptureLock::CaptureLock(std::chrono::milliseconds patience)
    : mutex_(*capture_mutex()), owns_(mutex_.try_lock_for(patience)) {}
CaptureLock::~CaptureLock() {
  if (owns_) mutex_.unlock();
}

void capture_after_fork_in_child() {
  // The old mutex may be held by a thread that is not here.
  capture_mutex() = std::make_unique<std::timed_mutex>().release();
  if (!interface_in_place) return;
  // Its interface would stay in libtorch's place for ever: the guard was that thread's. The only way to the place is
  // the reference that libtorch gives out for reading.
  auto& place = const_cast<std::unique_ptr<PyCompilerInterface>&>(torch::dynamo::autograd::getPyCompilerInterface());
  static_cast<void>(place.release());  // not deleted: it may be in use by half-done work in this copy of memory
  interface_in_place = false;
}

}  // namespace retrograd::bindings
