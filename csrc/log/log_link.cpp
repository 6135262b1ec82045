// Logs that share files with others: one that is linked into a folder, and one that goes on from
// there.
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "log/log_tier.hpp"
#include "log/row_log_core.hpp"

namespace hotbed {

namespace {

bool same_stores(const Manifest& one, const Manifest& other) {
  auto same_tables = [](const LogTable& a, const LogTable& b) {
    return a.table == b.table && a.rows == b.rows;
  };
  auto same_store = [&](const LogStore& a, const LogStore& b) {
    return a.record_bytes == b.record_bytes &&
           std::equal(a.tables.begin(), a.tables.end(), b.tables.begin(), b.tables.end(),
                      same_tables);
  };
  return one.segment_bytes == other.segment_bytes &&
         std::equal(one.stores.begin(), one.stores.end(), other.stores.begin(), other.stores.end(),
                    same_store);
}

}  // namespace

// Nothing is written to the segment any more that has something by now.
void LogTier::end_segment(Stream& stream) {
  seal(stream);
  if (!stream.segment || stream.next_block == 0) return;
  std::unique_lock state(state_);
  stream.segment->open = false;
  if (stream.buffer) {  // with nothing in it
    std::erase(buffers_, stream.buffer);
    --stream.segment->unwritten;
  }
  state.unlock();
  stream.buffer = nullptr;
  stream.segment = nullptr;
  stream.next_block = 0;
}

// While compaction rests. Those that are needed to know all rows.
std::vector<std::shared_ptr<LogSegment>> LogTier::end_segments() {
  std::lock_guard appending(append_mutex_);
  place_erasures(fresh_, to_erase_, true);
  end_segment(fresh_);
  end_segment(moved_);
  std::shared_lock state(state_);
  std::vector<std::shared_ptr<LogSegment>> needed;
  for (const auto& segment : *segments_) {
    if (segment && (segment->live || segment->erasures)) needed.push_back(segment);
  }
  return needed;
}

bool LogTier::link(const std::string& folder) {
  core_.link(folder);
  return true;
}

bool LogTier::adopt(const std::string& folder) { return core_.adopt(folder); }

void RowLogCore::link(const std::string& folder) {
  check_writable();
  std::vector<std::unique_lock<std::mutex>> compacting;
  for (auto& tier : tiers_) compacting.emplace_back(tier->compact_mutex_);
  struct Linked {
    std::string name;
    std::shared_ptr<LogSegment> segment;
    uint64_t bytes;  // that were written
  };
  std::vector<Linked> segments;
  Manifest manifest = manifest_;
  manifest.linked.emplace(tiers_.size());
  for (size_t s = 0; s < tiers_.size(); ++s) {
    for (auto& segment : tiers_[s]->end_segments()) {
      uint64_t bytes = uint64_t{segment->blocks} * tiers_[s]->layout().block_bytes;
      (*manifest.linked)[s][segment->number] = segment->blocks;
      segments.push_back({segment_name(s, segment->number), std::move(segment), bytes});
    }
  }
  sync();
  for (const Linked& each : segments) engine_.release_behind(*each.segment->file, each.bytes);
  try {
    if (::mkdir(folder.c_str(), 0777) != 0) throw IoError("making, with", folder, 0, 0, errno);
    for (const Linked& each : segments) {
      engine_.link(each.segment->file->path(), folder + "/" + each.name);
    }
    engine_.replace(folder + "/" + kManifest, encode(manifest));
  } catch (const IoError& error) {
    if (error.code != EXDEV && error.code != EPERM && error.code != EOPNOTSUPP &&
        error.code != EMLINK) {
      throw tier_error(error);
    }
    throw TierError("Files of the row log " + path_ + " cannot be linked into " + folder + ": " +
                        std::strerror(error.code) +
                        ". Both must lie on one file system that has hard links. Save there, or "
                        "without linked=True.",
                    folder);
  }
}

// While nobody uses the tier.
void LogTier::forget_all() {
  end_segment(fresh_);
  end_segment(moved_);
  core_.writer().wait();
  std::unique_lock state(state_);
  for (Stream* stream : {&fresh_, &moved_}) {
    std::erase(buffers_, stream->buffer);
    *stream = {};
  }
  to_erase_.clear();
  erasures_moved_.clear();
  index_ = LogIndex({});  // memory of the one before is given back first
  index_ = LogIndex(described_.tables);
  segments_ = std::make_shared<Segments>();
  segment_count_ = live_ = 0;
  nothing_to_gain_ = false;
}

void RowLogCore::forget_all() {
  for (auto& tier : tiers_) tier->forget_all();
  for (const auto& [store, files] : segment_files_in(path_)) {
    for (const auto& file : files) engine_.remove(file.second);
  }
}

bool RowLogCore::adopt(const std::string& folder) {
  check_writable();
  Manifest found = read_manifest(folder);
  if (!found.linked || !same_stores(manifest_, found)) return false;
  std::vector<std::unique_lock<std::mutex>> held;
  // Who compacts one tier waits for appending to all, as it syncs.
  for (auto& tier : tiers_) held.emplace_back(tier->compact_mutex_);
  for (auto& tier : tiers_) held.emplace_back(tier->append_mutex_);
  for (const auto& tier : tiers_) {
    if (tier->live_ || !tier->scans_.empty()) return false;
  }
  auto files = segment_files_in(folder);
  try {
    forget_all();
    for (size_t s = 0; s < tiers_.size(); ++s) {
      if (!link_here(s, files[s], found.linked->at(s))) {
        forget_all();
        return false;
      }
    }
    manifest_.log = found.log;
    engine_.replace(path_ + "/" + kManifest, encode(manifest_));
    for (size_t s = 0; s < tiers_.size(); ++s) {
      take_over(s, files[s], found.linked->at(s), folder);
    }
  } catch (const IoError&) {  // whoever reads the rows is told
    forget_all();
    return false;
  } catch (...) {
    forget_all();
    throw;
  }
  names_changed_ = true;
  return true;
}

// `files` become those that were linked, by their names here. False where one cannot have another
// name.
bool RowLogCore::link_here(size_t store, SegmentFiles& files, const BlocksOfSegments& linked) {
  std::erase_if(files, [&](const auto& file) { return !linked.contains(file.first); });
  for (auto& [number, path] : files) {
    std::string own = path_ + "/" + segment_name(store, number);
    try {
      engine_.link(path, own);
    } catch (const IoError&) {
      return false;
    }
    path = own;
  }
  return true;
}

// Into a store that is empty.
void RowLogCore::take_over(size_t store, const SegmentFiles& files, const BlocksOfSegments& linked,
                           const std::string& from) {
  LogTier& tier = *tiers_[store];
  RecoveryReport report;
  std::unique_lock state(tier.state_);
  tier.recover(files, &linked, report);
  if (!report.dropped) return;
  const DroppedBlock& block = report.dropped_blocks[0];
  std::string path = from + "/" + std::filesystem::path(block.path).filename().string();
  throw TierError(path + " at " + std::to_string(block.offset) + ": " + block.reason + ".", path);
}

}  // namespace hotbed
