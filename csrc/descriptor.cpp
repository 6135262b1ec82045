#include "descriptor.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>
#include <set>

namespace hotbed {

namespace {

std::mutex mutex;  // of what follows; a fork holds it
uint64_t forks = 0;

// Never destroyed: descriptors may be closed while static objects go.
std::set<int>& open_ones() {
  static auto* numbers = new std::set<int>;
  return *numbers;
}

void before_fork() { mutex.lock(); }
void in_parent() { mutex.unlock(); }
void in_child() {
  for (int number : open_ones()) ::close(number);
  open_ones().clear();
  ++forks;
  mutex.unlock();
}

}  // namespace

Descriptor::Descriptor(const std::function<int()>& open) {
  static const int watching = pthread_atfork(before_fork, in_parent, in_child);
  static_cast<void>(watching);
  std::lock_guard lock(mutex);
  number_ = open();
  process_ = forks;
  if (number_ < 0) return;
  int error = errno;
  open_ones().insert(number_);
  errno = error;
}

Descriptor::Descriptor(const std::string& path, int flags, mode_t mode)
    : Descriptor([&] { return ::open(path.c_str(), flags | O_CLOEXEC, mode); }) {}

bool Descriptor::inherited() const {
  std::lock_guard lock(mutex);
  return process_ != forks;
}

Descriptor::~Descriptor() {
  if (number_ < 0) return;
  std::lock_guard lock(mutex);
  if (process_ != forks) return;
  open_ones().erase(number_);
  ::close(number_);
}

}  // namespace hotbed
