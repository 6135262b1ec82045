// Records in memory: the tier between the one that computes and the SSD, or the last one.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "base/memory.hpp"
#include "base/tier.hpp"
#include "tiers/residency.hpp"

namespace hotbed {

// Holds rows that the tier above has given up, the most useful ones where they do not all fit; the
// others lie below. Without a tier below it refuses rows beyond its capacity.
//
// Threads: any number. All wait for each other, and for the tier below, but own_traffic().
class HostTier : public Tier {
 public:
  // table_rows as of Residency. `below` may be null, else it has records of the same size.
  HostTier(int64_t record_bytes, const std::vector<int64_t>& table_rows, int64_t capacity,
           std::shared_ptr<Tier> below);

  int64_t record_bytes() const override { return record_bytes_; }
  void read(std::span<const RowKey> keys, uint8_t* records, bool* found) override;
  void holds(std::span<const RowKey> keys, bool* found) const override;
  // Of all rows.
  std::unique_ptr<RecordScan> scan(std::span<const int32_t> tables, uint64_t since = 0) override;
  void write(std::span<const RowKey> keys, const uint8_t* records) override;
  void erase(std::span<const RowKey> keys) override;
  int64_t rows(int32_t table) const override;
  void ids(int32_t table, int64_t* out) const override;
  uint64_t memory_bytes() const override;

  // Writes what the tier below does not have yet.
  void flush();

  // Rows found here, not below, and taken over. A call that throws counts for nothing read, and for
  // what it has taken over.
  TierTraffic own_traffic() const { return {rows_read_, rows_written_}; }

  // Asked before rows are taken over: how many there may be from now on; as RowSpace::allow().
  void allow(std::function<int64_t(uint64_t)> allowed) { allowed_ = std::move(allowed); }

 private:
  class Scan;

  void check_room(std::span<const RowKey> keys) const;
  void narrow();
  template <class Chosen>
  void write_below(Chosen chosen);
  void write_part(std::span<const RowKey> keys, const uint8_t* records);
  void restore(std::span<const RowKey> keys, const uint8_t* records);
  std::vector<int64_t> ids_of(int32_t table) const;
  uint8_t* record(int64_t slot) const { return records_.data() + slot * record_bytes_; }

  int64_t record_bytes_;
  std::shared_ptr<Tier> below_;
  std::function<int64_t(uint64_t)> allowed_;
  mutable std::mutex mutex_;
  Mapping records_;
  Residency residency_;
  std::atomic<uint64_t> rows_read_{0}, rows_written_{0};  // written under mutex_
};

}  // namespace hotbed
