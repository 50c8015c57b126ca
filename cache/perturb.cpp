#include "cache/perturb.h"

#include <chrono>
#include <cstdlib>
#include <thread>

namespace retrograd::cache {

namespace {

std::atomic<uint64_t> delays{0};
std::atomic<uint64_t> settings{1};  // changes with every perturb_with(): threads begin anew
std::atomic<uint64_t> threads{0};   // that passed a point since

// splitmix64: any state will do, neighbouring ones give unrelated numbers.
uint64_t next_random(uint64_t& state) noexcept {
  uint64_t z = state += 0x9E3779B97F4A7C15U;
  z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27U)) * 0x94D049BB133111EBU;
  return z ^ (z >> 31U);
}

uint64_t seed_of_environment() noexcept {
  const char* const text = std::getenv("RETROGRAD_PERTURB");  // NOLINT(concurrency-mt-unsafe): before any thread
  return text == nullptr ? 0 : std::strtoull(text, nullptr, 10);
}

}  // namespace

// Points that are passed before this is initialized see zero.
std::atomic<uint64_t> detail::perturb_seed{seed_of_environment()};

void detail::delay(const char* point) noexcept {
  constinit static thread_local uint64_t setting = 0;
  constinit static thread_local uint64_t state = 0;
  if (const uint64_t now = settings.load(std::memory_order_acquire); setting != now) {
    setting = now;
    state = perturb_seed.load(std::memory_order_relaxed) * 0x10001 + threads.fetch_add(1, std::memory_order_relaxed);
  }
  for (const char* c = point; *c != '\0'; ++c) {  // each point has delays of its own
    state = (state ^ static_cast<unsigned char>(*c)) * 0x100000001B3U;
  }
  const uint64_t random = next_random(state);
  if (random % 16 < 11) {
    return;
  }
  delays.fetch_add(1, std::memory_order_relaxed);
  if (random % 16 < 15) {
    std::this_thread::yield();
    return;
  }
  // Long enough for the others to do a whole lookup or insert meanwhile.
  std::this_thread::sleep_for(std::chrono::microseconds(1 + (random >> 8U) % 256));
}

uint64_t perturb_with(uint64_t seed) noexcept {
  const uint64_t former = detail::perturb_seed.exchange(seed, std::memory_order_relaxed);
  threads.store(0, std::memory_order_relaxed);
  settings.fetch_add(1, std::memory_order_release);
  return former;
}

uint64_t perturbations() noexcept { return delays.load(std::memory_order_relaxed); }

}  // namespace retrograd::cache
