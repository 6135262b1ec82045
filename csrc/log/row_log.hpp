// The log of rows on SSD: a folder of segments, one store for each size of record.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "log/io_engine.hpp"
#include "log/log_format.hpp"
#include "log/log_options.hpp"
#include "log/log_tier.hpp"

namespace hotbed {

struct LogStatistics {
  IoStatistics io;
  LogWriterStatistics writer;
  std::vector<StoreStatistics> stores;
  uint64_t memory_bytes = 0;
};

// Whether a folder has the manifest of a log, of whatever version or state.
bool holds_log(const std::string& path);
// Removes the files of a log, and its folder unless something else is in it: the names of that.
// Throws TierError where the log is in use, or where a file cannot be removed.
std::vector<std::string> discard_log(const std::string& path);

// A folder is used by one RowLog at a time, or by any number that only read.
//
// A log serves the process that opened it: in a forked child every call throws, and the child's
// copy goes without touching anything.
//
// Threading: every member may be called by several threads at once, but for close(), which needs
// the log (and its tiers) for itself.
class RowLog {
 public:
  // A log for a fresh user. Throws TierError where the folder holds a log (unless reset), is in use
  // or cannot be written; std::invalid_argument where stores or options make no sense.
  static std::unique_ptr<RowLog> create(const std::string& path, std::vector<LogStore> stores,
                                        LogOptions options);

  // What a log holds, after a clean end or a crash; writing throws. Reads all of it. `locked`:
  // whether others might change it, so that nobody may while it is open.
  static std::unique_ptr<RowLog> open_to_read(const std::string& path, IoOptions io = {},
                                              bool locked = true);

  RowLog(const RowLog&) = delete;
  RowLog& operator=(const RowLog&) = delete;
  ~RowLog();

  const std::string& path() const;
  const Manifest& manifest() const;
  size_t stores() const;
  LogTier& tier(size_t store);

  // Everything written before is in the files, that is safe from a crash of this process. Throws
  // TierError; nothing is lost then, and it may be called again.
  void flush();

  // Everything written before is confirmed: safe from a crash of the machine. Once a sync failed in
  // the kernel every later one throws, since nobody can tell what is on the disk.
  void sync();

  // Everything written before becomes a log in a folder that is not there yet, to be opened and
  // adopted: its files are hard links to those of this one, which writes to them no more. Throws
  // TierError; files may be in the folder then.
  void link(const std::string& folder);

  // Becomes one that link() has made; it holds no rows, and nobody uses it meanwhile. False, and
  // nothing is changed, where its tables are others, or files cannot be linked or read. Throws
  // TierError where the other is damaged; this one holds no rows then.
  bool adopt(const std::string& folder);

  // Syncs, ends the threads and lets the folder go. Throws TierError where the sync fails; the log
  // is closed all the same. Called again it does nothing.
  void close();

  // What opening to read found, by store; empty for a log that is written.
  const std::vector<RecoveryReport>& recovery() const;
  LogStatistics statistics() const;
  uint64_t memory_bytes() const { return statistics().memory_bytes; }

 private:
  RowLog(std::unique_ptr<RowLogCore> core);
  static std::unique_ptr<RowLog> begin(const std::string& path, Manifest manifest,
                                       LogOptions options);
  std::unique_ptr<RowLogCore> core_;
  int process_;
};

}  // namespace hotbed
