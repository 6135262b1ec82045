#include "storage/log_layouts.hpp"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "log/log_sizes.hpp"

namespace hotbed {

std::vector<std::shared_ptr<Tier>> LogLayouts::operator()(const std::vector<RecordGroup>& groups) {
  discard_left();
  if (groups.size() > kMostStores) {
    throw TierError("Tables whose rows differ in size, " + std::to_string(groups.size()) +
                    " kinds of them, do not all fit into one folder: at most " +
                    std::to_string(kMostStores) + " do. Give some of them the same dim and dtype.");
  }
  std::vector<LogStore> stores;
  uint64_t segment_bytes = this->segment_bytes;
  for (const RecordGroup& group : groups) {
    if (group.record_bytes > kMostRecordBytes) {
      throw TierError("Table '" + group.tables[0]->name() + "': a row of dim " +
                          std::to_string(group.tables[0]->dim()) + " takes " +
                          std::to_string(group.record_bytes) +
                          " bytes with its optimizer states, and a row on an SSD at most " +
                          std::to_string(kMostRecordBytes) +
                          ". Use a smaller dim or dtype, or a rule with smaller states.",
                      {}, static_cast<uint64_t>(group.record_bytes));
    }
    segment_bytes =
        std::max(segment_bytes, kLeastBlocks * BlockLayout(group.record_bytes).block_bytes);
    LogStore store{group.record_bytes, {}};
    for (size_t t = 0; t < group.tables.size(); ++t) {
      const Table& table = *group.tables[t];
      store.tables.push_back(
          {static_cast<int32_t>(t), table.name(), table.dynamic() ? -1 : table.size()});
    }
    stores.push_back(std::move(store));
  }
  std::string folder;
  do {  // not into a folder that is somebody else's
    folder = path + "/rows-" + std::to_string(++layouts);
  } while (std::filesystem::exists(std::filesystem::symlink_status(folder)));
  LogOptions options;
  options.space_ratio = space_ratio;
  options.segment_bytes = segment_bytes;
  options.io.observer = observer;
  std::vector<int64_t> record_bytes;
  for (const LogStore& store : stores) record_bytes.push_back(store.record_bytes);
  LogSizes sizes(host, record_bytes);
  options.io.arena_bytes = sizes.arena_bytes;
  options.append_bytes = sizes.append_bytes;
  options.buffer_bytes = sizes.buffer_bytes;
  std::shared_ptr<RowLog> log = kept(RowLog::create(folder, std::move(stores), options));
  std::vector<std::shared_ptr<Tier>> tiers;
  for (size_t g = 0; g < groups.size(); ++g) {
    tiers.push_back(std::shared_ptr<Tier>(log, &log->tier(g)));
  }
  return tiers;
}

std::shared_ptr<RowLog> LogLayouts::kept(std::unique_ptr<RowLog> log) const {
  {
    std::lock_guard lock(logs->mutex);
    ++logs->open;
  }
  return {log.release(), [logs = logs, process = getpid()](RowLog* goes) {
            std::string path = goes->path();
            delete goes;
            if (getpid() != process) return;
            std::lock_guard lock(logs->mutex);
            if (--logs->open == 0) {
              logs->left = path;
              return;
            }
            try {
              discard_log(path);
            } catch (const TierError&) {
              // It is in nobody's way, and the next run is told of it.
            }
          }};
}

void LogLayouts::discard_left() const {
  std::lock_guard lock(logs->mutex);
  if (!logs->left.empty()) discard_log(std::exchange(logs->left, {}));
}

}  // namespace hotbed
