// What a forked child finds of what other threads change at that moment.
#include "base/forks.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <thread>
#include <vector>

#include "check.hpp"
#include "table/table.hpp"

using namespace hotbed;

namespace {

constexpr int64_t kDim = 8, kIds = 600;

// The exit code of a child that does this; 255: it was killed.
template <class F>
int in_child(F f) {
  pid_t child = fork();
  if (child == 0) _exit(f());
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 255;
}

// Rows of a table whose weights are all its id: 0 if those of the index are so, and no others.
int look(const Table& table) {
  std::vector<int64_t> ids = table.stored_ids();
  auto n = static_cast<int64_t>(ids.size());
  if (std::adjacent_find(ids.begin(), ids.end()) != ids.end()) return 1;
  std::vector<float> rows(static_cast<size_t>(n * kDim));
  std::vector<int64_t> slots(ids.size());
  table.find(ids.data(), n, slots.data());
  for (int64_t slot : slots) {
    if (slot < 0 || slot >= n) return 2;
  }
  table.copy_rows(ids.data(), n, rows.data(), nullptr, nullptr);
  for (int64_t i = 0; i < n * kDim; ++i) {
    if (rows[static_cast<size_t>(i)] != static_cast<float>(ids[static_cast<size_t>(i / kDim)])) {
      return 3;
    }
  }
  return 0;
}

}  // namespace

TEST(a_child_finds_whole_rows) {
  Table table("a", -1, kDim, DType::f32, initial_spec(Initial::constant, 0, 0, 0, 0, 1));
  std::atomic<bool> over = false;
  std::thread changing([&] {
    std::vector<int64_t> ids(kIds);
    std::vector<float> rows(kIds * kDim);
    for (int64_t round = 0; !over; ++round) {
      std::iota(ids.begin(), ids.end(), round * kIds / 2);
      for (int64_t i = 0; i < kIds * kDim; ++i) rows[i] = static_cast<float>(ids[i / kDim]);
      table.write(ids.data(), kIds, rows.data(), nullptr, nullptr);
      if (round % 16) continue;
      std::vector<int64_t> gone = table.stored_ids();
      table.erase(gone.data(), static_cast<int64_t>(gone.size()) / 3 * 2);
    }
  });
  for (int i = 0; i < 150; ++i) CHECK(in_child([&] { return look(table); }) == 0);
  over = true;
  changing.join();
}

TEST(a_child_changes_on_its_own) {
  std::atomic<bool> over = false;
  std::vector<std::thread> others;
  for (int i = 0; i < 2; ++i) {
    others.emplace_back([&] {
      while (!over) {
        WholeInForks whole, inside;
      }
    });
    others.emplace_back([&] {  // while others fork
      while (!over) in_child([] { return 0; });
    });
  }
  for (int i = 0; i < 100; ++i) {
    CHECK(in_child([] {
            {
              WholeInForks whole;
            }
            return in_child([] {
              WholeInForks whole;
              return 7;
            });
          }) == 7);
  }
  over = true;
  for (std::thread& other : others) other.join();
}
