// What a forked child finds of the locks of this process.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>

namespace hotbed {

// Forks that led from the first process to this one. What another process made has other numbers.
uint64_t forks();

// While a thread has one, a fork waits: for changes after which what a child finds is whole, and in
// whose midst it is not. A thread may have several. In its scope it waits for no lock of Python's,
// and for no other thread that begins one; whoever has a ForkMutex begins none.
class WholeInForks {
 public:
  WholeInForks();
  WholeInForks(const WholeInForks&) = delete;
  WholeInForks& operator=(const WholeInForks&) = delete;
  ~WholeInForks();
};

// A mutex that nobody has in a forked child, where what it guards is whole: a fork waits for it.
// Whoever has one takes no other. Lives for ever.
class ForkMutex : public std::mutex {
 public:
  // `in_child`: called there before the mutex is free.
  explicit ForkMutex(std::function<void()> in_child = [] {});
  ~ForkMutex() = delete;
};

}  // namespace hotbed
