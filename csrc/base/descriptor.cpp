#include "base/descriptor.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>
#include <set>

#include "base/forks.hpp"

namespace hotbed {

namespace {

// Never destroyed: descriptors may be closed while static objects go.
std::set<int>& open_ones = *new std::set<int>;
std::mutex& mutex = *new ForkMutex([] {
  for (int number : open_ones) ::close(number);
  open_ones.clear();
});

}  // namespace

Descriptor::Descriptor(const std::function<int()>& open) {
  std::lock_guard lock(mutex);
  number_ = open();
  process_ = forks();
  if (number_ < 0) return;
  int error = errno;
  open_ones.insert(number_);
  errno = error;
}

Descriptor::Descriptor(const std::string& path, int flags, mode_t mode)
    : Descriptor([&] { return ::open(path.c_str(), flags | O_CLOEXEC, mode); }) {}

bool Descriptor::inherited() const { return process_ != forks(); }

Descriptor::~Descriptor() {
  if (number_ < 0) return;
  std::lock_guard lock(mutex);
  if (inherited()) return;
  open_ones.erase(number_);
  ::close(number_);
}

}  // namespace hotbed
