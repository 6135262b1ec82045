// File descriptors that stay with the process that opened them.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>

namespace hotbed {

// A forked child gets a copy of every descriptor, and with it a hold on locks and on the space of
// removed files, for as long as it lives (a worker of a DataLoader: for as long as the loader). So
// it closes these at once, and its copies of this object hold nothing.
//
// Threads: one at a time, as any value; descriptors are made and closed beside each other, and
// beside forks.
class Descriptor {
 public:
  Descriptor() = default;
  // What `open` returns, a descriptor or a number below 0; no fork comes between.
  explicit Descriptor(const std::function<int()>& open);
  // As open(2), with O_CLOEXEC.
  Descriptor(const std::string& path, int flags, mode_t mode = 0644);
  Descriptor(Descriptor&& other) noexcept { swap(other); }
  Descriptor& operator=(Descriptor&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Descriptor();

  // Below 0: there is none, and errno says why, where it was just opened.
  int number() const { return number_; }
  // Whether it was opened by the process that this one was forked from.
  bool inherited() const;

 private:
  void swap(Descriptor& other) noexcept {
    std::swap(number_, other.number_);
    std::swap(process_, other.process_);
  }
  int number_ = -1;
  uint64_t process_ = 0;  // forks that led to the process that opened it
};

}  // namespace hotbed
