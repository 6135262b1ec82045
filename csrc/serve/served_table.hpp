// Tables that are only read: rows of files, in layers, that others map into memory and keep.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/dtype.hpp"
#include "kernels/stored_rows.hpp"
#include "serve/missing_rows.hpp"
#include "serve/sorted_ids.hpp"

namespace hotbed {

// Rows of one set of files.
struct ServedRows {
  StoredRows stored;
  int64_t count;
  const int64_t* ids;  // rising; nullptr: those from 0 on
};

// Threads: everything const may run in several.
class ServedTable {
 public:
  // `layers`: oldest first; of ids that several have, the newest counts. `missing`: of ids that
  // none has. `limit`: ids must lie below it, and not below 0; nullopt: any may be asked.
  ServedTable(std::vector<ServedRows> layers, MissingRows missing, std::optional<int64_t> limit);

  int64_t dim() const { return missing_.dim(); }
  // The most bytes of a row.
  int64_t row_bytes() const;
  // The first of n ids that is outside of the limit, and not to be skipped; or -1.
  int64_t first_outside(const int64_t* ids, int64_t n, const std::optional<int64_t>& skipped) const;
  // True if ids are the rows themselves, those to be skipped, too.
  bool is_direct(const std::optional<int64_t>& skipped) const;

  // Writes where the rows of n ids lie, as of StoredTask, and appends those that are computed.
  void locate(const int64_t* ids, int64_t n, const std::optional<int64_t>& skipped, int64_t* rows,
              std::vector<float>& computed) const;
  // Pools bags [begin, end) of a task that lacks what the table knows. `rows` and `computed` are of
  // locate(), or rows are ids where is_direct().
  void pool(StoredTask task, const std::vector<float>& computed, int64_t begin, int64_t end) const;

 private:
  void pool_apart(const StoredTask& task, int64_t begin, int64_t end) const;
  void pool_mixed(const StoredTask& task, int64_t begin, int64_t end) const;

  std::vector<StoredRows> stored_;
  std::vector<int64_t> counts_;
  std::vector<SortedIds> ids_;
  std::vector<bool> has_ids_;
  MissingRows missing_;
  std::optional<int64_t> limit_;
  bool is_mixed_ = false;  // layers are stored in several ways
};

// Ids of one lookup and where their vectors go.
struct ServedLookup {
  const ServedTable* table;
  const int64_t* ids;
  int64_t count;
  const int64_t* offsets;  // of bags + 1, rising from 0 to count; nullptr: each id is a bag
  int64_t bags;
  Combiner combiner;
  std::optional<int64_t> skipped;  // this id is none
  float* out;                      // bags x dim
};

// An id outside of its table's limit.
struct RefusedId {
  int64_t lookup;
  int64_t position;
};

// Looks all of them up. Returns the first id that is refused; vectors are then of no use.
std::optional<RefusedId> look_up(const std::vector<ServedLookup>& lookups);

}  // namespace hotbed
