// Reading rows: looked up under the lock, then fetched without it, sorted by where they lie.
#include <algorithm>

#include "log/log_tier.hpp"
#include "log/row_log_core.hpp"

namespace hotbed {

namespace {

// Blocks that nobody asked for but that lie between two wanted ones are read along, up to this many
// at a time: a request costs more than a block.
constexpr uint32_t kGap = 1;
constexpr uint64_t kRequestBytes = 16384;
// Requests that keep a disk busy: a small arena holds shorter ones rather than fewer.
constexpr uint64_t kBusy = 64;

// Radix sort by the location, the high half: three passes of 11 bits.
void sort_by_location(std::vector<uint64_t>& wanted) {
  if (wanted.size() < 512) {
    std::sort(wanted.begin(), wanted.end());
    return;
  }
  std::vector<uint64_t> other(wanted.size());
  for (int shift = 32; shift < 64; shift += 11) {
    size_t begins[2049] = {};
    for (uint64_t w : wanted) ++begins[(w >> shift & 2047) + 1];
    for (size_t d = 0; d < 2048; ++d) begins[d + 1] += begins[d];
    for (uint64_t w : wanted) other[begins[w >> shift & 2047]++] = w;
    wanted.swap(other);
  }
}

}  // namespace

// The state of one read().
struct LogTier::Reading {
  Reading(std::span<const RowKey> of_rows, uint8_t* into) : keys(of_rows), records(into) {}

  std::span<const RowKey> keys;
  uint8_t* records;
  std::vector<uint64_t> wanted;  // location << 32 | position in keys, sorted
  std::shared_ptr<const Segments> segments;
  // Locations that were in a buffer when the rows were looked up.
  struct Buffered {
    uint64_t begin, end;
    std::shared_ptr<LogBuffer> buffer;
  };
  std::vector<Buffered> buffered;
  uint64_t blocks = 0, requests = 0, rereads = 0;
  std::vector<Request> suspect;  // did not hold what they should
  std::string failure, failed_path;
  uint64_t failed_bytes = 0;

  uint64_t location(size_t i) const { return wanted[i] >> 32; }
  size_t position(size_t i) const { return wanted[i] & UINT32_MAX; }

  void fail(const std::string& message, const std::string& path, uint64_t bytes) {
    if (!failure.empty()) return;
    failure = message;
    failed_path = path;
    failed_bytes = bytes;
  }
};

void LogTier::read(std::span<const RowKey> keys, uint8_t* records, bool* found) {
  core_.check_readable();
  if (keys.size() > UINT32_MAX) throw std::invalid_argument("A read has at most 2^32 - 1 keys.");
  std::vector<uint32_t> locations(keys.size());
  Reading reading(keys, records);
  {
    std::shared_lock state(state_);
    index_.find(keys, locations.data());
    reading.segments = segments_;
    for (const auto& buffer : buffers_) {
      uint64_t begin = buffer->segment->slot * segment_records_ +
                       uint64_t{buffer->first_block} * layout_.records;
      uint64_t end = begin + uint64_t{buffer->blocks} * layout_.records;
      reading.buffered.push_back({begin, end, buffer});
    }
  }
  reading.wanted.reserve(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    found[i] = locations[i] != LogIndex::kNone;
    if (found[i]) reading.wanted.push_back(uint64_t{locations[i]} << 32 | i);
  }
  sort_by_location(reading.wanted);
  uint64_t rows = reading.wanted.size();
  uint64_t from_memory = take_from_buffers(reading);
  if (!reading.wanted.empty()) fetch(reading);
  {
    std::unique_lock state(state_);
    counted_.rows_read += rows;
    counted_.rows_from_memory += from_memory;
    counted_.blocks_read += reading.blocks;
    counted_.requests += reading.requests;
    counted_.rereads += reading.rereads;
  }
  if (!reading.failure.empty()) {
    throw TierError(reading.failure, reading.failed_path, reading.failed_bytes);
  }
}

// Copies what lies in buffers, takes it out of `wanted` and says how many records that were.
uint64_t LogTier::take_from_buffers(Reading& reading) {
  auto& buffered = reading.buffered;
  std::sort(buffered.begin(), buffered.end(),
            [](const auto& a, const auto& b) { return a.begin < b.begin; });
  size_t kept = 0, b = 0;
  for (size_t i = 0; i < reading.wanted.size(); ++i) {
    uint64_t location = reading.location(i);
    while (b < buffered.size() && buffered[b].end <= location) ++b;
    if (b == buffered.size() || location < buffered[b].begin) {
      reading.wanted[kept++] = reading.wanted[i];
      continue;
    }
    uint64_t within = location - buffered[b].begin;
    const uint8_t* record = buffered[b].buffer->data +
                            within / layout_.records * layout_.block_bytes +
                            layout_.record_offset(static_cast<uint32_t>(within % layout_.records));
    std::memcpy(reading.records + reading.position(i) * layout_.record_bytes,
                record + sizeof(RecordHeader), layout_.record_bytes);
  }
  uint64_t taken = reading.wanted.size() - kept;
  reading.wanted.resize(kept);
  return taken;
}

// Has the blocks of the wanted records read, many requests at a time, and unpacks each as it comes.
void LogTier::fetch(Reading& reading) {
  auto queue = core_.engine().lease();
  uint64_t room = std::min(kRequestBytes, queue->arena_bytes() / kBusy / kBlockUnit * kBlockUnit);
  room = std::max<uint64_t>(layout_.block_bytes, room);
  auto most_blocks = static_cast<uint32_t>(room / layout_.block_bytes);
  uint64_t places = std::min<uint64_t>(queue->depth(), queue->arena_bytes() / room);
  std::vector<Request> requests(places);
  std::vector<uint32_t> free_places(places);
  for (uint32_t p = 0; p < places; ++p) free_places[p] = p;
  std::vector<Completion> done;
  size_t next = 0;
  while (next < reading.wanted.size() || queue->in_flight() > 0) {
    while (next < reading.wanted.size() && !free_places.empty() && reading.failure.empty()) {
      uint32_t place = free_places.back();
      free_places.pop_back();
      Request& request = requests[place];
      request = next_request(reading, next, most_blocks);
      next = request.end;
      queue->submit(
          {request.segment->file.get(), uint64_t{request.first_block} * layout_.block_bytes,
           queue->arena() + place * room, request.blocks * layout_.block_bytes, false, place});
      ++reading.requests;
    }
    if (!reading.failure.empty()) next = reading.wanted.size();
    // Some at a time, so that the disk has enough to do while they are unpacked.
    bool more = next < reading.wanted.size();
    unsigned at_least = more ? static_cast<unsigned>(places + 3) / 4 : queue->in_flight() / 2;
    done.clear();
    queue->collect(std::max(1u, at_least), done);
    for (const Completion& completion : done) {
      const Request& request = requests[completion.tag];
      if (completion.error) {
        IoError error("reading", request.segment->file->path(),
                      uint64_t{request.first_block} * layout_.block_bytes,
                      uint64_t{request.blocks} * layout_.block_bytes, completion.error);
        reading.fail(error.what(), error.path, error.bytes);
      } else if (!unpack(reading, request, queue->arena() + completion.tag * room)) {
        reading.suspect.push_back(request);
      }
      free_places.push_back(static_cast<uint32_t>(completion.tag));
    }
  }
  for (const Request& request : reading.suspect) {
    if (reading.failure.empty()) read_again(reading, request, *queue);
  }
}

// The read that brings wanted[begin] and as many of the following as lie close behind.
LogTier::Request LogTier::next_request(const Reading& reading, size_t begin,
                                       uint32_t most_blocks) const {
  uint64_t slot = reading.location(begin) / segment_records_;
  uint64_t slot_end = (slot + 1) * segment_records_;
  uint64_t slot_begin = slot * segment_records_;
  auto first = static_cast<uint32_t>((reading.location(begin) - slot_begin) / layout_.records);
  uint32_t last = first;
  size_t end = begin + 1;
  for (; end < reading.wanted.size() && reading.location(end) < slot_end; ++end) {
    auto block = static_cast<uint32_t>((reading.location(end) - slot_begin) / layout_.records);
    if (block > last + 1 + kGap || block >= first + most_blocks) break;
    last = block;
  }
  return {(*reading.segments)[slot].get(), first, last - first + 1, begin, end};
}

// Copies the wanted records out of blocks that were read. False if a block is not what was written.
bool LogTier::unpack(Reading& reading, const Request& request, const uint8_t* blocks) {
  BlockHeader expected{};
  expected.log = core_.manifest().log;
  expected.segment = request.segment->number;
  expected.store = store_;
  uint64_t slot_begin = request.segment->slot * segment_records_;
  uint32_t checked = UINT32_MAX;
  for (size_t i = request.begin; i < request.end; ++i) {
    uint64_t within = reading.location(i) - slot_begin;
    auto number = static_cast<uint32_t>(within / layout_.records);
    auto record = static_cast<uint32_t>(within % layout_.records);
    const uint8_t* block = blocks + uint64_t{number - request.first_block} * layout_.block_bytes;
    if (number != checked) {
      expected.block = checked = number;
      ++reading.blocks;
      if (check_block(block, layout_, expected) != BlockState::good) return false;
    }
    const uint8_t* at = block + layout_.record_offset(record);
    size_t position = reading.position(i);
    BlockHeader header = header_of(block);
    if (header.kind != BlockKind::records || record >= header.count ||
        read_as<RecordHeader>(at).key() != reading.keys[position]) {
      return false;
    }
    std::memcpy(reading.records + position * layout_.record_bytes, at + sizeof(RecordHeader),
                layout_.record_bytes);
  }
  return true;
}

// Wires and memory err too, so blocks that look wrong get a second chance, one by one.
void LogTier::read_again(Reading& reading, const Request& request, IoQueue& queue) {
  uint64_t slot_begin = request.segment->slot * segment_records_;
  auto block_of = [&](size_t i) {
    return static_cast<uint32_t>((reading.location(i) - slot_begin) / layout_.records);
  };
  for (size_t begin = request.begin, end; begin < request.end; begin = end) {
    end = begin + 1;
    while (end < request.end && block_of(end) == block_of(begin)) ++end;
    Request one{request.segment, block_of(begin), 1, begin, end};
    const std::string& path = one.segment->file->path();
    uint64_t offset = uint64_t{one.first_block} * layout_.block_bytes;
    Transfer transfer{one.segment->file.get(), offset, queue.arena(),
                      layout_.block_bytes,     false,  0};
    try {
      queue.run({&transfer, 1});
    } catch (const IoError& error) {
      return reading.fail(error.what(), error.path, error.bytes);
    }
    ++reading.rereads;
    if (unpack(reading, one, queue.arena())) continue;
    const RowKey& key = reading.keys[reading.position(begin)];
    return reading.fail(path + ": the block at offset " + std::to_string(offset) +
                            " does not hold what was written there (its checksum or its records "
                            "are wrong, twice). Row " +
                            std::to_string(key.id) + " of table number " +
                            std::to_string(key.table) +
                            " and the others in it are lost: go back to a checkpoint.",
                        path, layout_.block_bytes);
  }
}

}  // namespace hotbed
