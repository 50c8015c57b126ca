#include "cache/store_files.h"

#include <dirent.h>
#include <fcntl.h>
#include <optional>
#include <sys/statvfs.h>
#include <system_error>

namespace retrograd::cache::files {

namespace fs = std::filesystem;

std::string with_errno(const std::string& what, int error) {
  return what + ": " + std::generic_category().message(error);
}

// O_NONBLOCK: a FIFO in a file's place must not stop us.
File open_at(int folder, const std::string& name, int flags) {
  return File(openat(folder, name.c_str(), flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, S_IRUSR | S_IWUSR));
}
File open_folder_at(int folder, const std::string& name) { return open_at(folder, name, O_RDONLY | O_DIRECTORY); }

bool same_file(const struct stat& a, const struct stat& b) { return a.st_dev == b.st_dev && a.st_ino == b.st_ino; }

bool is_at(int fd, int folder, const std::string& name) {
  struct stat ours {};
  struct stat there {};
  return fstat(fd, &ours) == 0 && fstatat(folder, name.c_str(), &there, AT_SYMLINK_NOFOLLOW) == 0 &&
         same_file(ours, there);
}

std::chrono::system_clock::time_point time_of(const timespec& time) {
  return std::chrono::system_clock::time_point(std::chrono::duration_cast<std::chrono::system_clock::duration>(
      std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec)));
}

bool only_ours(const struct stat& status) {
  return status.st_uid == geteuid() && (status.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

std::vector<std::string> names_in(int folder, bool (*wanted)(std::string_view)) {
  std::vector<std::string> names;
  File again = open_folder_at(folder, ".");
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(again ? fdopendir(again.get()) : nullptr, closedir);
  if (stream == nullptr) {
    return names;
  }
  again.release();                                       // the stream closes it
  while (const dirent* entry = readdir(stream.get())) {  // NOLINT(concurrency-mt-unsafe): the stream is our own
    if (wanted(entry->d_name)) {
      names.emplace_back(entry->d_name);
    }
  }
  return names;
}

bool write_all(int fd, const void* data, size_t size) {
  const auto* at = static_cast<const std::byte*>(data);
  while (size > 0) {
    const ssize_t put = write(fd, at, size);
    if (put < 0 && errno == EINTR) {
      continue;
    }
    if (put <= 0) {
      return false;
    }
    at += put;
    size -= static_cast<size_t>(put);
  }
  return true;
}

namespace {

// Where others cannot write, but may put another folder in ours' place. A sticky folder (/tmp) forbids that.
std::optional<fs::path> exchangeable_parent(const fs::path& folder) {
  for (fs::path path = folder; path.has_relative_path();) {
    path = path.parent_path();
    struct stat status {};
    if (stat(path.c_str(), &status) == 0 && (status.st_mode & S_IWOTH) != 0 && (status.st_mode & S_ISVTX) == 0) {
      return path;
    }
  }
  return std::nullopt;
}

std::string refusal(const fs::path& folder, const std::string& why, const std::string& remedy) {
  return "the plan store does not use " + folder.string() + ", " + why + ": " + remedy +
         "name another folder in RETROGRAD_CACHE_DIR, or turn the store off with RETROGRAD_CACHE=0";
}

// Why code must not be loaded from this open folder; empty: it may.
std::string danger(int fd, const fs::path& folder) {
  struct stat status {};
  if (fstat(fd, &status) != 0) {
    return refusal(folder, with_errno("which cannot be looked at", errno), "");
  }
  if (status.st_uid != geteuid()) {
    return refusal(folder, "which belongs to user " + std::to_string(status.st_uid) + ", because plans are code", "");
  }
  if (!only_ours(status)) {
    return refusal(folder, "which others may write to, because plans are code",
                   "run `chmod go-w '" + folder.string() + "'`, ");
  }
  return "";
}

bool make_folders(const fs::path& folder) {
  if (mkdir(folder.c_str(), S_IRWXU) == 0 || errno == EEXIST) {
    return true;
  }
  return errno == ENOENT && folder.has_relative_path() && make_folders(folder.parent_path()) &&
         (mkdir(folder.c_str(), S_IRWXU) == 0 || errno == EEXIST);
}

}  // namespace

File open_part(int root, const fs::path& folder, const char* name, bool make, std::string& problem) {
  File part = open_folder_at(root, name);
  if (!part && errno == ENOENT && make && (mkdirat(root, name, S_IRWXU) == 0 || errno == EEXIST)) {
    part = open_folder_at(root, name);
  }
  if (!part) {
    if (errno != ENOENT || make) {
      problem = refusal(folder, with_errno(std::string("whose ") + name + "/ cannot be opened", errno), "");
    }
    return part;
  }
  problem = danger(part.get(), folder / name);
  return problem.empty() ? std::move(part) : File();
}

Opened open_store(const fs::path& folder, bool make) {
  Opened opened;
  File root = open_folder_at(AT_FDCWD, folder.string());
  if (!root && errno == ENOENT && make && make_folders(folder)) {
    root = open_folder_at(AT_FDCWD, folder.string());
  }
  if (!root) {
    const int error = errno;
    struct stat status {};
    if (error == ENOENT && !make) {
      return opened;
    }
    if ((error == ELOOP || error == ENOTDIR) && lstat(folder.c_str(), &status) == 0) {
      opened.problem = refusal(
          folder, S_ISLNK(status.st_mode) ? "a symbolic link to nothing or a new one" : "which is not a folder", "");
    } else {
      opened.problem = refusal(folder, with_errno("which cannot be opened or made", error), "");
    }
    return opened;
  }
  opened.problem = danger(root.get(), folder);
  if (const auto parent = exchangeable_parent(folder); parent && opened.problem.empty()) {
    opened.problem = refusal(folder,
                             "which others may exchange for another one since they may write to " + parent->string() +
                                 ", because plans are code",
                             "run `chmod +t '" + parent->string() + "'`, ");
  }
  struct statvfs system {};
  if (opened.problem.empty() && fstatvfs(root.get(), &system) == 0 && (system.f_flag & ST_NOEXEC) != 0) {
    opened.problem = refusal(folder, "from which no code can be loaded (it is mounted noexec)", "");
  }
  if (opened.problem.empty()) {
    opened.plans = open_part(root.get(), folder, "plans", make, opened.problem);
    opened.root = std::move(root);
  }
  return opened;
}

}  // namespace retrograd::cache::files
