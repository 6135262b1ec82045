#include "base/errors.hpp"

#include <cstdio>

namespace hotbed {

namespace {

std::string with_unit(uint64_t bytes) {
  char text[64];
  std::snprintf(text, sizeof text, "%.2f GB", static_cast<double>(bytes) / 1e9);
  return text;
}

}  // namespace

OutOfMemory::OutOfMemory(const std::string& what_for, uint64_t asked_bytes, uint64_t free_bytes,
                         const std::string& remedy)
    : std::runtime_error(what_for + " needs " + std::to_string(asked_bytes) + " bytes (" +
                         with_unit(asked_bytes) + ") more, and " + std::to_string(free_bytes) +
                         " bytes (" + with_unit(free_bytes) + ") are free. " + remedy),
      asked(asked_bytes),
      free(free_bytes) {}

}  // namespace hotbed
