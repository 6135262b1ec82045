#include "base/memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

namespace hotbed {

namespace {

constexpr uint64_t kHugePage = Mapping::kGrain;
// Blocks below this come from malloc: they are cheap to get anew.
constexpr uint64_t kSmallBlock = 64u << 10;
// A freed block is handed out for a request of at least this share of its size.
constexpr uint64_t kWaste = 2;
constexpr uint64_t kIdleLimit = 4ull << 30;
// Filling a block of this size takes longer than finding out whether there is memory for it.
constexpr uint64_t kWorthAsking = 64u << 20;

const char* const kBuffer = "A buffer of this batch";
const char* const kSmallerBatch = "Use a smaller batch, or smaller tables.";

std::atomic<uint64_t> pretended_bytes{0};

uint64_t read_number(const char* path) {
  std::ifstream file(path);
  uint64_t value = 0;
  return file >> value ? value : 0;  // "max" does not parse: no limit
}

// The number after a word; `otherwise` where the file or the word is missing.
uint64_t number_after(const char* path, const char* name, uint64_t otherwise) {
  std::ifstream file(path);
  std::string word;
  uint64_t value = 0;
  while (file >> word) {
    if (word == name && file >> value) return value;
  }
  return otherwise;
}

uint64_t meminfo_available() {
  uint64_t kib = number_after("/proc/meminfo", "MemAvailable:", UINT64_MAX >> 10);
  return kib << 10;
}

std::string with_unit(uint64_t bytes) {
  char text[64];
  std::snprintf(text, sizeof text, "%.2f GB", static_cast<double>(bytes) / 1e9);
  return text;
}

uint8_t* map_aligned(uint64_t bytes) {
  // Reserve one huge page more than asked and cut the ends off, so that the start is aligned.
  uint64_t total = bytes + kHugePage;
  void* raw = mmap(nullptr, total, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  auto begin = reinterpret_cast<uint64_t>(raw);
  uint64_t start = round_up(begin, kHugePage);
  if (start > begin) munmap(raw, start - begin);
  uint64_t end = start + bytes;
  if (begin + total > end) munmap(reinterpret_cast<void*>(end), begin + total - end);
  auto* data = reinterpret_cast<uint8_t*>(start);
  madvise(data, bytes, MADV_HUGEPAGE);
  return data;
}

}  // namespace

OutOfMemory::OutOfMemory(const std::string& what_for, uint64_t asked_bytes, uint64_t free_bytes,
                         const std::string& remedy)
    : std::runtime_error(what_for + " needs " + std::to_string(asked_bytes) + " bytes (" +
                         with_unit(asked_bytes) + ") more, and " + std::to_string(free_bytes) +
                         " bytes (" + with_unit(free_bytes) + ") are free. " + remedy),
      asked(asked_bytes),
      free(free_bytes) {}

uint64_t available_memory() {
  if (uint64_t bytes = pretended_bytes.load()) return bytes;
  uint64_t available = meminfo_available();
  uint64_t limit = read_number("/sys/fs/cgroup/memory.max");
  if (limit) {
    uint64_t used = read_number("/sys/fs/cgroup/memory.current");
    // Cached file pages count as used, and are given up when asked for.
    used -= std::min(used, number_after("/sys/fs/cgroup/memory.stat", "inactive_file", 0));
    uint64_t left = limit > used ? limit - used : 0;
    if (left < available) available = left;
  }
  return available;
}

void set_available_memory_for_test(uint64_t bytes) { pretended_bytes = bytes; }

Mapping::~Mapping() {
  if (data_) munmap(data_, bytes_);
}

void Mapping::reserve(uint64_t bytes, const std::string& what_for, const std::string& remedy) {
  if (bytes <= bytes_) return;
  uint64_t wanted = round_up(bytes, kHugePage);
  if (wanted < bytes) throw OutOfMemory(what_for, bytes, available_memory(), remedy);
  uint64_t grown = wanted - bytes_;
  // Small arrays are not worth reading /proc for.
  if (grown > 4 * kHugePage && grown > available_memory()) {
    BlockPool::instance().trim();
    uint64_t available = available_memory();
    if (grown > available) throw OutOfMemory(what_for, grown, available, remedy);
  }
  uint8_t* fresh = map_aligned(wanted);
  if (!fresh) throw OutOfMemory(what_for, grown, available_memory(), remedy);
  if (data_) {
    // Moves the page tables of the old range onto the start of the new one.
    void* moved = mremap(data_, bytes_, bytes_, MREMAP_MAYMOVE | MREMAP_FIXED, fresh);
    if (moved == MAP_FAILED) {
      munmap(fresh, wanted);
      throw OutOfMemory(what_for, grown, available_memory(), remedy);
    }
  }
  data_ = fresh;
  bytes_ = wanted;
}

void Mapping::release(uint64_t begin, uint64_t end) {
  constexpr uint64_t kPage = 4096;
  begin = round_up(begin, kPage);
  end = std::min(end, bytes_) / kPage * kPage;
  if (begin < end) madvise(data_ + begin, end - begin, MADV_DONTNEED);
}

BlockPool& BlockPool::instance() {
  static BlockPool* pool = new BlockPool;  // never destroyed: tensors may outlive static objects
  return *pool;
}

void* BlockPool::take(uint64_t bytes) {
  if (bytes < kSmallBlock) {
    void* block = std::aligned_alloc(64, round_up(bytes ? bytes : 1, 64));
    if (!block) throw OutOfMemory(kBuffer, bytes, available_memory(), kSmallerBatch);
    return block;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = idle_.lower_bound(bytes);
  if (found != idle_.end() && found->first <= kWaste * bytes) {
    void* block = found->second;
    idle_bytes_ -= found->first;
    idle_.erase(found);
    return block;
  }
  uint64_t size = round_up(bytes, bytes >= kHugePage ? kHugePage : kSmallBlock);
  // The system would promise any number of pages, and end the process when they are used.
  if (size > kWorthAsking && size > available_memory()) {
    return_idle();
    uint64_t available = available_memory();
    if (size > available) throw OutOfMemory(kBuffer, bytes, available, kSmallerBatch);
  }
  void* block;
  // By the rounded size, as give() and trim() see it: just under 2 MB rounds up to 2 MB.
  if (size >= kHugePage) {
    block = map_aligned(size);
  } else {
    block = std::aligned_alloc(64, size);
  }
  if (!block) throw OutOfMemory(kBuffer, bytes, available_memory(), kSmallerBatch);
  size_[block] = size;
  return block;
}

void BlockPool::give(void* block) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto known = size_.find(block);
  if (known == size_.end()) {
    std::free(block);
    return;
  }
  if (idle_bytes_ + known->second > kIdleLimit) {
    if (known->second >= kHugePage) {
      munmap(block, known->second);
    } else {
      std::free(block);
    }
    size_.erase(known);
    return;
  }
  idle_bytes_ += known->second;
  idle_.emplace(known->second, block);
}

uint64_t BlockPool::idle_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return idle_bytes_;
}

void BlockPool::trim() {
  std::lock_guard<std::mutex> lock(mutex_);
  return_idle();
}

void BlockPool::return_idle() {
  for (auto& [size, block] : idle_) {
    if (size >= kHugePage) {
      munmap(block, size);
    } else {
      std::free(block);
    }
    size_.erase(block);
  }
  idle_.clear();
  idle_bytes_ = 0;
}

}  // namespace hotbed
