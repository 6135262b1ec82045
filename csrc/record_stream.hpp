// The rows of a table one chunk after the other.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "row_space.hpp"
#include "table.hpp"

namespace hotbed {

// Room for a chunk of rows, each part by itself.
struct RecordParts {
  RecordParts(const RecordLayout& layout, int64_t most);

  // Takes what a scan gives next: how many rows, 0 behind the last.
  int64_t take_next(RecordScan& scan);

  const RecordLayout layout;
  const int64_t most;
  Buffer<int64_t> ids;
  Buffer<uint8_t> weights;
  std::vector<Buffer<uint8_t>> states;
  std::vector<const void*> states_at;
  Buffer<int64_t> last;  // undefined where the layout has none

 private:
  Buffer<uint8_t> records_;
};

// Every row of a table that is stored, once, in the order in which they lie. Of a static table in
// tiers those are the rows that differ from their first values, or did.
//
// While it lives rows must not change: who makes it holds the table, and sees to it that it has a
// place. Those of a row space stay where they are, see RowSpace::scan().
class RecordStream {
 public:
  // `current`: as the last step has left them, where rows may be behind (untouched="exact"); else
  // as they are stored.
  RecordStream(std::shared_ptr<Table> table, int64_t most, bool current);

  const Table& table() const { return *table_; }
  // At most that many rows at once.
  int64_t most() const { return most_; }

  // Rows of dtype() and so on, as Table::copy_rows has them; `states` and `last` may be null.
  // Throws TierError.
  int64_t next(int64_t* ids, void* weights, void* const* states, int64_t* last);
  // Rows may move again; next() gives nothing any more.
  void close() {
    scan_.reset();
    parts_.reset();
    closed_ = true;
  }

 private:
  int64_t next_as_stored(int64_t* ids, void* weights, void* const* states, int64_t* last);

  std::shared_ptr<Table> table_;
  const int64_t most_;
  const bool current_;
  int64_t slot_ = 0;
  bool closed_ = false;
  std::shared_ptr<RowSpace> space_;  // outlives what scans it
  std::unique_ptr<RecordScan> scan_;
  std::unique_ptr<RecordParts> parts_;
};

}  // namespace hotbed
