#include "table/hold.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <random>
#include <thread>

#include "check.hpp"
#include "rules/initial.hpp"
#include "table/table.hpp"

using namespace hotbed;

namespace {

std::shared_ptr<Table> table(const std::string& name) {
  return std::make_shared<Table>(name, 4, 2, DType::f32,
                                 initial_spec(Initial::constant, 0, 0, 0, 0, 1));
}

}  // namespace

// Threads that read or write any of some tables: a writer finds nobody else, a reader no writer.
TEST(everybody_at_once) {
  std::vector<std::shared_ptr<Table>> tables;
  for (int t = 0; t < 5; ++t) tables.push_back(table("t" + std::to_string(t)));
  std::vector<int64_t> rows(tables.size());  // what the locks guard
  std::vector<int64_t> written(tables.size());
  std::atomic<bool> wrong = false;
  auto work = [&](uint64_t seed) {
    std::mt19937_64 random(seed);
    for (int round = 0; round < 3000; ++round) {
      std::vector<std::shared_ptr<Table>> mine;
      std::vector<size_t> which;
      for (size_t t = 0; t < tables.size(); ++t) {
        if (random() % 2) which.push_back(t);
      }
      for (size_t t : which) mine.push_back(tables[t]);
      if (random() % 2 && !mine.empty()) mine.push_back(mine[0]);  // twice is once
      bool alone = random() % 3 == 0;
      Hold hold(mine, alone);
      if (!hold.try_take()) hold.take();
      if (alone) {
        Hold again(mine, random() % 2);
        again.take();
        for (size_t t : which) ++rows[t];
        again.release();
        hold.share();
      }
      for (size_t t : which) {
        int64_t before = rows[t];
        std::this_thread::yield();
        if (rows[t] != before) wrong = true;
      }
      hold.release();
      if (alone) {
        Hold counting(tables, true);
        counting.take();
        for (size_t t : which) ++written[t];
      }
    }
  };
  std::vector<std::thread> threads;
  for (uint64_t seed = 0; seed < 6; ++seed) threads.emplace_back(work, seed);
  for (std::thread& thread : threads) thread.join();
  CHECK(!wrong);
  CHECK(rows == written);
}

TEST(a_reader_does_not_become_a_writer) {
  auto a = table("a");
  Hold reading({a}, false);
  reading.take();
  bool refused = false;
  try {
    Hold writing({a}, true);
    writing.take();
  } catch (const std::logic_error&) {
    refused = true;
  }
  CHECK(refused);
  Hold more({a}, false);
  CHECK(more.try_take());
  more.release();
  reading.release();
  Hold writing({a}, true);
  CHECK(writing.try_take());
}

// Or readers who take turns would keep it out for ever.
TEST(new_readers_let_a_waiting_writer_go_first) {
  auto a = table("a");
  Hold reading({a}, false);
  reading.take();
  std::thread writer([&] {
    Hold writing({a}, true);
    writing.take();
  });
  // Refused as soon as the writer waits: nobody else writes.
  bool refused = false;
  std::thread reader([&] {
    while (!refused) {
      Hold late({a}, false);
      refused = !late.try_take();
    }
  });
  reader.join();
  CHECK(refused);
  Hold more({a}, false);
  CHECK(more.try_take());  // but who reads may read more
  more.release();
  reading.release();
  writer.join();
}

TEST(nothing_is_held_in_a_child) {
  auto a = table("a");
  std::atomic<int> state = 0;
  std::thread holder([&] {
    Hold hold({a}, true);
    hold.take();
    state = 1;
    while (state != 2) std::this_thread::yield();
  });
  while (state != 1) std::this_thread::yield();
  pid_t child = fork();
  if (child == 0) {
    Hold hold({a}, true);
    _exit(hold.try_take() ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  Hold waiting({a}, false);
  CHECK(!waiting.try_take());  // in the parent it is
  state = 2;
  waiting.take();
  holder.join();
}
