// Who watches what a log does to files, and may have some of it fail.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace hotbed {

// One step of what was done to files, for replaying a crash. `pair` of a finished step is the
// number of the event that started it.
struct IoEvent {
  enum class Kind {
    create,
    write_started,
    write_finished,
    sync_started,
    sync_finished,
    rename,
    link,
    remove,
    directory_started,
    directory_finished,
    mark,
  };
  Kind kind;
  std::string path;
  std::string target;         // of a rename or a link
  uint64_t offset = 0;        // of a write; of a creation, the size; of a mark, its number
  std::vector<uint8_t> data;  // of a write
  size_t pair = 0;
};

// An I/O engine asks before it does something, and does no more of it than it is allowed.
//
// Threading: every member may be called by several threads at once.
class IoObserver {
 public:
  virtual ~IoObserver() = default;

  struct Verdict {
    int error = 0;
    uint32_t bytes;  // to transfer
    uint64_t nth;    // the observer's own
    size_t event = 0;
  };
  virtual Verdict before_transfer(const std::string& path, bool write, uint64_t offset,
                                  const uint8_t* data, uint32_t bytes) = 0;
  // A transfer that moved `bytes` bytes.
  virtual void after_transfer(const Verdict& verdict, bool write, uint8_t* data,
                              uint32_t bytes) = 0;
  // An error number, or 0.
  virtual int before_preallocation(uint64_t bytes) = 0;
  virtual int before_sync() = 0;
  // Its number, for the event that ends what this one starts.
  virtual size_t note(IoEvent event) = 0;
};

}  // namespace hotbed
