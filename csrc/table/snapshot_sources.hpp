// What a snapshot reads: a table in memory, or all tables of a row space.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "table/snapshot_part.hpp"
#include "tiers/row_space.hpp"

namespace hotbed {

// A table whose rows lie in its planes: those in slots below those at the beginning, each copied
// once, either by whoever is about to change it or in the order of slots.
class MemorySnapshot final : public TableKeeper,
                             public SnapshotSource,
                             public std::enable_shared_from_this<MemorySnapshot> {
 public:
  // `most`, `since`: as of a RecordStream.
  MemorySnapshot(std::shared_ptr<SnapshotRoom> room, Table& table, size_t place, int64_t most,
                 uint64_t since);
  void begin();

  bool next(std::unique_lock<std::mutex>& lock, Rows& rows) override;
  void stop() override {}
  void end() override;

 private:
  void choose(const int64_t* slots, int64_t n) override;
  bool wanted(int64_t slot) const;
  void note_forgotten();

  const int64_t most_, limit_;
  const uint64_t since_;
  bool reads_changes_ = false;
  int64_t at_ = 0;                // rows below are copied
  std::vector<uint64_t> copied_;  // a bit a slot
};

// Tables of a row space. Of a row that the tier below does not have as it is, what is in its slot
// is copied, by whoever is about to change it or to take the slot, or in the order of slots; and
// the tier below leaves it out. All others it gives as they were, whatever comes meanwhile.
class SpaceSnapshot final : public SnapshotSource,
                            public SlotKeeper,
                            public std::enable_shared_from_this<SpaceSnapshot> {
 public:
  // Tables of one space, with their places in the snapshot.
  using Members = std::map<size_t, std::shared_ptr<Table>>;

  SpaceSnapshot(std::shared_ptr<SnapshotRoom> room, const Members& tables, int64_t most);
  // What it keeps of each table.
  std::map<size_t, std::shared_ptr<TableKeeper>> begin(const Members& tables, uint64_t since);

  bool next(std::unique_lock<std::mutex>& lock, Rows& rows) override;
  void stop() override;
  void end() override;

  void begin(SpaceMoment moment) override;
  void keep(const int64_t* slots, int64_t n) noexcept override;
  void leave_out(const int64_t* slots, int64_t n) noexcept override;

 private:
  class OfTable;

  OfTable* table_in(int64_t slot) const;
  template <class F>
  void change(F f) noexcept;
  bool take(OfTable& keeper, int64_t slot);
  void leave_out_chosen(const OfTable& keeper);
  void keep_held_back();
  RecordParts& part_of(OfTable& one) const;
  void copy_slots();
  bool give(Rows& rows, bool any);

  const std::shared_ptr<SnapshotRoom> room_;
  const std::shared_ptr<RowSpace> space_;
  const int64_t at_once_;
  SpaceMoment moment_;
  std::shared_ptr<TierSnapshot> below_;           // null: read
  std::vector<std::shared_ptr<OfTable>> tables_;  // by number, null where others'
  std::vector<OfTable*> members_;
  int64_t at_ = 0;  // no row is to be copied from slots below
  std::vector<RowKey> keys_;
  Buffer<uint8_t> records_;
};

}  // namespace hotbed
