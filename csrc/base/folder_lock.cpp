#include "base/folder_lock.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <set>

#include "base/errors.hpp"
#include "base/forks.hpp"

namespace hotbed {

namespace {

constexpr size_t kMostDigits = 20;

// Files that this process has locked, or that the one from which it was forked had.
std::mutex& mutex = *new ForkMutex;
std::multiset<std::pair<uint64_t, uint64_t>>& locked_ones() {
  static auto* files = new std::multiset<std::pair<uint64_t, uint64_t>>;
  return *files;
}

// The number of a process and a line feed, or nothing, is what these files hold.
std::string owner_in(int descriptor, const std::string& path) {
  char text[kMostDigits + 2];
  ssize_t length = pread(descriptor, text, sizeof text, 0);
  std::string owner(text, static_cast<size_t>(std::max<ssize_t>(0, length)));
  if (!owner.empty() && owner.back() == '\n') owner.pop_back();
  bool digits =
      std::all_of(owner.begin(), owner.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (length < 0 || !digits || owner.size() > kMostDigits) {
    throw TierError(path + " is not a lock of Hotbed's. Move it away, or take another folder.",
                    path);
  }
  return owner;
}

}  // namespace

FolderLock::FolderLock(const std::string& folder, const std::string& name, bool shared,
                       const std::string& what, const std::string& remedy)
    : file_(folder + "/" + name, (shared ? O_RDONLY : O_RDWR | O_CREAT) | O_NOFOLLOW | O_NONBLOCK) {
  std::string path = folder + "/" + name;
  struct stat status;
  if (file_.number() < 0 || fstat(file_.number(), &status) != 0) {
    // A copy of a folder may come without the file, on a disk that cannot be written.
    if (shared && errno == ENOENT) return;
    throw TierError(path + ": " + std::strerror(errno), path);
  }
  if (!S_ISREG(status.st_mode)) throw TierError(path + " is no file.", path);
  std::string owner = owner_in(file_.number(), path);
  file_number_ = {status.st_dev, status.st_ino};
  std::lock_guard lock(mutex);
  if (flock(file_.number(), (shared ? LOCK_SH : LOCK_EX) | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) throw TierError(path + ": " + std::strerror(errno), path);
    // Numbers repeat across containers, so that alone proves nothing.
    bool here = locked_ones().count(file_number_) > 0;
    bool named_here = owner == std::to_string(getpid());
    std::string user = here && named_here            ? "this process"
                       : owner.empty() || named_here ? "another process"
                                                     : "process " + owner;
    throw TierError(what + " is in use by " + user + ". " + remedy, folder);
  }
  locked_ones().insert(file_number_);
  if (shared) return;
  std::string text = std::to_string(getpid()) + "\n";
  if (ftruncate(file_.number(), 0) != 0 ||
      pwrite(file_.number(), text.data(), text.size(), 0) != static_cast<ssize_t>(text.size())) {
    // The number is a courtesy to the next who comes.
  }
}

FolderLock::~FolderLock() {
  if (file_.number() < 0 || file_.inherited()) return;
  std::lock_guard lock(mutex);
  auto own = locked_ones().find(file_number_);
  if (own != locked_ones().end()) locked_ones().erase(own);
  // In so many words: a child that is being started by other means may have the file for a moment.
  flock(file_.number(), LOCK_UN);
}

}  // namespace hotbed
