// Asynchronous reads and writes of files past the page cache, many at a time: by io_uring where the
// kernel allows it, else by a pool of threads. And what else a log does to files (create, sync,
// remove), so that all of it can be watched in one place (IoObserver).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "base/descriptor.hpp"
#include "base/memory.hpp"
#include "log/io_observer.hpp"

namespace hotbed {

enum class IoBackend : int { automatic = 0, ring = 1, threads = 2 };

// "auto", "ring", "threads", as the variable HOTBED_IO says them. Throws std::invalid_argument.
IoBackend io_backend_named(std::string_view name);

struct IoOptions {
  // Automatic: what HOTBED_IO says, else io_uring where it works, else threads.
  IoBackend backend = IoBackend::automatic;
  unsigned depth = 128;   // transfers of one queue in flight
  unsigned threads = 32;  // of the pool, where threads do the work
  bool direct = true;     // O_DIRECT, where the file system allows it
  // Memory of one queue; a multiple of 4096, at most 2 MiB.
  uint64_t arena_bytes = 2u << 20;
  std::shared_ptr<IoObserver> observer;  // or null
};

// A transfer or another operation on a file that failed. `code` is an errno.
struct IoError : std::runtime_error {
  IoError(const std::string& doing, std::string of_path, uint64_t at, uint64_t count,
          int errno_code);
  std::string path;
  uint64_t offset, bytes;
  int code;
};

// An open file; closed with its last owner. Immutable, so free to share among threads.
class IoFile {
 public:
  IoFile(std::string path, Descriptor descriptor, bool direct)
      : path_(std::move(path)), descriptor_(std::move(descriptor)), direct_(direct) {}

  const std::string& path() const { return path_; }
  int descriptor() const { return descriptor_.number(); }
  // Whether transfers go past the page cache.
  bool direct() const { return direct_; }
  // Bytes to its end.
  uint64_t size() const;

 private:
  std::string path_;
  Descriptor descriptor_;
  bool direct_;
};

// Offset, address and length are multiples of 4096.
struct Transfer {
  const IoFile* file;
  uint64_t offset;
  uint8_t* data;
  uint32_t bytes;
  bool write;
  uint64_t tag;  // comes back with the completion
};

struct Completion {
  uint64_t tag;
  int error;  // an errno, or 0: all bytes were moved; ENODATA: the file ended before
};

struct IoStatistics {
  std::string backend;
  unsigned threads = 0;  // of the pool; 0 while io_uring does all
  bool registered_memory = false;
  uint64_t reads = 0, writes = 0;  // requests to the kernel, retries included
  uint64_t bytes_read = 0, bytes_written = 0;
  uint64_t retries = 0;  // after short or interrupted transfers
  uint64_t errors = 0;
  uint64_t syncs = 0;
  uint64_t deepest = 0;                           // most transfers of one queue in flight
  uint64_t direct_files = 0, buffered_files = 0;  // opened so far
};

class IoEngine;

// Transfers of one thread. Short ones are taken up where they ended, and counted.
// Not thread-safe: it belongs to the thread that leased it.
class IoQueue {
 public:
  IoQueue(const IoQueue&) = delete;
  IoQueue& operator=(const IoQueue&) = delete;
  virtual ~IoQueue();

  unsigned depth() const { return depth_; }
  unsigned in_flight() const { return in_flight_; }

  // Memory for transfers, aligned to huge pages, that costs the kernel less than other memory.
  uint8_t* arena() const { return arena_.data(); }
  uint64_t arena_bytes() const { return arena_bytes_; }

  // Only with in_flight() < depth(). The memory belongs to the transfer until it is collected. It
  // may start no earlier than the next collect.
  void submit(const Transfer& transfer);

  // Waits until at least `at_least` transfers ended (at most in_flight()) and appends all that did.
  void collect(unsigned at_least, std::vector<Completion>& done);

  // Does all transfers, whatever their tags. Needs an idle queue. Throws the first IoError after
  // all have ended.
  void run(std::span<const Transfer> transfers);

 protected:
  struct Raw {
    uint32_t place;
    int result;  // bytes, or -errno
  };

  IoQueue(IoEngine& engine, unsigned depth, uint64_t arena_bytes);
  virtual void start(uint32_t place, const Transfer& part) = 0;
  // Waits for at least this many of the started ones; appends all that ended.
  virtual void reap(unsigned at_least, std::vector<Raw>& ended) = 0;

  IoEngine& engine_;
  Mapping arena_;

 private:
  friend class IoEngine;
  struct Pending {
    Transfer transfer;
    uint32_t moved;
    uint32_t tries;
    IoObserver::Verdict verdict;
  };
  void issue(uint32_t place);
  void finish(uint32_t place, int error, std::vector<Completion>& done);

  unsigned depth_;
  uint64_t arena_bytes_;
  unsigned in_flight_ = 0;
  std::vector<Pending> pending_;
  std::vector<uint32_t> free_places_;
  std::vector<Raw> ended_;
  std::vector<Raw> refused_;  // by the observer, without having been started
  uint64_t owner_ = 0;        // the thread that made it
};

// Threading: every member may be called by several threads at once.
class IoEngine {
 public:
  // Throws std::invalid_argument where the backend asked for does not work here.
  explicit IoEngine(IoOptions options);
  IoEngine(const IoEngine&) = delete;
  IoEngine& operator=(const IoEngine&) = delete;
  ~IoEngine();

  class Lease {
   public:
    Lease(IoEngine& engine, std::unique_ptr<IoQueue> queue)
        : engine_(engine), queue_(std::move(queue)) {}
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    ~Lease() { engine_.give_back(std::move(queue_)); }
    IoQueue& operator*() const { return *queue_; }
    IoQueue* operator->() const { return queue_.get(); }

   private:
    IoEngine& engine_;
    std::unique_ptr<IoQueue> queue_;
  };

  // A queue for the calling thread, until the lease ends (in the same thread). Without an arena for
  // a thread that brings memory of its own, and never leases another.
  Lease lease(bool with_arena = true);

  // A new file of `bytes` bytes. Preallocated where the file system can, so that writing to it does
  // not meet a full disk; otherwise sparse. Throws IoError and leaves no file.
  std::shared_ptr<IoFile> create(const std::string& path, uint64_t bytes, bool preallocate);
  std::shared_ptr<IoFile> open(const std::string& path);
  // Gives back what was preallocated behind so many bytes, where the file system can; the size
  // stays.
  void release_behind(const IoFile& file, uint64_t bytes);
  // Another name for a file. Throws IoError.
  void link(const std::string& path, const std::string& to);
  // Everything that was written to the file survives a crash of the machine.
  void sync(const IoFile& file);
  // So do the names in the directory.
  void sync_directory(const std::string& path);
  // The file holds exactly these bytes, or what it held before, whenever the machine crashes.
  void replace(const std::string& path, std::span<const uint8_t> bytes);
  void remove(const std::string& path);

  IoStatistics statistics() const;
  // Arenas that are kept: of threads that compact, train, look ahead and evaluate. More threads
  // that transfer at the same moment have more.
  static constexpr uint64_t kArenas = 4;
  // What all arenas take by now.
  uint64_t memory_bytes() const;

 private:
  friend class IoQueue;
  friend class RingQueue;
  friend class ThreadQueue;
  struct Counters {
    std::atomic<uint64_t> reads{0}, writes{0}, bytes_read{0}, bytes_written{0}, retries{0},
        errors{0}, syncs{0}, deepest{0}, direct_files{0}, buffered_files{0};
  };

  void give_back(std::unique_ptr<IoQueue> queue);
  std::unique_ptr<IoQueue> surplus(uint64_t arenas);
  std::shared_ptr<IoFile> opened(const std::string& path, int flags);
  size_t note(IoEvent::Kind kind, const std::string& path, size_t pair = 0, uint64_t offset = 0,
              const std::string& target = {});

  IoOptions options_;
  Counters counters_;
  std::atomic<bool> registered_{false};
  mutable std::mutex mutex_;
  std::unique_ptr<class ThreadPool> pool_;  // made when first needed
  std::set<const Mapping*> arenas_;         // of all queues
  std::vector<std::unique_ptr<IoQueue>> idle_;
};

// The two backends, for IoEngine.
std::unique_ptr<IoQueue> make_ring_queue(IoEngine& engine, unsigned depth, uint64_t arena_bytes);
bool ring_works();

}  // namespace hotbed
