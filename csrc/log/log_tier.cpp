// Appending, and what a store knows of itself.
#include "log/log_tier.hpp"

#include <algorithm>
#include <cerrno>
#include <cmath>

#include "log/log_sizes.hpp"
#include "log/row_log_core.hpp"

namespace hotbed {

namespace {

// Records that are published under one lock.
constexpr size_t kChunk = 256;

uint64_t blocks_for(uint64_t count, uint64_t in_a_block) {
  return (count + in_a_block - 1) / in_a_block;
}

}  // namespace

LogTier::LogTier(RowLogCore& core, size_t store, const LogStore& described)
    : core_(core),
      store_(static_cast<uint8_t>(store)),
      described_(described),
      layout_(described.record_bytes),
      segment_blocks_(static_cast<uint32_t>(core.manifest().segment_bytes / layout_.block_bytes)),
      segment_records_(uint64_t{segment_blocks_} * layout_.records),
      index_(described.tables),
      segments_(std::make_shared<Segments>()) {
  if (3 * segment_records_ > LogIndex::kLimit) {
    throw std::invalid_argument("Store " + std::to_string(store) + " of a row log: a segment of " +
                                std::to_string(core.manifest().segment_bytes) + " bytes holds " +
                                std::to_string(segment_records_) + " records of " +
                                std::to_string(layout_.record_bytes) + " bytes; a store numbers " +
                                std::to_string(LogIndex::kLimit) +
                                " and needs three segments. Take smaller segments.");
  }
}

LogTier::~LogTier() = default;

// --- Streams. ---

uint64_t LogTier::room(const Stream& stream) const {
  uint64_t records = stream.spare.size() * segment_records_;
  if (stream.segment) {
    uint32_t begun = stream.next_block + stream.block + (stream.filled > 0);
    records += uint64_t{segment_blocks_ - begun} * layout_.records;
    if (stream.filled) records += layout_.records - stream.filled;
  }
  return records;
}

uint64_t LogTier::segments_for(const Stream& stream, uint64_t records) const {
  uint64_t has = room(stream);
  return records > has ? blocks_for(records - has, segment_records_) : 0;
}

void LogTier::make_room(Stream& stream, uint64_t records) {
  for (uint64_t missing = segments_for(stream, records); missing > 0; --missing) {
    stream.spare.push_back(create_segment());
  }
}

std::shared_ptr<LogSegment> LogTier::create_segment() {
  uint64_t number;
  {
    std::unique_lock state(state_);
    number = next_number_++;
  }
  std::string path = core_.path() + "/" + segment_name(store_, number);
  std::shared_ptr<IoFile> file;
  try {
    file = core_.engine().create(path, uint64_t{segment_blocks_} * layout_.block_bytes,
                                 core_.options().preallocate);
  } catch (const IoError& error) {
    TierError told = tier_error(error);
    std::shared_lock state(state_);
    bool full = error.code == ENOSPC || error.code == EDQUOT;
    if (!full || scans_.empty()) throw told;
    throw TierError(
        std::string(told.what()) + " While a save reads the rows of the log, it does not shrink.",
        told.path, told.bytes);
  }
  core_.names_changed();
  std::unique_lock state(state_);
  auto segments = std::make_shared<Segments>(*segments_);
  size_t slot = 0;
  while (slot < segments->size() && (*segments)[slot]) ++slot;
  if ((slot + 1) * segment_records_ > LogIndex::kLimit) {
    state.unlock();
    core_.engine().remove(path);
    throw TierError(path + ": the " + std::to_string(LogIndex::kLimit) +
                        " record numbers of a store are used up. Spread the tables over more "
                        "stores or processes, or lower the space ratio.",
                    path);
  }
  if (slot == segments->size()) segments->emplace_back();
  auto segment = std::make_shared<LogSegment>(std::move(file), number, static_cast<uint32_t>(slot));
  (*segments)[slot] = segment;
  segments_ = std::move(segments);
  ++segment_count_;
  nothing_to_gain_ = false;
  bool wanted = wants_compaction();
  state.unlock();
  if (wanted) core_.want_compaction();
  return segment;
}

// Goes on to the next segment where the last one is full.
void LogTier::open_segment(Stream& stream) {
  if (stream.segment && stream.next_block < segment_blocks_) return;
  stream.segment = std::move(stream.spare.front());
  stream.spare.pop_front();
  stream.next_block = 0;
}

void LogTier::open_buffer(Stream& stream) {
  open_segment(stream);
  auto buffer = core_.writer().take();
  buffer->segment = stream.segment;
  buffer->first_block = stream.next_block;
  buffer->layout = &layout_;
  buffer->blocks = static_cast<uint32_t>(std::min<uint64_t>(
      core_.writer().buffer_bytes() / layout_.block_bytes, segment_blocks_ - stream.next_block));
  buffer->header.log = core_.manifest().log;
  buffer->header.segment = stream.segment->number;
  buffer->header.store = store_;
  buffer->written = [this](const std::shared_ptr<LogBuffer>& done) { written(done); };
  stream.block = stream.filled = 0;
  std::unique_lock state(state_);
  buffers_.push_back(buffer);
  ++stream.segment->unwritten;
  stream.buffer = std::move(buffer);
}

// Records that fit into the buffer, of which there is one afterwards.
uint64_t LogTier::room_in_buffer(Stream& stream) {
  if (stream.buffer && stream.block == stream.buffer->blocks) seal(stream);
  if (!stream.buffer) open_buffer(stream);
  return uint64_t{stream.buffer->blocks - stream.block} * layout_.records - stream.filled;
}

uint8_t* LogTier::begin_block(Stream& stream, BlockKind kind) {
  room_in_buffer(stream);
  uint8_t* block = stream.buffer->data + uint64_t{stream.block} * layout_.block_bytes;
  BlockHeader header{};
  header.kind = kind;
  std::memcpy(block, &header, sizeof header);
  return block;
}

void LogTier::end_block(Stream& stream) {
  stream.filled = 0;
  ++stream.block;
}

// What is in the buffer goes to the disk, the block that is being filled as it is.
void LogTier::seal(Stream& stream) {
  if (!stream.buffer) return;
  if (stream.filled) {
    stream.filled = 0;
    ++stream.block;
  }
  if (stream.block == 0) return;
  {
    std::unique_lock state(state_);
    stream.buffer->blocks = stream.block;
    stream.next_block += stream.block;
    stream.segment->blocks = stream.next_block;
    if (stream.next_block == segment_blocks_) stream.segment->open = false;
  }
  core_.writer().seal(std::move(stream.buffer));
  stream.buffer = nullptr;
  stream.block = 0;
}

void LogTier::written(const std::shared_ptr<LogBuffer>& buffer) {
  std::unique_lock state(state_);
  std::erase(buffers_, buffer);
  --buffer->segment->unwritten;
  buffer->segment->unsynced = true;
}

// Appends a record and says where. There must be room.
uint32_t LogTier::place(Stream& stream, const RecordHeader& header, const uint8_t* record) {
  if (stream.filled == 0) begin_block(stream, BlockKind::records);
  uint8_t* block = stream.buffer->data + uint64_t{stream.block} * layout_.block_bytes;
  uint8_t* at = block + layout_.record_offset(stream.filled);
  std::memcpy(at, &header, sizeof header);
  std::memcpy(at + sizeof header, record, layout_.record_bytes);
  uint64_t location = stream.segment->slot * segment_records_ +
                      uint64_t{stream.next_block + stream.block} * layout_.records + stream.filled;
  BlockHeader block_header = header_of(block);
  block_header.count = static_cast<uint16_t>(++stream.filled);
  block_header.sequence = std::max(block_header.sequence, header.sequence());
  std::memcpy(block, &block_header, sizeof block_header);
  auto& newest = stream.segment->newest;
  newest = std::max(newest.load(), header.sequence());
  if (stream.filled == layout_.records) end_block(stream);
  return static_cast<uint32_t>(location);
}

// Appends erasures in blocks of their own: full ones, or all.
void LogTier::place_erasures(Stream& stream, std::vector<Erasure>& erasures, bool all) {
  uint64_t blocks = erasures.size() / layout_.erasures;
  if (all) blocks = blocks_for(erasures.size(), layout_.erasures);
  if (blocks == 0) return;
  // One more for the rest of the block that is being filled, which is given up.
  make_room(stream, (blocks + 1) * layout_.records);
  if (stream.filled) end_block(stream);
  size_t next = 0;
  for (uint64_t b = 0; b < blocks; ++b) {
    uint8_t* block = begin_block(stream, BlockKind::erasures);
    BlockHeader header = header_of(block);
    size_t count = std::min<size_t>(layout_.erasures, erasures.size() - next);
    std::memcpy(block + sizeof header, &erasures[next], count * sizeof(Erasure));
    header.count = static_cast<uint16_t>(count);
    for (size_t i = 0; i < count; ++i) {
      header.sequence = std::max(header.sequence, erasures[next + i].row.sequence());
    }
    std::memcpy(block, &header, sizeof header);
    next += count;
    {
      std::unique_lock state(state_);
      stream.segment->erasures += count;
    }
    end_block(stream);
  }
  erasures.erase(erasures.begin(), erasures.begin() + static_cast<std::ptrdiff_t>(next));
}

// --- The space bound. All under the lock of the state. ---

uint64_t LogTier::live_bytes() const {
  return blocks_for(live_, layout_.records) * layout_.block_bytes;
}

uint64_t LogTier::segment_limit() const {
  double bytes = core_.options().space_ratio * static_cast<double>(live_bytes());
  uint64_t segment_bytes = uint64_t{segment_blocks_} * layout_.block_bytes;
  return static_cast<uint64_t>(bytes / static_cast<double>(segment_bytes)) + kSlackSegments;
}

// Ahead of the limit, so that writes seldom wait.
bool LogTier::wants_compaction() const {
  return !nothing_to_gain_ && scans_.empty() && segment_count_ + 2 > segment_limit();
}

bool LogTier::compaction_due() const {
  std::shared_lock state(state_);
  return wants_compaction();
}

// Waits for compaction where the records need a segment beyond the limit.
void LogTier::await_space(std::unique_lock<std::mutex>& appending, uint64_t records) {
  if (!core_.options().background) return;
  for (bool stalled = false; segments_for(fresh_, records) > 0; stalled = true) {
    std::unique_lock state(state_);
    auto may_grow = [&] {
      return segment_count_ < segment_limit() || nothing_to_gain_ || !scans_.empty() ||
             core_.stopping();
    };
    if (may_grow()) return;
    if (!stalled) ++counted_.stalls;
    appending.unlock();
    core_.want_compaction();
    space_.wait(state, may_grow);
    state.unlock();
    appending.lock();
  }
}

// --- Tier. ---

void LogTier::write(std::span<const RowKey> keys, const uint8_t* records) {
  core_.check_writable();
  index_.check(keys);
  if (keys.empty()) return;
  std::unique_lock appending(append_mutex_);
  await_space(appending, keys.size());
  core_.writer().settle();
  make_room(fresh_, keys.size());
  uint64_t sequence;
  {
    std::unique_lock state(state_);
    index_.prepare(keys);
    sequence = ++sequence_;
  }
  // Nothing can fail from here on.
  uint32_t locations[kChunk], previous[kChunk];
  for (size_t begin = 0; begin < keys.size();) {
    // A chunk never goes beyond its buffer: a segment that is complete and written may be emptied,
    // so all that lies in it must be published by then.
    size_t most = std::min<size_t>(kChunk, room_in_buffer(fresh_));
    auto chunk = keys.subspan(begin, std::min(most, keys.size() - begin));
    for (size_t i = 0; i < chunk.size(); ++i) {
      locations[i] = place(fresh_, RecordHeader::of(chunk[i], sequence),
                           records + (begin + i) * layout_.record_bytes);
    }
    std::unique_lock state(state_);
    index_.replace(chunk, locations, previous);
    for (size_t i = 0; i < chunk.size(); ++i) {
      if (previous[i] != LogIndex::kNone) died(previous[i]);
      ++(*segments_)[locations[i] / segment_records_]->live;
    }
    live_ += chunk.size();
    counted_.rows_written += chunk.size();
    begin += chunk.size();
  }
  // What is complete need not wait for the next write.
  if (fresh_.block == fresh_.buffer->blocks) seal(fresh_);
}

void LogTier::erase(std::span<const RowKey> keys) {
  core_.check_writable();
  index_.check(keys);
  std::lock_guard appending(append_mutex_);
  uint32_t previous[kChunk];
  for (size_t begin = 0; begin < keys.size(); begin += kChunk) {
    auto chunk = keys.subspan(begin, std::min(kChunk, keys.size() - begin));
    std::unique_lock state(state_);
    uint64_t sequence = ++sequence_;
    index_.erase(chunk, previous);
    for (size_t i = 0; i < chunk.size(); ++i) {
      if (previous[i] == LogIndex::kNone) continue;
      died(previous[i]);
      to_erase_.push_back({RecordHeader::of(chunk[i], sequence), next_number_ - 1});
    }
  }
  {
    std::unique_lock state(state_);
    nothing_to_gain_ = false;
    if (wants_compaction()) core_.want_compaction();
  }
  try {
    place_erasures(fresh_, to_erase_, false);
  } catch (const TierError&) {
    // Only a crash could tell the difference; the next flush says that the disk is full.
  }
}

int64_t LogTier::rows(int32_t table) const {
  std::shared_lock state(state_);
  return index_.rows(table);
}

void LogTier::ids(int32_t table, int64_t* out) const {
  std::shared_lock state(state_);
  index_.ids(table, out);
}

uint64_t LogTier::memory_bytes() const {
  // What all stores share is counted with the first.
  uint64_t bytes = store_ == 0 ? core_.memory_bytes() : 0;
  std::shared_lock state(state_);
  return bytes + index_.resident_bytes() + segment_bytes();
}

uint64_t LogTier::most_bytes_beside_index(uint64_t budget) const {
  if (store_ != 0) return 0;
  std::vector<int64_t> record_bytes;
  for (const LogStore& store : core_.manifest().stores) record_bytes.push_back(store.record_bytes);
  return LogSizes(budget, record_bytes).bytes;
}

uint64_t LogTier::index_bytes() const {
  std::shared_lock state(state_);
  return index_.memory_bytes() + segment_bytes();
}

uint64_t LogTier::segment_bytes() const { return segments_->size() * (sizeof(LogSegment) + 64); }

void LogTier::sync() { core_.sync(); }

TierTraffic LogTier::traffic() const {
  std::shared_lock state(state_);
  return {counted_.rows_read, counted_.rows_written};
}

StoreStatistics LogTier::statistics() const {
  std::shared_lock state(state_);
  StoreStatistics s = counted_;
  s.live_records = live_;
  s.segments = segment_count_;
  s.dead_records = segment_count_ * segment_records_ - live_;
  s.bytes = segment_count_ * segment_blocks_ * layout_.block_bytes;
  s.live_bytes = live_bytes();
  for (const auto& segment : *segments_) s.damaged_segments += segment && segment->damaged;
  return s;
}

// --- For RowLogCore. ---

void LogTier::seal_for_sync() {
  std::lock_guard appending(append_mutex_);
  place_erasures(fresh_, to_erase_, true);
  seal(fresh_);
}

std::vector<std::shared_ptr<LogSegment>> LogTier::take_unsynced() {
  std::unique_lock state(state_);
  std::vector<std::shared_ptr<LogSegment>> taken;
  for (const auto& segment : *segments_) {
    if (!segment || !segment->unsynced) continue;
    segment->unsynced = false;
    taken.push_back(segment);
  }
  return taken;
}

}  // namespace hotbed
