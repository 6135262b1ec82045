// What the tests of the row log share: small logs, keys, and a look at their files.
#pragma once

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "log/row_log.hpp"
#include "testing/io_faults.hpp"

namespace hotbed {

constexpr uint64_t kSmallest = 64 * 4096;  // a segment

inline LogOptions small(IoBackend backend = IoBackend::automatic,
                        std::shared_ptr<IoFaults> faults = nullptr) {
  LogOptions options;
  options.segment_bytes = kSmallest;
  options.append_bytes = 2 * kSmallest;
  options.io.backend = backend;
  options.io.threads = 4;
  options.io.depth = 32;
  options.io.observer = std::move(faults);
  return options;
}

inline std::vector<LogStore> one_store(int64_t record_bytes, int64_t rows) {
  return {{record_bytes, {{0, "item", rows}}}};
}

inline std::vector<RowKey> range(int64_t begin, int64_t end, int32_t table = 0) {
  std::vector<RowKey> keys;
  for (int64_t id = begin; id < end; ++id) keys.push_back({id, table});
  return keys;
}

// Bytes of the segments in a folder, as the file system counts them.
inline uint64_t bytes_in(const std::string& folder) {
  uint64_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::error_code gone;  // removed meanwhile
    uint64_t size = entry.path().extension() == ".rows" ? entry.file_size(gone) : 0;
    if (!gone) bytes += size;
  }
  return bytes;
}

inline std::vector<std::string> segments_in(const std::string& folder) {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".rows") paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

inline std::vector<IoBackend> backends() {
  if (ring_works()) return {IoBackend::threads, IoBackend::ring};
  return {IoBackend::threads};
}

}  // namespace hotbed
