#include "engine/callable.h"

#include <atomic>

namespace retrograd {
namespace {

std::atomic<CallableBackend*> the_backend{nullptr};

}  // namespace

void set_callable_backend(CallableBackend* backend) noexcept { the_backend.store(backend, std::memory_order_release); }
CallableBackend* callable_backend() noexcept { return the_backend.load(std::memory_order_acquire); }

}  // namespace retrograd
