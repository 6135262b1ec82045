// A tier below the one that computes: whole rows by table and id, each a record of fixed size.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/errors.hpp"

namespace hotbed {

// What helps where the memory that a budget promises is not there.
inline constexpr const char* kLowerBudget = "Give Storage smaller budgets, or free memory.";

struct RowKey {
  int64_t id;
  int32_t table;
  bool operator==(const RowKey&) const = default;
};

inline bool before(const RowKey& a, const RowKey& b) {
  return a.table != b.table ? a.table < b.table : a.id < b.id;
}

inline bool among(const std::vector<RowKey>& sorted, const RowKey& key) {
  return std::binary_search(sorted.begin(), sorted.end(), key, before);
}

// Records of some tables in the order in which they lie, each row once.
class RecordScan {
 public:
  virtual ~RecordScan() = default;
  // At most `most` of those that follow: how many they are, 0 behind the last. Throws TierError.
  virtual int64_t next(int64_t most, RowKey* keys, uint8_t* records) = 0;
};

// The same as they were when it was made, while rows are written and erased.
class TierSnapshot : public RecordScan {
 public:
  // Their records are not wanted: before any is given.
  virtual void leave_out(std::span<const RowKey> keys) = 0;
};

// Of n keys and their records those that are `wanted`, side by side: how many they are.
template <class F>
int64_t keep_rows(RowKey* keys, uint8_t* records, int64_t n, int64_t record_bytes, F wanted) {
  int64_t kept = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (!wanted(i)) continue;
    if (kept < i) {
      keys[kept] = keys[i];
      std::memmove(records + kept * record_bytes, records + i * record_bytes,
                   static_cast<size_t>(record_bytes));
    }
    ++kept;
  }
  return kept;
}

// Rows that a tier has found for others, and taken over, since it was made.
struct TierTraffic {
  uint64_t rows_read = 0, rows_written = 0;
};

// Rows of equal record size: weights, states and metadata one after the other, as the tier above
// laid them out. A tier knows nothing of what is in a record.
//
// Threading: every member may be called by several threads at once. A read that follows a write of
// the same row, in program order or by other synchronisation, sees it.
class Tier {
 public:
  virtual ~Tier() = default;

  virtual int64_t record_bytes() const = 0;

  // records + i * record_bytes() becomes the record of keys[i] where the tier holds one, and is
  // left alone otherwise; found[i] says which. Keys may repeat. Throws TierError.
  virtual void read(std::span<const RowKey> keys, uint8_t* records, bool* found) = 0;

  // found[i] says whether there is a record of keys[i]; none is read.
  virtual void holds(std::span<const RowKey> keys, bool* found) const = 0;

  // While it lives rows may be read, and not written or erased. `since`: a moment(), after which
  // rows were written that are wanted; 0: all rows. Throws TierError.
  virtual std::unique_ptr<RecordScan> scan(std::span<const int32_t> tables, uint64_t since = 0) = 0;

  // As scan(); null where rows must not be written or erased meanwhile.
  virtual std::unique_ptr<TierSnapshot> snapshot(std::span<const int32_t> tables, uint64_t since) {
    static_cast<void>(tables), static_cast<void>(since);
    return nullptr;
  }
  virtual bool has_snapshots() const { return false; }

  // A number that all writes so far have reached and later ones exceed; nothing of a tier that
  // cannot tell when a row was written.
  virtual std::optional<uint64_t> moment() const { return {}; }

  // Takes rows over, replacing what it held of them. Keys are distinct. Throws TierError with the
  // tier as it was.
  virtual void write(std::span<const RowKey> keys, const uint8_t* records) = 0;

  // Forgets rows; absent ones are passed over.
  virtual void erase(std::span<const RowKey> keys) = 0;

  // Rows held of one table.
  virtual int64_t rows(int32_t table) const = 0;

  // Their ids, rising.
  virtual void ids(int32_t table, int64_t* out) const = 0;

  // Bytes of memory in use, indices and buffers included.
  virtual uint64_t memory_bytes() const = 0;

  // Of these, what the rows of the lowest tier are found by: it grows with them.
  virtual uint64_t index_bytes() const { return 0; }

  // What the lowest tier may come to take beside its index, had it been made for such a budget.
  virtual uint64_t most_bytes_beside_index(uint64_t budget) const {
    static_cast<void>(budget);
    return memory_bytes() - index_bytes();
  }

  // What was written survives a crash of the machine, if the tier can promise that. Throws
  // TierError.
  virtual void sync() {}

  // Of the lowest tier: all that was written by now, here and in tiers of the same place, is in a
  // folder of its own, to be adopted; and a tier that holds no rows has those of such a folder.
  // False where there is no such thing. Throw TierError.
  virtual bool link(const std::string& folder) {
    static_cast<void>(folder);
    return false;
  }
  virtual bool adopt(const std::string& folder) {
    static_cast<void>(folder);
    return false;
  }

  // Of the lowest tier.
  virtual TierTraffic traffic() const { return {}; }
};

}  // namespace hotbed
