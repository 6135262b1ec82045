// The rows of tables one chunk after the other.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "table/table.hpp"
#include "tiers/row_space.hpp"

namespace hotbed {

// Some rows of one table, each part by itself.
struct RecordParts {
  RecordParts(const RecordLayout& layout, int64_t most);

  int64_t count = 0;
  void add(int64_t id, const uint8_t* record);
  // The rows in some slots of a table whose rows are in its planes.
  void add_from(const Table& table, const int64_t* slots, int64_t n);

  const RecordLayout layout;
  const int64_t most;
  Buffer<int64_t> ids;
  Buffer<uint8_t> weights;
  std::vector<Buffer<uint8_t>> states;
  Buffer<int64_t> last;  // undefined where the layout has none

  std::vector<void*> states_at() const;
};

// Takes the records that a scan gives, in one pass.
class RecordsByTable {
 public:
  // A chunk has at most `most` rows. `owner`: of what is scanned.
  RecordsByTable(const RecordLayout& layout, std::shared_ptr<const void> owner,
                 std::unique_ptr<RecordScan> scan, int64_t most);

  // The next rows of one table, whose number in keys `table` becomes; null behind the last. They
  // are good until it is called again.
  RecordParts* next(int32_t& table);

 private:
  const RecordLayout layout_;
  std::shared_ptr<const void> owner_;  // outlives the scan
  const int64_t most_;
  std::map<int32_t, RecordParts> parts_;
  RecordParts* given_ = nullptr;
  std::vector<RowKey> keys_;
  Buffer<uint8_t> records_;
  std::unique_ptr<RecordScan> scan_;
};

// Every row of some tables that is stored, once, in the order in which they lie. Of a static table
// in tiers those are the rows that differ from their first values, or did; as the last step has
// left them, others may differ too, and come last.
//
// While it lives rows must not change: who makes it holds the tables, and sees to it that they have
// a place. Those of row spaces stay where they are, see RowSpace::scan().
class RecordStream {
 public:
  // A chunk has at most `most` rows. `current`: as the last step has left them, where rows may be
  // behind (untouched="exact"); else as they are stored. `since`: of tables of which only rows are
  // wanted that have changed since a mark, that mark, which must be known; 0, or nothing: all rows.
  // Throws TierError where one is not.
  RecordStream(std::vector<std::shared_ptr<Table>> tables, int64_t most, bool current,
               std::vector<uint64_t> since = {});
  ~RecordStream() { end_reading(); }

  // The next rows of one table: its place among `tables`, and their parts, until it is called
  // again; null behind the last. Throws TierError.
  const RecordParts* next(size_t& table);
  // Rows may move again; next() gives nothing any more.
  void close();

 private:
  RecordParts* next_of_space(size_t& table);
  RecordParts* next_in_memory(size_t table);
  RecordParts* next_changed(const Table& table, uint64_t mark);
  void end_reading();
  RecordParts* next_untouched(size_t table);
  void make_current(const Table& table, RecordParts& rows) const;

  const std::vector<std::shared_ptr<Table>> tables_;
  const int64_t most_;
  const bool current_;
  const std::vector<uint64_t> since_;
  std::vector<const Table*> reading_;  // whose marks must stay good
  // Tables of those that are to come, by what is wanted of them.
  std::map<std::pair<RowSpace*, uint64_t>, std::vector<size_t>> spaces_;
  std::vector<size_t> in_space_;  // those of the one that is read
  std::unique_ptr<RecordsByTable> stream_;
  size_t at_ = 0;     // the table that is next, of those without a space or with untouched rows
  int64_t slot_ = 0;  // in it, or id
  std::unique_ptr<RecordParts> parts_;
};

}  // namespace hotbed
