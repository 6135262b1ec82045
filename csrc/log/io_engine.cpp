#include "log/io_engine.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <thread>

#include "base/integers.hpp"

namespace hotbed {

namespace {

constexpr uint32_t kAlignment = 4096;
constexpr uint32_t kMostTries = 100;  // of one transfer that gets nowhere

// A number that no other thread of this process has or had.
uint64_t this_thread() {
  static std::atomic<uint64_t> next{1};
  thread_local uint64_t number = next++;
  return number;
}

}  // namespace

IoBackend io_backend_named(std::string_view name) {
  if (name.empty() || name == "auto") return IoBackend::automatic;
  if (name == "ring") return IoBackend::ring;
  if (name == "threads") return IoBackend::threads;
  throw std::invalid_argument("HOTBED_IO is '" + std::string(name) +
                              "'; it must be auto, ring (io_uring) or threads.");
}

// --- The part of a queue that does not depend on the backend. ---

IoQueue::IoQueue(IoEngine& engine, unsigned depth, uint64_t arena_bytes)
    : engine_(engine),
      depth_(depth),
      arena_bytes_(arena_bytes),
      pending_(depth),
      owner_(this_thread()) {
  for (uint32_t place = depth; place > 0; --place) free_places_.push_back(place - 1);
  if (!arena_bytes) return;
  arena_.reserve(arena_bytes, "a queue of transfers");
  // The kernel may move bytes into it at any time, so it must not be copied on write.
  madvise(arena_.data(), arena_.bytes(), MADV_DONTFORK);
  std::lock_guard lock(engine_.mutex_);
  engine_.arenas_.insert(&arena_);
}

IoQueue::~IoQueue() {
  std::lock_guard lock(engine_.mutex_);
  engine_.arenas_.erase(&arena_);
}

void IoQueue::submit(const Transfer& transfer) {
  uint32_t place = free_places_.back();
  free_places_.pop_back();
  ++in_flight_;
  uint64_t deepest = engine_.counters_.deepest.load(std::memory_order_relaxed);
  while (deepest < in_flight_ &&
         !engine_.counters_.deepest.compare_exchange_weak(deepest, in_flight_)) {
  }
  pending_[place] = {transfer, 0, 0, {}};
  issue(place);
}

void IoQueue::issue(uint32_t place) {
  Pending& pending = pending_[place];
  Transfer part = pending.transfer;
  part.offset += pending.moved;
  part.data += pending.moved;
  part.bytes -= pending.moved;
  auto& counters = engine_.counters_;
  (part.write ? counters.writes : counters.reads).fetch_add(1, std::memory_order_relaxed);
  if (IoObserver* observer = engine_.options_.observer.get()) {
    pending.verdict = observer->before_transfer(part.file->path(), part.write, part.offset,
                                                part.data, part.bytes);
    if (pending.verdict.error) {
      refused_.push_back({place, -pending.verdict.error});
      return;
    }
    if (pending.verdict.bytes == 0) {
      refused_.push_back({place, 0});
      return;
    }
    // A little more than is allowed, since only whole sectors can be asked for.
    auto allowed = static_cast<uint32_t>(round_up(pending.verdict.bytes, kAlignment));
    part.bytes = std::min(part.bytes, allowed);
  }
  start(place, part);
}

void IoQueue::finish(uint32_t place, int error, std::vector<Completion>& done) {
  if (error) ++engine_.counters_.errors;
  done.push_back({pending_[place].transfer.tag, error});
  free_places_.push_back(place);
  --in_flight_;
}

void IoQueue::collect(unsigned at_least, std::vector<Completion>& done) {
  at_least = std::min(at_least, in_flight_);
  size_t target = done.size() + at_least;
  do {
    ended_.clear();
    ended_.swap(refused_);
    size_t missing = target > done.size() ? target - done.size() : 0;
    reap(static_cast<unsigned>(missing > ended_.size() ? missing - ended_.size() : 0), ended_);
    for (Raw raw : ended_) {
      Pending& pending = pending_[raw.place];
      const Transfer& transfer = pending.transfer;
      bool write = transfer.write;
      if (raw.result == -EINTR || raw.result == -EAGAIN) {
        if (++pending.tries > kMostTries) {
          finish(raw.place, -raw.result, done);
          continue;
        }
      } else if (raw.result < 0) {
        finish(raw.place, -raw.result, done);
        continue;
      } else {
        auto moved = static_cast<uint32_t>(raw.result);
        auto& bytes = write ? engine_.counters_.bytes_written : engine_.counters_.bytes_read;
        bytes.fetch_add(moved, std::memory_order_relaxed);
        if (IoObserver* observer = engine_.options_.observer.get()) {
          moved = std::min(moved, pending.verdict.bytes);
          observer->after_transfer(pending.verdict, write, transfer.data + pending.moved, moved);
        }
        if (pending.moved + moved == transfer.bytes) {
          finish(raw.place, 0, done);
          continue;
        }
        // Past the page cache only whole sectors can be asked for.
        uint32_t whole = (pending.moved + moved) / kAlignment * kAlignment;
        pending.tries = whole > pending.moved ? 0 : pending.tries + 1;
        pending.moved = whole;
        if (pending.tries > kMostTries || (raw.result == 0 && pending.tries > 2)) {
          finish(raw.place, write ? EIO : ENODATA, done);
          continue;
        }
      }
      engine_.counters_.retries.fetch_add(1, std::memory_order_relaxed);
      issue(raw.place);
    }
  } while (done.size() < target || !refused_.empty());
}

void IoQueue::run(std::span<const Transfer> transfers) {
  std::vector<Completion> done;
  size_t failed = SIZE_MAX;
  int error = 0;
  for (size_t next = 0; next < transfers.size() || in_flight_ > 0;) {
    for (; next < transfers.size() && in_flight_ < depth_; ++next) {
      Transfer transfer = transfers[next];
      transfer.tag = next;
      submit(transfer);
    }
    done.clear();
    collect(next < transfers.size() ? (depth_ + 3) / 4 : in_flight_, done);
    for (const Completion& completion : done) {
      if (completion.error && completion.tag < failed) {
        failed = completion.tag;
        error = completion.error;
      }
    }
  }
  if (!error) return;
  const Transfer& transfer = transfers[failed];
  throw IoError(transfer.write ? "writing" : "reading", transfer.file->path(), transfer.offset,
                transfer.bytes, error);
}

// --- Threads that call pread and pwrite. ---

class ThreadPool {
 public:
  struct Task {
    class ThreadQueue* queue;
    uint32_t place;
    Transfer part;
  };

  explicit ThreadPool(unsigned threads) : count_(threads) {}
  ~ThreadPool();
  void add(std::vector<Task>& tasks);

 private:
  void work();

  unsigned count_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;  // started with the first task
};

class ThreadQueue : public IoQueue {
 public:
  ThreadQueue(IoEngine& engine, unsigned depth, uint64_t arena_bytes, ThreadPool& pool)
      : IoQueue(engine, depth, arena_bytes), pool_(pool) {}

  // By a thread of the pool. The notification stays under the lock: after it the queue may be gone.
  void ended(uint32_t place, int result) {
    std::lock_guard lock(mutex_);
    results_.push_back({place, result});
    if (results_.size() >= wanted_) changed_.notify_one();
  }

 protected:
  void start(uint32_t place, const Transfer& part) override {
    waiting_.push_back({this, place, part});
  }

  void reap(unsigned at_least, std::vector<Raw>& ended) override {
    pool_.add(waiting_);
    std::unique_lock lock(mutex_);
    wanted_ = at_least;
    changed_.wait(lock, [&] { return results_.size() >= wanted_; });
    ended.insert(ended.end(), results_.begin(), results_.end());
    results_.clear();
  }

 private:
  ThreadPool& pool_;
  std::vector<ThreadPool::Task> waiting_;
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t wanted_ = 0;
  std::vector<Raw> results_;
};

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::add(std::vector<Task>& tasks) {
  if (tasks.empty()) return;
  {
    std::lock_guard lock(mutex_);
    while (threads_.size() < count_) threads_.emplace_back([this] { work(); });
    tasks_.insert(tasks_.end(), tasks.begin(), tasks.end());
  }
  if (tasks.size() == 1) {
    changed_.notify_one();
  } else {
    changed_.notify_all();
  }
  tasks.clear();
}

void ThreadPool::work() {
  for (;;) {
    Task task;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stopping_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      task = tasks_.front();
      tasks_.pop_front();
    }
    const Transfer& part = task.part;
    auto offset = static_cast<off_t>(part.offset);
    int descriptor = part.file->descriptor();
    ssize_t moved = part.write ? ::pwrite(descriptor, part.data, part.bytes, offset)
                               : ::pread(descriptor, part.data, part.bytes, offset);
    task.queue->ended(task.place, moved < 0 ? -errno : static_cast<int>(moved));
  }
}

// --- The engine. ---

IoEngine::IoEngine(IoOptions options) : options_(std::move(options)) {
  if (options_.depth == 0 || options_.threads == 0) {
    throw std::invalid_argument("A queue needs a depth and threads of at least 1.");
  }
  if (options_.backend == IoBackend::automatic) {
    const char* asked = std::getenv("HOTBED_IO");
    options_.backend = io_backend_named(asked ? asked : "");
  }
  if (options_.backend == IoBackend::automatic) {
    options_.backend = ring_works() ? IoBackend::ring : IoBackend::threads;
  }
  if (options_.backend == IoBackend::ring && !ring_works()) {
    throw std::invalid_argument(
        "io_uring was asked for and this system does not allow it (see "
        "/proc/sys/kernel/io_uring_disabled, or the container's seccomp profile). Use threads.");
  }
}

IoEngine::~IoEngine() = default;

// Of more queues than so many, the one that was idle longest; its thread may be gone. Under mutex_.
std::unique_ptr<IoQueue> IoEngine::surplus(uint64_t arenas) {
  if (idle_.empty() || arenas_.size() <= arenas) return nullptr;
  auto queue = std::move(idle_.front());
  idle_.erase(idle_.begin());
  return queue;
}

IoEngine::Lease IoEngine::lease(bool with_arena) {
  std::unique_ptr<IoQueue> goes;  // when mutex_ is free
  uint64_t arena_bytes = with_arena ? options_.arena_bytes : 0;
  {
    std::lock_guard lock(mutex_);
    for (size_t i = idle_.size(); i-- > 0;) {
      if (idle_[i]->owner_ != this_thread()) continue;
      auto queue = std::move(idle_[i]);
      idle_.erase(idle_.begin() + static_cast<std::ptrdiff_t>(i));
      return Lease(*this, std::move(queue));
    }
    if (with_arena) goes = surplus(kArenas - 1);
  }
  goes.reset();
  if (options_.backend == IoBackend::ring) {
    try {
      return Lease(*this, make_ring_queue(*this, options_.depth, arena_bytes));
    } catch (const IoError&) {
      // Rings take memory that may be limited (RLIMIT_MEMLOCK before Linux 5.12): threads will do.
    }
  }
  ThreadPool* pool;
  {
    std::lock_guard lock(mutex_);
    if (!pool_) pool_ = std::make_unique<ThreadPool>(options_.threads);
    pool = pool_.get();
  }
  return Lease(*this, std::make_unique<ThreadQueue>(*this, options_.depth, arena_bytes, *pool));
}

void IoEngine::give_back(std::unique_ptr<IoQueue> queue) {
  std::vector<Completion> done;
  queue->collect(queue->in_flight(), done);
  std::unique_ptr<IoQueue> goes;
  std::lock_guard lock(mutex_);
  idle_.push_back(std::move(queue));
  goes = surplus(kArenas);
}

IoStatistics IoEngine::statistics() const {
  IoStatistics s;
  s.backend = options_.backend == IoBackend::ring ? "ring" : "threads";
  {
    std::lock_guard lock(mutex_);
    bool pooled = pool_ || options_.backend == IoBackend::threads;
    s.threads = pooled ? options_.threads : 0;
  }
  s.registered_memory = registered_;
  s.reads = counters_.reads;
  s.writes = counters_.writes;
  s.bytes_read = counters_.bytes_read;
  s.bytes_written = counters_.bytes_written;
  s.retries = counters_.retries;
  s.errors = counters_.errors;
  s.syncs = counters_.syncs;
  s.deepest = counters_.deepest;
  s.direct_files = counters_.direct_files;
  s.buffered_files = counters_.buffered_files;
  return s;
}

uint64_t IoEngine::memory_bytes() const {
  std::lock_guard lock(mutex_);
  uint64_t bytes = 0;
  for (const Mapping* arena : arenas_) bytes += arena->resident_bytes();
  return bytes;
}

}  // namespace hotbed
