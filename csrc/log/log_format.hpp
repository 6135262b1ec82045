// What lies in the files of a row log. docs/internals/row-log.md describes it in words.
//
// A log is a folder: `manifest` (stores and tables), `lock`, and segments "store-number.rows". A
// segment is a sequence of blocks of equal size. A block is a header, then records or erasures from
// its start, then zeros. All numbers are little-endian.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/crc32c.hpp"
#include "base/tier.hpp"

namespace hotbed {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "blocks are little-endian");

constexpr uint32_t kBlockUnit = 4096;
constexpr uint64_t kMostTables = 1u << 16;
constexpr size_t kMostStores = 256;
constexpr int64_t kMostRecordBytes = 1 << 20;
constexpr uint64_t kLeastBlocks = 64, kMostBlocks = 1u << 31;  // of a segment

enum class BlockKind : uint8_t { records = 1, erasures = 2 };

struct BlockHeader {
  uint32_t checksum;  // CRC32C of all that follows in the block
  uint32_t log;       // the log's own number: no block of another log is taken for one of this
  uint64_t segment;
  uint64_t sequence;  // the newest of its records
  uint32_t block;     // its place in the segment
  uint16_t count;     // of records or erasures
  uint8_t store;
  BlockKind kind;
};
static_assert(sizeof(BlockHeader) == 32);

// Which row, and which of several records of it is newest: 16 bits of table, 48 of sequence.
// Every call that writes or erases takes the next sequence number of its store; a record that
// compaction moves keeps the one it has.
struct RecordHeader {
  int64_t id;
  uint64_t table_and_sequence;

  static RecordHeader of(const RowKey& key, uint64_t sequence) {
    return {key.id, static_cast<uint64_t>(key.table) << 48 | sequence};
  }
  RowKey key() const { return {id, static_cast<int32_t>(table_and_sequence >> 48)}; }
  uint64_t sequence() const { return table_and_sequence & ((uint64_t{1} << 48) - 1); }
};
static_assert(sizeof(RecordHeader) == 16);

// A row that was forgotten. Worth keeping while a segment numbered `segment` or lower exists, since
// only those can hold older records of the row.
struct Erasure {
  RecordHeader row;
  uint64_t segment;
};
static_assert(sizeof(Erasure) == 24);

// How records of one size lie in blocks.
struct BlockLayout {
  uint32_t record_bytes;  // of a row, without the record's header
  uint32_t stride;        // with it
  uint32_t block_bytes;
  uint32_t records;   // in a block
  uint32_t erasures;  // in a block

  BlockLayout() = default;
  // The smallest block of which records fill three quarters. Throws std::invalid_argument.
  explicit BlockLayout(int64_t bytes_of_record);

  uint64_t record_offset(uint32_t i) const { return sizeof(BlockHeader) + uint64_t{i} * stride; }
};

// Writes the header of a block whose contents are final. Contents beyond `count` must be zero.
void seal_block(uint8_t* block, const BlockLayout& layout, BlockHeader header);

enum class BlockState { good, empty, torn, foreign };

// Whether the block is what it should be: `expected` has log, segment, block and store. `empty`:
// all zeros, as in a file that was never written there.
BlockState check_block(const uint8_t* block, const BlockLayout& layout,
                       const BlockHeader& expected);

inline BlockHeader header_of(const uint8_t* block) {
  BlockHeader header;
  std::memcpy(&header, block, sizeof header);
  return header;
}

template <class T>
T read_as(const uint8_t* data) {
  T value;
  std::memcpy(&value, data, sizeof value);
  return value;
}

// --- The manifest. ---

struct LogTable {
  int32_t table;  // its number in keys, 0 .. 65535
  std::string name;
  int64_t rows;  // ids are 0 .. rows-1; -1: any id
};

struct LogStore {
  int64_t record_bytes;
  std::vector<LogTable> tables;
};

using BlocksOfSegments = std::map<uint64_t, uint32_t>;  // by number, how many were written

struct Manifest {
  uint32_t log = 0;
  uint64_t segment_bytes = 0;
  std::vector<LogStore> stores;
  // Of a log that was linked, by store: all that is in it.
  std::optional<std::vector<BlocksOfSegments>> linked;
};

// Throws std::invalid_argument, naming what is wrong.
void check_manifest(const Manifest& manifest);
std::vector<uint8_t> encode(const Manifest& manifest);
// Whether these are the first bytes of a manifest.
bool begins_manifest(std::span<const uint8_t> bytes);
// Throws TierError, naming the path.
Manifest decode(std::span<const uint8_t> bytes, const std::string& path);

// Segments by number with their paths, rising.
using SegmentFiles = std::vector<std::pair<uint64_t, std::string>>;

std::string segment_name(size_t store, uint64_t number);
// False for any other name.
bool parse_segment_name(const std::string& name, size_t* store, uint64_t* number);

}  // namespace hotbed
