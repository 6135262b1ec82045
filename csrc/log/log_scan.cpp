// All rows of some tables, segment after segment.
#include <algorithm>
#include <climits>
#include <set>

#include "log/log_tier.hpp"
#include "log/row_log_core.hpp"

namespace hotbed {

void LogTier::holds(std::span<const RowKey> keys, bool* found) const {
  std::vector<uint32_t> locations(keys.size());
  std::shared_lock state(state_);
  index_.find(keys, locations.data());
  for (size_t i = 0; i < keys.size(); ++i) found[i] = locations[i] != LogIndex::kNone;
}

std::optional<uint64_t> LogTier::moment() const {
  std::shared_lock state(state_);
  return sequence_;
}

// A record is its row's newest of the moment where the index names its place, or did when another
// took its place or the row was erased.
class LogTier::Scan : public TierSnapshot {
 public:
  Scan(LogTier& tier, std::span<const int32_t> tables, uint64_t since)
      : tier_(tier), tables_(tables.begin(), tables.end()), since_(since) {
    // A compaction that is under way ends first.
    std::lock_guard compacting(tier_.compact_mutex_);
    std::lock_guard appending(tier_.append_mutex_);
    if (tier_.core_.writes()) {
      tier_.seal(tier_.fresh_);
      tier_.seal(tier_.moved_);
    }
    std::unique_lock state(tier_.state_);
    limit_ = tier_.segments_->size() * tier_.segment_records_;
    died_.reserve(limit_ / CHAR_BIT + 1, "A scan of the log", kLowerBudget);
    left_out_.reserve(limit_ / CHAR_BIT + 1, "A scan of the log", kLowerBudget);
    for (const auto& segment : *tier_.segments_) {
      if (!segment || !segment->live || (since_ && segment->newest <= since_)) continue;
      segments_.push_back({segment, tier_.segment_blocks_});
      for (const Stream* stream : {&tier_.fresh_, &tier_.moved_}) {
        if (stream->segment == segment) segments_.back().blocks = stream->next_block;
      }
    }
    std::sort(segments_.begin(), segments_.end(),
              [](const auto& a, const auto& b) { return a.segment->number < b.segment->number; });
    tier_.scans_.push_back(this);
  }
  ~Scan() override {
    std::unique_lock state(tier_.state_);
    std::erase(tier_.scans_, this);
    bool wanted = tier_.wants_compaction();
    state.unlock();
    if (wanted) tier_.core_.want_compaction();
  }

  void begin() {
    try {
      if (tier_.core_.writes()) tier_.core_.flush();
    } catch (const TierError&) {
      // What cannot be written is read from memory.
    }
    std::shared_lock state(tier_.state_);
    buffers_ = tier_.buffers_;
  }

  // Under the lock of the state: a record is not its row's newest any more.
  void note_died(uint32_t location) { set(died_, location); }

  void leave_out(std::span<const RowKey> keys) override {
    std::vector<uint32_t> locations(keys.size());
    std::unique_lock state(tier_.state_);
    tier_.index_.find(keys, locations.data());
    for (uint32_t location : locations) {
      if (location != LogIndex::kNone) set(left_out_, location);
    }
  }

  int64_t next(int64_t most, RowKey* keys, uint8_t* records) override {
    int64_t count = 0;
    while (count < most) {
      if (given_ == ready_.size()) {
        if (at_ == segments_.size()) break;
        read_more();
        continue;
      }
      size_t n = std::min(ready_.size() - given_, static_cast<size_t>(most - count));
      uint64_t bytes = tier_.layout_.record_bytes;
      std::copy_n(ready_.begin() + static_cast<int64_t>(given_), n, keys + count);
      std::memcpy(records + static_cast<uint64_t>(count) * bytes, records_.data() + given_ * bytes,
                  n * bytes);
      given_ += n;
      count += static_cast<int64_t>(n);
    }
    return count;
  }

 private:
  // The rows of the blocks that follow, as many as the disk can be asked for at once.
  void read_more() {
    tier_.core_.check_readable();
    ready_.clear();
    records_.clear();
    given_ = 0;
    const LogSegment& segment = *segments_[at_].segment;
    if (block_ == segments_[at_].blocks) return go_on(0);
    if (take_from_buffer(segment)) return;
    auto queue = tier_.core_.engine().lease();
    uint32_t bytes = tier_.layout_.block_bytes;
    auto blocks = static_cast<uint32_t>(
        std::min<uint64_t>(queue->arena_bytes() / bytes, end_of_written(segment) - block_));
    constexpr uint32_t kPieceBytes = 256 << 10;
    uint32_t piece = std::max(1u, kPieceBytes / bytes);
    std::vector<Transfer> transfers;
    for (uint32_t b = 0; b < blocks; b += piece) {
      transfers.push_back({segment.file.get(), uint64_t{block_ + b} * bytes,
                           queue->arena() + uint64_t{b} * bytes,
                           std::min(piece, blocks - b) * bytes, false, 0});
    }
    std::vector<uint32_t> bad;
    try {
      queue->run(transfers);
      for (uint32_t b = 0; b < blocks; ++b) {
        if (!take(segment, block_ + b, queue->arena() + uint64_t{b} * bytes)) bad.push_back(b);
      }
    } catch (const IoError&) {  // nothing was taken
      for (uint32_t b = 0; b < blocks; ++b) bad.push_back(b);
    }
    for (uint32_t b : bad) read_again(segment, block_ + b, *queue);
    go_on(blocks);
  }

  void go_on(uint32_t blocks) {
    block_ += blocks;
    if (block_ < segments_[at_].blocks) return;
    ++at_;
    block_ = 0;
  }

  // Whether the blocks that follow are in memory.
  bool take_from_buffer(const LogSegment& segment) {
    for (const auto& buffer : buffers_) {
      if (buffer->segment.get() != &segment || buffer->first_block != block_) continue;
      for (uint32_t b = 0; b < buffer->blocks; ++b) {
        const uint8_t* block = buffer->data + uint64_t{b} * tier_.layout_.block_bytes;
        take_records(segment, block_ + b, block);
      }
      go_on(buffer->blocks);
      return true;
    }
    return false;
  }

  // Behind the blocks from here on that are in the file.
  uint32_t end_of_written(const LogSegment& segment) const {
    uint32_t end = segments_[at_].blocks;
    for (const auto& buffer : buffers_) {
      if (buffer->segment.get() == &segment && buffer->first_block >= block_) {
        end = std::min(end, buffer->first_block);
      }
    }
    return end;
  }

  // Notes the rows of a block. False if it is not what was written.
  bool take(const LogSegment& segment, uint32_t number, const uint8_t* block) {
    BlockHeader expected{};
    expected.log = tier_.core_.manifest().log;
    expected.segment = segment.number;
    expected.store = tier_.store_;
    expected.block = number;
    BlockState found = check_block(block, tier_.layout_, expected);
    if (found == BlockState::good) take_records(segment, number, block);
    return found == BlockState::good || found == BlockState::empty;
  }

  void take_records(const LogSegment& segment, uint32_t number, const uint8_t* block) {
    const BlockLayout& layout = tier_.layout_;
    BlockHeader header = header_of(block);
    if (header.kind != BlockKind::records) return;
    keys_.clear();
    places_.clear();
    for (uint32_t i = 0; i < header.count; ++i) {
      auto record = read_as<RecordHeader>(block + layout.record_offset(i));
      RowKey key = record.key();
      if (!tables_.count(key.table) || record.sequence() <= since_) continue;
      keys_.push_back(key);
      places_.push_back(i);
    }
    locations_.resize(keys_.size());
    uint64_t first = segment.slot * tier_.segment_records_ + uint64_t{number} * layout.records;
    {
      std::shared_lock state(tier_.state_);
      tier_.index_.find(keys_, locations_.data());
      for (size_t k = 0; k < keys_.size(); ++k) {
        auto here = static_cast<uint32_t>(first + places_[k]);
        if (!was_newest(here, locations_[k])) places_[k] = kNotWanted;
      }
    }
    for (size_t k = 0; k < keys_.size(); ++k) {
      if (places_[k] == kNotWanted) continue;
      const uint8_t* at = block + layout.record_offset(places_[k]) + sizeof(RecordHeader);
      ready_.push_back(keys_[k]);
      records_.insert(records_.end(), at, at + layout.record_bytes);
    }
  }

  // Throws TierError where a block with rows of the table cannot be read.
  void read_again(const LogSegment& segment, uint32_t number, IoQueue& queue) {
    uint32_t bytes = tier_.layout_.block_bytes;
    uint64_t offset = uint64_t{number} * bytes;
    const std::string& path = segment.file->path();
    std::string failure = path + ": the block at offset " + std::to_string(offset) +
                          " does not hold what was written there, twice";
    Transfer transfer{segment.file.get(), offset, queue.arena(), bytes, false, 0};
    try {
      queue.run({&transfer, 1});
      if (take(segment, number, queue.arena())) return;
    } catch (const IoError& error) {
      failure = error.what();
    }
    uint64_t first =
        segment.slot * tier_.segment_records_ + uint64_t{number} * tier_.layout_.records;
    int64_t lost = 0;
    {
      std::shared_lock state(tier_.state_);
      tier_.index_.for_each([&](RowKey key, uint32_t location) {
        lost += tables_.count(key.table) && location >= first &&
                location < first + tier_.layout_.records && was_newest(location, location);
      });
      for (uint32_t i = 0; i < tier_.layout_.records; ++i) {  // of whichever table
        lost += was_newest(static_cast<uint32_t>(first + i), LogIndex::kNone);
      }
    }
    if (!lost) return;
    throw TierError(
        failure + ". " + std::to_string(lost) + " rows in it are lost: go back to a checkpoint.",
        path, bytes);
  }

  // Under the lock of the state; `newest`: where the index has its row now.
  bool was_newest(uint32_t location, uint32_t newest) const {
    return (newest == location || is_set(died_, location)) && !is_set(left_out_, location);
  }
  void set(Mapping& bits, uint32_t location) const {
    if (location < limit_) bits.data()[location / CHAR_BIT] |= 1u << location % CHAR_BIT;
  }
  static bool is_set(const Mapping& bits, uint32_t location) {
    return bits.data()[location / CHAR_BIT] >> location % CHAR_BIT & 1;
  }

  static constexpr uint32_t kNotWanted = UINT32_MAX;

  struct Part {
    std::shared_ptr<LogSegment> segment;
    uint32_t blocks;  // that were there
  };

  LogTier& tier_;
  const std::set<int32_t> tables_;
  const uint64_t since_;
  uint64_t limit_;           // locations of the moment lie below it
  Mapping died_, left_out_;  // a bit a location, under the lock of the state
  std::vector<Part> segments_;
  std::vector<std::shared_ptr<LogBuffer>> buffers_;  // not written
  size_t at_ = 0;                                    // the segment
  uint32_t block_ = 0;                               // in it
  std::vector<RowKey> ready_;
  std::vector<uint8_t> records_;
  size_t given_ = 0;
  std::vector<RowKey> keys_;
  std::vector<uint32_t> places_, locations_;
};

void LogTier::died(uint32_t location) {
  --(*segments_)[location / segment_records_]->live;
  --live_;
  for (Scan* scan : scans_) scan->note_died(location);
}

std::unique_ptr<RecordScan> LogTier::scan(std::span<const int32_t> tables, uint64_t since) {
  return snapshot(tables, since);
}

std::unique_ptr<TierSnapshot> LogTier::snapshot(std::span<const int32_t> tables, uint64_t since) {
  core_.check_readable();
  auto made = std::make_unique<Scan>(*this, tables, since);
  made->begin();
  return made;
}

}  // namespace hotbed
