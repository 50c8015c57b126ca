#include "cache/plan_record.h"

#include <cstring>
#include <fcntl.h>

namespace retrograd::cache::files {

Flaw read_record(int fd, Record& record) {
  struct stat status {};
  if (fstat(fd, &status) != 0) {
    return {"its record cannot be looked at", errno};
  }
  if (!S_ISREG(status.st_mode) || !only_ours(status)) {
    return "its record is not a file that only its owner may write to";
  }
  const auto size = static_cast<uint64_t>(status.st_size);
  if (size < sizeof(Header) || size > kMaxRecord) {
    return "its record has a wrong length";
  }
  std::string bytes;
  bytes.reserve(size);
  const bool read = read_pieces(fd, [&](const std::byte* data, size_t count) {
    errno = EFBIG;
    if (bytes.size() + count > size) return false;
    bytes.append(reinterpret_cast<const char*>(data), count);
    return true;
  });
  if (!read) {
    return {"its record cannot be read", errno};
  }
  if (bytes.size() != size) {
    return "its record has a wrong length";
  }
  std::memcpy(&record.header, bytes.data(), sizeof(Header));
  const Header& header = record.header;
  if (header.magic != kMagic) {
    return "its record is not one";
  }
  if (header.format != kFormat) {
    return "it is of another version of retrograd";
  }
  uint64_t left = size - sizeof(Header);
  for (const uint64_t part : {header.key_size, header.environment_size, header.metadata_size}) {
    if (part > left) {
      return "its record is damaged";
    }
    left -= part;
  }
  record.body = bytes.substr(sizeof(Header));
  if (left != 0 || header.has_side > 1 || !same(record.sum(), header.sum)) {
    return "its record is damaged";
  }
  return {};
}

Flaw check_file(int folder, const char* name, const Content& expected, Depth depth) {
  const File file = open_at(folder, name, O_RDONLY);
  struct stat status {};
  if (!file || fstat(file.get(), &status) != 0) {
    return {std::string(name) + " cannot be opened", errno};
  }
  if (!S_ISREG(status.st_mode) || !only_ours(status)) {
    return std::string(name) + " is not a file that only its owner may write to";
  }
  if (static_cast<uint64_t>(status.st_size) != expected.size) {
    return std::string(name) + " has a wrong length";
  }
  if (depth == Depth::kLengths) {
    return {};
  }
  Hasher hasher;
  uint64_t size = 0;
  if (!read_pieces(file.get(), [&](const std::byte* data, size_t count) {
        hasher.add(data, count);
        size += count;
        errno = EFBIG;
        return size <= expected.size;
      })) {
    return {std::string(name) + " cannot be read", errno};
  }
  if (size != expected.size || !same(hasher.digest(), expected.sum)) {
    return std::string(name) + " is damaged";
  }
  return {};
}

}  // namespace retrograd::cache::files
