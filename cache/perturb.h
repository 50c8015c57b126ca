// Delays at named points of the code where threads meet, so that tests reach schedules that are rare otherwise.
#pragma once

#include <atomic>
#include <cstdint>

namespace retrograd::cache {

namespace detail {
extern std::atomic<uint64_t> perturb_seed;
void delay(const char* point) noexcept;
}  // namespace detail

// One relaxed load while perturbation is off, as it is unless RETROGRAD_PERTURB in the environment or perturb_with()
// gives a seed; then, at random, nothing, a yield or a sleep of at most a third of a millisecond. `point` is a literal
// of the form "where.what".
inline void perturb(const char* point) noexcept {
  if (detail::perturb_seed.load(std::memory_order_relaxed) != 0) [[unlikely]] {
    detail::delay(point);
  }
}

// Whether it is on.
inline bool is_perturbed() noexcept { return detail::perturb_seed.load(std::memory_order_relaxed) != 0; }

// For all threads, from their next point on; 0: off. Returns the former seed. Equal seeds give the n-th thread that
// passes a point the same delays, which makes a failure likely to come again, not certain: the scheduler has its own
// will.
uint64_t perturb_with(uint64_t seed) noexcept;

// How many yields and sleeps there were so far. A test that is to run perturbed asserts that this grew.
uint64_t perturbations() noexcept;

}  // namespace retrograd::cache
