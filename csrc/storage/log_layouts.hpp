// The lowest tiers of a storage on SSD: a log of rows for each layout of its tables.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "log/row_log.hpp"
#include "storage/storage.hpp"

namespace hotbed {

// The logs of one storage's layouts, in folders of their own below `path`. While rows move there
// are two; whichever goes first, since its rows have left it or since the other's found no room, is
// of no use any more. The last one stays behind, to be looked at.
struct LogLayouts {
  std::string path;
  uint64_t host;  // bytes of the budget that the logs are in
  double space_ratio;
  uint64_t segment_bytes;
  std::shared_ptr<IoObserver> observer;
  int layouts = 0;
  struct Logs {
    std::mutex mutex;
    int open = 0;
    std::string left;  // folder of the last one, once it is closed
  };
  std::shared_ptr<Logs> logs = std::make_shared<Logs>();

  // A MakeLowest.
  std::vector<std::shared_ptr<Tier>> operator()(const std::vector<RecordGroup>& groups);

  std::shared_ptr<RowLog> kept(std::unique_ptr<RowLog> log) const;
  void discard_left() const;
};

}  // namespace hotbed
