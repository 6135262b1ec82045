#include "log/io_engine.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <random>
#include <thread>

#include "check.hpp"
#include "folder.hpp"
#include "testing/io_faults.hpp"

using namespace hotbed;

namespace {

constexpr uint32_t kPage = 4096;

struct Free {
  void operator()(uint8_t* data) const { std::free(data); }
};

// `pages` aligned pages of numbers drawn from the seed.
std::unique_ptr<uint8_t, Free> pages(uint64_t count, uint64_t seed) {
  auto* data = static_cast<uint8_t*>(std::aligned_alloc(kPage, count * kPage));
  std::mt19937_64 random(seed);
  for (uint64_t i = 0; i < count * kPage; i += 8) {
    uint64_t value = random();
    std::copy_n(reinterpret_cast<uint8_t*>(&value), 8, data + i);
  }
  return std::unique_ptr<uint8_t, Free>(data);
}

IoOptions options_of(IoBackend backend, std::shared_ptr<IoFaults> faults = nullptr) {
  IoOptions options;
  options.backend = backend;
  options.depth = 16;
  options.threads = 4;
  options.observer = std::move(faults);
  return options;
}

template <class F>
void with_each_backend(F f) {
  f(IoBackend::threads);
  if (ring_works()) {
    f(IoBackend::ring);
  } else {
    std::cout << "  (io_uring does not work here)" << std::endl;
  }
}

void write_pages(IoEngine& engine, const IoFile& file, uint8_t* data, uint64_t count) {
  auto queue = engine.lease();
  Transfer whole{&file, 0, data, static_cast<uint32_t>(count * kPage), true, 0};
  queue->run({&whole, 1});
}

}  // namespace

TEST(what_was_written_is_read_in_any_order) {
  with_each_backend([](IoBackend backend) {
    Folder folder;
    IoEngine engine(options_of(backend));
    constexpr uint64_t count = 300;
    auto data = pages(count, 1);
    auto file = engine.create(folder / "a", count * kPage, true);
    CHECK_EQ(file->size(), count * kPage);
    {
      auto queue = engine.lease();
      std::vector<Transfer> writes;
      for (uint64_t i = 0; i < count; ++i) {
        writes.push_back({file.get(), i * kPage, data.get() + i * kPage, kPage, true, 0});
      }
      std::shuffle(writes.begin(), writes.end(), std::mt19937(2));
      queue->run(writes);
    }
    engine.sync(*file);
    auto again = engine.open(folder / "a");
    auto queue = engine.lease();
    std::vector<Completion> done;
    uint64_t slots = queue->arena_bytes() / kPage;
    CHECK(slots >= queue->depth());
    std::vector<uint64_t> order(count);
    for (uint64_t i = 0; i < count; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), std::mt19937(3));
    std::vector<uint64_t> free_slots, page_of(slots);
    for (uint64_t s = 0; s < queue->depth(); ++s) free_slots.push_back(s);
    uint64_t next = 0, read = 0;
    while (read < count) {
      while (next < count && queue->in_flight() < queue->depth()) {
        uint64_t slot = free_slots.back();
        free_slots.pop_back();
        page_of[slot] = order[next++];
        queue->submit({again.get(), page_of[slot] * kPage, queue->arena() + slot * kPage, kPage,
                       false, slot});
      }
      done.clear();
      queue->collect(1, done);
      CHECK(!done.empty());
      for (Completion completion : done) {
        CHECK_EQ(completion.error, 0);
        CHECK(std::equal(data.get() + page_of[completion.tag] * kPage,
                         data.get() + (page_of[completion.tag] + 1) * kPage,
                         queue->arena() + completion.tag * kPage));
        free_slots.push_back(completion.tag);
        ++read;
      }
    }
    IoStatistics s = engine.statistics();
    CHECK_EQ(s.backend, backend == IoBackend::ring ? "ring" : "threads");
    CHECK_EQ(s.threads, backend == IoBackend::ring ? 0u : 4u);
    CHECK_EQ(s.reads, count);
    CHECK_EQ(s.bytes_read, count * kPage);
    CHECK_EQ(s.bytes_written, count * kPage);
    CHECK_EQ(s.deepest, 16u);
    CHECK_EQ(s.retries, 0u);
    CHECK_EQ(s.direct_files + s.buffered_files, 2u);
    CHECK(engine.memory_bytes() >= queue->arena_bytes());
  });
}

TEST(many_threads_have_queues_of_their_own) {
  with_each_backend([](IoBackend backend) {
    Folder folder;
    IoEngine engine(options_of(backend));
    auto data = pages(64, 1);
    auto file = engine.create(folder / "a", 64 * kPage, true);
    write_pages(engine, *file, data.get(), 64);
    // Twice: queues of threads that are gone must not be used again.
    for (int round = 0; round < 2; ++round) {
      std::vector<std::thread> threads;
      for (int t = 0; t < 6; ++t) {
        threads.emplace_back([&, t] {
          for (int i = 0; i < 5; ++i) {
            auto queue = engine.lease();
            std::vector<Transfer> reads;
            for (uint64_t p = 0; p < 64; ++p) {
              uint64_t page = (p * 7 + static_cast<uint64_t>(t)) % 64;
              reads.push_back(
                  {file.get(), page * kPage, queue->arena() + page * kPage, kPage, false, 0});
            }
            queue->run(reads);
            CHECK(std::equal(data.get(), data.get() + 64 * kPage, queue->arena()));
          }
        });
      }
      for (std::thread& thread : threads) thread.join();
    }
  });
}

TEST(short_transfers_are_continued_and_counted) {
  with_each_backend([](IoBackend backend) {
    Folder folder;
    auto faults = std::make_shared<IoFaults>();
    // Not even a page, more than a page, and nothing at all once.
    faults->shorten_write(1, 1000).shorten_write(2, 5000).shorten_read(1, 0).shorten_read(2, 9000);
    IoEngine engine(options_of(backend, faults));
    auto data = pages(8, 1);
    auto file = engine.create(folder / "a", 8 * kPage, true);
    write_pages(engine, *file, data.get(), 8);
    CHECK_EQ(engine.statistics().retries, 2u);
    auto queue = engine.lease();
    Transfer whole{file.get(), 0, queue->arena(), 8 * kPage, false, 0};
    queue->run({&whole, 1});
    CHECK(std::equal(data.get(), data.get() + 8 * kPage, queue->arena()));
    CHECK_EQ(engine.statistics().retries, 4u);
    CHECK_EQ(engine.statistics().errors, 0u);
  });
}

TEST(errors_name_path_offset_and_bytes) {
  with_each_backend([](IoBackend backend) {
    Folder folder;
    auto faults = std::make_shared<IoFaults>();
    faults->fail_read(2, EIO);
    IoEngine engine(options_of(backend, faults));
    auto data = pages(8, 1);
    auto file = engine.create(folder / "a", 8 * kPage, true);
    write_pages(engine, *file, data.get(), 8);
    auto queue = engine.lease();
    std::vector<Transfer> reads;
    for (uint64_t i = 0; i < 4; ++i) {
      reads.push_back({file.get(), i * kPage, queue->arena() + i * kPage, kPage, false, 0});
    }
    try {
      queue->run(reads);
      CHECK(false);
    } catch (const IoError& error) {
      CHECK_EQ(error.code, EIO);
      CHECK_EQ(error.path, folder / "a");
      CHECK_EQ(error.offset, kPage);
      CHECK_EQ(error.bytes, kPage);
      CHECK(std::string(error.what()).find("offset 4096") != std::string::npos);
    }
    queue->run(reads);  // the third and later reads
    CHECK(std::equal(data.get(), data.get() + 4 * kPage, queue->arena()));

    Transfer beyond{file.get(), 8 * kPage, queue->arena(), kPage, false, 0};
    std::string message = CHECK_THROWS(queue->run({&beyond, 1}), IoError);
    CHECK(message.find("No data") != std::string::npos);
    CHECK_THROWS(engine.open(folder / "missing"), IoError);
    CHECK_THROWS(engine.create(folder / "a", kPage, true), IoError);
    CHECK_THROWS(engine.remove(folder / "missing"), IoError);
  });
}

TEST(a_flipped_bit_and_a_failed_sync_can_be_asked_for) {
  Folder folder;
  auto faults = std::make_shared<IoFaults>();
  faults->flip_bit(1, 8 * 5000 + 3).fail_sync(2, EIO);
  IoEngine engine(options_of(IoBackend::threads, faults));
  auto data = pages(2, 1);
  auto file = engine.create(folder / "a", 2 * kPage, true);
  write_pages(engine, *file, data.get(), 2);
  auto queue = engine.lease();
  Transfer whole{file.get(), 0, queue->arena(), 2 * kPage, false, 0};
  queue->run({&whole, 1});
  for (uint32_t i = 0; i < 2 * kPage; ++i) {
    CHECK_EQ(queue->arena()[i] ^ data.get()[i], i == 5000 ? 8 : 0);
  }
  queue->run({&whole, 1});
  CHECK(std::equal(data.get(), data.get() + 2 * kPage, queue->arena()));
  engine.sync(*file);
  CHECK_THROWS(engine.sync(*file), IoError);
}

TEST(a_full_disk_is_told_when_writing_or_when_preallocating) {
  with_each_backend([](IoBackend backend) {
    Folder folder;
    auto faults = std::make_shared<IoFaults>();
    faults->full_after_writing(3 * kPage).full_after_preallocating(20 * kPage);
    IoEngine engine(options_of(backend, faults));
    auto data = pages(8, 1);
    auto file = engine.create(folder / "a", 16 * kPage, true);
    CHECK_THROWS(engine.create(folder / "b", 16 * kPage, true), IoError);
    CHECK_THROWS(engine.open(folder / "b"), IoError);
    auto sparse = engine.create(folder / "b", 16 * kPage, false);
    CHECK_EQ(sparse->size(), 16 * kPage);
    // Three pages of the eight get through; the rest meets the end of the disk.
    try {
      write_pages(engine, *file, data.get(), 8);
      CHECK(false);
    } catch (const IoError& error) {
      CHECK_EQ(error.code, ENOSPC);
    }
    faults->make_room();
    write_pages(engine, *file, data.get(), 8);
    engine.create(folder / "c", 16 * kPage, true);
  });
}

TEST(events_tell_what_reached_the_files_in_order) {
  Folder folder;
  auto faults = std::make_shared<IoFaults>();
  faults->record();
  IoEngine engine(options_of(IoBackend::threads, faults));
  auto data = pages(1, 1);
  auto file = engine.create(folder / "a", kPage, true);
  write_pages(engine, *file, data.get(), 1);
  faults->mark(7);
  engine.sync(*file);
  engine.sync_directory(folder.path);
  std::vector<uint8_t> bytes{1, 2, 3};
  engine.replace(folder / "m", bytes);
  engine.remove(folder / "a");
  using Kind = IoEvent::Kind;
  std::vector<Kind> expected{
      Kind::create,        Kind::write_started, Kind::write_finished,    Kind::mark,
      Kind::sync_started,  Kind::sync_finished, Kind::directory_started, Kind::directory_finished,
      Kind::create,        Kind::write_started, Kind::write_finished,    Kind::sync_started,
      Kind::sync_finished, Kind::rename,        Kind::directory_started, Kind::directory_finished,
      Kind::remove};
  auto events = faults->events();
  CHECK_EQ(events.size(), expected.size());
  for (size_t i = 0; i < events.size(); ++i) CHECK(events[i].kind == expected[i]);
  CHECK(std::equal(events[1].data.begin(), events[1].data.end(), data.get()));
  CHECK_EQ(events[2].pair, 1u);
  CHECK_EQ(events[3].offset, 7u);
  CHECK_EQ(events[5].pair, 4u);
  CHECK_EQ(events[13].target, folder / "m");
  std::filesystem::path kept = folder / "m";
  CHECK_EQ(std::filesystem::file_size(kept), 3u);
}

TEST(buffered_transfers_where_direct_ones_are_not_wanted) {
  with_each_backend([](IoBackend backend) {
    Folder folder;
    IoOptions options = options_of(backend);
    options.direct = false;
    IoEngine engine(options);
    auto data = pages(4, 1);
    auto file = engine.create(folder / "a", 4 * kPage, true);
    CHECK(!file->direct());
    write_pages(engine, *file, data.get(), 4);
    auto queue = engine.lease();
    Transfer whole{file.get(), 0, queue->arena(), 4 * kPage, false, 0};
    queue->run({&whole, 1});
    CHECK(std::equal(data.get(), data.get() + 4 * kPage, queue->arena()));
    CHECK_EQ(engine.statistics().buffered_files, 1u);
    CHECK_EQ(engine.statistics().direct_files, 0u);
  });
}

TEST(the_backend_can_be_named) {
  CHECK(io_backend_named("") == IoBackend::automatic);
  CHECK(io_backend_named("ring") == IoBackend::ring);
  CHECK_THROWS(io_backend_named("aio"), std::invalid_argument);
  setenv("HOTBED_IO", "threads", 1);
  CHECK_EQ(IoEngine(IoOptions{}).statistics().backend, "threads");
  if (ring_works()) {
    IoOptions asked;
    asked.backend = IoBackend::ring;
    CHECK_EQ(IoEngine(asked).statistics().backend, "ring");
    unsetenv("HOTBED_IO");
    CHECK_EQ(IoEngine(IoOptions{}).statistics().backend, "ring");
  }
  unsetenv("HOTBED_IO");
  IoOptions none;
  none.depth = 0;
  CHECK_THROWS(IoEngine{none}, std::invalid_argument);
}
