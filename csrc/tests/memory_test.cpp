// Growing keeps what was written; blocks from several threads never overlap; what is asked of the
// system is given back the way it was taken.
#include "base/memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "base/integers.hpp"
#include "testing/pretended_memory.hpp"

using namespace hotbed;

#define CHECK(condition)                                                 \
  if (!(condition)) {                                                    \
    std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
    std::exit(1);                                                        \
  }

namespace {

constexpr uint64_t kMegabyte = 1 << 20;

void growing_keeps_contents() {
  Mapping mapping;
  CHECK(mapping.data() == nullptr && mapping.bytes() == 0);
  uint64_t written = 0;
  for (uint64_t bytes :
       {uint64_t{1}, uint64_t{5000}, kMegabyte, 3 * kMegabyte, 5 * kMegabyte, 64 * kMegabyte}) {
    mapping.reserve(bytes, "a test");
    CHECK(mapping.bytes() >= bytes);
    CHECK(reinterpret_cast<uint64_t>(mapping.data()) %
              (bytes >= 5 * kMegabyte ? Mapping::kHugePage : Mapping::kPage) ==
          0);
    for (uint64_t i = 0; i < written; i += 4096) CHECK(mapping.data()[i] == 7 + i / 4096 % 100);
    for (uint64_t i = written; i < mapping.bytes(); i += 4096) {
      CHECK(mapping.data()[i] == 0);
      mapping.data()[i] = static_cast<uint8_t>(7 + i / 4096 % 100);
    }
    written = mapping.bytes();
    CHECK(mapping.resident_bytes() == written);
  }
  uint8_t* before = mapping.data();
  mapping.reserve(10, "a test");
  CHECK(mapping.data() == before);
}

// What is written of it, in whole pages; what is reckoned before it grows holds afterwards.
void a_mapping_takes_what_is_written() {
  std::vector<Mapping> many(200);
  uint64_t resident = 0;
  for (Mapping& mapping : many) {
    CHECK(mapping.resident_bytes() == 0);
    mapping.reserve(1000, "a test");
    mapping.reserve(100'000, "a test");
    for (uint64_t i = 0; i <= 9000; i += 1000) mapping.data()[i] = 1;
    resident += mapping.resident_bytes();
    CHECK(mapping.page_bytes(9000, mapping.bytes()) == 3 * Mapping::kPage);
  }
  CHECK(resident == 200 * 3 * Mapping::kPage);
  many[0].release(4096, 100'000);
  CHECK(many[0].resident_bytes() == Mapping::kPage && many[0].data()[5000] == 0);

  for (uint64_t first : {uint64_t{1}, kMegabyte, 3 * kMegabyte}) {
    for (uint64_t then : {100'000 + first, 3 * kMegabyte + 1, 9 * kMegabyte + 1}) {
      Mapping mapping;
      uint64_t at_first = mapping.page_bytes(first, first);
      CHECK(at_first == round_up(first, Mapping::kPage));
      mapping.reserve(first, "a test");
      std::memset(mapping.data(), 1, first);
      CHECK(mapping.resident_bytes() <= at_first && mapping.page_bytes(first, first) == at_first);
      if (then <= first) continue;
      uint64_t reckoned = mapping.page_bytes(then, then + 100);
      mapping.reserve(then + 100, "a test");
      CHECK(mapping.page_bytes(then, 0) == reckoned);
      std::memset(mapping.data(), 1, then);
      CHECK(mapping.resident_bytes() >= round_up(then, Mapping::kPage));
      CHECK(mapping.resident_bytes() <= reckoned && reckoned < then + Mapping::kHugePage);
    }
  }
  Mapping none;
  CHECK(none.page_bytes(UINT64_MAX, 0) == UINT64_MAX && none.page_bytes(0, 0) == 0);
}

// A large mapping of which little was written takes its last huge page, where the machine has any;
// what is told of it is what all its pages tell.
void a_part_takes_the_pages_in_which_it_lies() {
  Mapping mapping;
  CHECK(mapping.written_bytes(0, 0) == 0);
  mapping.reserve(40 * kMegabyte, "a test");
  CHECK(mapping.written_bytes(0, 0) == 0 && mapping.page() == Mapping::kHugePage);
  for (uint64_t written : {uint64_t{1}, 3 * kMegabyte, 7 * kMegabyte, 21 * kMegabyte + 1}) {
    std::memset(mapping.data(), 1, written);
    uint64_t told = mapping.written_bytes(0, written);
    CHECK(told == mapping.resident_bytes());
    CHECK(told >= written && told <= round_up(written, Mapping::kHugePage));
  }
  std::memset(mapping.data() + 30 * kMegabyte, 1, 1);
  uint64_t apart = mapping.written_bytes(30 * kMegabyte, 30 * kMegabyte + 1);
  CHECK(apart + mapping.written_bytes(0, 21 * kMegabyte + 1) == mapping.resident_bytes());
  mapping.release(5 * kMegabyte, 40 * kMegabyte);
  CHECK(mapping.written_bytes(0, 5 * kMegabyte) == 5 * kMegabyte);
}

void refusal_changes_nothing() {
  Mapping mapping;
  mapping.reserve(4 * kMegabyte, "a test");
  mapping.data()[0] = 42;
  pretend_memory(100 * kMegabyte);
  bool refused = false;
  try {
    mapping.reserve(200 * kMegabyte, "table 'item'");
  } catch (const OutOfMemory& error) {
    refused = true;
    CHECK(error.asked == 196 * kMegabyte);
    CHECK(error.free == 100 * kMegabyte);
    CHECK(std::string(error.what()).find("table 'item'") == 0);
  }
  pretend_memory(0);
  CHECK(refused);
  CHECK(mapping.bytes() == 4 * kMegabyte && mapping.data()[0] == 42);
}

// Sizes on both sides of the borders between malloc, pooled heap blocks and pooled mappings.
void blocks_of_every_size_come_and_go() {
  BlockPool& pool = BlockPool::instance();
  for (uint64_t border : {64 * 1024 * uint64_t{1}, 2 * kMegabyte}) {
    for (int64_t offset : {-65536, -65535, -1, 0, 1}) {
      if (static_cast<int64_t>(border) + offset <= 0) continue;
      uint64_t bytes = border + static_cast<uint64_t>(offset);
      void* block = pool.take(bytes);
      CHECK(reinterpret_cast<uint64_t>(block) % 64 == 0);
      std::memset(block, 1, bytes);
      pool.give(block);
      pool.trim();
      CHECK(pool.idle_bytes() == 0);
    }
  }
  void* first = pool.take(5 * kMegabyte);
  pool.give(first);
  CHECK(pool.take(5 * kMegabyte) == first);
  pool.give(first);
  pool.trim();
}

// Blocks of a size that no batch has any more.
void blocks_that_rest_are_given_back() {
  BlockPool& pool = BlockPool::instance();
  pool.trim();
  std::vector<void*> large;
  for (uint64_t n = 1; n <= 3; ++n) large.push_back(pool.take(n * 20 * kMegabyte));
  for (void* block : large) pool.give(block);
  CHECK(pool.idle_bytes() == 120 * kMegabyte);
  for (uint64_t i = 0; i < 2 * BlockPool::kRestedGives; ++i) {
    pool.give(pool.take(kMegabyte));
    if (i % 1000 == 0) pool.give(pool.take(40 * kMegabyte));  // stays, as it is used
    if (i < BlockPool::kRestedGives / 2) CHECK(pool.idle_bytes() == 121 * kMegabyte);
  }
  CHECK(pool.idle_bytes() == 41 * kMegabyte);
  pool.trim();
  CHECK(pool.idle_bytes() == 0);
}

// A batch that is the first to use a block waits for little more than it asked for.
void the_end_of_a_block_takes_plain_pages() {
  constexpr uint64_t kEnd = 800'000;
  BlockPool& pool = BlockPool::instance();
  auto* block = static_cast<uint8_t*>(pool.take(8 * Mapping::kHugePage + kEnd));
  uint8_t* end = block + 8 * Mapping::kHugePage;
  *end = 1;
  std::vector<unsigned char> present(kEnd / Mapping::kPage);
  CHECK(mincore(end, present.size() * Mapping::kPage, present.data()) == 0);
  for (size_t p = 0; p < present.size(); ++p) CHECK((present[p] & 1) == (p == 0));
  pool.give(block);
  pool.trim();
}

// Bytes from `data` on that lie in huge pages, by the system's account of the mapping.
uint64_t in_huge_pages(const void* data, uint64_t bytes) {
  auto begin = reinterpret_cast<uint64_t>(data);
  std::ifstream maps("/proc/self/smaps");
  uint64_t from = 0, to = 0, kilobytes = 0, sum = 0;
  bool inside = false;
  for (std::string line; std::getline(maps, line);) {
    if (std::sscanf(line.c_str(), "%lx-%lx", &from, &to) == 2) {
      inside = from < begin + bytes && begin < to;
    } else if (inside && std::sscanf(line.c_str(), "AnonHugePages: %lu", &kilobytes) == 1) {
      sum += kilobytes * 1024;
    }
  }
  return sum;
}

// The first batch waits for plain pages only; those that take the block again put huge ones in
// their place, where the system makes any when asked to.
void blocks_get_huge_pages_when_taken_again() {
  constexpr uint64_t kBytes = 2 * Mapping::kHugePage;
  Mapping probe;
  probe.reserve(kBytes, "probe");
  std::memset(probe.data(), 1, kBytes);
  bool collapses = madvise(probe.data(), kBytes, 25) == 0;
  if (!collapses) std::printf("this machine makes no huge pages when asked to\n");
  BlockPool& pool = BlockPool::instance();
  pool.trim();
  auto* block = static_cast<uint8_t*>(pool.take(kBytes));
  std::memset(block, 7, kBytes);
  CHECK(in_huge_pages(block, kBytes) == 0);
  pool.give(block);
  CHECK(pool.take(kBytes, true) == block);
  CHECK(in_huge_pages(block, kBytes) == 0);  // for a while only
  for (uint64_t taken = 1; taken <= 3; ++taken) {
    pool.give(block);
    CHECK(pool.take(kBytes) == block);
    uint64_t huge = in_huge_pages(block, kBytes);
    if (collapses) CHECK(huge == std::min(taken * Mapping::kHugePage, kBytes));
    for (uint64_t i = 0; i < kBytes; i += 4096) CHECK(block[i] == 7);
  }
  pool.give(block);
  pool.trim();
}

void threads_share_the_pool() {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int round = 0; round < 200; ++round) {
        uint64_t count = 1000 + 40000 * static_cast<uint64_t>((round * 7 + t) % 9);
        Buffer<int> buffer(count);
        for (uint64_t i = 0; i < count; i += 512) buffer[i] = t;
        for (uint64_t i = 0; i < count; i += 512) CHECK(buffer[i] == t);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  BlockPool::instance().trim();
}

void a_released_buffer_belongs_to_the_receiver() {
  Buffer<float> buffer(100000);
  float* data = buffer.release();
  CHECK(buffer.data() == nullptr && buffer.size() == 0);
  data[99999] = 1;
  BlockPool::instance().give(data);
  Buffer<float> moved(10);
  Buffer<float> target(std::move(moved));
  CHECK(moved.data() == nullptr && target.size() == 10);
}

}  // namespace

int main() {
  growing_keeps_contents();
  a_mapping_takes_what_is_written();
  a_part_takes_the_pages_in_which_it_lies();
  refusal_changes_nothing();
  blocks_of_every_size_come_and_go();
  blocks_that_rest_are_given_back();
  the_end_of_a_block_takes_plain_pages();
  blocks_get_huge_pages_when_taken_again();
  threads_share_the_pool();
  a_released_buffer_belongs_to_the_receiver();
}
