// std::mutex that clang's thread-safety analysis understands, and its lock guard.
#pragma once

#include <condition_variable>
#include <mutex>

#include "cache/thread_annotations.h"

namespace retrograd::cache {

class RETROGRAD_CAPABILITY("mutex") Mutex {
 public:
  void lock() RETROGRAD_ACQUIRE() { mutex_.lock(); }
  void unlock() RETROGRAD_RELEASE() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

class RETROGRAD_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) RETROGRAD_ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() RETROGRAD_RELEASE() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

// Waits on a Mutex that the caller holds: `condition.wait(mutex_)`.
using Condition = std::condition_variable_any;

}  // namespace retrograd::cache
