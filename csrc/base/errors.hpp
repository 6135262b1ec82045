// Errors that the bindings turn into those of hotbed.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace hotbed {

// Thrown before anything is lost; the binding turns it into hotbed.OutOfMemory.
struct OutOfMemory : std::runtime_error {
  OutOfMemory(const std::string& what_for, uint64_t asked_bytes, uint64_t free_bytes,
              const std::string& remedy = kRemedy);
  static constexpr const char* kRemedy = "Use smaller or fewer tables, or free memory.";
  uint64_t asked;
  uint64_t free;
};

// A tier that cannot keep a row, or cannot give one back. `path` and `bytes` (0: unknown) say of
// which file and how many bytes the matter is, and `code` is what the system said (0: nothing).
struct TierError : std::runtime_error {
  explicit TierError(const std::string& message, std::string of_path = {}, uint64_t of_bytes = 0)
      : std::runtime_error(message), path(std::move(of_path)), bytes(of_bytes) {}
  std::string path;
  uint64_t bytes;
  int code = 0;
};

}  // namespace hotbed
