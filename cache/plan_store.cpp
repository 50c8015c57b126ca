// The files, under the store's folder. All are of mode 0600 and all folders 0700.
//
//   plans/<digest>/   a plan: "record", "plan.so", and "plan.json" where there is a side file
//   tmp/              plans that are being written, and such as are being removed
//   locks/<digest>    reservations; "removal" is the right to take plans away
//
// Invariants:
// - A plan's folder appears whole, by a rename out of tmp/, and nothing in it is changed afterwards but the record's
//   time stamp, which is the time of its last use. A rename onto a plan fails, so the first publisher wins.
// - A plan goes whole, by a rename into tmp/, and only in the hands of one that holds "removal" and the exclusive
//   lock on its record. A lease is the shared lock on that record, so a leased plan stays.
// - All names are taken relative to open folders whose owner and mode were looked at, and no link is followed.
//
// A crash of the machine may leave a plan that is not whole, as no folder is synced; checksums find that.
#include "cache/plan_store.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <pwd.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <system_error>
#include <thread>
#include <unistd.h>
#include <utility>

#include "cache/plan_record.h"
#include "cache/store_files.h"

namespace retrograd::cache {

using namespace files;  // NOLINT(google-build-using-namespace): the store's own

namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using Clock = std::chrono::system_clock;
using Digest = PlanStore::Digest;

constexpr const char* kRecord = "record";
constexpr const char* kLibrary = "plan.so";
constexpr const char* kSide = "plan.json";

constexpr auto kUseGrain = 1min;       // how exact the time of the last use is
constexpr auto kDebrisAge = 1h;        // what is older in tmp/ was left by a killed process
constexpr auto kOldLockAge = 24h;      // likewise in locks/
constexpr auto kRemovalPatience = 5s;  // the removal lock is held for milliseconds

// --- Names ---

std::string hex(uint64_t value) {
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(value));
  return text.data();
}

std::string name_of(Digest digest) { return hex(digest.high) + hex(digest.low); }

bool is_hex(std::string_view text, size_t size) {
  return text.size() == size && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}
bool is_plan_name(std::string_view name) { return is_hex(name, 32); }
bool is_tmp_name(std::string_view name) {
  return name.size() == 49 && is_plan_name(name.substr(0, 32)) && name[32] == '.' && is_hex(name.substr(33), 16);
}

std::string tmp_name(const std::string& plan) {
  uint64_t random = 0;
  if (getrandom(&random, sizeof(random), 0) != sizeof(random)) {
    random = static_cast<uint64_t>(Clock::now().time_since_epoch().count()) ^ (uint64_t{1} * getpid() << 40U);
  }
  return plan + "." + hex(random);
}

bool equal(KeyView a, KeyView b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

// --- Plans ---

struct Wanted {
  KeyView key;
  std::string_view environment;
};

struct Checked {
  // kOther: whole, but another plan with the same digest. kUnknown: this process could not look.
  enum class State { kGone, kBad, kUnknown, kOther, kGood };
  State state = State::kGone;
  std::string reason;
  Record record;
  FileLock lease;
};

class Plans {
 public:
  Plans(const Opened& opened, const fs::path& folder, PlanStore::DigestFunction digest)
      : root_(opened.root.get()), plans_(opened.plans.get()), folder_(folder), digest_(digest) {}

  // Looks at one plan, leased. Without `wanted` any key is right that belongs to the plan's name.
  Checked check(const std::string& name, const Wanted* wanted, Depth depth) const {
    Checked checked;
    const File folder = open_folder_at(plans_, name);
    if (!folder) {
      if (errno != ENOENT) {
        fail(checked, {"its folder cannot be opened", errno});
      }
      return checked;
    }
    examine(folder.get(), name, wanted, depth, checked);
    // Someone may have taken the plan away in the middle, which looks like damage. Once it is leased nobody can.
    if (!is_at(folder.get(), plans_, name)) {
      return {};
    }
    return checked;
  }

  // Takes a plan away, if `unwanted()` says so when nobody else can. What cannot be locked cannot be leased either.
  enum class Removal { kRemoved, kLeased, kKept, kFailed };
  template <class Unwanted>
  Removal remove(const std::string& name, const FileLock& removal, Unwanted unwanted) const {
    std::string problem;
    const File tmp = open_part(root_, folder_, "tmp", true, problem);
    if (!tmp || !removal.held()) {
      return Removal::kFailed;
    }
    const File folder = open_folder_at(plans_, name);
    if (!folder && errno == ENOENT) {
      return Removal::kKept;
    }
    FileLock lock;
    if (folder) {
      File record = open_at(folder.get(), kRecord, O_RDWR);  // NFS wants it writable for an exclusive lock
      if (!record) {
        record = open_at(folder.get(), kRecord, O_RDONLY);
      }
      if (record) {
        lock = FileLock::try_exclusive(record.release());
        if (!lock.held() && errno == EWOULDBLOCK) {
          return Removal::kLeased;
        }
      }
    }
    if (!unwanted()) {
      return Removal::kKept;
    }
    const std::string aside = tmp_name(name);
    if (renameat(plans_, name.c_str(), tmp.get(), aside.c_str()) != 0) {
      return errno == ENOENT ? Removal::kKept : Removal::kFailed;
    }
    lock.release();
    delete_tree(aside);
    return Removal::kRemoved;
  }

  // The right to take plans away; not held where it could not be had.
  FileLock removal_lock() const {
    std::string problem;
    const File locks = open_part(root_, folder_, "locks", true, problem);
    const auto deadline = std::chrono::steady_clock::now() + kRemovalPatience;
    while (locks) {
      FileLock lock = FileLock::try_exclusive(open_at(locks.get(), "removal", O_RDWR | O_CREAT).release());
      if (lock.held() || errno != EWOULDBLOCK || std::chrono::steady_clock::now() > deadline) {
        return lock;
      }
      std::this_thread::sleep_for(1ms);
    }
    return {};
  }

  // Removes a plan if it is still found to be bad, and returns whether it is gone. Others who look at it lease it for
  // as long.
  bool remove_bad(const std::string& name) const {
    const FileLock removal = removal_lock();
    const auto deadline = std::chrono::steady_clock::now() + kRemovalPatience;
    while (true) {
      // Before remove() locks the record, as looking locks it too. With `removal` in our hands it cannot be replaced.
      const Checked::State state = check(name, nullptr, Depth::kAll).state;
      if (state != Checked::State::kBad) {
        return state != Checked::State::kUnknown;
      }
      const Removal removed = remove(name, removal, [] { return true; });
      if (removed != Removal::kLeased || std::chrono::steady_clock::now() > deadline) {
        return removed == Removal::kRemoved;
      }
      std::this_thread::sleep_for(1ms);
    }
  }

  void delete_tree(const std::string& name) const {
    std::error_code ignored;
    fs::remove_all(folder_ / "tmp" / name, ignored);
  }

  struct Size {
    uint64_t bytes = 0;
    Clock::time_point last_use;  // the epoch: no record
  };
  Size size(const std::string& name) const {
    Size result;
    for (const char* file : {kLibrary, kSide, kRecord}) {
      struct stat status {};
      if (fstatat(plans_, (name + "/" + file).c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0) {
        result.bytes += static_cast<uint64_t>(status.st_size);
        if (file == kRecord) {
          result.last_use = time_of(status.st_mtim);
        }
      }
    }
    return result;
  }

  // A time of use in the future comes from a clock that has been put back since. Left alone, it would keep the plan
  // for ever, so the plan ages from now on.
  Clock::time_point mend_last_use(const std::string& name, Clock::time_point last_use, Clock::time_point now) const {
    if (last_use <= now + kUseGrain) {
      return last_use;
    }
    utimensat(plans_, (name + "/" + kRecord).c_str(), nullptr, AT_SYMLINK_NOFOLLOW);
    return now;
  }

  void evict(const PlanStore::Limits& limits) const {
    struct Candidate {
      std::string name;
      Size size;
    };
    std::vector<Candidate> candidates;
    uint64_t bytes = 0;
    const Clock::time_point now = Clock::now();
    for (std::string& name : names_in(plans_, is_plan_name)) {
      Size size = this->size(name);
      size.last_use = mend_last_use(name, size.last_use, now);
      bytes += size.bytes;
      candidates.push_back({std::move(name), size});
    }
    size_t plans = candidates.size();
    const auto exceeds = [&] { return plans > limits.max_plans || bytes > limits.max_bytes; };
    if (!exceeds()) {
      return;
    }
    std::sort(candidates.begin(), candidates.end(),
              [](const Candidate& a, const Candidate& b) { return a.size.last_use < b.size.last_use; });
    const FileLock removal = removal_lock();
    for (const Candidate& candidate : candidates) {
      if (!exceeds()) {
        return;
      }
      const Removal removed = remove(candidate.name, removal, [&] {
        const Size size = this->size(candidate.name);
        return mend_last_use(candidate.name, size.last_use, now) <= candidate.size.last_use;
      });
      // Another process may have been quicker, which is as good.
      if (removed == Removal::kRemoved || (removed == Removal::kKept && this->size(candidate.name).bytes == 0)) {
        --plans;
        bytes -= candidate.size.bytes;
      }
    }
  }

  // Removes what processes that were killed have left.
  void sweep() const {
    std::string problem;
    const Clock::time_point now = Clock::now();
    const auto is_old = [now](int folder, const std::string& name, Clock::duration limit) {
      struct stat status {};
      if (fstatat(folder, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) {
        return false;
      }
      const Clock::duration age = now - time_of(status.st_mtim);
      return age > limit || -age > limit;  // or the clock was put back
    };
    const File tmp = open_part(root_, folder_, "tmp", false, problem);
    for (const std::string& name : tmp ? names_in(tmp.get(), is_tmp_name) : std::vector<std::string>()) {
      if (is_old(tmp.get(), name, kDebrisAge)) {
        delete_tree(name);
      }
    }
    const File locks = open_part(root_, folder_, "locks", false, problem);
    for (const std::string& name : locks ? names_in(locks.get(), is_plan_name) : std::vector<std::string>()) {
      if (!is_old(locks.get(), name, kOldLockAge)) {
        continue;
      }
      const FileLock lock = FileLock::try_exclusive(open_at(locks.get(), name, O_RDWR).release());
      if (lock.held() && is_at(lock.fd(), locks.get(), name)) {
        unlinkat(locks.get(), name.c_str(), 0);
      }
    }
  }

 private:
  static void fail(Checked& checked, Flaw flaw) {
    checked.state = flaw.is_ours ? Checked::State::kUnknown : Checked::State::kBad;
    checked.reason = std::move(flaw.reason);
    checked.lease.release();
  }

  void examine(int folder, const std::string& name, const Wanted* wanted, Depth depth, Checked& checked) const {
    struct stat status {};
    if (fstat(folder, &status) != 0 || !only_ours(status)) {
      return fail(checked, "its folder is not one that only its owner may write to");
    }
    File file = open_at(folder, kRecord, O_RDONLY);
    if (!file) {
      return fail(checked, {"its record cannot be opened", errno});
    }
    checked.lease = FileLock::try_shared(file.release());
    if (!checked.lease.held()) {
      if (errno == EWOULDBLOCK) {
        return;  // someone is taking it away
      }
      return fail(checked, {"its record cannot be locked", errno});
    }
    const Record& record = checked.record;
    Flaw flaw = read_record(checked.lease.fd(), checked.record);
    if (flaw) {
      return fail(checked, std::move(flaw));
    }
    const bool is_wanted =
        wanted != nullptr && equal(record.key(), wanted->key) && record.environment() == wanted->environment;
    if (!is_wanted && name_of(digest_(record.key(), record.environment())) != name) {
      return fail(checked, "it lies under another plan's name");
    }
    flaw = check_file(folder, kLibrary, record.header.library, depth);
    if (!flaw && record.header.has_side != 0) {
      flaw = check_file(folder, kSide, record.header.side, depth);
    } else if (!flaw && (fstatat(folder, kSide, &status, AT_SYMLINK_NOFOLLOW) == 0 || errno != ENOENT)) {
      flaw = std::string(kSide) + " was added";
    }
    if (flaw) {
      return fail(checked, std::move(flaw));
    }
    checked.state = wanted != nullptr && !is_wanted ? Checked::State::kOther : Checked::State::kGood;
    if (checked.state == Checked::State::kOther) {
      checked.reason = "another plan has the same digest";
    }
  }

  int root_;
  int plans_;
  const fs::path& folder_;
  PlanStore::DigestFunction digest_;
};

// --- Publishing ---

// A plan's folder in tmp/ while it is written; removed unless it was moved into its place.
class Staging {
 public:
  Staging(const Plans& plans, const File& tmp, const std::string& plan)
      : plans_(plans), tmp_(tmp.get()), name_(tmp_name(plan)) {
    if (mkdirat(tmp_, name_.c_str(), S_IRWXU) == 0) {
      made_ = true;
      folder_ = open_folder_at(tmp_, name_);
    }
    error_ = errno;
  }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  ~Staging() {
    if (made_) {
      plans_.delete_tree(name_);
    }
  }

  // These return why not; empty: done. `error()` is the errno of the last failure.
  std::string copy(const File& from, const fs::path& path, const char* name, Content& content) {
    File to = create(name);
    if (!to) {
      return write_failed();
    }
    Hasher hasher;
    bool writing = false;
    const bool copied = read_pieces(from.get(), [&](const std::byte* data, size_t size) {
      hasher.add(data, size);
      content.size += size;
      writing = true;
      const bool written = write_all(to.get(), data, size);
      writing = !written;
      return written;
    });
    error_ = errno;
    if (!copied && !writing) {
      return with_errno(path.string() + " cannot be read", error_);
    }
    content.sum = hasher.digest();
    return copied && sync(to) ? "" : write_failed();
  }

  // Leases the record before anyone can see it.
  std::string write_record(const Record& record, FileLock& lease) {
    File to = create(kRecord);
    if (!to || !write_all(to.get(), &record.header, sizeof(Header)) ||
        !write_all(to.get(), record.body.data(), record.body.size()) || !sync(to)) {
      error_ = errno;
      return write_failed();
    }
    lease = FileLock::try_shared(to.release());
    error_ = errno;
    return lease.held() ? "" : with_errno("files in the plan store cannot be locked", error_);
  }

  bool move_to(int plans, const std::string& name) {
    // An empty folder must not be replaced either, since one that removes it could then take the plan with it.
    int failed = renameat2(tmp_, name_.c_str(), plans, name.c_str(), RENAME_NOREPLACE);
    if (failed != 0 && (errno == EINVAL || errno == ENOSYS)) {  // NFS
      failed = renameat(tmp_, name_.c_str(), plans, name.c_str());
    }
    error_ = errno;
    made_ = failed != 0;
    return !made_;
  }

  bool is_ready() const { return static_cast<bool>(folder_); }
  int error() const { return error_; }
  std::string write_failed() const { return with_errno("the plan cannot be written to the store", error_); }

 private:
  File create(const char* name) {
    File file = open_at(folder_.get(), name, O_RDWR | O_CREAT | O_EXCL);
    error_ = errno;
    return file;
  }
  bool sync(const File& file) {
    const bool synced = fsync(file.get()) == 0;
    error_ = errno;
    return synced;
  }

  const Plans& plans_;
  int tmp_;
  std::string name_;
  File folder_;
  bool made_ = false;
  int error_ = 0;
};

// The caller's file, which may be any path; none with errno where it is no readable file.
File open_source(const fs::path& path) {
  File file(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  struct stat status {};
  if (file && fstat(file.get(), &status) == 0 && !S_ISREG(status.st_mode)) {
    errno = EINVAL;
    return {};
  }
  return file;
}

StoredPlan stored(Checked&& checked, const fs::path& folder, const std::string& name) {
  return {.library = folder / "plans" / name / kLibrary,
          .metadata = std::string(checked.record.metadata()),
          .lease = std::move(checked.lease)};
}

PlanStore::Result failure(std::string reason) { return {.plan = {}, .added = false, .reason = std::move(reason)}; }

// What one attempt to publish came to; none: the folder was removed meanwhile, so that another attempt makes it anew.
std::optional<PlanStore::Result> try_publish(const fs::path& folder, const PlanStore::Limits& limits,
                                             PlanStore::DigestFunction digest, const Wanted& wanted,
                                             const fs::path& library, std::string_view metadata) {
  const Opened opened = open_store(folder, true);
  if (!opened.problem.empty()) {
    return failure(opened.problem);
  }
  const Plans plans(opened, folder, digest);
  const std::string name = name_of(digest(wanted.key, wanted.environment));
  Checked present = plans.check(name, &wanted, Depth::kAll);
  if (present.state == Checked::State::kGood) {
    return PlanStore::Result{.plan = stored(std::move(present), folder, name), .added = false, .reason = ""};
  }
  if (present.state == Checked::State::kOther || present.state == Checked::State::kUnknown) {
    return failure(present.reason);
  }

  std::string problem;
  const File tmp = open_part(opened.root.get(), folder, "tmp", true, problem);
  if (!tmp) {
    return failure(problem);
  }
  plans.sweep();
  const File library_file = open_source(library);
  if (!library_file) {
    return failure(with_errno(library.string() + " cannot be opened", errno));
  }
  Staging staging(plans, tmp, name);
  if (!staging.is_ready()) {
    return staging.error() == ENOENT ? std::nullopt : std::optional(failure(staging.write_failed()));
  }
  Record record;
  Header& header = record.header;
  std::string reason = staging.copy(library_file, library, kLibrary, header.library);
  if (reason.empty() && header.library.size == 0) {
    return failure(library.string() + " is empty");
  }
  if (const fs::path side = fs::path(library).replace_extension(".json"); reason.empty()) {
    if (const File side_file = open_source(side)) {
      header.has_side = 1;
      reason = staging.copy(side_file, side, kSide, header.side);
    } else if (errno != ENOENT) {
      return failure(with_errno(side.string() + " cannot be opened", errno));
    }
  }
  FileLock lease;
  if (reason.empty()) {
    header.key_size = wanted.key.size();
    header.environment_size = wanted.environment.size();
    header.metadata_size = metadata.size();
    record.body.append(reinterpret_cast<const char*>(wanted.key.data()), wanted.key.size());
    record.body.append(wanted.environment).append(metadata);
    header.sum = record.sum();
    reason = staging.write_record(record, lease);
  }
  if (!reason.empty()) {
    return staging.error() == ENOENT ? std::nullopt : std::optional(failure(reason));
  }

  // Another publisher may be quicker, and something that is no plan, or one that is just being removed, be in the way.
  const auto deadline = std::chrono::steady_clock::now() + kRemovalPatience;
  do {
    if (staging.move_to(opened.plans.get(), name)) {
      plans.evict(limits);
      return PlanStore::Result{.plan = StoredPlan{.library = folder / "plans" / name / kLibrary,
                                                  .metadata = std::string(metadata),
                                                  .lease = std::move(lease)},
                               .added = true,
                               .reason = ""};
    }
    if (staging.error() == ENOENT) {
      return std::nullopt;
    }
    if (staging.error() != EEXIST && staging.error() != ENOTEMPTY && staging.error() != ENOTDIR) {
      return failure(staging.write_failed());
    }
    present = plans.check(name, &wanted, Depth::kAll);
    if (present.state == Checked::State::kGood) {
      return PlanStore::Result{.plan = stored(std::move(present), folder, name), .added = false, .reason = ""};
    }
    if (present.state == Checked::State::kOther || present.state == Checked::State::kUnknown) {
      return failure(present.reason);
    }
    if (present.state == Checked::State::kBad && !plans.remove_bad(name)) {
      return failure("a damaged plan (" + present.reason + ") is in the way and cannot be removed");
    }
    if (present.state == Checked::State::kGone) {
      std::this_thread::sleep_for(1ms);
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return failure("other processes publish and remove the same plan all the time");
}

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): nothing here sets variables
  return value != nullptr && *value != '\0' ? std::optional<std::string>(value) : std::nullopt;
}

std::optional<fs::path> home() {
  if (const auto named = variable("HOME")) {
    return *named;
  }
  std::array<char, 4096> buffer{};
  struct passwd user {};
  struct passwd* found = nullptr;
  if (getpwuid_r(geteuid(), &user, buffer.data(), buffer.size(), &found) == 0 && found != nullptr) {
    return found->pw_dir;
  }
  return std::nullopt;
}

}  // namespace

Reservation& Reservation::operator=(Reservation&& other) noexcept {
  if (this != &other) {
    release();
    lock_ = std::move(other.lock_);
    path_ = std::move(other.path_);
    reason_ = std::move(other.reason_);
  }
  return *this;
}

// The file goes before its lock, so that one who waits for the lock sees that it got an old file's.
void Reservation::release() noexcept {
  if (lock_.held() && lock_.is_owner() && is_at(lock_.fd(), AT_FDCWD, path_)) {
    unlink(path_.c_str());
  }
  lock_.release();
}

Digest PlanStore::digest(KeyView key, std::string_view environment) {
  Hasher hasher;
  const std::array<uint64_t, 2> start = {kFormat, key.size()};
  hasher.add(start.data(), sizeof(start));
  hasher.add(key.data(), key.size());
  hasher.add(environment.data(), environment.size());
  return hasher.digest();
}

std::optional<fs::path> PlanStore::default_folder() {
  if (variable("RETROGRAD_CACHE") == "0") {
    return std::nullopt;
  }
  if (const auto named = variable("RETROGRAD_CACHE_DIR")) {
    return *named;
  }
  if (const auto cache = variable("XDG_CACHE_HOME"); cache && fs::path(*cache).is_absolute()) {
    return fs::path(*cache) / "retrograd";
  }
  if (const auto folder = home()) {
    return *folder / ".cache" / "retrograd";
  }
  return std::nullopt;
}

PlanStore::Limits PlanStore::default_limits(std::string* problem) {
  Limits limits;
  const auto text = variable("RETROGRAD_CACHE_LIMIT");
  if (!text) {
    return limits;
  }
  uint64_t number = 0;
  const char* const end = text->data() + text->size();
  const auto read = std::from_chars(text->data(), end, number);
  const std::string_view unit(read.ptr, static_cast<size_t>(end - read.ptr));
  constexpr std::array<std::pair<std::string_view, uint64_t>, 4> kUnits = {
      {{"", 1}, {"K", 1'000}, {"M", 1'000'000}, {"G", 1'000'000'000}}};
  const auto* const found = std::ranges::find(kUnits, unit, &decltype(kUnits)::value_type::first);
  uint64_t bytes = 0;
  if (read.ec == std::errc() && found != kUnits.end() && !__builtin_mul_overflow(number, found->second, &bytes)) {
    limits.max_bytes = bytes;
  } else if (problem != nullptr) {
    *problem = "RETROGRAD_CACHE_LIMIT=" + *text + " is no size such as 500M or 2G: the usual limit is used";
  }
  return limits;
}

PlanStore::PlanStore(const fs::path& folder, Limits limits, DigestFunction digest) : limits_(limits), digest_(digest) {
  std::error_code error;
  fs::path full = fs::absolute(folder, error);
  fs::path resolved = fs::weakly_canonical(full, error);
  folder_ = error ? std::move(full) : std::move(resolved);
  if (!folder_.has_filename()) {
    folder_ = folder_.parent_path();  // a name that ends with a slash would be followed where it is a link
  }
}

std::string PlanStore::problem() const noexcept {
  try {
    return open_store(folder_, true).problem;
  } catch (...) {
    return "out of memory";
  }
}

PlanStore::Result PlanStore::find(KeyView key, std::string_view environment) const noexcept {
  try {
    const Opened opened = open_store(folder_, false);
    if (!opened.plans) {
      return failure(opened.problem);
    }
    const Wanted wanted{key, environment};
    const std::string name = name_of(digest_(key, environment));
    Checked checked = Plans(opened, folder_, digest_).check(name, &wanted, Depth::kAll);
    if (checked.state != Checked::State::kGood) {
      return failure(std::move(checked.reason));
    }
    struct stat status {};
    if (fstat(checked.lease.fd(), &status) == 0) {
      const Clock::duration age = Clock::now() - time_of(status.st_mtim);
      if (age >= kUseGrain || age < -kUseGrain) {
        futimens(checked.lease.fd(), nullptr);
      }
    }
    return {.plan = stored(std::move(checked), folder_, name), .added = false, .reason = ""};
  } catch (...) {
    return {};
  }
}

PlanStore::Result PlanStore::publish(KeyView key, std::string_view environment, const fs::path& library,
                                     std::string_view metadata) const noexcept {
  try {
    if (key.size() + environment.size() + metadata.size() + sizeof(Header) > kMaxRecord) {
      return failure("the plan's key and metadata are too large for the store");
    }
    constexpr int kAttempts = 3;
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      if (auto result = try_publish(folder_, limits_, digest_, {key, environment}, library, metadata)) {
        return std::move(*result);
      }
    }
    return failure("the plan store's folder is removed again and again");
  } catch (...) {
    return {.plan = {}, .added = false, .reason = "out of memory"};
  }
}

Reservation PlanStore::reserve(KeyView key, std::string_view environment,
                               std::chrono::milliseconds timeout) const noexcept {
  try {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    const std::string name = name_of(digest_(key, environment));
    std::chrono::milliseconds pause = 1ms;
    constexpr int kAttempts = 10;
    int lost = 0;  // how often the folder was removed under our hands
    while (true) {
      const Opened opened = open_store(folder_, true);
      std::string problem = opened.problem;
      const File locks = opened.plans ? open_part(opened.root.get(), folder_, "locks", true, problem) : File();
      if (!locks) {
        return Reservation(problem);
      }
      FileLock lock = FileLock::try_exclusive(open_at(locks.get(), name, O_RDWR | O_CREAT).release());
      if (!lock.held() && errno != EWOULDBLOCK && !(errno == ENOENT && ++lost < kAttempts)) {
        return Reservation(with_errno("files in the plan store cannot be locked", errno));
      }
      if (lock.held()) {
        if (is_at(lock.fd(), locks.get(), name)) {
          return {std::move(lock), folder_ / "locks" / name};
        }
        continue;  // its former holder has removed the file
      }
      const auto now = std::chrono::steady_clock::now();
      if (now >= deadline) {
        return Reservation("");
      }
      std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(pause, deadline - now));
      pause = std::min<std::chrono::milliseconds>(pause * 2, 50ms);
    }
  } catch (...) {
    return Reservation("out of memory");
  }
}

PlanStore::Listing PlanStore::list() const {
  Listing listing;
  std::vector<Entry>& entries = listing.entries;
  const Opened opened = open_store(folder_, false);
  if (!opened.plans) {
    listing.reason = opened.problem;
    return listing;
  }
  const Plans plans(opened, folder_, digest_);
  for (const std::string& name : names_in(opened.plans.get(), is_plan_name)) {
    const Checked checked = plans.check(name, nullptr, Depth::kLengths);
    if (checked.state == Checked::State::kGone) {
      continue;
    }
    const Plans::Size size = plans.size(name);
    Entry entry{.name = name,
                .bytes = size.bytes,
                .last_use = size.last_use,
                .environment = "",
                .metadata = "",
                .problem = checked.reason};
    if (checked.state == Checked::State::kGood) {
      entry.environment = checked.record.environment();
      entry.metadata = checked.record.metadata();
    }
    entries.push_back(std::move(entry));
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.last_use > b.last_use; });
  return listing;
}

PlanStore::Cleared PlanStore::clear() const {
  Cleared cleared;
  const Opened opened = open_store(folder_, false);
  if (!opened.plans) {
    cleared.reason = opened.problem;
    return cleared;
  }
  const Plans plans(opened, folder_, digest_);
  const FileLock removal = plans.removal_lock();
  for (const std::string& name : names_in(opened.plans.get(), is_plan_name)) {
    const uint64_t bytes = plans.size(name).bytes;
    switch (plans.remove(name, removal, [] { return true; })) {
      case Plans::Removal::kRemoved:
        ++cleared.plans;
        cleared.bytes += bytes;
        break;
      case Plans::Removal::kLeased:
        ++cleared.leased;
        break;
      case Plans::Removal::kKept:
        break;
      case Plans::Removal::kFailed:
        cleared.reason = "some plans cannot be removed";
        break;
    }
  }
  plans.sweep();
  return cleared;
}

PlanStore::Verified PlanStore::verify(bool remove) const {
  Verified verified;
  const Opened opened = open_store(folder_, false);
  if (!opened.plans) {
    verified.reason = opened.problem;
    return verified;
  }
  const Plans plans(opened, folder_, digest_);
  for (const std::string& name : names_in(opened.plans.get(), is_plan_name)) {
    Checked checked = plans.check(name, nullptr, Depth::kAll);
    if (checked.state == Checked::State::kGood) {
      ++verified.good;
    } else if (checked.state == Checked::State::kBad) {
      verified.bad.push_back({name, std::move(checked.reason), remove && plans.remove_bad(name)});
    } else if (checked.state == Checked::State::kUnknown) {
      verified.reason = "some plans could not be looked at: " + checked.reason;
    }
  }
  return verified;
}

}  // namespace retrograd::cache
