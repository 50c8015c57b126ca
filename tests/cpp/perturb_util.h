// What tests under perturbation share (cache/perturb.h).
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

#include <gtest/gtest.h>

#include "cache/perturb.h"

namespace retrograd::test {

// Delays while it lives; fails the test if there were none.
class Perturbation {
 public:
  explicit Perturbation(uint64_t seed) : former_(cache::perturb_with(seed)) {}
  ~Perturbation() {
    cache::perturb_with(former_);
    EXPECT_GT(cache::perturbations(), before_);
  }
  Perturbation(const Perturbation&) = delete;
  Perturbation& operator=(const Perturbation&) = delete;

 private:
  const uint64_t before_ = cache::perturbations();
  const uint64_t former_;
};

// In a process that got its seed from the environment, some point must have been passed.
class PerturbedProcess : public testing::Environment {
 public:
  // Once in a program, before its tests run.
  static bool watch() {
    testing::AddGlobalTestEnvironment(std::make_unique<PerturbedProcess>().release());  // gtest owns it
    return true;
  }
  void TearDown() override {
    if (std::getenv("RETROGRAD_PERTURB") != nullptr) {
      EXPECT_GT(cache::perturbations(), 0U);
    }
  }
};

}  // namespace retrograd::test
