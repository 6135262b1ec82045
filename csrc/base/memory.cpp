#include "base/memory.hpp"

#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "base/integers.hpp"

namespace hotbed {

namespace {

constexpr uint64_t kPage = Mapping::kPage;
constexpr uint64_t kHugePage = Mapping::kHugePage;
// Blocks below this come from malloc: they are cheap to get anew.
constexpr uint64_t kSmallBlock = 64u << 10;
// A freed block is handed out for a request of at least this share of its size.
constexpr uint64_t kWaste = 2;
constexpr uint64_t kIdleLimit = 4ull << 30;
// Up to this share of a huge page, the end of a block takes plain ones: whoever uses it first waits
// for the machine to clear, and some machines to find, all of it.
constexpr uint64_t kWorthAHugePage = kHugePage / 2;
// Linux 6.1's MADV_COLLAPSE, which headers of many systems do not have yet; older kernels refuse
// it.
constexpr int kCollapse = 25;
// Blocks up to this size begin with plain pages: the first step of a model waits for 2 MB to be
// cleared for less time where the machine has them as 4 kB pages that were used before.
constexpr uint64_t kPlainAtFirst = 8 * kHugePage;
// Filling a block of this size takes longer than finding out whether there is memory for it.
constexpr uint64_t kWorthAsking = 64u << 20;

const char* const kBuffer = "A buffer of this batch";
const char* const kSmallerBatch = "Use a smaller batch, or smaller tables.";

std::atomic<MemorySource> memory_source{nullptr};

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

uint8_t* map_plain(uint64_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  // Wherever the machine gives huge pages unasked.
  madvise(data, bytes, MADV_NOHUGEPAGE);
  return static_cast<uint8_t*>(data);
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

// Puts a huge page in the place of the plain ones, where the system can.
void make_huge(uint8_t* data) {
  madvise(data, kHugePage, MADV_HUGEPAGE);
  madvise(data, kHugePage, kCollapse);
}

}  // namespace

void populate(void* data, uint64_t bytes) {
#ifdef MADV_POPULATE_WRITE
  madvise(data, bytes, MADV_POPULATE_WRITE);
#else
  static_cast<void>(data), static_cast<void>(bytes);
#endif
}

uint64_t available_memory() {
  if (MemorySource source = memory_source.load()) return source();
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

void set_memory_source(MemorySource source) { memory_source = source; }

Mapping::~Mapping() {
  if (data_) munmap(data_, bytes_);
}

// What has grown is rarely full, so its last huge page weighs more. It ends with a whole one, as
// what moves with plain pages keeps them.
Mapping::Size Mapping::grown(uint64_t bytes) const {
  if (bytes <= bytes_) return {bytes_, huge_};
  bool huge = huge_ || bytes >= (data_ ? 2 * kHugePage : kHugePage);
  return {round_up(bytes, huge && data_ ? kHugePage : kPage), huge};
}

void Mapping::reserve(uint64_t bytes, const std::string& what_for, const std::string& remedy) {
  if (bytes <= bytes_) return;
  Size wanted = grown(bytes);
  if (wanted.bytes < bytes) throw OutOfMemory(what_for, bytes, available_memory(), remedy);
  uint64_t more = wanted.bytes - bytes_;
  // Small arrays are not worth reading /proc for.
  if (more > 4 * kHugePage && more > available_memory()) {
    BlockPool::instance().trim();
    uint64_t available = available_memory();
    if (more > available) throw OutOfMemory(what_for, more, available, remedy);
  }
  uint8_t* fresh = moved_to(wanted);
  if (!fresh) throw OutOfMemory(what_for, more, available_memory(), remedy);
  data_ = fresh;
  bytes_ = wanted.bytes;
  huge_ = wanted.huge;
}

// Null, with the mapping as it was, where the system refuses.
uint8_t* Mapping::moved_to(Size size) {
  if (!size.huge) {
    if (!data_) return map_plain(size.bytes);
    void* moved = mremap(data_, bytes_, size.bytes, MREMAP_MAYMOVE);
    return moved == MAP_FAILED ? nullptr : static_cast<uint8_t*>(moved);
  }
  uint8_t* fresh = map_aligned(size.bytes);
  if (!fresh || !data_) return fresh;
  if (!huge_) {
    // Pages that moved would stay plain.
    std::memcpy(fresh, data_, bytes_);
    munmap(data_, bytes_);
    return fresh;
  }
  // Moves the page tables of the old range onto the start of the new one.
  if (mremap(data_, bytes_, bytes_, MREMAP_MAYMOVE | MREMAP_FIXED, fresh) != MAP_FAILED) {
    return fresh;
  }
  munmap(fresh, size.bytes);
  return nullptr;
}

void Mapping::release(uint64_t begin, uint64_t end) {
  begin = round_up(begin, kPage);
  end = std::min(end, bytes_) / kPage * kPage;
  if (begin < end) madvise(data_ + begin, end - begin, MADV_DONTNEED);
}

uint64_t Mapping::page_bytes(uint64_t written, uint64_t room) const {
  if (std::max(written, room) > UINT64_MAX - kHugePage) return UINT64_MAX;
  Size size = grown(room);
  bool in_huge = size.huge && written <= size.bytes / kHugePage * kHugePage;
  return round_up(written, in_huge ? kHugePage : kPage);
}

// Of whole pages.
uint64_t Mapping::resident_bytes(uint64_t begin, uint64_t end) const {
  constexpr uint64_t kAtOnce = 16384;  // pages
  std::vector<unsigned char> present(std::min(kAtOnce, (end - begin) / kPage));
  uint64_t pages = 0;
  for (uint64_t bytes; begin < end; begin += bytes) {
    bytes = std::min(kAtOnce * kPage, end - begin);
    if (mincore(data_ + begin, bytes, present.data())) return pages * kPage + (end - begin);
    for (uint64_t p = 0; p < bytes / kPage; ++p) pages += present[p] & 1;
  }
  return pages * kPage;
}

uint64_t Mapping::written_bytes(uint64_t begin, uint64_t end) const {
  if (begin >= end || !data_) return 0;
  // In pages of the machine, as it may have no huge ones to give.
  uint64_t first = begin / kHugePage * kHugePage, last = (end - 1) / kHugePage * kHugePage;
  uint64_t stop = std::min(bytes_, last + kHugePage);
  if (last <= first + kHugePage) return resident_bytes(first, stop);
  uint64_t between = last - first - kHugePage;
  return resident_bytes(first, first + kHugePage) + between + resident_bytes(last, stop);
}

BlockPool& BlockPool::instance() {
  static BlockPool* pool = new BlockPool;  // never destroyed: tensors may outlive static objects
  return *pool;
}

void* BlockPool::take(uint64_t bytes, bool briefly) {
  if (bytes < kSmallBlock) {
    void* block = std::aligned_alloc(64, round_up(bytes ? bytes : 1, 64));
    if (!block) throw OutOfMemory(kBuffer, bytes, available_memory(), kSmallerBatch);
    return block;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  auto found = idle_.lower_bound(bytes);
  if (found == idle_.end() || found->first > kWaste * bytes) {
    void* block = fresh(bytes);
    bool plain = blocks_[block].plain_to > 0;
    lock.unlock();
    if (plain) populate(block, bytes);
    return block;
  }
  void* block = found->second;
  idle_bytes_ -= found->first;
  idle_.erase(found);
  Block& known = blocks_[block];
  if (known.plain_from == known.plain_to || briefly) return block;
  uint64_t begin = known.plain_from;
  known.plain_from += kHugePage;
  lock.unlock();
  make_huge(static_cast<uint8_t*>(block) + begin);
  return block;
}

// With the lock held.
void* BlockPool::fresh(uint64_t bytes) {
  uint64_t size = round_up(bytes, bytes >= kHugePage ? kHugePage : kSmallBlock);
  // The system would promise any number of pages, and end the process when they are used.
  if (size > kWorthAsking && size > available_memory()) {
    return_idle(UINT64_MAX);
    uint64_t available = available_memory();
    if (size > available) throw OutOfMemory(kBuffer, bytes, available, kSmallerBatch);
  }
  // By the rounded size, as give() and trim() see it: just under 2 MB rounds up to 2 MB.
  void* block = size >= kHugePage ? map_aligned(size) : std::aligned_alloc(64, size);
  if (!block) throw OutOfMemory(kBuffer, bytes, available_memory(), kSmallerBatch);
  Block& known = blocks_[block] = {size, 0, 0, 0};
  uint64_t whole = bytes / kHugePage * kHugePage;
  if (whole && bytes - whole > kWorthAHugePage) whole = size;
  if (whole && size <= kPlainAtFirst) {
    madvise(block, size, MADV_NOHUGEPAGE);
    known.plain_to = whole;
  } else if (whole) {
    madvise(static_cast<uint8_t*>(block) + whole, size - whole, MADV_NOHUGEPAGE);
  }
  return block;
}

void BlockPool::give(void* block) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = blocks_.find(block);
  if (found == blocks_.end()) {
    std::free(block);
    return;
  }
  uint64_t size = found->second.bytes;
  if (idle_bytes_ + size > kIdleLimit) {
    if (size >= kHugePage) {
      munmap(block, size);
    } else {
      std::free(block);
    }
    blocks_.erase(found);
    return;
  }
  idle_bytes_ += size;
  idle_.emplace(size, block);
  found->second.given = gives_++;
  if (gives_ % (kRestedGives / 4) == 0) return_idle(gives_ - std::min(gives_, kRestedGives));
}

uint64_t BlockPool::idle_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return idle_bytes_;
}

void BlockPool::trim() {
  std::lock_guard<std::mutex> lock(mutex_);
  return_idle(UINT64_MAX);
}

void give_back_freed() {
  BlockPool::instance().trim();
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

void BlockPool::return_idle(uint64_t before) {
  std::erase_if(idle_, [&](const auto& one) {
    auto [size, block] = one;
    if (blocks_[block].given >= before) return false;
    if (size >= kHugePage) {
      munmap(block, size);
    } else {
      std::free(block);
    }
    blocks_.erase(block);
    idle_bytes_ -= size;
    return true;
  });
}

}  // namespace hotbed
