// What the stores of a log share. Only for the files of the row log.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/folder_lock.hpp"
#include "base/tier.hpp"
#include "log/log_format.hpp"
#include "log/log_options.hpp"
#include "log/log_reports.hpp"
#include "log/log_writer.hpp"

namespace hotbed {

class LogTier;

inline constexpr const char* kManifest = "manifest";  // of a log, in its folder

// Those in a folder by store.
std::map<size_t, SegmentFiles> segment_files_in(const std::string& folder);
// Throws TierError where there is none.
Manifest read_manifest(const std::string& folder);

// Threading: as RowLog.
class RowLogCore {
 public:
  // `path` exists and holds no segments; makes the manifest.
  RowLogCore(std::string path, std::unique_ptr<FolderLock> lock, Manifest manifest,
             LogOptions options);
  // To read what is in `path`.
  RowLogCore(std::string path, std::unique_ptr<FolderLock> lock, Manifest manifest, IoOptions io);
  ~RowLogCore();

  const std::string& path() const { return path_; }
  const Manifest& manifest() const { return manifest_; }
  const LogOptions& options() const { return options_; }
  IoEngine& engine() { return engine_; }
  LogWriter& writer() { return *writer_; }
  bool stopping() const { return stopping_; }
  bool writes() const { return writer_ != nullptr; }  // or was opened to read

  // Throw TierError in a forked child, and when closed; the second also for a log opened to read.
  void check_readable() const;
  void check_writable() const;

  void flush();
  void sync();
  void link(const std::string& folder);
  bool adopt(const std::string& folder);
  void close();

  // Of buffers and queues.
  uint64_t memory_bytes() const;

  // Wakes the thread that compacts.
  void want_compaction();
  // Files were created since the last sync.
  void names_changed() { names_changed_ = true; }

 private:
  friend class RowLog;
  void compact();
  void stop();
  void forget_all();
  bool link_here(size_t store, SegmentFiles& files, const BlocksOfSegments& linked);
  void take_over(size_t store, const SegmentFiles& files, const BlocksOfSegments& linked,
                 const std::string& from);

  const std::string path_;
  const int process_;
  std::unique_ptr<FolderLock> lock_;
  Manifest manifest_;
  LogOptions options_;
  IoEngine engine_;
  std::unique_ptr<LogWriter> writer_;  // null: to read only
  std::vector<std::unique_ptr<LogTier>> tiers_;
  std::vector<RecoveryReport> recovery_;  // of a log opened to read

  std::mutex sync_mutex_;
  bool sync_failed_ = false;  // under sync_mutex_
  std::atomic<bool> names_changed_{true};

  std::mutex compaction_mutex_;
  std::condition_variable compaction_wanted_;
  bool wanted_ = false;  // under compaction_mutex_
  std::atomic<bool> stopping_{false};
  std::atomic<bool> closed_{false};
  std::thread compaction_;
};

// An IoError as the tier tells it.
TierError tier_error(const IoError& error);

}  // namespace hotbed
