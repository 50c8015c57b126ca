// The plan store: what it gives out, what it refuses, and what many threads and processes make of it at once.
#include "cache/plan_store.h"

#include <atomic>
#include <barrier>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <functional>
#include <iterator>
#include <random>
#include <sched.h>
#include <string>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cache/plan_record.h"

namespace retrograd::cache {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;

KeyView bytes(std::string_view text) { return std::as_bytes(std::span(text.data(), text.size())); }

constexpr std::string_view kKey = "addmm relu addmm";
constexpr std::string_view kEnvironment = "torch 2.13.0 avx512 threads 1";
constexpr std::string_view kMetadata = R"({"name": "mlp"})";

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
void write_file(const fs::path& path, std::string_view text) { std::ofstream(path, std::ios::binary) << text; }

std::string random_text(size_t size, uint32_t seed) {
  std::mt19937_64 random(seed);
  std::string text(size, '\0');
  for (char& c : text) c = static_cast<char>(random());
  return text;
}

void set_mtime(const fs::path& path, std::chrono::seconds from_now) {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  now.tv_sec += from_now.count();
  const std::array<timespec, 2> times = {now, now};
  ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times.data(), 0), 0);
}
std::chrono::seconds mtime_from_now(const fs::path& path) {
  struct stat status {};
  EXPECT_EQ(stat(path.c_str(), &status), 0);
  return std::chrono::seconds(status.st_mtim.tv_sec - time(nullptr));
}

mode_t mode_of(const fs::path& path) {
  struct stat status {};
  EXPECT_EQ(stat(path.c_str(), &status), 0) << path;
  return status.st_mode & 07777U;
}

size_t files_in(const fs::path& folder) {
  return static_cast<size_t>(std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

template <class Body>
void run_threads(int count, Body body) {
  std::vector<std::jthread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back([&body, i] { body(i); });
}

// A forked process that runs `body` and ends with what it returns. Killed when it is dropped.
class Child {
 public:
  explicit Child(const std::function<int()>& body) : pid_(fork()) {
    if (pid_ == 0) {
      // NOLINTNEXTLINE(concurrency-mt-unsafe)
      _exit(body());
    }
  }
  Child(Child&& other) noexcept : pid_(std::exchange(other.pid_, -1)) {}
  Child& operator=(Child&&) = delete;
  ~Child() {
    if (pid_ > 0) kill_and_wait();
  }
  void kill_and_wait() {
    kill(pid_, SIGKILL);
    wait();
  }
  // The exit code; -1: it was killed.
  int wait() {
    int status = 0;
    waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  pid_t pid_;
};

class PlanStoreTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "plan_store_XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    scratch_ = pattern;
    folder_ = scratch_ / "store";
    library_ = scratch_ / "model.wrapper.so";
    write_file(library_, random_text(300'000, 1));
  }
  void TearDown() override {
    std::error_code ignored;
    fs::remove_all(scratch_, ignored);
  }

  fs::path side() const { return scratch_ / "model.wrapper.json"; }

  // Publishes under kKey and returns the plan's folder.
  fs::path publish(const PlanStore& store) const { return publish(store, kKey); }
  fs::path publish(const PlanStore& store, std::string_view key) const {
    const PlanStore::Result result = store.publish(bytes(key), kEnvironment, library_, kMetadata);
    EXPECT_TRUE(result.plan) << result.reason;
    return result.plan ? result.plan->library.parent_path() : fs::path("/nonexistent");
  }
  static bool has(const PlanStore& store, std::string_view key) {
    return fs::exists(store.folder() / "plans") && store.find(bytes(key), kEnvironment).plan.has_value();
  }

  fs::path scratch_, folder_, library_;
};

// --- What is given out ---

TEST_F(PlanStoreTest, APublishedPlanIsFoundWithAllItsFiles) {
  write_file(side(), "{\"nodes\": []}");
  const PlanStore store(folder_);
  EXPECT_FALSE(store.find(bytes(kKey), kEnvironment).plan);
  EXPECT_EQ(store.find(bytes(kKey), kEnvironment).reason, "");

  const PlanStore::Result published = store.publish(bytes(kKey), kEnvironment, library_, kMetadata);
  ASSERT_TRUE(published.plan) << published.reason;
  EXPECT_TRUE(published.added);
  EXPECT_EQ(published.plan->metadata, kMetadata);

  const PlanStore::Result found = PlanStore(folder_).find(bytes(kKey), kEnvironment);
  ASSERT_TRUE(found.plan) << found.reason;
  EXPECT_FALSE(found.added);
  EXPECT_EQ(found.plan->library, published.plan->library);
  EXPECT_EQ(found.plan->metadata, kMetadata);
  EXPECT_EQ(read_file(found.plan->library), read_file(library_));
  EXPECT_EQ(read_file(fs::path(found.plan->library).replace_extension(".json")), read_file(side()));
  EXPECT_TRUE(fs::exists(library_)) << "the caller's library was taken";
  EXPECT_EQ(files_in(folder_ / "tmp"), 0U);
}

TEST_F(PlanStoreTest, KeyAndEnvironmentTellPlansApart) {
  const PlanStore store(folder_);
  publish(store);
  EXPECT_FALSE(store.find(bytes("addmm relu"), kEnvironment).plan);
  EXPECT_FALSE(store.find(bytes(kKey), "torch 2.14.0").plan);
  // The same bytes, divided in another way.
  ASSERT_TRUE(store.publish(bytes("ab"), "c", library_, "1").plan);
  EXPECT_FALSE(store.find(bytes("a"), "bc").plan);
  EXPECT_FALSE(store.find(bytes(""), "abc").plan);
}

TEST_F(PlanStoreTest, EmptyKeyEnvironmentAndMetadataAreAsGoodAsAny) {
  const PlanStore store(folder_);
  ASSERT_TRUE(store.publish({}, "", library_, "").plan);
  const PlanStore::Result found = store.find({}, "");
  ASSERT_TRUE(found.plan) << found.reason;
  EXPECT_EQ(found.plan->metadata, "");
}

TEST_F(PlanStoreTest, TheFirstPublisherWins) {
  const PlanStore store(folder_);
  publish(store);
  write_file(library_, "another library");
  const PlanStore::Result second = store.publish(bytes(kKey), kEnvironment, library_, "{}");
  ASSERT_TRUE(second.plan) << second.reason;
  EXPECT_FALSE(second.added);
  EXPECT_EQ(second.plan->metadata, kMetadata);
  EXPECT_EQ(fs::file_size(second.plan->library), 300'000U);
}

TEST_F(PlanStoreTest, DigestsThatCollideAreAMissAndAFailedPublish) {
  const PlanStore store(folder_, {}, [](KeyView, std::string_view) { return PlanStore::Digest{1, 2}; });
  publish(store);
  const PlanStore::Result other = store.find(bytes("other"), kEnvironment);
  EXPECT_FALSE(other.plan);
  EXPECT_THAT(other.reason, HasSubstr("same digest"));
  EXPECT_FALSE(store.find(bytes(kKey), "other").plan);
  EXPECT_FALSE(store.publish(bytes("other"), kEnvironment, library_, kMetadata).plan);
  EXPECT_TRUE(has(store, kKey));
}

TEST_F(PlanStoreTest, ListNamesWhatIsThereLastUsedFirst) {
  const PlanStore store(folder_);
  EXPECT_TRUE(store.list().entries.empty());
  set_mtime(publish(store, "old") / "record", -1h);
  publish(store, "new");
  const std::vector<PlanStore::Entry> entries = store.list().entries;
  ASSERT_EQ(entries.size(), 2U);
  EXPECT_GT(entries[0].last_use, entries[1].last_use);
  for (const PlanStore::Entry& entry : entries) {
    EXPECT_EQ(entry.environment, kEnvironment);
    EXPECT_EQ(entry.metadata, kMetadata);
    EXPECT_EQ(entry.problem, "");
    EXPECT_GT(entry.bytes, 300'000U);
  }
}

TEST_F(PlanStoreTest, ClearLeavesLeasedPlansAndForeignFiles) {
  const PlanStore store(folder_);
  publish(store, "a");
  PlanStore::Result leased = store.publish(bytes("b"), kEnvironment, library_, kMetadata);
  fs::create_directory(folder_ / "plans" / "holidays");
  write_file(folder_ / "tmp" / "letter", "");
  write_file(folder_ / "notes.txt", "");

  PlanStore::Cleared cleared = store.clear();
  EXPECT_EQ(cleared.plans, 1U);
  EXPECT_EQ(cleared.leased, 1U);
  EXPECT_GT(cleared.bytes, 300'000U);
  EXPECT_TRUE(has(store, "b"));
  leased.plan.reset();
  EXPECT_EQ(store.clear().plans, 1U);
  EXPECT_FALSE(has(store, "b"));
  EXPECT_TRUE(fs::exists(folder_ / "plans" / "holidays"));
  EXPECT_TRUE(fs::exists(folder_ / "tmp" / "letter"));
  EXPECT_TRUE(fs::exists(folder_ / "notes.txt"));
}

// --- Bad files ---

struct Damage {
  const char* name;
  std::function<void(const fs::path& plan)> inflict;
};
void PrintTo(const Damage& damage, std::ostream* out) { *out << damage.name; }

class DamagedPlan : public PlanStoreTest, public testing::WithParamInterface<Damage> {};

TEST_P(DamagedPlan, IsAMissIsReportedAndIsReplaced) {
  write_file(side(), "{\"nodes\": []}");
  const PlanStore store(folder_);
  const fs::path plan = publish(store);
  publish(store, "a good one");
  GetParam().inflict(plan);

  const PlanStore::Result found = store.find(bytes(kKey), kEnvironment);
  EXPECT_FALSE(found.plan);
  EXPECT_NE(found.reason, "");
  EXPECT_EQ(store.list().entries.size(), 2U);
  PlanStore::Verified verified = store.verify(false);
  EXPECT_EQ(verified.good, 1U);
  ASSERT_EQ(verified.bad.size(), 1U);
  EXPECT_EQ(verified.bad[0].name, plan.filename());
  EXPECT_EQ(verified.bad[0].reason, found.reason);
  EXPECT_FALSE(verified.bad[0].removed);

  const PlanStore::Result published = store.publish(bytes(kKey), kEnvironment, library_, kMetadata);
  EXPECT_TRUE(published.plan) << published.reason;
  EXPECT_TRUE(published.added);
  EXPECT_TRUE(has(store, kKey));
  EXPECT_TRUE(store.verify(false).bad.empty());
}

TEST_P(DamagedPlan, IsRemovedByVerify) {
  write_file(side(), "{\"nodes\": []}");
  const PlanStore store(folder_);
  const fs::path plan = publish(store);
  publish(store, "a good one");
  GetParam().inflict(plan);

  const PlanStore::Verified verified = store.verify(true);
  ASSERT_EQ(verified.bad.size(), 1U);
  EXPECT_TRUE(verified.bad[0].removed);
  EXPECT_FALSE(fs::exists(fs::symlink_status(plan)));
  EXPECT_TRUE(store.verify(true).bad.empty());
  EXPECT_TRUE(has(store, "a good one"));
}

// Overwrites one byte.
void flip(const fs::path& path, int64_t at) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekg(at);
  const int byte = file.get();
  file.seekp(at);
  file.put(static_cast<char>(byte ^ 0x40));
  ASSERT_TRUE(file.good());
}
void replace_by_link(const fs::path& path) {
  const fs::path copy = path.string() + ".copy";
  fs::rename(path, copy);
  fs::create_symlink(copy, path);
}
void replace_by_fifo(const fs::path& path) {
  fs::remove(path);
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
}
void replace_by_folder(const fs::path& path) {
  fs::remove_all(path);
  fs::create_directory(path);
  write_file(path / "file", "");
}
void make_writable(const fs::path& path, mode_t who) { ASSERT_EQ(chmod(path.c_str(), mode_of(path) | who), 0); }

INSTANTIATE_TEST_SUITE_P(
    PlanStore, DamagedPlan,
    testing::Values(
        Damage{"LibraryTruncated", [](const fs::path& plan) { fs::resize_file(plan / "plan.so", 1000); }},
        Damage{"LibraryEmpty", [](const fs::path& plan) { fs::resize_file(plan / "plan.so", 0); }},
        Damage{"LibraryLonger", [](const fs::path& plan) { fs::resize_file(plan / "plan.so", 300'001); }},
        Damage{"LibraryFirstByte", [](const fs::path& plan) { flip(plan / "plan.so", 0); }},
        Damage{"LibraryMiddleByte", [](const fs::path& plan) { flip(plan / "plan.so", 150'000); }},
        Damage{"LibraryLastByte", [](const fs::path& plan) { flip(plan / "plan.so", 299'999); }},
        Damage{"LibraryMissing", [](const fs::path& plan) { fs::remove(plan / "plan.so"); }},
        Damage{"LibraryLink", [](const fs::path& plan) { replace_by_link(plan / "plan.so"); }},
        Damage{"LibraryFifo", [](const fs::path& plan) { replace_by_fifo(plan / "plan.so"); }},
        Damage{"LibraryFolder", [](const fs::path& plan) { replace_by_folder(plan / "plan.so"); }},
        Damage{"LibraryWritableByGroup", [](const fs::path& plan) { make_writable(plan / "plan.so", S_IWGRP); }},
        Damage{"LibraryWritableByOthers", [](const fs::path& plan) { make_writable(plan / "plan.so", S_IWOTH); }},
        Damage{"SideByte", [](const fs::path& plan) { flip(plan / "plan.json", 3); }},
        Damage{"SideTruncated", [](const fs::path& plan) { fs::resize_file(plan / "plan.json", 3); }},
        Damage{"SideMissing", [](const fs::path& plan) { fs::remove(plan / "plan.json"); }},
        Damage{"SideLink", [](const fs::path& plan) { replace_by_link(plan / "plan.json"); }},
        Damage{"RecordMissing", [](const fs::path& plan) { fs::remove(plan / "record"); }},
        Damage{"RecordEmpty", [](const fs::path& plan) { fs::resize_file(plan / "record", 0); }},
        Damage{"RecordTruncated",
               [](const fs::path& plan) { fs::resize_file(plan / "record", fs::file_size(plan / "record") - 1); }},
        Damage{"RecordLonger",
               [](const fs::path& plan) { fs::resize_file(plan / "record", fs::file_size(plan / "record") + 1); }},
        Damage{"RecordHuge", [](const fs::path& plan) { fs::resize_file(plan / "record", uint64_t{1} << 40U); }},
        Damage{"RecordGarbage", [](const fs::path& plan) { write_file(plan / "record", random_text(500, 2)); }},
        Damage{"RecordText", [](const fs::path& plan) { write_file(plan / "record", std::string(300, '{')); }},
        Damage{"RecordLink", [](const fs::path& plan) { replace_by_link(plan / "record"); }},
        Damage{"RecordFifo", [](const fs::path& plan) { replace_by_fifo(plan / "record"); }},
        Damage{"RecordFolder", [](const fs::path& plan) { replace_by_folder(plan / "record"); }},
        Damage{"RecordWritableByOthers", [](const fs::path& plan) { make_writable(plan / "record", S_IWOTH); }},
        Damage{"FolderEmpty",
               [](const fs::path& plan) {
                 fs::remove_all(plan);
                 fs::create_directory(plan);
               }},
        Damage{"FolderIsAFile",
               [](const fs::path& plan) {
                 fs::remove_all(plan);
                 write_file(plan, "");
               }},
        Damage{"FolderIsALink",
               [](const fs::path& plan) {
                 const fs::path moved = plan.parent_path().parent_path() / "moved";
                 fs::rename(plan, moved);
                 fs::create_directory_symlink(moved, plan);
               }},
        Damage{"FolderWritableByGroup", [](const fs::path& plan) { make_writable(plan, S_IWGRP); }},
        Damage{"AnotherPlansFiles",
               [](const fs::path& plan) {
                 for (const auto& other : fs::directory_iterator(plan.parent_path())) {
                   if (other.path() != plan) {
                     fs::remove_all(plan);
                     fs::copy(other.path(), plan);
                     return;
                   }
                 }
               }}),
    [](const auto& info) { return info.param.name; });

TEST_F(PlanStoreTest, EveryByteOfARecordCounts) {
  const PlanStore store(folder_);
  const fs::path record = publish(store) / "record";
  const std::string good = read_file(record);
  for (size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 1);
    write_file(record, bad);
    EXPECT_FALSE(has(store, kKey)) << "byte " << i;
    bad[i] = static_cast<char>(0xff);
    write_file(record, bad);
    EXPECT_FALSE(has(store, kKey)) << "byte " << i;
  }
  for (size_t size = 0; size < good.size(); ++size) {
    write_file(record, std::string_view(good).substr(0, size));
    EXPECT_FALSE(has(store, kKey)) << size << " bytes";
  }
  write_file(record, good);
  EXPECT_TRUE(has(store, kKey));
}

// Checksums do not protect from a record that was written wrong.
TEST_F(PlanStoreTest, LengthsThatDoNotFitTheRecordAreDamage) {
  const PlanStore store(folder_);
  const fs::path path = publish(store) / "record";
  const std::string good = read_file(path);
  const auto with_lengths = [&](uint64_t key, uint64_t environment, uint64_t metadata) {
    files::Record record;
    std::memcpy(&record.header, good.data(), sizeof(record.header));
    record.body = good.substr(sizeof(record.header));
    record.header.key_size = key;
    record.header.environment_size = environment;
    record.header.metadata_size = metadata;
    record.header.sum = record.sum();
    std::string text(reinterpret_cast<const char*>(&record.header), sizeof(record.header));
    write_file(path, text + record.body);
    return store.find(bytes(kKey), kEnvironment).reason;
  };
  const uint64_t key = kKey.size(), environment = kEnvironment.size(), metadata = kMetadata.size();
  EXPECT_EQ(with_lengths(key, environment, metadata), "");
  EXPECT_THAT(with_lengths(key, environment, metadata - 1), HasSubstr("record is damaged"));
  EXPECT_THAT(with_lengths(key, environment, metadata + 1), HasSubstr("record is damaged"));
  EXPECT_THAT(with_lengths(~uint64_t{0}, key + environment + metadata + 1, 0), HasSubstr("record is damaged"));
  EXPECT_THAT(with_lengths(uint64_t{1} << 40U, environment, metadata), HasSubstr("record is damaged"));
}

// Nor from one that something else wrote, with a checksum of the same kind.
TEST_F(PlanStoreTest, AHeaderThatNoVersionWritesIsRefused) {
  const PlanStore store(folder_);
  const fs::path path = publish(store) / "record";
  const std::string good = read_file(path);
  const auto with = [&](const std::function<void(files::Header&)>& change) {
    files::Record record;
    std::memcpy(&record.header, good.data(), sizeof(record.header));
    record.body = good.substr(sizeof(record.header));
    change(record.header);
    record.header.sum = record.sum();
    std::string text(reinterpret_cast<const char*>(&record.header), sizeof(record.header));
    write_file(path, text + record.body);
    return store.find(bytes(kKey), kEnvironment).reason;
  };
  EXPECT_EQ(with([](files::Header&) {}), "");
  EXPECT_EQ(with([](files::Header& header) { header.magic[3] = 'x'; }), "its record is not one");
  EXPECT_EQ(with([](files::Header& header) { header.has_side = 2; }), "its record is damaged");
  EXPECT_THAT(with([](files::Header& header) { ++header.format; }), HasSubstr("another version"));
}

TEST_F(PlanStoreTest, ARecordThatEndsInItsHeaderIsNotLookedInto) {
  const PlanStore store(folder_);
  const fs::path record = publish(store) / "record";
  for (size_t size = sizeof(files::Header); size-- > 0;) {
    fs::resize_file(record, size);
    ASSERT_EQ(store.find(bytes(kKey), kEnvironment).reason, "its record has a wrong length") << size;
  }
}

// A list looks at lengths and reads no library.
TEST_F(PlanStoreTest, ListNamesFilesOfAWrongLength) {
  write_file(side(), "{\"nodes\": []}");
  const PlanStore store(folder_);
  const fs::path plan = publish(store);
  EXPECT_EQ(store.list().entries.at(0).problem, "");
  for (const char* file : {"plan.so", "plan.json"}) {
    const uintmax_t size = fs::file_size(plan / file);
    for (const uintmax_t wrong : {size - 1, size + 1}) {
      fs::resize_file(plan / file, wrong);
      EXPECT_EQ(store.list().entries.at(0).problem, std::string(file) + " has a wrong length");
    }
    fs::resize_file(plan / file, size);
  }
}

TEST_F(PlanStoreTest, ARecordOfAnotherVersionIsNamedAsOne) {
  const PlanStore store(folder_);
  flip(publish(store) / "record", 8);
  EXPECT_THAT(store.find(bytes(kKey), kEnvironment).reason, HasSubstr("another version"));
}

TEST_F(PlanStoreTest, ASideFileThatWasAddedIsDamage) {
  const PlanStore store(folder_);
  write_file(publish(store) / "plan.json", "{}");
  EXPECT_FALSE(has(store, kKey));
}

TEST_F(PlanStoreTest, FilesOfAnotherUserAreDamage) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can give files away";
  const PlanStore store(folder_);
  const fs::path plan = publish(store);
  for (const char* file : {"plan.so", "record", "."}) {
    ASSERT_EQ(chown((plan / file).c_str(), 65534, 65534), 0);
    EXPECT_FALSE(has(store, kKey)) << file;
    ASSERT_EQ(chown((plan / file).c_str(), 0, 0), 0);
    EXPECT_TRUE(has(store, kKey)) << file;
  }
}

// --- Failed publishes ---

TEST_F(PlanStoreTest, AFailedPublishSaysWhyAndLeavesNothing) {
  const PlanStore store(folder_);
  const auto reason = [&](const fs::path& library) {
    const PlanStore::Result result = store.publish(bytes(kKey), kEnvironment, library, kMetadata);
    EXPECT_FALSE(result.plan);
    return result.reason;
  };
  EXPECT_THAT(reason(scratch_ / "none.so"), HasSubstr("none.so cannot be opened"));
  EXPECT_THAT(reason(scratch_), HasSubstr("cannot be opened"));
  write_file(scratch_ / "empty.so", "");
  EXPECT_THAT(reason(scratch_ / "empty.so"), HasSubstr("is empty"));
  ASSERT_EQ(mkfifo((scratch_ / "fifo.so").c_str(), 0600), 0);
  EXPECT_THAT(reason(scratch_ / "fifo.so"), HasSubstr("cannot be opened"));
  fs::create_directory(side());
  EXPECT_THAT(reason(library_), HasSubstr("json cannot be opened"));
  fs::remove(side());
  const std::string large(size_t{65} << 20U, 'x');
  EXPECT_THAT(store.publish(bytes(kKey), kEnvironment, library_, large).reason, HasSubstr("too large"));
  EXPECT_EQ(files_in(folder_ / "plans"), 0U);
  EXPECT_EQ(files_in(folder_ / "tmp"), 0U);
  publish(store);
  EXPECT_TRUE(has(store, kKey));
}

// A limit on the size of files stands for a full disk.
TEST_F(PlanStoreTest, AFullDiskFailsThePublishAndLeavesNothing) {
  const PlanStore store(folder_);
  for (const rlim_t limit : {rlim_t{0}, rlim_t{100'000}, rlim_t{299'999}}) {
    Child child([&] {
      signal(SIGXFSZ, SIG_IGN);
      const rlimit limits{limit, limit};
      setrlimit(RLIMIT_FSIZE, &limits);
      const PlanStore::Result result = store.publish(bytes(kKey), kEnvironment, library_, kMetadata);
      return !result.plan && result.reason.find("File too large") != std::string::npos ? 0 : 1;
    });
    EXPECT_EQ(child.wait(), 0);
    EXPECT_FALSE(has(store, kKey));
    EXPECT_EQ(files_in(folder_ / "tmp"), 0U);
  }
  publish(store);
  EXPECT_TRUE(has(store, kKey));
}

TEST_F(PlanStoreTest, RunningOutOfDescriptorsIsAMissOrAFailure) {
  const PlanStore store(folder_);
  publish(store);
  Child child([&] {
    for (rlim_t limit = 3; limit < 16; ++limit) {
      const rlimit limits{limit, 64};
      setrlimit(RLIMIT_NOFILE, &limits);
      store.find(bytes(kKey), kEnvironment);
      store.publish(bytes("other" + std::to_string(limit)), kEnvironment, library_, kMetadata);
      store.reserve(bytes(kKey), kEnvironment);
      store.list();
      store.verify(true);
    }
    return store.find(bytes(kKey), kEnvironment).plan ? 0 : 1;
  });
  EXPECT_EQ(child.wait(), 0) << "verify() removed a good plan, or the store crashed";
}

// --- The folder ---

TEST_F(PlanStoreTest, FoldersAreMadeForTheOwnerAlone) {
  const mode_t mask = umask(0);
  const PlanStore store(scratch_ / "a" / "b" / "store");
  EXPECT_FALSE(fs::exists(scratch_ / "a")) << "made before it is needed";
  EXPECT_EQ(store.problem(), "");
  const fs::path plan = publish(store);
  const Reservation reservation = store.reserve(bytes(kKey), kEnvironment);
  umask(mask);
  for (const fs::path& folder : {scratch_ / "a", scratch_ / "a" / "b", store.folder(), store.folder() / "plans",
                                 store.folder() / "tmp", store.folder() / "locks", plan}) {
    EXPECT_EQ(mode_of(folder), 0700U) << folder;
  }
  for (const auto& file : fs::recursive_directory_iterator(store.folder())) {
    if (file.is_regular_file()) {
      EXPECT_EQ(mode_of(file), 0600U) << file;
    }
  }
}

class RefusedFolder : public PlanStoreTest {
 protected:
  // Nothing is read from `store`, nothing written, and it is said why.
  static void expect_refused(const PlanStore& store, const fs::path& library, const std::string& why) {
    EXPECT_THAT(store.problem(), AllOf(HasSubstr(why), HasSubstr("RETROGRAD_CACHE_DIR")));
    EXPECT_EQ(store.find(bytes(kKey), kEnvironment).reason, store.problem());
    EXPECT_FALSE(store.find(bytes(kKey), kEnvironment).plan);
    EXPECT_EQ(store.publish(bytes(kKey), kEnvironment, library, kMetadata).reason, store.problem());
    EXPECT_EQ(store.reserve(bytes(kKey), kEnvironment).reason(), store.problem());
    EXPECT_EQ(store.list().reason, store.problem());
    EXPECT_EQ(store.clear().reason, store.problem());
    EXPECT_EQ(store.verify(true).reason, store.problem());
  }
};

TEST_F(RefusedFolder, OthersMayWrite) {
  const PlanStore store(folder_);
  publish(store);
  for (const mode_t mode : {0770U, 0707U, 0720U, 0702U, 01777U}) {
    ASSERT_EQ(chmod(folder_.c_str(), mode), 0);
    expect_refused(store, library_, "others may write to");
    EXPECT_THAT(store.problem(), HasSubstr("chmod go-w '" + folder_.string()));
  }
  ASSERT_EQ(chmod(folder_.c_str(), 0755), 0);
  EXPECT_TRUE(has(store, kKey));
}

TEST_F(RefusedFolder, OthersMayWriteToAPartOfIt) {
  const PlanStore store(folder_);
  publish(store);
  ASSERT_EQ(chmod((folder_ / "plans").c_str(), 0777), 0);
  expect_refused(store, library_, "plans, which others may write to");
  ASSERT_EQ(chmod((folder_ / "plans").c_str(), 0700), 0);
  ASSERT_EQ(chmod((folder_ / "tmp").c_str(), 0777), 0);
  EXPECT_THAT(store.publish(bytes("new"), kEnvironment, library_, kMetadata).reason, HasSubstr("tmp"));
  fs::create_directory(folder_ / "locks");
  ASSERT_EQ(chmod((folder_ / "locks").c_str(), 0777), 0);
  EXPECT_THAT(store.reserve(bytes("new"), kEnvironment).reason(), HasSubstr("locks"));
}

TEST_F(RefusedFolder, BelongsToSomeoneElse) {
  fs::path foreign = "/usr";
  if (geteuid() == 0) {
    publish(PlanStore(folder_));
    foreign = folder_;
    ASSERT_EQ(chown(foreign.c_str(), 65534, 65534), 0);
  }
  expect_refused(PlanStore(foreign), library_, "which belongs to user");
}

TEST_F(RefusedFolder, OthersMayExchangeIt) {
  const PlanStore store(scratch_ / "open" / "inner" / "store");
  publish(store);
  ASSERT_EQ(chmod((scratch_ / "open").c_str(), 0777), 0);
  expect_refused(store, library_, "may exchange");
  ASSERT_EQ(chmod((scratch_ / "open").c_str(), 01777), 0);
  EXPECT_EQ(store.problem(), "");
  EXPECT_TRUE(has(store, kKey));
}

TEST_F(RefusedFolder, LinkToAFolderThatOthersMayWriteTo) {
  fs::create_directory(folder_);
  ASSERT_EQ(chmod(folder_.c_str(), 0777), 0);
  fs::create_directory_symlink(folder_, scratch_ / "link");
  expect_refused(PlanStore(scratch_ / "link"), library_, "others may write to");
  expect_refused(PlanStore(scratch_ / "link" / ""), library_, "others may write to");
}

TEST_F(RefusedFolder, LinkThatWasPutThereSince) {
  const PlanStore store(folder_);
  publish(store);
  fs::rename(folder_, scratch_ / "moved");
  fs::create_directory_symlink(scratch_ / "moved", folder_);
  expect_refused(store, library_, "symbolic link");
}

TEST_F(RefusedFolder, FileOrLinkToNothing) {
  expect_refused(PlanStore(library_), library_, "not a folder");
  fs::create_directory_symlink(scratch_ / "nothing", scratch_ / "link");
  expect_refused(PlanStore(scratch_ / "link"), library_, "symbolic link");
  EXPECT_NE(PlanStore(library_ / "below").problem(), "");
}

TEST_F(PlanStoreTest, ALinkToASafeFolderIsFollowedOnce) {
  fs::create_directory(folder_);
  fs::create_directory_symlink(folder_, scratch_ / "link");
  const PlanStore store(scratch_ / "link");
  publish(store);
  fs::remove(scratch_ / "link");
  EXPECT_TRUE(has(store, kKey));
  EXPECT_EQ(store.folder(), fs::canonical(folder_));
}

TEST_F(PlanStoreTest, AFolderThatIsNotExecutableIsRefused) {
  std::ifstream mounts("/proc/mounts");
  std::string device, where, type, options, rest;
  while (mounts >> device >> where >> type >> options && std::getline(mounts, rest)) {
    const fs::path folder = fs::path(where) / ("plan_store_test_" + std::to_string(getpid()));
    std::error_code error;
    if (type == "tmpfs" && options.find("noexec") != std::string::npos && fs::create_directory(folder, error)) {
      fs::permissions(folder, fs::perms::owner_all);
      const std::string problem = PlanStore(folder).problem();
      fs::remove_all(folder);
      if (problem.find("may exchange") == std::string::npos) {
        EXPECT_THAT(problem, HasSubstr("noexec"));
        return;
      }
    }
  }
  // One in a mount namespace of a child's own, where that is allowed.
  constexpr int kNotAllowed = 77;
  const int code = Child([&] {
                     if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
                         mount("none", scratch_.c_str(), "tmpfs", MS_NOEXEC, "mode=700") != 0) {
                       return kNotAllowed;
                     }
                     return PlanStore(folder_).problem().find("noexec") != std::string::npos ? 0 : 1;
                   }).wait();
  if (code == kNotAllowed) GTEST_SKIP() << "no file system here is mounted noexec";
  EXPECT_EQ(code, 0);
}

TEST_F(PlanStoreTest, AFolderThatWasRemovedIsMadeAgain) {
  const PlanStore store(folder_);
  publish(store);
  fs::remove_all(folder_);
  EXPECT_FALSE(store.find(bytes(kKey), kEnvironment).plan);
  EXPECT_EQ(store.clear().plans, 0U);
  EXPECT_TRUE(store.reserve(bytes(kKey), kEnvironment).held());
  publish(store);
  EXPECT_TRUE(has(store, kKey));
  fs::remove_all(folder_ / "tmp");
  fs::remove_all(folder_ / "locks");
  publish(store, "other");
  EXPECT_TRUE(has(store, "other"));
}

class Environment : public PlanStoreTest {
 protected:
  void SetUp() override {
    PlanStoreTest::SetUp();
    for (const char* name : kNames) {
      const char* value = std::getenv(name);
      former_.emplace_back(value != nullptr ? std::optional<std::string>(value) : std::nullopt);
      unsetenv(name);
    }
    setenv("HOME", "/home/somebody", 1);
  }
  void TearDown() override {
    for (size_t i = 0; i < former_.size(); ++i) {
      former_[i] ? setenv(kNames.at(i), former_[i]->c_str(), 1) : unsetenv(kNames.at(i));
    }
    PlanStoreTest::TearDown();
  }
  static constexpr std::array kNames = {"HOME", "XDG_CACHE_HOME", "RETROGRAD_CACHE_DIR", "RETROGRAD_CACHE",
                                        "RETROGRAD_CACHE_LIMIT"};
  std::vector<std::optional<std::string>> former_;
};

TEST_F(Environment, NamesTheFolder) {
  EXPECT_EQ(PlanStore::default_folder(), "/home/somebody/.cache/retrograd");
  setenv("XDG_CACHE_HOME", "relative", 1);  // to be ignored, says the specification
  EXPECT_EQ(PlanStore::default_folder(), "/home/somebody/.cache/retrograd");
  setenv("XDG_CACHE_HOME", "/var/tmp/somebody", 1);
  EXPECT_EQ(PlanStore::default_folder(), "/var/tmp/somebody/retrograd");
  setenv("RETROGRAD_CACHE_DIR", "/scratch/plans", 1);
  EXPECT_EQ(PlanStore::default_folder(), "/scratch/plans");
  setenv("RETROGRAD_CACHE_DIR", "", 1);
  EXPECT_EQ(PlanStore::default_folder(), "/var/tmp/somebody/retrograd");
  setenv("RETROGRAD_CACHE", "1", 1);
  EXPECT_NE(PlanStore::default_folder(), std::nullopt);
  setenv("RETROGRAD_CACHE", "0", 1);
  EXPECT_EQ(PlanStore::default_folder(), std::nullopt);
}

TEST_F(Environment, NamesTheLargestSize) {
  const uint64_t usual = PlanStore::Limits().max_bytes;
  std::string problem;
  EXPECT_EQ(PlanStore::default_limits(&problem).max_bytes, usual);
  for (const auto& [text, bytes] : std::vector<std::pair<const char*, uint64_t>>{
           {"0", 0}, {"123456", 123456}, {"7K", 7000}, {"500M", 500'000'000}, {"4G", 4'000'000'000}}) {
    setenv("RETROGRAD_CACHE_LIMIT", text, 1);
    EXPECT_EQ(PlanStore::default_limits(&problem).max_bytes, bytes) << text;
    EXPECT_EQ(problem, "") << text;
  }
  for (const char* text : {"much", "-1", "5 G", "5GB", "1.5G", "G", "99999999999999999999", "99999999999999999G"}) {
    setenv("RETROGRAD_CACHE_LIMIT", text, 1);
    problem.clear();
    EXPECT_EQ(PlanStore::default_limits(&problem).max_bytes, usual) << text;
    EXPECT_NE(problem.find(text), std::string::npos) << problem;
  }
  EXPECT_EQ(PlanStore::default_limits().max_plans, PlanStore::Limits().max_plans);
}

TEST_F(Environment, ARelativeFolderStaysWhereItWas) {
  const fs::path before = fs::current_path();
  fs::current_path(scratch_);
  const PlanStore store("store");
  fs::current_path("/");
  publish(store);
  fs::current_path(before);
  EXPECT_TRUE(has(PlanStore(folder_), kKey));
}

// --- Limits ---

TEST_F(PlanStoreTest, TheLeastRecentlyUsedPlansAreEvicted) {
  const PlanStore store(folder_, {.max_plans = 3});
  const std::vector<std::string> keys = {"a", "b", "c"};
  for (size_t i = 0; i < keys.size(); ++i) {
    set_mtime(publish(store, keys[i]) / "record", -10h + i * 1h);
  }
  ASSERT_TRUE(has(store, "a"));  // used now
  publish(store, "d");
  EXPECT_FALSE(has(store, "b"));
  publish(store, "e");
  EXPECT_FALSE(has(store, "c"));
  for (const char* key : {"a", "d", "e"}) EXPECT_TRUE(has(store, key)) << key;
  EXPECT_EQ(files_in(folder_ / "tmp"), 0U);
}

TEST_F(PlanStoreTest, BytesAreLimitedToo) {
  const PlanStore store(folder_, {.max_bytes = 700'000});
  set_mtime(publish(store, "a") / "record", -2h);
  set_mtime(publish(store, "b") / "record", -1h);
  write_file(side(), std::string(200'000, 'x'));
  publish(store, "c");
  EXPECT_FALSE(has(store, "a"));
  EXPECT_FALSE(has(store, "b"));
  EXPECT_TRUE(has(store, "c"));
  const PlanStore small(folder_, {.max_bytes = 1, .max_plans = 0});
  publish(small, "d");
  EXPECT_FALSE(has(store, "c"));
  EXPECT_TRUE(has(store, "d")) << "the plan published last";
}

TEST_F(PlanStoreTest, LeasedPlansAreNotEvicted) {
  const PlanStore store(folder_, {.max_plans = 1});
  PlanStore::Result leased = store.publish(bytes("a"), kEnvironment, library_, kMetadata);
  set_mtime(leased.plan->library.parent_path() / "record", -2h);
  publish(store, "b");
  EXPECT_TRUE(fs::exists(leased.plan->library));
  leased = store.find(bytes("a"), kEnvironment);
  set_mtime(leased.plan->library.parent_path() / "record", -2h);
  publish(store, "c");
  EXPECT_TRUE(fs::exists(leased.plan->library));
  const fs::path library = leased.plan->library;
  leased.plan->lease.release();
  publish(store, "d");
  EXPECT_FALSE(fs::exists(library));
}

TEST_F(PlanStoreTest, ALeaseEndsWithItsProcess) {
  const PlanStore store(folder_);
  publish(store);
  std::array<int, 2> ready{};
  ASSERT_EQ(pipe(ready.data()), 0);
  Child child([&] {
    const PlanStore::Result found = store.find(bytes(kKey), kEnvironment);
    (void)!write(ready[1], "x", 1);
    pause();
    return found.plan ? 0 : 1;
  });
  char byte = 0;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  EXPECT_EQ(store.clear().leased, 1U);
  child.kill_and_wait();
  EXPECT_EQ(store.clear().plans, 1U);
  close(ready[0]);
  close(ready[1]);
}

TEST_F(PlanStoreTest, ALeaseEndsWithItsHolderThoughAForkedChildLives) {
  const PlanStore store(folder_);
  PlanStore::Result leased = store.publish(bytes(kKey), kEnvironment, library_, kMetadata);
  Child child([] {
    pause();
    return 0;
  });
  EXPECT_EQ(store.clear().leased, 1U);
  leased.plan.reset();
  EXPECT_EQ(store.clear().plans, 1U);
}

TEST_F(PlanStoreTest, AUseIsNotedOnceAMinute) {
  const PlanStore store(folder_);
  const fs::path record = publish(store) / "record";
  set_mtime(record, -30s);
  ASSERT_TRUE(has(store, kKey));
  EXPECT_LT(mtime_from_now(record), -25s);
  set_mtime(record, -70s);
  ASSERT_TRUE(has(store, kKey));
  EXPECT_GT(mtime_from_now(record), -25s);
}

TEST_F(PlanStoreTest, ATimeInTheFutureIsPutBack) {
  const PlanStore store(folder_, {.max_plans = 2});
  const fs::path a = publish(store, "a") / "record";
  set_mtime(a, 1000h);
  ASSERT_TRUE(has(store, "a"));
  EXPECT_LE(mtime_from_now(a), 1s);

  // Also where nobody uses the plan: it ages from now on.
  set_mtime(a, 1000h);
  set_mtime(publish(store, "b") / "record", -1h);
  const fs::path c = publish(store, "c") / "record";
  EXPECT_FALSE(has(store, "b"));
  EXPECT_LE(mtime_from_now(a), 1s);
  set_mtime(a, -1s);
  publish(store, "d");
  EXPECT_FALSE(fs::exists(a));
  EXPECT_TRUE(fs::exists(c));
}

TEST_F(PlanStoreTest, DebrisOfKilledProcessesIsSweptWhenItIsOld) {
  const PlanStore store(folder_);
  publish(store);
  const std::string name = std::string(32, 'a');
  const auto debris = [&](const char* suffix) {
    const fs::path path = folder_ / "tmp" / (name + "." + suffix);
    fs::create_directory(path);
    write_file(path / "plan.so", "half a library");
    return path;
  };
  const fs::path fresh = debris("0000000000000001");
  const fs::path old = debris("0000000000000002");
  const fs::path future = debris("0000000000000003");
  const fs::path old_lock = folder_ / "locks" / name;
  const fs::path held_lock = folder_ / "locks" / std::string(32, 'b');
  fs::create_directory(folder_ / "locks");
  write_file(old_lock, "");
  write_file(held_lock, "");
  set_mtime(old, -2h);
  set_mtime(future, 2h);
  set_mtime(old_lock, -48h);
  set_mtime(held_lock, -48h);
  const int fd = open(held_lock.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(flock(fd, LOCK_EX), 0);

  publish(store, "another");
  EXPECT_TRUE(fs::exists(fresh));
  EXPECT_FALSE(fs::exists(old));
  EXPECT_FALSE(fs::exists(future));
  EXPECT_FALSE(fs::exists(old_lock));
  EXPECT_TRUE(fs::exists(held_lock));
  close(fd);
}

// --- Reservations ---

TEST_F(PlanStoreTest, OneCallerHoldsAReservation) {
  const PlanStore store(folder_);
  Reservation first = store.reserve(bytes(kKey), kEnvironment);
  EXPECT_TRUE(first.held());
  Reservation second = store.reserve(bytes(kKey), kEnvironment);
  EXPECT_FALSE(second.held());
  EXPECT_EQ(second.reason(), "");
  EXPECT_TRUE(store.reserve(bytes("other"), kEnvironment).held());

  const auto start = std::chrono::steady_clock::now();
  EXPECT_FALSE(store.reserve(bytes(kKey), kEnvironment, 60ms).held());
  EXPECT_GE(std::chrono::steady_clock::now() - start, 60ms);

  Reservation moved = std::move(first);
  EXPECT_FALSE(store.reserve(bytes(kKey), kEnvironment).held());
  moved.release();
  EXPECT_TRUE(store.reserve(bytes(kKey), kEnvironment).held());
  EXPECT_LE(files_in(folder_ / "locks"), 1U) << "lock files stay";
}

TEST_F(PlanStoreTest, AWaiterGetsTheReservationWhenItsHolderDies) {
  const PlanStore store(folder_);
  std::array<int, 2> ready{};
  ASSERT_EQ(pipe(ready.data()), 0);
  Child child([&] {
    const Reservation held = store.reserve(bytes(kKey), kEnvironment);
    (void)!write(ready[1], held.held() ? "y" : "n", 1);
    pause();
    return 0;
  });
  char answer = 0;
  ASSERT_EQ(read(ready[0], &answer, 1), 1);
  ASSERT_EQ(answer, 'y');
  EXPECT_FALSE(store.reserve(bytes(kKey), kEnvironment, 50ms).held());
  std::jthread killer([&] {
    std::this_thread::sleep_for(50ms);
    child.kill_and_wait();
  });
  EXPECT_TRUE(store.reserve(bytes(kKey), kEnvironment, 30s).held());
  close(ready[0]);
  close(ready[1]);
}

TEST_F(PlanStoreTest, AForkedChildNeitherHoldsNorEndsItsParentsReservation) {
  const PlanStore store(folder_);
  Reservation mine = store.reserve(bytes(kKey), kEnvironment);
  {
    Child child([&] {
      mine.release();
      return store.reserve(bytes(kKey), kEnvironment).held() ? 1 : 0;
    });
    EXPECT_EQ(child.wait(), 0);
  }
  EXPECT_FALSE(store.reserve(bytes(kKey), kEnvironment).held());
  Child child([] {
    pause();
    return 0;
  });
  mine.release();
  EXPECT_TRUE(store.reserve(bytes(kKey), kEnvironment).held());
}

TEST_F(PlanStoreTest, ReservationsThatComeAndGoNeverOverlap) {
  const PlanStore store(folder_);
  std::atomic<int> holders{0};
  std::atomic<int> taken{0};
  run_threads(4, [&](int) {
    for (int round = 0; round < 2000; ++round) {
      const Reservation reservation = store.reserve(bytes(kKey), kEnvironment);
      if (reservation.held()) {
        EXPECT_EQ(++holders, 1);
        ++taken;
        std::this_thread::sleep_for(1us);  // lets the others in
        --holders;
      }
    }
  });
  EXPECT_GT(taken, 100);
}

// The recipe of reserve(): whoever comes second finds what the first one made.
int make_once(const PlanStore& store, const fs::path& library, int rounds) {
  int made = 0;
  for (int round = 0; round < rounds; ++round) {
    const std::string key = std::to_string(round);
    if (store.find(bytes(key), kEnvironment).plan) continue;
    const Reservation reservation = store.reserve(bytes(key), kEnvironment, 60s);
    if (!reservation.held()) return 100;
    if (store.find(bytes(key), kEnvironment).plan) continue;
    std::this_thread::sleep_for(1ms);  // compiling
    if (!store.publish(bytes(key), kEnvironment, library, kMetadata).added) return 100;
    ++made;
  }
  return made;
}

TEST_F(PlanStoreTest, ProcessesAndThreadsThatReserveMakeEachPlanOnce) {
  constexpr int kRounds = 20;
  write_file(library_, "a small library");
  const PlanStore store(folder_);
  std::vector<Child> children;
  for (int i = 0; i < 3; ++i) {
    children.emplace_back([&] { return make_once(PlanStore(folder_), library_, kRounds); });
  }
  std::atomic<int> made{0};
  run_threads(3, [&](int) { made += make_once(store, library_, kRounds); });
  for (Child& child : children) made += child.wait();
  EXPECT_EQ(made, kRounds);
  EXPECT_EQ(store.verify(false).good, size_t{kRounds});
}

// --- Many at once ---

TEST_F(PlanStoreTest, RacingPublishersHaveOneWinner) {
  constexpr int kThreads = 4;
  constexpr int kRounds = 20;
  write_file(library_, random_text(20'000, 3));
  const PlanStore store(folder_);
  std::barrier start(kThreads);
  std::vector<std::atomic<int>> winners(kRounds);
  run_threads(kThreads, [&](int thread) {
    for (int round = 0; round < kRounds; ++round) {
      start.arrive_and_wait();
      const std::string mine = std::to_string(thread);
      const PlanStore::Result result = store.publish(bytes(std::to_string(round)), kEnvironment, library_, mine);
      ASSERT_TRUE(result.plan) << result.reason;
      if (result.added) {
        ++winners[round];
        EXPECT_EQ(result.plan->metadata, mine);
      }
      EXPECT_EQ(store.find(bytes(std::to_string(round)), kEnvironment).plan->metadata, result.plan->metadata);
    }
  });
  for (const auto& count : winners) EXPECT_EQ(count, 1);
  EXPECT_EQ(files_in(folder_ / "tmp"), 0U);
}

TEST_F(PlanStoreTest, RacingPublishersReplaceADamagedPlan) {
  const PlanStore store(folder_);
  for (int round = 0; round < 10; ++round) {
    flip(publish(store) / "plan.so", 299'999);
    std::atomic<int> winners{0};
    std::barrier start(4);
    run_threads(4, [&](int thread) {
      start.arrive_and_wait();
      for (int i = 0; i < 50 && thread % 2 == 0; ++i) store.find(bytes(kKey), kEnvironment);  // leases it
      const PlanStore::Result result = store.publish(bytes(kKey), kEnvironment, library_, kMetadata);
      EXPECT_TRUE(result.plan) << result.reason;
      winners += result.added ? 1 : 0;
    });
    EXPECT_EQ(winners, 1);
  }
}

// Publishes, finds, evicts, removes and verifies at random. A plan that was given out has the content of its key for as
// long as it is leased. Returns what went wrong.
std::string roam(const fs::path& folder, const fs::path& libraries, uint32_t seed, std::chrono::milliseconds time) {
  constexpr uint32_t kKeys = 6;
  const PlanStore store(folder, {.max_plans = 3});
  std::mt19937 random(seed);
  const auto end = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() < end) {
    const std::string key = std::to_string(random() % kKeys);
    const fs::path library = libraries / (key + ".so");
    PlanStore::Result result;
    switch (random() % 16) {
      case 0:
        if (const PlanStore::Verified verified = store.verify(true); !verified.bad.empty()) {
          return "bad plan: " + verified.bad[0].reason;
        }
        continue;
      case 1:
        store.clear();
        continue;
      case 2:
      case 3:
      case 4:
        result = store.publish(bytes(key), kEnvironment, library, key);
        if (!result.plan) return "not published: " + result.reason;
        break;
      default:
        result = store.find(bytes(key), kEnvironment);
        if (!result.plan) {
          if (!result.reason.empty()) return "not found: " + result.reason;
          continue;
        }
    }
    if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
    if (result.plan->metadata != key) return "another plan's metadata";
    if (!fs::exists(fs::path(result.plan->library).replace_extension(".json"))) return "the side file is gone";
    if (read_file(result.plan->library) != read_file(library)) return "the library is gone or another one";
  }
  return "";
}

TEST_F(PlanStoreTest, ThreadsAndProcessesThatPublishFindAndEvictSeeWholePlansOnly) {
  for (uint32_t i = 0; i < 6; ++i) {
    write_file(scratch_ / (std::to_string(i) + ".so"), random_text(5000 + i, i));
    write_file(scratch_ / (std::to_string(i) + ".json"), "{}");
  }
  const auto run = [&](uint32_t seed) {
    std::array<std::string, 3> wrong;
    run_threads(3, [&](int i) { wrong.at(i) = roam(folder_, scratch_, seed + i, 2s); });
    std::string all;
    for (const std::string& one : wrong) all += one;
    if (!all.empty()) std::fprintf(stderr, "%s\n", all.c_str());
    return all.empty() ? 0 : 1;
  };
  Child first([&] { return run(10); });
  Child second([&] { return run(20); });
  EXPECT_EQ(run(30), 0);
  EXPECT_EQ(first.wait(), 0);
  EXPECT_EQ(second.wait(), 0);
  EXPECT_LE(files_in(folder_ / "plans"), 4U);
  EXPECT_EQ(files_in(folder_ / "tmp"), 0U);
}

TEST_F(PlanStoreTest, AFolderThatIsRemovedAgainAndAgainIsNoMoreThanAMiss) {
  write_file(library_, "a small library");
  std::atomic<bool> stop{false};
  std::atomic<int> published{0};
  std::jthread remover([&] {
    while (!stop) {
      std::error_code ignored;
      fs::remove_all(folder_, ignored);
      std::this_thread::sleep_for(1ms);
    }
  });
  run_threads(2, [&](int i) {
    const PlanStore store(folder_, {.max_plans = 2});
    for (int round = 0; round < 60; ++round) {
      const std::string key = std::to_string(i) + std::to_string(round % 5);
      const Reservation reservation = store.reserve(bytes(key), kEnvironment);
      const PlanStore::Result result = store.publish(bytes(key), kEnvironment, library_, kMetadata);
      EXPECT_TRUE(result.plan || !result.reason.empty());
      published += result.plan ? 1 : 0;
      store.find(bytes(key), kEnvironment);
      store.verify(true);
    }
  });
  stop = true;
  remover.join();
  EXPECT_GT(published, 0);
  publish(PlanStore(folder_));
  EXPECT_TRUE(has(PlanStore(folder_), kKey));
}

TEST_F(PlanStoreTest, APublisherThatIsKilledLeavesNoHalfPlan) {
  write_file(library_, random_text(4'000'000, 4));
  const PlanStore store(folder_, {.max_plans = 2});
  std::mt19937 random(5);
  size_t in_the_middle = 0;
  for (int round = 0; round < 60; ++round) {
    Child child([&] {
      for (int i = 0;; ++i) {
        store.publish(bytes(std::to_string(i % 4)), kEnvironment, library_, kMetadata);
      }
      return 0;
    });
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 30'000));
    child.kill_and_wait();
    const PlanStore::Verified verified = store.verify(false);
    EXPECT_TRUE(verified.bad.empty()) << verified.bad[0].reason;
    if (fs::exists(folder_ / "tmp")) {
      for (const auto& left : fs::directory_iterator(folder_ / "tmp")) {
        ++in_the_middle;
        fs::remove_all(left);
      }
    }
    if (round % 4 == 0) store.clear();
  }
  EXPECT_GT(in_the_middle, 5U) << "no publisher was met at work";
  publish(store);
  EXPECT_TRUE(has(store, kKey));
}

}  // namespace
}  // namespace retrograd::cache
