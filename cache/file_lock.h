// An advisory lock (flock) on an open file, held until the object goes or the process ends.
#pragma once

#include <sys/types.h>
#include <utility>

namespace retrograd::cache {

// Excludes other holders in this process and in others alike; the kernel gives it back however the process ends. A
// child made by fork() shares the lock and cannot give it back, only its parent can; if the parent is killed, the lock
// stays until such children have ended or called exec. Owned by one thread at a time.
class FileLock {
 public:
  // Takes over the descriptor `fd` and locks what it refers to, without waiting. Where that fails, the lock is not
  // held, the descriptor is closed and errno says why (EWOULDBLOCK: someone else holds it). A negative `fd`, from a
  // failed open, gives such a lock and leaves errno alone.
  static FileLock try_shared(int fd) noexcept;
  static FileLock try_exclusive(int fd) noexcept;

  FileLock() = default;
  FileLock(FileLock&& other) noexcept : fd_(std::exchange(other.fd_, -1)), owner_(other.owner_) {}
  FileLock& operator=(FileLock&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(owner_, other.owner_);
    return *this;
  }
  ~FileLock() { release(); }

  bool held() const noexcept { return fd_ >= 0; }
  int fd() const noexcept { return fd_; }
  bool is_owner() const noexcept;  // false in a forked child
  void release() noexcept;

 private:
  static FileLock try_lock(int fd, int operation) noexcept;

  int fd_ = -1;
  pid_t owner_ = 0;
};

}  // namespace retrograd::cache
