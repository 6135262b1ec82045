// Descriptors and locks stay with the process that made them.
#include "base/descriptor.hpp"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <memory>
#include <thread>
#include <vector>

#include "base/folder_lock.hpp"
#include "base/tier.hpp"
#include "check.hpp"
#include "folder.hpp"

using namespace hotbed;

namespace {

bool is_open(int number) { return fcntl(number, F_GETFD) >= 0; }

// What a forked child finds: 0, or the number of the check that failed.
template <class F>
int in_child(F f) {
  pid_t child = fork();
  if (child == 0) _exit(f());
  int status;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 99;
}

std::unique_ptr<FolderLock> lock(const Folder& folder, bool shared = false) {
  return std::make_unique<FolderLock>(folder.path, "lock", shared, "The folder", "Wait.");
}

}  // namespace

TEST(a_child_closes_what_it_was_not_given) {
  Folder folder;
  Descriptor file(folder / "a", O_RDWR | O_CREAT);
  Descriptor none(folder / "absent", O_RDONLY);
  CHECK(is_open(file.number()) && !file.inherited());
  CHECK(none.number() < 0 && errno == ENOENT);
  auto moved = std::make_unique<Descriptor>(std::move(file));
  CHECK_EQ(in_child([&] {
             if (is_open(moved->number()) || !moved->inherited()) return 1;
             // Its number may be another file's by now, which must stay open.
             Descriptor own(folder / "a", O_RDONLY);
             if (own.number() != moved->number()) return 2;
             moved.reset();
             return is_open(own.number()) && !own.inherited() ? 0 : 3;
           }),
           0);
  CHECK(is_open(moved->number()));
  int number = moved->number();
  moved.reset();
  CHECK(!is_open(number));
}

TEST(no_fork_comes_between_opening_and_knowing) {
  Folder folder;
  std::ofstream(folder / "a") << "x";
  std::atomic<bool> stop{false};
  std::thread opens([&] {
    while (!stop) Descriptor file(folder / "a", O_RDONLY);
  });
  for (int i = 0; i < 200; ++i) {
    CHECK_EQ(in_child([&] {
               for (int number = 3; number < 64; ++number) {
                 char name[64], to[512];
                 std::snprintf(name, sizeof name, "/proc/self/fd/%d", number);
                 ssize_t length = readlink(name, to, sizeof to);
                 if (length > 0 && std::string(to, length) == folder / "a") return 1;
               }
               return 0;
             }),
             0);
  }
  stop = true;
  opens.join();
}

TEST(a_lock_is_one_user_s_or_any_readers) {
  Folder folder;
  std::vector<std::unique_ptr<FolderLock>> readers;
  for (int i = 0; i < 2; ++i) readers.push_back(lock(folder, true));  // no file is there yet
  auto user = lock(folder);
  std::string said = CHECK_THROWS(lock(folder), TierError);
  CHECK_EQ(said, "The folder is in use by this process. Wait.");
  CHECK_THROWS(lock(folder, true), TierError);
  user.reset();
  readers.clear();
  for (int i = 0; i < 2; ++i) readers.push_back(lock(folder, true));
  CHECK_THROWS(lock(folder), TierError);
  readers.clear();
  user = lock(folder);
}

TEST(a_child_has_no_part_in_a_lock) {
  Folder folder;
  auto user = lock(folder);
  std::string parent = "process " + std::to_string(getpid());
  CHECK_EQ(in_child([&] {
             user.reset();
             try {
               lock(folder);
               return 1;
             } catch (const TierError& error) {
               return std::string(error.what()).find(parent) != std::string::npos ? 0 : 2;
             }
           }),
           0);
  CHECK_THROWS(lock(folder), TierError);
  int begin[2], end[2];
  CHECK(pipe(begin) == 0 && pipe(end) == 0);
  pid_t child = fork();
  if (child == 0) {
    char byte;
    close(end[1]);
    static_cast<void>(!write(begin[1], "x", 1));
    _exit(read(end[0], &byte, 1) == 0 ? 0 : 1);
  }
  char byte;
  CHECK(read(begin[0], &byte, 1) == 1);
  user.reset();
  user = lock(folder);  // while the child lives
  close(end[1]);
  int status;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(a_file_that_is_no_lock_is_left_alone) {
  Folder folder;
  for (const char* text : {"x", "12a\n", "123456789012345678901234567890\n", "\n\n", "1 2"}) {
    std::ofstream(folder / "lock") << text;
    for (bool shared : {false, true}) {
      CHECK(CHECK_THROWS(lock(folder, shared), TierError).find("not a lock") != std::string::npos);
    }
    std::string left;
    std::getline(std::ifstream(folder / "lock"), left, '\0');
    CHECK_EQ(left, text);
  }
  std::ofstream(folder / "lock") << "4711\n";  // of a process that was killed
  CHECK_THROWS((FolderLock{folder / "absent", "lock", false, "", ""}), TierError);
  lock(folder);
}
