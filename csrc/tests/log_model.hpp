// What a row log should hold, kept in a map, and records that tell which row and version they are.
#pragma once

#include <cstring>
#include <map>
#include <random>
#include <vector>

#include "base/random.hpp"
#include "check.hpp"
#include "log/row_log.hpp"

namespace model {

using hotbed::RowKey;

struct Less {
  bool operator()(const RowKey& a, const RowKey& b) const {
    return a.table != b.table ? a.table < b.table : a.id < b.id;
  }
};

// Version by row; rows that are not there are not in it.
using Versions = std::map<RowKey, uint64_t, Less>;

inline uint8_t byte_of(const RowKey& key, uint64_t version, size_t i) {
  uint64_t word = hotbed::mix(version * 1000003 + static_cast<uint64_t>(key.id) * 31 +
                              static_cast<uint64_t>(key.table) + (i / 8) * 7919);
  return static_cast<uint8_t>(word >> 8 * (i % 8));
}

// The version in the first eight bytes (as far as there is room), then bytes that depend on all.
inline void fill(uint8_t* record, size_t bytes, const RowKey& key, uint64_t version) {
  for (size_t i = 0; i < bytes; ++i) record[i] = byte_of(key, version, i);
  std::memcpy(record, &version, std::min<size_t>(8, bytes));
}

inline bool is(const uint8_t* record, size_t bytes, const RowKey& key, uint64_t version) {
  std::vector<uint8_t> expected(bytes);
  fill(expected.data(), bytes, key, version);
  return std::memcmp(record, expected.data(), bytes) == 0;
}

inline void write(hotbed::Tier& tier, const std::vector<RowKey>& keys, uint64_t version) {
  auto bytes = static_cast<size_t>(tier.record_bytes());
  std::vector<uint8_t> records(keys.size() * bytes);
  for (size_t i = 0; i < keys.size(); ++i) fill(&records[i * bytes], bytes, keys[i], version);
  tier.write(keys, records.data());
}

// Reads the keys and compares with the versions.
inline void check_rows(hotbed::Tier& tier, const std::vector<RowKey>& keys,
                       const Versions& versions) {
  auto bytes = static_cast<size_t>(tier.record_bytes());
  std::vector<uint8_t> records(keys.size() * bytes, 0xcc);
  auto found = std::make_unique<bool[]>(keys.size());
  tier.read(keys, records.data(), found.get());
  for (size_t i = 0; i < keys.size(); ++i) {
    auto known = versions.find(keys[i]);
    CHECK_EQ(found[i], known != versions.end());
    if (found[i]) {
      CHECK(is(&records[i * bytes], bytes, keys[i], known->second));
    } else {
      for (size_t b = 0; b < bytes; ++b) CHECK_EQ(records[i * bytes + b], 0xcc);
    }
  }
}

// Scans tables, a few rows at a time, and compares with the versions.
inline void check_scan(hotbed::Tier& tier, const std::vector<int32_t>& tables,
                       const Versions& versions) {
  constexpr int64_t kMost = 37;
  auto bytes = static_cast<size_t>(tier.record_bytes());
  std::vector<RowKey> keys(kMost);
  std::vector<uint8_t> records(kMost * bytes);
  Versions found;
  auto scan = tier.scan(tables);
  while (int64_t n = scan->next(kMost, keys.data(), records.data())) {
    for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
      auto known = versions.find(keys[i]);
      CHECK(known != versions.end());
      CHECK(is(&records[i * bytes], bytes, keys[i], known->second));
      CHECK(found.emplace(keys[i], known->second).second);
    }
  }
  int64_t wanted = 0;
  for (int32_t table : tables) wanted += tier.rows(table);
  CHECK_EQ(static_cast<int64_t>(found.size()), wanted);
}

// Compares everything there is to see of a tier.
inline void check_all(hotbed::LogTier& tier, const Versions& versions, bool scan = true) {
  std::vector<RowKey> keys;
  std::vector<int32_t> tables;
  for (const auto& table : tier.described().tables) {
    std::vector<int64_t> expected;
    for (const auto& [key, version] : versions) {
      if (key.table == table.table) expected.push_back(key.id);
    }
    CHECK_EQ(tier.rows(table.table), static_cast<int64_t>(expected.size()));
    std::vector<int64_t> ids(expected.size());
    tier.ids(table.table, ids.data());
    CHECK(ids == expected);
    for (int64_t id : ids) keys.push_back({id, table.table});
    tables.push_back(table.table);
    if (scan) check_scan(tier, {table.table}, versions);
  }
  CHECK_EQ(keys.size(), versions.size());
  if (scan) check_scan(tier, tables, versions);
  check_rows(tier, keys, versions);
  CHECK_EQ(tier.statistics().live_records, versions.size());
}

}  // namespace model
