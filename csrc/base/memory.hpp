// Huge-page memory: growing arrays (Mapping) and short-lived blocks that are used again
// (BlockPool).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/errors.hpp"
#include "base/forks.hpp"

namespace hotbed {

// Bytes the machine (or the control group of this process) can still give.
uint64_t available_memory();

// Has the system make these pages now, in one call, where it can: one at a time they take a third
// longer. `data` is the start of a page.
void populate(void* data, uint64_t bytes);

// Answers available_memory() from now on; null: the system does.
using MemorySource = uint64_t (*)();
void set_memory_source(MemorySource source);

// A private anonymous mapping that reads as zero until written. A small one takes plain pages, so
// that many of them cost what is in them; a large one takes huge pages, where they are whole.
// Growing moves page tables; bytes are copied once, when it becomes large. The address may change
// either way. Not thread-safe: whoever grows it must be its only user at that moment.
class Mapping {
 public:
  static constexpr uint64_t kPage = 4096;
  static constexpr uint64_t kHugePage = 2u << 20;

  Mapping() = default;
  Mapping(Mapping&& other) noexcept { swap(other); }
  Mapping& operator=(Mapping&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Mapping();

  // Makes at least `bytes` addressable. Throws OutOfMemory, with the mapping as it was, when the
  // bytes that are new exceed what the machine can give. `what_for` names the user in the message,
  // which ends with `remedy`.
  void reserve(uint64_t bytes, const std::string& what_for,
               const std::string& remedy = OutOfMemory::kRemedy);

  // Gives the memory of [begin, end) back, as far as it makes whole pages; it reads as zero then. A
  // huge page in which either lies is split.
  void release(uint64_t begin, uint64_t end);

  uint8_t* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  // What the first `written` bytes take in whole pages once there is room for `room` bytes.
  // UINT64_MAX where that is beyond counting.
  uint64_t page_bytes(uint64_t written, uint64_t room) const;
  // What it takes now. Pages that nobody touched take nothing; pages that were read and never
  // written are counted, and take nothing either.
  uint64_t resident_bytes() const { return resident_bytes(0, bytes_); }
  // What [begin, end), all of it written, takes with the rest of the pages in which it lies; of a
  // mapping of any size by looking at its two ends.
  uint64_t written_bytes(uint64_t begin, uint64_t end) const;
  // Of the pages that it would like to take.
  uint64_t page() const { return huge_ ? kHugePage : kPage; }

 private:
  struct Size {
    uint64_t bytes;
    bool huge;
  };
  Size grown(uint64_t bytes) const;
  uint8_t* moved_to(Size size);
  uint64_t resident_bytes(uint64_t begin, uint64_t end) const;
  void swap(Mapping& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(huge_, other.huge_);
  }
  uint8_t* data_ = nullptr;
  uint64_t bytes_ = 0;
  bool huge_ = false;
};

// Blocks for outputs and gradients. A fresh 50 MB block costs as many page faults as the work done
// on it, so freed blocks are kept and handed out again, until others have come and gone
// kRestedGives times. Thread-safe.
class BlockPool {
 public:
  static constexpr uint64_t kRestedGives = 4096;

  static BlockPool& instance();

  // A block of at least `bytes`, 64-byte aligned, contents undefined; `briefly`: it gets no huge
  // pages now, each of which takes a while. Throws OutOfMemory.
  void* take(uint64_t bytes, bool briefly = false);
  void give(void* block);

  // Bytes kept for reuse; they are returned to the system by trim().
  uint64_t idle_bytes() const;
  void trim();

 private:
  // Its pages between `plain_from` and `plain_to` become huge ones, one each time that it is taken
  // again.
  struct Block {
    uint64_t bytes;
    uint64_t plain_from;
    uint64_t plain_to;
    uint64_t given = 0;  // gives of others before its own
  };

  void* fresh(uint64_t bytes);
  // Those that were given before so many gives.
  void return_idle(uint64_t before);

  ForkMutex& mutex_ = *new ForkMutex;
  std::multimap<uint64_t, void*> idle_;
  std::map<void*, Block> blocks_;
  uint64_t idle_bytes_ = 0;
  uint64_t gives_ = 0;
};

// Returns to the system what was freed, and is kept by the pool or the C library to be handed out
// again: after work on whole tables, whose blocks no step needs.
void give_back_freed();

// An untyped block that returns to the pool when it goes.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(uint64_t count) { resize(count); }
  // `briefly`: as of BlockPool::take().
  Buffer(uint64_t count, bool briefly)
      : data_(static_cast<T*>(BlockPool::instance().take(count * sizeof(T), briefly))),
        count_(count),
        room_(count) {}
  Buffer(Buffer&& other) noexcept : data_(other.data_), count_(other.count_), room_(other.room_) {
    other.data_ = nullptr;
    other.count_ = other.room_ = 0;
  }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    std::swap(room_, other.room_);
    return *this;
  }
  ~Buffer() {
    if (data_) BlockPool::instance().give(data_);
  }

  // Contents are undefined after a growing resize.
  void resize(uint64_t count) {
    if (count > room_) {
      if (data_) BlockPool::instance().give(data_);
      data_ = nullptr;
      data_ = static_cast<T*>(BlockPool::instance().take(count * sizeof(T)));
      room_ = count;
    }
    count_ = count;
  }

  T* data() { return data_; }
  const T* data() const { return data_; }
  uint64_t size() const { return count_; }
  // Elements that fit without a new block.
  uint64_t capacity() const { return room_; }
  T& operator[](uint64_t i) { return data_[i]; }
  const T& operator[](uint64_t i) const { return data_[i]; }

  // Gives the block away; the receiver returns it with BlockPool::give.
  T* release() {
    T* data = data_;
    data_ = nullptr;
    count_ = room_ = 0;
    return data;
  }

 private:
  T* data_ = nullptr;
  uint64_t count_ = 0;
  uint64_t room_ = 0;
};

}  // namespace hotbed
