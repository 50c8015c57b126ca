#include "cache/file_lock.h"

#include <cerrno>
#include <sys/file.h>
#include <unistd.h>

namespace retrograd::cache {

FileLock FileLock::try_lock(int fd, int operation) noexcept {
  FileLock lock;
  if (fd < 0) {
    return lock;
  }
  if (flock(fd, operation | LOCK_NB) != 0) {
    const int error = errno;
    close(fd);
    errno = error;
    return lock;
  }
  lock.fd_ = fd;
  lock.owner_ = getpid();
  return lock;
}

FileLock FileLock::try_shared(int fd) noexcept { return try_lock(fd, LOCK_SH); }
FileLock FileLock::try_exclusive(int fd) noexcept { return try_lock(fd, LOCK_EX); }

bool FileLock::is_owner() const noexcept { return owner_ == getpid(); }

// Closing would not do: the lock goes with the last copy of the descriptor, and a forked child has one.
void FileLock::release() noexcept {
  if (!held()) {
    return;
  }
  if (is_owner()) {
    flock(fd_, LOCK_UN);
  }
  close(std::exchange(fd_, -1));
}

}  // namespace retrograd::cache
