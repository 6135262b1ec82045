// Opening a log that exists: its blocks are read, and of each row the newest record counts.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <unordered_map>

#include "base/integers.hpp"
#include "base/random.hpp"
#include "log/log_tier.hpp"
#include "log/row_log_core.hpp"

namespace hotbed {

namespace {

constexpr uint32_t kPieceBytes = 256 << 10;

struct KeyHash {
  size_t operator()(const RowKey& key) const {
    return mix(static_cast<uint64_t>(key.id) ^ mix(static_cast<uint64_t>(key.table)));
  }
};

// A number for each record of a segment, memory for which comes with its use: a segment may be a
// large file with little in it.
class SequenceOfRecords {
 public:
  explicit SequenceOfRecords(uint64_t records) : pages_((records + kPage - 1) / kPage) {}
  uint64_t& operator[](uint64_t record) {
    auto& page = pages_[record / kPage];
    if (!page) page = std::make_unique<uint64_t[]>(kPage);
    return page[record % kPage];
  }

 private:
  static constexpr uint64_t kPage = 4096;
  std::vector<std::unique_ptr<uint64_t[]>> pages_;
};

// The parts of a file [begin, end) that were ever written, in whole blocks.
std::vector<std::pair<uint64_t, uint64_t>> written_parts(const IoFile& file, uint64_t size,
                                                         uint32_t block_bytes) {
  std::vector<std::pair<uint64_t, uint64_t>> parts;
  for (uint64_t at = 0; at < size;) {
    off_t data = lseek(file.descriptor(), static_cast<off_t>(at), SEEK_DATA);
    if (data < 0 && errno == ENXIO) break;
    off_t hole = data < 0 ? -1 : lseek(file.descriptor(), data, SEEK_HOLE);
    // Where the file system cannot tell, all of it.
    if (hole < 0) return {{0, size}};
    uint64_t begin = std::max(at, static_cast<uint64_t>(data) / block_bytes * block_bytes);
    uint64_t end = std::min(size, round_up(static_cast<uint64_t>(hole), block_bytes));
    if (begin < end) parts.emplace_back(begin, end);
    at = std::max(end, at + block_bytes);
  }
  return parts;
}

}  // namespace

// What is known of a store while its files are read.
struct LogTier::Recovering {
  RecoveryReport& report;
  std::vector<SequenceOfRecords> sequences;  // by slot
  std::unordered_map<RowKey, uint64_t, KeyHash> erased;

  void drop(const std::string& path, uint64_t offset, std::string reason) {
    ++report.dropped;
    if (report.dropped_blocks.size() < RecoveryReport::kMostListed) {
      report.dropped_blocks.push_back({path, offset, std::move(reason)});
    }
  }
};

// `linked`: what must be there, of a log that was linked.
void LogTier::recover(const SegmentFiles& files, const BlocksOfSegments* linked,
                      RecoveryReport& report) {
  Recovering recovering{.report = report, .sequences = {}, .erased = {}};
  auto segments = std::make_shared<Segments>();
  BlocksOfSegments missing = linked ? *linked : BlocksOfSegments();
  for (const auto& [number, path] : files) {
    if (linked && !missing.contains(number)) continue;  // it is no part of it
    if ((segments->size() + 1) * segment_records_ > LogIndex::kLimit) {
      throw TierError(path + " is one segment more than a store can have.", path);
    }
    auto segment = std::make_shared<LogSegment>(core_.engine().open(path), number,
                                                static_cast<uint32_t>(segments->size()));
    segment->open = false;
    segments->push_back(segment);
    recovering.sequences.emplace_back(segment_records_);
    scan(recovering, *segment);
    if (linked) {
      uint32_t blocks = missing.extract(number).mapped();
      if (segment->blocks != blocks) {
        recovering.drop(path, 0,
                        "the file has " + std::to_string(segment->blocks) +
                            " good blocks, and was linked with " + std::to_string(blocks));
      }
    }
    next_number_ = std::max(next_number_, number + 1);
    ++report.segments;
  }
  for (const auto& [number, blocks] : missing) {
    recovering.drop(segment_name(store_, number), 0, "the file is missing");
  }
  for (const auto& [key, sequence] : recovering.erased) {
    uint32_t location, previous;
    index_.find({&key, 1}, &location);
    if (location == LogIndex::kNone) continue;
    auto& sequences = recovering.sequences[location / segment_records_];
    if (sequences[location % segment_records_] < sequence) index_.erase({&key, 1}, &previous);
  }
  index_.for_each([&](const RowKey&, uint32_t location) {
    ++(*segments)[location / segment_records_]->live;
    ++live_;
  });
  report.superseded = report.records - live_;
  segment_count_ = segments->size();
  segments_ = std::move(segments);
}

void LogTier::scan(Recovering& recovering, LogSegment& segment) {
  const IoFile& file = *segment.file;
  uint64_t size = file.size();
  uint64_t whole = uint64_t{segment_blocks_} * layout_.block_bytes;
  if (size != whole) {
    recovering.drop(
        file.path(), size,
        "the file has " + std::to_string(size) + " bytes, not " + std::to_string(whole));
    whole = std::min(whole, size / layout_.block_bytes * layout_.block_bytes);
  }
  struct Piece {
    uint64_t offset;
    uint32_t bytes;
  };
  auto queue = core_.engine().lease();
  auto most_bytes = static_cast<uint32_t>(std::min<uint64_t>(kPieceBytes, queue->arena_bytes()));
  uint32_t most = std::max(1u, most_bytes / layout_.block_bytes) * layout_.block_bytes;
  std::vector<Piece> pieces;
  for (auto [begin, end] : written_parts(file, whole, layout_.block_bytes)) {
    for (uint64_t at = begin; at < end; at += most) {
      pieces.push_back({at, static_cast<uint32_t>(std::min<uint64_t>(most, end - at))});
    }
  }
  uint64_t places = std::min<uint64_t>(queue->depth(), queue->arena_bytes() / most);
  std::vector<Piece> at_place(places);
  std::vector<uint64_t> free_places(places);
  for (uint64_t p = 0; p < places; ++p) free_places[p] = p;
  std::vector<Completion> done;
  std::vector<Piece> unread;
  for (size_t next = 0; next < pieces.size() || queue->in_flight() > 0;) {
    for (; next < pieces.size() && !free_places.empty(); ++next) {
      uint64_t place = free_places.back();
      free_places.pop_back();
      at_place[place] = pieces[next];
      queue->submit({&file, pieces[next].offset, queue->arena() + place * most, pieces[next].bytes,
                     false, place});
    }
    done.clear();
    queue->collect(1, done);
    for (const Completion& completion : done) {
      const Piece& piece = at_place[completion.tag];
      const uint8_t* data = queue->arena() + completion.tag * most;
      for (uint32_t b = 0; b < piece.bytes; b += layout_.block_bytes) {
        if (completion.error) {
          unread.push_back({piece.offset + b, layout_.block_bytes});
        } else {
          take_recovered(recovering, segment, piece.offset + b, data + b);
        }
      }
      free_places.push_back(completion.tag);
    }
  }
  for (const Piece& piece : unread) {
    Transfer transfer{&file, piece.offset, queue->arena(), piece.bytes, false, 0};
    try {
      queue->run({&transfer, 1});
      take_recovered(recovering, segment, piece.offset, queue->arena());
    } catch (const IoError& error) {
      recovering.drop(file.path(), piece.offset, std::strerror(error.code));
    }
  }
}

void LogTier::take_recovered(Recovering& recovering, LogSegment& segment, uint64_t offset,
                             const uint8_t* block) {
  BlockHeader expected{};
  expected.log = core_.manifest().log;
  expected.segment = segment.number;
  expected.store = store_;
  expected.block = static_cast<uint32_t>(offset / layout_.block_bytes);
  RecoveryReport& report = recovering.report;
  switch (check_block(block, layout_, expected)) {
    case BlockState::empty: return;
    case BlockState::torn:
      return recovering.drop(segment.file->path(), offset, "its checksum is wrong");
    case BlockState::foreign:
      return recovering.drop(segment.file->path(), offset, "it was written for another place");
    case BlockState::good: break;
  }
  ++report.blocks;
  ++segment.blocks;
  BlockHeader header = header_of(block);
  sequence_ = std::max(sequence_, header.sequence);
  if (header.kind == BlockKind::erasures) {
    for (uint32_t i = 0; i < header.count; ++i) {
      auto erasure = read_as<Erasure>(block + sizeof header + i * sizeof(Erasure));
      uint64_t& newest = recovering.erased[erasure.row.key()];
      newest = std::max(newest, erasure.row.sequence());
      ++report.erasures;
      ++segment.erasures;
    }
    return;
  }
  segment.newest = std::max(segment.newest.load(), header.sequence);
  uint64_t first = uint64_t{expected.block} * layout_.records;
  for (uint32_t i = 0; i < header.count; ++i) {
    auto record = read_as<RecordHeader>(block + layout_.record_offset(i));
    RowKey key = record.key();
    uint32_t known, previous;
    index_.prepare({&key, 1});
    index_.find({&key, 1}, &known);
    recovering.sequences[segment.slot][first + i] = record.sequence();
    ++report.records;
    if (known != LogIndex::kNone) {
      auto& sequences = recovering.sequences[known / segment_records_];
      if (sequences[known % segment_records_] > record.sequence()) continue;
    }
    auto location = static_cast<uint32_t>(segment.slot * segment_records_ + first + i);
    index_.replace({&key, 1}, &location, &previous);
  }
}

}  // namespace hotbed
