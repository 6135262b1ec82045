// io_uring by its system calls (io_uring_setup(2), io_uring_enter(2)), without liburing.
#include <cerrno>
#include <cstring>

#include "log/io_engine.hpp"

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
#endif

#if defined(IORING_OFF_SQES) && defined(__NR_io_uring_setup)

// Newer than some headers that this may be built with.
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif

namespace hotbed {

namespace {

int setup(unsigned entries, io_uring_params* parameters) {
  return static_cast<int>(syscall(__NR_io_uring_setup, entries, parameters));
}

// Completions handled by the thread that waits for them cost no interrupt of that thread (measured:
// a sixth of the processor time of a read). Kernels before 6.1 do not know the flags.
int setup_best(unsigned entries, io_uring_params* parameters) {
  for (unsigned flags : {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, 0u}) {
    *parameters = {};
    parameters->flags = flags;
    int ring = setup(entries, parameters);
    if (ring >= 0 || errno != EINVAL) return ring;
  }
  return -1;
}

template <class T>
T* at(void* base, uint64_t offset) {
  return reinterpret_cast<T*>(static_cast<uint8_t*>(base) + offset);
}

// Memory shared with the kernel.
struct Shared {
  void* data = MAP_FAILED;
  size_t bytes = 0;
  void map(int ring, size_t size, off_t what) {
    bytes = size;
    data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, what);
    if (data == MAP_FAILED) throw OutOfMemory("an io_uring", size, available_memory());
    madvise(data, size, MADV_DONTFORK);  // or a child would keep the ring
  }
  ~Shared() {
    if (data != MAP_FAILED) munmap(data, bytes);
  }
};

}  // namespace

class RingQueue : public IoQueue {
 public:
  RingQueue(IoEngine& engine, unsigned depth, uint64_t arena_bytes)
      : IoQueue(engine, depth, arena_bytes) {
    io_uring_params p;
    ring_ = Descriptor([&] { return setup_best(depth, &p); });
    if (ring_.number() < 0) throw IoError("setting up, with", "io_uring", 0, 0, errno);
    submissions_.map(ring_.number(), p.sq_off.array + p.sq_entries * sizeof(unsigned),
                     IORING_OFF_SQ_RING);
    completions_.map(ring_.number(), p.cq_off.cqes + p.cq_entries * sizeof(io_uring_cqe),
                     IORING_OFF_CQ_RING);
    entries_.map(ring_.number(), p.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
    tail_ = at<unsigned>(submissions_.data, p.sq_off.tail);
    mask_ = p.sq_entries - 1;
    auto* order = at<unsigned>(submissions_.data, p.sq_off.array);
    for (unsigned i = 0; i < p.sq_entries; ++i) order[i] = i;
    done_head_ = at<unsigned>(completions_.data, p.cq_off.head);
    done_tail_ = at<unsigned>(completions_.data, p.cq_off.tail);
    done_ = at<io_uring_cqe>(completions_.data, p.cq_off.cqes);
    done_mask_ = p.cq_entries - 1;
    // Pinned once instead of at each transfer. Refused beyond RLIMIT_MEMLOCK, where it does
    // without.
    if (!arena_bytes) return;
    iovec region{arena(), arena_bytes};
    registered_ =
        syscall(__NR_io_uring_register, ring_.number(), IORING_REGISTER_BUFFERS, &region, 1) == 0;
    engine_.registered_ = registered_;
  }

 protected:
  void start(uint32_t place, const Transfer& part) override {
    bool fixed =
        registered_ && part.data >= arena() && part.data + part.bytes <= arena() + arena_bytes();
    unsigned tail = *tail_;
    io_uring_sqe& entry = static_cast<io_uring_sqe*>(entries_.data)[tail & mask_];
    std::memset(&entry, 0, sizeof entry);
    entry.opcode = part.write ? (fixed ? IORING_OP_WRITE_FIXED : IORING_OP_WRITE)
                              : (fixed ? IORING_OP_READ_FIXED : IORING_OP_READ);
    entry.fd = part.file->descriptor();
    entry.off = part.offset;
    entry.addr = reinterpret_cast<uint64_t>(part.data);
    entry.len = part.bytes;
    entry.user_data = place;
    __atomic_store_n(tail_, tail + 1, __ATOMIC_RELEASE);
    ++unsubmitted_;
  }

  void reap(unsigned at_least, std::vector<Raw>& ended) override {
    size_t target = ended.size() + at_least;
    for (;;) {
      unsigned head = *done_head_;
      unsigned tail = __atomic_load_n(done_tail_, __ATOMIC_ACQUIRE);
      for (; head != tail; ++head) {
        const io_uring_cqe& entry = done_[head & done_mask_];
        ended.push_back({static_cast<uint32_t>(entry.user_data), entry.res});
      }
      __atomic_store_n(done_head_, head, __ATOMIC_RELEASE);
      if (ended.size() >= target && unsubmitted_ == 0) return;
      size_t missing = target > ended.size() ? target - ended.size() : 0;
      long taken = syscall(__NR_io_uring_enter, ring_.number(), unsubmitted_, missing,
                           missing ? IORING_ENTER_GETEVENTS : 0, nullptr, 0);
      if (taken >= 0) {
        unsubmitted_ -= static_cast<unsigned>(taken);
      } else if (errno != EINTR && errno != EAGAIN && errno != EBUSY) {
        throw IoError("entering, with", "io_uring", 0, 0, errno);
      }
    }
  }

 private:
  Shared submissions_, completions_, entries_;
  Descriptor ring_;
  unsigned* tail_;
  unsigned* done_head_;
  unsigned* done_tail_;
  io_uring_cqe* done_;
  unsigned mask_, done_mask_;
  unsigned unsubmitted_ = 0;
  bool registered_ = false;
};

std::unique_ptr<IoQueue> make_ring_queue(IoEngine& engine, unsigned depth, uint64_t arena_bytes) {
  return std::make_unique<RingQueue>(engine, depth, arena_bytes);
}

bool ring_works() {
  static const bool works = [] {
    io_uring_params parameters;
    Descriptor ring([&] { return setup_best(2, &parameters); });
    if (ring.number() < 0) return false;
    // Plain reads and writes came with Linux 5.6.
    alignas(io_uring_probe) uint8_t bytes[sizeof(io_uring_probe) + 64 * sizeof(io_uring_probe_op)];
    std::memset(bytes, 0, sizeof bytes);
    bool has_all = false;
    if (syscall(__NR_io_uring_register, ring.number(), IORING_REGISTER_PROBE, bytes, 64) == 0) {
      const auto* probe = reinterpret_cast<const io_uring_probe*>(bytes);
      has_all = probe->last_op >= IORING_OP_WRITE;
    }
    return has_all;
  }();
  return works;
}

}  // namespace hotbed

#else

namespace hotbed {

std::unique_ptr<IoQueue> make_ring_queue(IoEngine&, unsigned, uint64_t) {
  throw IoError("setting up, with", "io_uring", 0, 0, ENOSYS);
}

bool ring_works() { return false; }

}  // namespace hotbed

#endif
