#include "serve/served_table.hpp"

#include <omp.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <stdexcept>
#include <utility>

#include "kernels/kernels.hpp"

namespace hotbed {

namespace {

// Bytes of rows a task should move, and work that is left to the calling thread; as in pool.cpp.
constexpr int64_t kTaskBytes = 256 << 10;
constexpr int64_t kSerialElements = 32 << 10;
// Ids that are located at once, on the stack.
constexpr int64_t kLocated = 256;
// As many as a position has bits for; computed rows are one more.
constexpr int64_t kLayers = (int64_t{1} << (62 - kLayerBit)) - 1;

}  // namespace

ServedTable::ServedTable(std::vector<ServedRows> layers, MissingRows missing,
                         std::optional<int64_t> limit)
    : missing_(std::move(missing)), limit_(limit) {
  if (layers.empty() || static_cast<int64_t>(layers.size()) > kLayers) {
    throw std::invalid_argument("expected 1 to 16383 layers");
  }
  for (const ServedRows& layer : layers) {
    stored_.push_back(layer.stored);
    counts_.push_back(layer.count);
    has_ids_.push_back(layer.ids != nullptr);
    ids_.push_back(layer.ids ? SortedIds(layer.ids, layer.count) : SortedIds());
    is_mixed_ |= layer.stored.stored_as != layers[0].stored.stored_as;
  }
}

int64_t ServedTable::row_bytes() const {
  int64_t most = 0;
  for (const StoredRows& rows : stored_) most = std::max(most, rows.row_bytes);
  return most;
}

bool ServedTable::is_direct(const std::optional<int64_t>& skipped) const {
  return stored_.size() == 1 && !has_ids_[0] && limit_ && *limit_ <= counts_[0] &&
         (!skipped || *skipped < *limit_);
}

int64_t ServedTable::first_outside(const int64_t* ids, int64_t n,
                                   const std::optional<int64_t>& skipped) const {
  if (!limit_) return -1;
  auto limit = static_cast<uint64_t>(*limit_);
  bool any = false;  // without a branch for each: they are next to never outside
  if (!skipped) {
    for (int64_t i = 0; i < n; ++i) any |= static_cast<uint64_t>(ids[i]) >= limit;
  } else {
    for (int64_t i = 0; i < n; ++i) {
      any |= (static_cast<uint64_t>(ids[i]) >= limit) & (ids[i] != *skipped);
    }
  }
  for (int64_t i = 0; any && i < n; ++i) {
    if (static_cast<uint64_t>(ids[i]) >= limit && !(skipped && ids[i] == *skipped)) return i;
  }
  return -1;
}

void ServedTable::locate(const int64_t* ids, int64_t n, const std::optional<int64_t>& skipped,
                         int64_t* rows, std::vector<float>& computed) const {
  int64_t positions[kLocated], wanted[kLocated], found[kLocated];
  for (int64_t begin = 0; begin < n; begin += kLocated) {
    int64_t count = 0;
    for (int64_t i = begin; i < std::min(n, begin + kLocated); ++i) {
      bool is_skipped = skipped && ids[i] == *skipped;
      rows[i] = is_skipped ? kSkippedRow : kMissingRow;
      positions[count] = i;
      wanted[count] = ids[i];
      count += is_skipped ? 0 : 1;
    }
    for (auto layer = static_cast<int64_t>(stored_.size()) - 1; layer >= 0 && count; --layer) {
      if (has_ids_[layer]) {
        ids_[layer].find(wanted, count, found);
      } else {
        for (int64_t k = 0; k < count; ++k) {
          found[k] = wanted[k] >= 0 && wanted[k] < counts_[layer] ? wanted[k] : -1;
        }
      }
      int64_t left = 0;
      for (int64_t k = 0; k < count; ++k) {
        if (found[k] >= 0) {
          rows[positions[k]] = layer << kLayerBit | found[k];
        } else {
          positions[left] = positions[k];
          wanted[left++] = wanted[k];
        }
      }
      count = left;
    }
    if (count == 0 || !missing_.are_computed()) continue;
    size_t numbers = computed.size();
    computed.resize(numbers + static_cast<size_t>(count * dim()));
    missing_.compute(wanted, count, computed.data() + numbers);
    auto before = static_cast<int64_t>(numbers) / dim();
    auto layer = static_cast<int64_t>(stored_.size());
    for (int64_t k = 0; k < count; ++k) rows[positions[k]] = layer << kLayerBit | (before + k);
  }
}

void ServedTable::pool(StoredTask task, const std::vector<float>& computed, int64_t begin,
                       int64_t end) const {
  task.layers = stored_.data();
  task.missing = missing_.vector();
  task.dim = task.out_stride = dim();
  if (computed.empty()) {
    return is_mixed_ ? pool_mixed(task, begin, end) : kernels().pool_stored(task, begin, end);
  }
  std::vector<StoredRows> layers = stored_;
  layers.push_back({StoredAs::f32, reinterpret_cast<const uint8_t*>(computed.data()), nullptr,
                    dim() * static_cast<int64_t>(sizeof(float))});
  task.layers = layers.data();
  if (is_mixed_) return pool_mixed(task, begin, end);
  if (stored_[0].stored_as != StoredAs::f32) return pool_apart(task, begin, end);
  kernels().pool_stored(task, begin, end);
}

// Bags with computed rows one by one, and others as they are.
void ServedTable::pool_apart(const StoredTask& task, int64_t begin, int64_t end) const {
  auto computed = static_cast<int64_t>(stored_.size()) << kLayerBit;
  auto has_computed = [&](int64_t bag) {
    int64_t first = task.offsets ? task.offsets[bag] : bag;
    int64_t stop = task.offsets ? task.offsets[bag + 1] : bag + 1;
    return std::any_of(task.rows + first, task.rows + stop,
                       [=](int64_t row) { return row >= computed; });
  };
  for (int64_t bag = begin; bag < end;) {
    int64_t stop = bag;
    while (stop < end && !has_computed(stop)) ++stop;
    if (stop > bag) kernels().pool_stored(task, bag, stop);
    if (stop < end) pool_mixed(task, stop, stop + 1);
    bag = stop + 1;
  }
}

// Rows become floats first, a bag at a time.
void ServedTable::pool_mixed(const StoredTask& task, int64_t begin, int64_t end) const {
  std::vector<float> floats;
  std::vector<int64_t> rows;
  for (int64_t bag = begin; bag < end; ++bag) {
    int64_t first = task.offsets ? task.offsets[bag] : bag;
    int64_t count = task.offsets ? task.offsets[bag + 1] - first : 1;
    floats.resize(static_cast<size_t>(count * dim()));
    rows.resize(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
      int64_t row = task.rows[first + i];
      rows[i] = row == kSkippedRow ? kSkippedRow : i;
      if (row == kSkippedRow) continue;
      int64_t local = row & kRowMask;
      StoredTask one = task;
      if (row == kMissingRow) {
        local = kMissingRow;
      } else {
        one.layers = task.layers + (row >> kLayerBit);
      }
      one.is_plain = false;
      one.rows = &local;
      one.offsets = nullptr;
      one.combiner = Combiner::none;
      one.out = floats.data() + i * dim();
      kernels().pool_stored(one, 0, 1);
    }
    StoredRows all{StoredAs::f32, reinterpret_cast<const uint8_t*>(floats.data()), nullptr,
                   dim() * static_cast<int64_t>(sizeof(float))};
    int64_t offsets[2] = {0, count};
    StoredTask whole = task;
    whole.layers = &all;
    whole.is_plain = false;
    whole.rows = rows.data();
    whole.offsets = task.offsets ? offsets : nullptr;
    whole.out = task.out + bag * task.out_stride;
    kernels().pool_stored(whole, 0, 1);
  }
}

namespace {

// Bags [begin, end) of a lookup.
struct Piece {
  int64_t lookup;
  int64_t begin;
  int64_t end;
};

// Where rows lie, of those lookups whose ids do not say it.
struct Located {
  std::unique_ptr<int64_t[]> rows;  // of all positions
  std::vector<int64_t*> of_lookup;  // nullptr: ids are the rows
};

Located room_of(const std::vector<ServedLookup>& lookups) {
  Located located;
  int64_t total = 0;
  for (const ServedLookup& each : lookups) {
    total += each.table->is_direct(each.skipped) ? 0 : each.count;
  }
  located.rows.reset(new int64_t[static_cast<size_t>(total)]);
  int64_t* next = located.rows.get();
  for (const ServedLookup& each : lookups) {
    bool is_direct = each.table->is_direct(each.skipped);
    located.of_lookup.push_back(is_direct ? nullptr : next);
    next += is_direct ? 0 : each.count;
  }
  return located;
}

// Looks a piece up, unless an id is refused, whose position it returns; else -1.
int64_t look_up_piece(const ServedLookup& lookup, const Piece& piece, int64_t* located) {
  int64_t first = lookup.offsets ? lookup.offsets[piece.begin] : piece.begin;
  int64_t stop = lookup.offsets ? lookup.offsets[piece.end] : piece.end;
  const int64_t* ids = lookup.ids + first;
  int64_t outside = lookup.table->first_outside(ids, stop - first, lookup.skipped);
  if (outside >= 0) return first + outside;
  StoredTask task{};
  task.rows = lookup.ids;
  task.skipped = lookup.skipped.value_or(INT64_MIN);
  task.is_plain = !located && !lookup.skipped;
  std::vector<float> computed;
  if (located) {
    lookup.table->locate(ids, stop - first, lookup.skipped, located + first, computed);
    task.rows = located;
    task.skipped = kSkippedRow;
  }
  task.offsets = lookup.offsets;
  task.combiner = lookup.combiner;
  task.out = lookup.out;
  lookup.table->pool(task, computed, piece.begin, piece.end);
  return -1;
}

}  // namespace

std::optional<RefusedId> look_up(const std::vector<ServedLookup>& lookups) {
  Located located = room_of(lookups);
  std::vector<Piece> pieces;
  int64_t elements = 0;
  for (size_t l = 0; l < lookups.size(); ++l) {
    const ServedLookup& lookup = lookups[l];
    if (lookup.bags == 0) continue;
    elements += lookup.count * lookup.table->dim();
    int64_t bytes = lookup.count * lookup.table->row_bytes();
    int64_t count = std::clamp<int64_t>(bytes / kTaskBytes, 1, lookup.bags);
    for (int64_t i = 0; i < count; ++i) {
      pieces.push_back(
          {static_cast<int64_t>(l), lookup.bags * i / count, lookup.bags * (i + 1) / count});
    }
  }
  std::vector<int64_t> refused_at(pieces.size(), -1);
  bool is_parallel = pieces.size() > 1 && elements > kSerialElements;
  std::exception_ptr failed;  // none may leave the region
#pragma omp parallel for schedule(dynamic) if (is_parallel)
  for (size_t i = 0; i < pieces.size(); ++i) {
    int64_t l = pieces[i].lookup;
    try {
      refused_at[i] = look_up_piece(lookups[l], pieces[i], located.of_lookup[l]);
    } catch (...) {
#pragma omp critical(hotbed_look_up)
      failed = std::current_exception();
    }
  }
  if (failed) std::rethrow_exception(failed);
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (refused_at[i] >= 0) return RefusedId{pieces[i].lookup, refused_at[i]};
  }
  return std::nullopt;
}

}  // namespace hotbed
