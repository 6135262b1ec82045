// Emptying segments, so that their space is given back.
#include <algorithm>

#include "log/log_tier.hpp"
#include "log/row_log_core.hpp"

namespace hotbed {

namespace {

constexpr uint32_t kPieceBytes = 256 << 10;

uint64_t blocks_for(uint64_t count, uint64_t in_a_block) {
  return (count + in_a_block - 1) / in_a_block;
}

}  // namespace

// Records of a segment that may be live, and what becomes of them.
struct LogTier::Moving {
  explicit Moving(const LogSegment& emptied) : victim(emptied) {}

  const LogSegment& victim;
  uint64_t oldest_other = UINT64_MAX;  // number of the oldest segment besides the victim
  std::vector<RowKey> keys;
  std::vector<RecordHeader> headers;
  std::vector<uint32_t> from;
  std::vector<const uint8_t*> records;
  std::vector<uint32_t> bad_blocks;
};

// The closed segment with the least live records of which emptying gives space back, or the oldest
// where erasures, which only old segments make necessary, take up much.
std::shared_ptr<LogSegment> LogTier::choose_victim() {
  std::shared_lock state(state_);
  std::shared_ptr<LogSegment> emptiest, oldest;
  uint64_t erasure_blocks = 0;
  for (const auto& segment : *segments_) {
    if (!segment) continue;
    erasure_blocks += blocks_for(segment->erasures, layout_.erasures);
    if (segment->open || segment->unwritten > 0 || segment->damaged) continue;
    if (!oldest || segment->number < oldest->number) oldest = segment;
    uint64_t kept = blocks_for(segment->live, layout_.records) +
                    blocks_for(segment->erasures, layout_.erasures);
    // Two blocks may stay partly empty behind what is moved.
    if (kept + 2 >= segment_blocks_) continue;
    if (!emptiest || segment->live < emptiest->live) emptiest = segment;
  }
  bool many_erasures = 16 * erasure_blocks > segment_count_ * segment_blocks_;
  return many_erasures && oldest ? oldest : emptiest;
}

bool LogTier::compact_step() {
  core_.check_writable();
  std::lock_guard compacting(compact_mutex_);
  auto nothing_more = [&](const std::string& failure) {
    std::unique_lock state(state_);
    nothing_to_gain_ = true;
    if (!failure.empty()) counted_.compaction_failure = failure;
    state.unlock();
    space_.notify_all();
  };
  {
    std::shared_lock state(state_);
    if (!scans_.empty()) return false;
  }
  auto victim = choose_victim();
  if (!victim) {
    nothing_more("");
    return false;
  }
  try {
    if (!empty_segment(*victim)) return false;
    // Once its records are safe elsewhere, and those that made others of them dead are too.
    seal(moved_);
    core_.sync();
    remove_segment(victim);
  } catch (const std::exception& error) {
    nothing_more(error.what());
    if (const auto* io = dynamic_cast<const IoError*>(&error)) throw tier_error(*io);
    throw;
  }
  return true;
}

// Appends the live records of a segment to the stream of moved ones. False when the log is closing.
bool LogTier::empty_segment(LogSegment& victim) {
  Moving moving(victim);
  uint64_t live, erasures;
  {
    std::shared_lock state(state_);
    live = victim.live;
    erasures = victim.erasures;
    for (const auto& segment : *segments_) {
      if (segment && segment.get() != &victim) {
        moving.oldest_other = std::min(moving.oldest_other, segment->number);
      }
    }
  }
  if (live == 0 && erasures == 0) return true;
  // Before any record is looked up: an erasure that comes meanwhile then counts this segment among
  // those that may hold older records.
  make_room(moved_, live);

  auto queue = core_.engine().lease();
  auto most_bytes = static_cast<uint32_t>(std::min<uint64_t>(kPieceBytes, queue->arena_bytes()));
  uint32_t piece_blocks = std::max(1u, most_bytes / layout_.block_bytes);
  uint64_t piece_bytes = uint64_t{piece_blocks} * layout_.block_bytes;
  uint64_t places = std::min<uint64_t>(queue->depth(), queue->arena_bytes() / piece_bytes);
  std::vector<uint32_t> first_blocks(places);
  std::vector<uint64_t> free_places(places);
  for (uint64_t p = 0; p < places; ++p) free_places[p] = p;
  std::vector<Completion> done;
  for (uint32_t next = 0; next < segment_blocks_ || queue->in_flight() > 0;) {
    if (core_.stopping()) return false;
    for (; next < segment_blocks_ && !free_places.empty(); next += piece_blocks) {
      uint64_t place = free_places.back();
      free_places.pop_back();
      first_blocks[place] = next;
      uint32_t blocks = std::min(piece_blocks, segment_blocks_ - next);
      queue->submit({victim.file.get(), uint64_t{next} * layout_.block_bytes,
                     queue->arena() + place * piece_bytes, blocks * layout_.block_bytes, false,
                     place});
    }
    done.clear();
    queue->collect(1, done);
    for (const Completion& completion : done) {
      uint32_t first = first_blocks[completion.tag];
      uint32_t blocks = std::min(piece_blocks, segment_blocks_ - first);
      const uint8_t* data = queue->arena() + completion.tag * piece_bytes;
      for (uint32_t b = 0; b < blocks; ++b) {
        if (completion.error) {
          moving.bad_blocks.push_back(first + b);
        } else {
          take_block(moving, first + b, data + uint64_t{b} * layout_.block_bytes);
        }
      }
      move_batch(moving);
      free_places.push_back(completion.tag);
    }
  }
  // Once more, one by one.
  std::vector<uint32_t> bad_blocks;
  bad_blocks.swap(moving.bad_blocks);
  std::string failure;
  for (uint32_t block : bad_blocks) {
    uint64_t offset = uint64_t{block} * layout_.block_bytes;
    Transfer transfer{victim.file.get(), offset, queue->arena(), layout_.block_bytes, false, 0};
    try {
      queue->run({&transfer, 1});
      take_block(moving, block, queue->arena());
      move_batch(moving);
    } catch (const IoError& error) {
      failure = error.what();
    }
  }
  place_erasures(moved_, erasures_moved_, true);

  std::unique_lock state(state_);
  counted_.rereads += bad_blocks.size();
  if (victim.live == 0) return true;
  victim.damaged = true;
  if (failure.empty()) {
    failure = victim.file->path() + ": " + std::to_string(moving.bad_blocks.size()) +
              " blocks do not hold what was written there, the first at offset " +
              std::to_string(moving.bad_blocks.empty()
                                 ? 0
                                 : uint64_t{moving.bad_blocks[0]} * layout_.block_bytes) +
              ". The segment is kept; reading its other rows goes on.";
  }
  throw TierError(failure, victim.file->path(), layout_.block_bytes);
}

// Notes what a block holds that may have to be moved.
void LogTier::take_block(Moving& moving, uint32_t number, const uint8_t* block) {
  BlockHeader expected{};
  expected.log = core_.manifest().log;
  expected.segment = moving.victim.number;
  expected.store = store_;
  expected.block = number;
  BlockState found = check_block(block, layout_, expected);
  if (found == BlockState::empty) return;
  if (found != BlockState::good) {
    moving.bad_blocks.push_back(number);
    return;
  }
  BlockHeader header = header_of(block);
  if (header.kind == BlockKind::records) {
    uint64_t first = moving.victim.slot * segment_records_ + uint64_t{number} * layout_.records;
    for (uint32_t i = 0; i < header.count; ++i) {
      const uint8_t* at = block + layout_.record_offset(i);
      moving.headers.push_back(read_as<RecordHeader>(at));
      moving.keys.push_back(moving.headers.back().key());
      moving.from.push_back(static_cast<uint32_t>(first + i));
      moving.records.push_back(at + sizeof(RecordHeader));
    }
    return;
  }
  for (uint32_t i = 0; i < header.count; ++i) {
    auto erasure = read_as<Erasure>(block + sizeof header + i * sizeof(Erasure));
    if (erasure.segment < moving.oldest_other) continue;
    RowKey key = erasure.row.key();
    uint32_t location;
    std::shared_lock state(state_);
    index_.find({&key, 1}, &location);
    // A record that is newer says as much.
    if (location == LogIndex::kNone) erasures_moved_.push_back(erasure);
  }
}

// Appends the noted records that are live. One that is written or erased meanwhile has been copied
// for nothing: its sequence number says that it is older.
void LogTier::move_batch(Moving& moving) {
  size_t count = moving.keys.size();
  std::vector<uint32_t> to(count), now(count);
  {
    std::shared_lock state(state_);
    index_.find(moving.keys, now.data());
  }
  size_t live = 0;
  for (size_t i = 0; i < count; ++i) {
    if (now[i] != moving.from[i]) continue;
    to[live] = place(moved_, moving.headers[i], moving.records[i]);
    moving.keys[live] = moving.keys[i];
    moving.from[live] = moving.from[i];
    ++live;
  }
  std::unique_lock state(state_);
  std::span<const RowKey> keys(moving.keys.data(), live);
  index_.find(keys, now.data());
  for (size_t i = 0; i < live; ++i) {
    if (now[i] != moving.from[i]) continue;
    uint32_t previous;
    index_.replace(keys.subspan(i, 1), &to[i], &previous);
    --(*segments_)[previous / segment_records_]->live;
    ++(*segments_)[to[i] / segment_records_]->live;
    ++counted_.rows_moved;
  }
  moving.keys.clear();
  moving.headers.clear();
  moving.from.clear();
  moving.records.clear();
}

void LogTier::remove_segment(const std::shared_ptr<LogSegment>& victim) {
  core_.engine().remove(victim->file->path());
  // An erasure is dropped once the segments that made it necessary are gone, also after a crash.
  core_.engine().sync_directory(core_.path());
  std::unique_lock state(state_);
  auto segments = std::make_shared<Segments>(*segments_);
  (*segments)[victim->slot] = nullptr;
  segments_ = std::move(segments);
  --segment_count_;
  ++counted_.compactions;
  state.unlock();
  space_.notify_all();
}

}  // namespace hotbed
