// Layout. mix(key) gives 64 bits. Its low bits number the home bucket inside a segment; its high 32
// bits, bent by spread(), number the segment through the directory.
//
// A bucket is one cache line of five keys with their slots. A key whose home is full goes to the
// next bucket of the same segment with room, and every full bucket that it passes counts it in
// `overflow`. A search therefore stops at the first bucket without overflow, nearly always the
// first, and erasing a key takes it out of those counts: no tombstones, no search that ages.
//
// Growth. Up to 4096 buckets there is one segment that doubles. From then on a full segment splits
// in two. With evenly spread hashes all segments would fill up and split at the same time, and the
// table would swing between 41 % and 82 % full. spread() makes the segments' shares of the keys
// unequal, as in spiral storage (Martin, 1979; Mullin, Computer Journal 1985), so that at any
// time some segments are about to split and others have just split.
#include "index/key_index.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

#include "base/integers.hpp"
#include "base/random.hpp"

namespace hotbed {

namespace {

constexpr uint64_t kSmallestSegment = 16;  // buckets
constexpr uint64_t kSegmentBuckets = 4096;
constexpr uint64_t kSegmentBytes = kSegmentBuckets * 64;
constexpr uint64_t kChunkSegments = 8;     // 2 MB, one huge page
constexpr uint64_t kSmallChunk = 4;        // 1 MB of plain pages
constexpr uint64_t kSmallSegments = 16;    // up to which an index is not worth huge pages
constexpr uint64_t kLargestChunk = 256;    // 64 MB
constexpr double kFullShare = 0.82;        // of a segment's entries
constexpr uint64_t kTypicalKeyBytes = 22;  // measured 20 to 22 once there are many segments
constexpr uint64_t kMostKeyBytes = 24;     // beside two segments; measured
constexpr uint32_t kMaxDepth = 22;         // 2^32 keys reach 20
constexpr int64_t kAhead = 24;             // keys between prefetching a bucket and reading it
constexpr int64_t kSoon = 8;
constexpr int64_t kRing = 32;  // a power of two above kAhead

uint64_t hash_of(int64_t key) { return mix(static_cast<uint64_t>(key)); }

// Maps u = high half of the hash, read as a fraction in [0, 1), to u + 0.34 u (1 - u), close to
// log2(1 + u): the density of the result doubles from one end to the other.
uint64_t spread(uint64_t hash) {
  uint64_t u = hash >> 32;
  uint64_t bend = u * (u ^ 0xffffffffull) >> 32;
  return u + (bend * 1460288881ull >> 32);
}

}  // namespace

// What an index without memory shows to a search; never written, since its segment counts as full.
KeyIndex::Bucket KeyIndex::empty_bucket_ = {};

KeyIndex::KeyIndex(std::string name)
    : name_(std::move(name)), directory_{0}, segments_{Segment{&empty_bucket_, 0, 0}} {}

inline uint64_t KeyIndex::prefix(uint64_t hash) const { return spread(hash) >> (32 - depth_); }

inline const KeyIndex::Bucket& KeyIndex::home(uint64_t hash) const {
  return segments_[directory_[prefix(hash)]].buckets[hash & bucket_mask_];
}

namespace {

// Bit e is set if entry e holds the key. Five independent compares: nothing to mispredict.
template <class Bucket>
inline unsigned matches(const Bucket& bucket, int64_t key) {
  unsigned equal = static_cast<unsigned>(bucket.keys[0] == key) |
                   static_cast<unsigned>(bucket.keys[1] == key) << 1 |
                   static_cast<unsigned>(bucket.keys[2] == key) << 2 |
                   static_cast<unsigned>(bucket.keys[3] == key) << 3 |
                   static_cast<unsigned>(bucket.keys[4] == key) << 4;
  return equal & bucket.occupied;
}

// Three bits of the hash that number neither bucket nor segment.
inline unsigned trace(uint64_t hash) { return hash >> 13 & 7; }

// Whether a key of this hash may live beyond this bucket, which does not hold it.
template <class Bucket>
inline bool leads_on(const Bucket& bucket, uint64_t hash) {
  return bucket.beyond >> trace(hash) & 1;
}

}  // namespace

// The bucket and entry that hold the key, or null. Once round is enough: keys that live far from
// home since fuller days may, in a small segment, leave every bucket leading on.
const KeyIndex::Bucket* KeyIndex::find_bucket(int64_t key, uint64_t hash, int* entry) const {
  const Bucket* buckets = segments_[directory_[prefix(hash)]].buckets;
  for (uint64_t step = 0; step <= bucket_mask_; ++step) {
    const Bucket& bucket = buckets[(hash + step) & bucket_mask_];
    if (unsigned match = matches(bucket, key)) {
      *entry = __builtin_ctz(match);
      return &bucket;
    }
    if (!leads_on(bucket, hash)) break;
  }
  return nullptr;
}

// For a key that its home does not hold though it has overflow.
__attribute__((noinline)) int64_t KeyIndex::find_beyond(int64_t key, uint64_t hash) const {
  int entry;
  const Bucket* bucket = find_bucket(key, hash, &entry);
  return bucket ? static_cast<int64_t>(bucket->slots[entry]) : -1;
}

void KeyIndex::find(const int64_t* keys, int64_t n, int64_t* slots) const {
  const Bucket* ahead[kRing];
  uint64_t hashes[kRing];
  auto prepare = [&](int64_t i) {
    uint64_t hash = hash_of(keys[i]);
    const Bucket* bucket = &home(hash);
    __builtin_prefetch(bucket);
    hashes[i & (kRing - 1)] = hash;
    ahead[i & (kRing - 1)] = bucket;
  };
  int64_t started = std::min(n, kAhead);
  for (int64_t i = 0; i < started; ++i) prepare(i);
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) prepare(i + kAhead);
    int64_t key = keys[i];
    const Bucket& bucket = *ahead[i & (kRing - 1)];
    unsigned match = matches(bucket, key);
    int64_t slot = bucket.slots[match ? __builtin_ctz(match) : 0];
    slot = match ? slot : -1;
    if (!match && leads_on(bucket, hashes[i & (kRing - 1)])) {
      slot = find_beyond(key, hashes[i & (kRing - 1)]);
    }
    slots[i] = slot;
  }
}

// Puts an absent key into a segment with room. The count of the segment is the caller's to keep.
inline void KeyIndex::place(Bucket* buckets, uint64_t mask, int64_t key, uint64_t hash,
                            uint32_t slot) {
  uint64_t b = hash & mask;
  while (buckets[b].occupied == kAllOccupied) {
    ++buckets[b].overflow;
    buckets[b].beyond |= static_cast<uint8_t>(1u << trace(hash));
    b = (b + 1) & mask;
  }
  int entry = __builtin_ctz(~static_cast<unsigned>(buckets[b].occupied));
  buckets[b].keys[entry] = key;
  buckets[b].slots[entry] = slot;
  buckets[b].occupied |= static_cast<uint8_t>(1u << entry);
}

void KeyIndex::check_slot(int64_t key, int64_t slot) const {
  if (slot >= 0 && slot < kSlotLimit) return;
  throw std::length_error(name_ + ": slot " + std::to_string(slot) + " for key " +
                          std::to_string(key) + " is outside [0, " + std::to_string(kSlotLimit) +
                          "). Split the table, or evict rows so that slots are used again.");
}

// For each key in turn calls accept(position, slot), slot being the one found or -1. If accept
// returns true the key is inserted with what accept has made of the slot.
template <class Accept>
void KeyIndex::insert_batch(const int64_t* keys, int64_t n, Accept accept) {
  // Only hashes are kept ahead: a split moves buckets.
  uint64_t hashes[kRing];
  auto prepare = [&](int64_t i) {
    uint64_t hash = hash_of(keys[i]);
    hashes[i & (kRing - 1)] = hash;
    __builtin_prefetch(&home(hash), 1);
  };
  int64_t started = std::min(n, kAhead);
  for (int64_t i = 0; i < started; ++i) prepare(i);
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) prepare(i + kAhead);
    if (i + kSoon < n) {
      // A key whose home is full will go to the next bucket, if it is new.
      const Bucket* soon = &home(hashes[(i + kSoon) & (kRing - 1)]);
      __builtin_prefetch(soon + (soon->occupied == kAllOccupied), 1);
    }
    int64_t key = keys[i];
    uint64_t hash = hashes[i & (kRing - 1)];
    const Bucket& bucket = home(hash);
    unsigned match = matches(bucket, key);
    int64_t slot = bucket.slots[match ? __builtin_ctz(match) : 0];
    slot = match ? slot : -1;
    if (!match && leads_on(bucket, hash)) slot = find_beyond(key, hash);
    if (!accept(i, slot)) continue;
    check_slot(key, slot);
    Segment* segment = &segments_[directory_[prefix(hash)]];
    while (segment->keys >= full_) {
      grow(hash);
      segment = &segments_[directory_[prefix(hash)]];
    }
    place(segment->buckets, bucket_mask_, key, hash, static_cast<uint32_t>(slot));
    ++segment->keys;
    ++size_;
  }
}

int64_t KeyIndex::find_or_insert(const int64_t* keys, int64_t n, int64_t* slots,
                                 const FreshSlots& fresh, int64_t* new_positions) {
  int64_t before = size_;
  int64_t offered = 0;
  try {
    insert_batch(keys, n, [&](int64_t i, int64_t& slot) {
      bool absent = slot < 0;
      if (absent) {
        slot = fresh(offered);
        if (new_positions) new_positions[offered] = i;
        ++offered;
      }
      slots[i] = slot;
      return absent;
    });
  } catch (...) {
    // A position whose slot is the next of the fresh ones is where that key was inserted.
    int64_t inserted = size_ - before;
    for (int64_t i = 0, k = 0; k < inserted; ++i) {
      if (slots[i] != fresh(k)) continue;
      erase(keys[i]);
      ++k;
    }
    throw;
  }
  return size_ - before;
}

bool KeyIndex::insert(int64_t key, int64_t slot) {
  int entry;
  if (find_bucket(key, hash_of(key), &entry)) return false;
  insert(&key, 1, &slot);
  return true;
}

void KeyIndex::insert(const int64_t* keys, int64_t n, const int64_t* slots) {
  int64_t before = size_;
  try {
    insert_batch(keys, n, [&](int64_t i, int64_t& slot) {
      if (slot >= 0) {
        throw std::invalid_argument(name_ + ": key " + std::to_string(keys[i]) + " has slot " +
                                    std::to_string(slot) +
                                    " already. Give each key once, and only absent ones.");
      }
      slot = slots[i];
      return true;
    });
  } catch (...) {
    for (int64_t i = 0; size_ > before; ++i) erase(keys[i]);
    throw;
  }
}

int64_t KeyIndex::update(const int64_t* keys, int64_t n, const int64_t* slots, int64_t* previous) {
  for (int64_t i = 0; i < n; ++i) check_slot(keys[i], slots[i]);
  int64_t found = 0;
  uint64_t hashes[kRing];
  auto prepare = [&](int64_t i) {
    hashes[i & (kRing - 1)] = hash_of(keys[i]);
    __builtin_prefetch(&home(hashes[i & (kRing - 1)]), 1);
  };
  int64_t started = std::min(n, kAhead);
  for (int64_t i = 0; i < started; ++i) prepare(i);
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) prepare(i + kAhead);
    int entry;
    const Bucket* bucket = find_bucket(keys[i], hashes[i & (kRing - 1)], &entry);
    if (previous) previous[i] = bucket ? static_cast<int64_t>(bucket->slots[entry]) : -1;
    if (!bucket) continue;
    // The buckets belong to this index, which is not const here.
    const_cast<Bucket*>(bucket)->slots[entry] = static_cast<uint32_t>(slots[i]);
    ++found;
  }
  return found;
}

int64_t KeyIndex::erase(int64_t key) { return erase(key, hash_of(key)); }

int64_t KeyIndex::erase(int64_t key, uint64_t hash) {
  int entry;
  const Bucket* found = find_bucket(key, hash, &entry);
  if (!found) return -1;
  Segment& segment = segments_[directory_[prefix(hash)]];
  uint64_t b = hash & bucket_mask_;
  for (; &segment.buckets[b] != found; b = (b + 1) & bucket_mask_) {
    if (--segment.buckets[b].overflow == 0) segment.buckets[b].beyond = 0;
  }
  segment.buckets[b].occupied &= static_cast<uint8_t>(~(1u << entry));
  --segment.keys;
  --size_;
  return segment.buckets[b].slots[entry];
}

int64_t KeyIndex::erase(const int64_t* keys, int64_t n, int64_t* slots) {
  int64_t before = size_;
  uint64_t hashes[kRing];
  auto prepare = [&](int64_t i) {
    hashes[i & (kRing - 1)] = hash_of(keys[i]);
    __builtin_prefetch(&home(hashes[i & (kRing - 1)]), 1);
  };
  int64_t started = std::min(n, kAhead);
  for (int64_t i = 0; i < started; ++i) prepare(i);
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) prepare(i + kAhead);
    slots[i] = erase(keys[i], hashes[i & (kRing - 1)]);
  }
  return before - size_;
}

// Makes room for a key of this hash, or at least a smaller segment around it. Throws before it
// changes anything.
void KeyIndex::grow(uint64_t hash) {
  try {
    if (bucket_mask_ + 1 < kSegmentBuckets) {
      enlarge_only_segment();
    } else {
      split(prefix(hash));
    }
  } catch (const std::bad_alloc&) {
    throw OutOfMemory(name_, kSegmentBytes + 2 * sizeof(uint32_t) * directory_.size(),
                      available_memory());
  }
}

// Puts each key of a segment into part 0 or 1, as part_of(hash) says.
template <class PartOf>
void KeyIndex::move_keys(const Segment& from, uint64_t buckets, Segment* parts, uint64_t mask,
                         PartOf part_of) {
  for (uint64_t b = 0; b < buckets; ++b) {
    const Bucket& bucket = from.buckets[b];
    for (unsigned left = bucket.occupied; left; left &= left - 1) {
      int entry = __builtin_ctz(left);
      uint64_t hash = hash_of(bucket.keys[entry]);
      Segment& part = parts[part_of(hash)];
      place(part.buckets, mask, bucket.keys[entry], hash, bucket.slots[entry]);
      ++part.keys;
    }
  }
}

uint32_t KeyIndex::keys_of(uint64_t buckets) {
  return static_cast<uint32_t>(kFullShare * static_cast<double>(buckets * kEntries));
}

void KeyIndex::enlarge_only_segment() {
  uint64_t buckets = bucket_mask_ + 1;
  uint64_t more = full_ == 0 ? kSmallestSegment : 2 * buckets;
  std::unique_ptr<Bucket, Free> block;
  Segment larger{nullptr, 0, 0};
  if (more < kSegmentBuckets) {
    block.reset(static_cast<Bucket*>(std::aligned_alloc(sizeof(Bucket), more * sizeof(Bucket))));
    if (!block) throw std::bad_alloc();
    std::memset(static_cast<void*>(block.get()), 0, more * sizeof(Bucket));
    larger.buckets = block.get();
  } else {
    larger.buckets = take_segment();
  }
  move_keys(segments_[0], buckets, &larger, more - 1, [](uint64_t) { return 0; });
  segments_[0] = larger;
  small_segment_ = std::move(block);
  bucket_mask_ = more - 1;
  full_ = keys_of(more);
}

// Brings all segments, and room for as many more, from small chunks to one of huge pages.
void KeyIndex::leave_small_chunks() {
  uint64_t room = 0;
  for (const Chunk& chunk : chunks_) room += chunk.room();
  room = std::max(room, 2 * segments_.size());
  std::vector<Chunk> chunks(1);
  Chunk& large = chunks[0];
  large.memory.reserve(room * kSegmentBytes, name_);
  for (Segment& segment : segments_) {
    uint8_t* to = large.memory.data() + kSegmentBytes * large.used++;
    std::memcpy(to, segment.buckets, kSegmentBytes);
    segment.buckets = reinterpret_cast<Bucket*>(to);
  }
  idle_segments_.clear();
  chunks_.swap(chunks);
  open_chunk_ = 0;
}

// Splits the segment at this place of the directory by the next bit of the hashes.
void KeyIndex::split(uint64_t place_in_directory) {
  if (segments_.size() == kSmallSegments && chunks_[0].room() == kSmallChunk) leave_small_chunks();
  uint32_t number = directory_[place_in_directory];
  Segment full = segments_[number];
  if (full.depth == kMaxDepth) {
    throw std::length_error(name_ + ": " + std::to_string(full.keys) + " of its " +
                            std::to_string(size_) + " keys have the same " +
                            std::to_string(kMaxDepth) +
                            " leading hash bits. Hash the ids by another function first.");
  }
  if (segments_.size() == segments_.capacity()) segments_.reserve(2 * segments_.size());
  idle_segments_.reserve(idle_segments_.size() + 2);
  std::vector<uint32_t> doubled;
  if (full.depth == depth_) {
    doubled.resize(2 * directory_.size());
    for (uint64_t i = 0; i < doubled.size(); ++i) doubled[i] = directory_[i / 2];
  }
  Segment parts[2] = {{take_segment(), 0, full.depth + 1}, {nullptr, 0, full.depth + 1}};
  try {
    parts[1].buckets = take_segment();
  } catch (...) {
    idle_segments_.push_back(parts[0].buckets);
    throw;
  }
  // Nothing below throws.
  uint32_t shift = 31 - full.depth;
  move_keys(full, kSegmentBuckets, parts, kSegmentBuckets - 1,
            [shift](uint64_t hash) { return spread(hash) >> shift & 1; });
  if (!doubled.empty()) {
    directory_.swap(doubled);
    ++depth_;
    place_in_directory *= 2;
  }
  uint64_t span = uint64_t{1} << (depth_ - full.depth);
  uint64_t begin = place_in_directory / span * span;
  auto second = static_cast<uint32_t>(segments_.size());
  segments_[number] = parts[0];
  segments_.push_back(parts[1]);
  std::fill_n(directory_.begin() + static_cast<int64_t>(begin + span / 2), span / 2, second);
  idle_segments_.push_back(full.buckets);
}

uint64_t KeyIndex::Chunk::room() const { return memory.bytes() / kSegmentBytes; }

void KeyIndex::add_chunk(uint64_t segments) {
  Chunk chunk;
  chunk.memory.reserve(segments * kSegmentBytes, name_);
  chunks_.push_back(std::move(chunk));
}

// A zeroed segment.
KeyIndex::Bucket* KeyIndex::take_segment() {
  if (!idle_segments_.empty()) {
    // The last one split is still in the processor's cache.
    Bucket* buckets = idle_segments_.back();
    idle_segments_.pop_back();
    std::memset(static_cast<void*>(buckets), 0, kSegmentBytes);
    return buckets;
  }
  while (open_chunk_ < chunks_.size() && chunks_[open_chunk_].used == chunks_[open_chunk_].room()) {
    ++open_chunk_;
  }
  if (open_chunk_ == chunks_.size()) {
    uint64_t more = segments_.size() / 4 / kChunkSegments * kChunkSegments;
    bool small = segments_.size() < kSmallSegments;
    add_chunk(std::clamp(more, small ? kSmallChunk : kChunkSegments, kLargestChunk));
  }
  Chunk& chunk = chunks_[open_chunk_];
  return reinterpret_cast<Bucket*>(chunk.memory.data() + kSegmentBytes * chunk.used++);
}

void KeyIndex::reserve(int64_t keys) {
  if (keys > kSlotLimit) {
    throw std::length_error(name_ + ": " + std::to_string(keys) + " keys are more than the " +
                            std::to_string(kSlotLimit) + " that one index holds.");
  }
  if (keys <= static_cast<int64_t>(kSegmentBuckets)) return;
  uint64_t wanted = static_cast<uint64_t>(keys) * kTypicalKeyBytes / kSegmentBytes + 2;
  uint64_t have = 0;
  for (const Chunk& chunk : chunks_) have += chunk.room();
  if (wanted <= have) return;
  try {
    add_chunk(round_up(wanted - have, kChunkSegments));
  } catch (const std::bad_alloc&) {
    throw OutOfMemory(name_, (wanted - have) * kSegmentBytes, available_memory());
  }
}

uint64_t KeyIndex::bytes_for(int64_t keys) {
  if (keys <= 0) return 0;
  uint64_t buckets = kSmallestSegment;
  while (buckets < kSegmentBuckets && keys > keys_of(buckets)) buckets *= 2;
  if (keys <= keys_of(buckets))
    return buckets * sizeof(Bucket) + sizeof(Segment) + sizeof(uint32_t);
  uint64_t bytes = sum(product(static_cast<uint64_t>(keys), kMostKeyBytes), 2 * kSegmentBytes);
  bool small = bytes <= kSmallSegments * kSegmentBytes;
  return small ? bytes : sum(bytes, Mapping::kHugePage);
}

uint64_t KeyIndex::memory_bytes() const {
  uint64_t bytes =
      directory_.capacity() * sizeof(uint32_t) + segments_.capacity() * sizeof(Segment);
  if (small_segment_) bytes += (bucket_mask_ + 1) * sizeof(Bucket);
  for (const Chunk& chunk : chunks_) {
    bytes += chunk.memory.page_bytes(chunk.used * kSegmentBytes, chunk.memory.bytes());
  }
  return bytes;
}

void KeyIndex::clear() {
  segments_.assign(1, Segment{&empty_bucket_, 0, 0});
  directory_.assign(1, 0);
  idle_segments_.clear();
  chunks_.clear();
  small_segment_.reset();
  open_chunk_ = 0;
  size_ = 0;
  depth_ = 0;
  bucket_mask_ = 0;
  full_ = 0;
}

}  // namespace hotbed
