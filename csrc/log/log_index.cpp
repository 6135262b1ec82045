#include "log/log_index.hpp"

#include <algorithm>
#include <stdexcept>

#include "base/integers.hpp"

namespace hotbed {

namespace {

constexpr size_t kRun = 512;
constexpr size_t kAhead = 16;  // rows of a static table between prefetching and reading

struct Ids {
  int64_t ids[kRun];
  int64_t slots[kRun];
  int64_t previous[kRun];

  void take(std::span<const RowKey> keys) {
    for (size_t i = 0; i < keys.size(); ++i) ids[i] = keys[i].id;
  }
};

}  // namespace

LogIndex::LogIndex(const std::vector<LogTable>& tables) {
  uint64_t static_rows = 0;
  for (const LogTable& described : tables) {
    if (described.rows > 0) static_rows = sum(static_rows, static_cast<uint64_t>(described.rows));
  }
  static_.reserve(product(static_rows, sizeof(uint32_t)),
                  "The index of " + std::to_string(static_rows) + " rows on SSD",
                  "Use rows=None, with which only ids that were met take memory.");
  auto* places = reinterpret_cast<uint32_t*>(static_.data());
  for (const LogTable& described : tables) {
    Table table;
    table.number = described.table;
    table.name = described.name;
    table.limit = described.rows;
    if (described.rows < 0) {
      table.keys = std::make_unique<KeyIndex>("the locations of table '" + described.name + "'");
    } else {
      table.places = places;
      places += described.rows;
    }
    auto number = static_cast<size_t>(described.table);
    if (number >= position_.size()) position_.resize(number + 1, -1);
    position_[number] = static_cast<int32_t>(tables_.size());
    tables_.push_back(std::move(table));
  }
}

const LogIndex::Table& LogIndex::table(int32_t number) const {
  auto at = static_cast<size_t>(number);
  if (number < 0 || at >= position_.size() || position_[at] < 0) {
    throw std::invalid_argument("Table number " + std::to_string(number) +
                                " is not of this store of the row log.");
  }
  return tables_[static_cast<size_t>(position_[at])];
}

void LogIndex::check(std::span<const RowKey> keys) const {
  const Table* known = nullptr;
  for (const RowKey& key : keys) {
    if (!known || known->number != key.table) known = &table(key.table);
    if (known->limit >= 0 && (key.id < 0 || key.id >= known->limit)) {
      throw std::invalid_argument("Table '" + known->name + "': id " + std::to_string(key.id) +
                                  " is outside [0, " + std::to_string(known->limit) + ").");
    }
  }
}

template <class Self, class F>
void LogIndex::by_runs(Self& self, std::span<const RowKey> keys, F f) {
  for (size_t begin = 0; begin < keys.size();) {
    int32_t number = keys[begin].table;
    size_t most = std::min(keys.size(), begin + kRun);
    size_t end = begin + 1;
    while (end < most && keys[end].table == number) ++end;
    f(self.tables_[static_cast<size_t>(self.position_[static_cast<size_t>(number)])], begin,
      end - begin);
    begin = end;
  }
}

void LogIndex::find(std::span<const RowKey> keys, uint32_t* locations) const {
  check(keys);
  Ids run;
  by_runs(*this, keys, [&](const Table& table, size_t first, size_t count) {
    if (table.keys) {
      run.take(keys.subspan(first, count));
      table.keys->find(run.ids, static_cast<int64_t>(count), run.slots);
      for (size_t i = 0; i < count; ++i) {
        bool known = run.slots[i] >= 0 && run.slots[i] != kUnplaced;
        locations[first + i] = known ? static_cast<uint32_t>(run.slots[i]) : kNone;
      }
      return;
    }
    const uint32_t* places = table.places;
    for (size_t i = 0; i < count; ++i) {
      if (i + kAhead < count) __builtin_prefetch(&places[keys[first + i + kAhead].id]);
      locations[first + i] = places[keys[first + i].id] - 1;  // 0 becomes kNone
    }
  });
}

void LogIndex::prepare(std::span<const RowKey> keys) {
  check(keys);
  Ids run;
  int64_t unplaced[kRun];
  std::fill(unplaced, unplaced + kRun, kUnplaced);
  std::vector<RowKey> inserted;
  try {
    by_runs(*this, keys, [&](Table& table, size_t first, size_t count) {
      if (!table.keys) return;
      run.take(keys.subspan(first, count));
      // Room first: what was inserted must not go unlisted.
      if (inserted.capacity() < inserted.size() + count) {
        inserted.reserve(2 * inserted.capacity() + count);
      }
      auto n = static_cast<int64_t>(count);
      FreshSlots fresh{0, unplaced, n};
      int64_t fresh_keys = table.keys->find_or_insert(run.ids, n, run.slots, fresh, run.previous);
      for (int64_t i = 0; i < fresh_keys; ++i) {
        inserted.push_back(keys[first + static_cast<size_t>(run.previous[i])]);
      }
    });
  } catch (...) {
    for (const RowKey& key : inserted) table(key.table).keys->erase(key.id);
    throw;
  }
}

void LogIndex::replace(std::span<const RowKey> keys, const uint32_t* locations,
                       uint32_t* previous) {
  Ids run;
  by_runs(*this, keys, [&](Table& table, size_t first, size_t count) {
    if (table.keys) {
      run.take(keys.subspan(first, count));
      for (size_t i = 0; i < count; ++i) run.slots[i] = locations[first + i];
      table.keys->update(run.ids, static_cast<int64_t>(count), run.slots, run.previous);
      for (size_t i = 0; i < count; ++i) {
        bool known = run.previous[i] >= 0 && run.previous[i] != kUnplaced;
        previous[first + i] = known ? static_cast<uint32_t>(run.previous[i]) : kNone;
      }
    } else {
      uint32_t* places = table.places;
      for (size_t i = 0; i < count; ++i) {
        if (i + kAhead < count) __builtin_prefetch(&places[keys[first + i + kAhead].id], 1);
        uint32_t& place = places[keys[first + i].id];
        previous[first + i] = place - 1;
        place = locations[first + i] + 1;
      }
    }
    for (size_t i = 0; i < count; ++i) table.rows += previous[first + i] == kNone;
  });
}

void LogIndex::erase(std::span<const RowKey> keys, uint32_t* previous) {
  check(keys);
  Ids run;
  by_runs(*this, keys, [&](Table& table, size_t first, size_t count) {
    if (table.keys) {
      run.take(keys.subspan(first, count));
      table.keys->erase(run.ids, static_cast<int64_t>(count), run.slots);
      for (size_t i = 0; i < count; ++i) {
        bool known = run.slots[i] >= 0 && run.slots[i] != kUnplaced;
        previous[first + i] = known ? static_cast<uint32_t>(run.slots[i]) : kNone;
      }
    } else {
      uint32_t* places = table.places;
      for (size_t i = 0; i < count; ++i) {
        uint32_t& place = places[keys[first + i].id];
        previous[first + i] = place - 1;
        // An unwritten page of the array stays unwritten.
        if (place) place = 0;
      }
    }
    for (size_t i = 0; i < count; ++i) table.rows -= previous[first + i] != kNone;
  });
}

int64_t LogIndex::rows(int32_t number) const { return table(number).rows; }

void LogIndex::ids(int32_t number, int64_t* out) const {
  const Table& known = table(number);
  if (known.keys) {
    int64_t* end = out;
    known.keys->for_each([&](int64_t id, int64_t slot) {
      if (slot != kUnplaced) *end++ = id;
    });
    std::sort(out, end);
    return;
  }
  const uint32_t* places = known.places;
  for (int64_t id = 0; id < known.limit; ++id) {
    if (places[id]) *out++ = id;
  }
}

uint64_t LogIndex::memory_bytes() const { return static_.bytes() + dynamic_bytes(); }

uint64_t LogIndex::resident_bytes() const {
  uint64_t rows = 0;
  for (const Table& table : tables_) {
    if (!table.keys) rows += static_cast<uint64_t>(table.rows);
  }
  return std::min(static_.bytes(), product(rows, static_.page())) + dynamic_bytes();
}

uint64_t LogIndex::dynamic_bytes() const {
  uint64_t bytes = 0;
  for (const Table& table : tables_) {
    if (table.keys) bytes += table.keys->memory_bytes();
  }
  return bytes;
}

}  // namespace hotbed
