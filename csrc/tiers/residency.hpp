// Which rows have which slot of a pool. Residency decides and moves nothing: its user writes rows
// back and loads them as it is told.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <span>
#include <vector>

#include "base/memory.hpp"
#include "base/prefetch.hpp"
#include "base/tier.hpp"
#include "tiers/frequency.hpp"
#include "tiers/row_map.hpp"

namespace hotbed {

struct ResidencyPolicy {
  // The weight of a use halves while half_life x capacity rows are used.
  double half_life = 16;
  // Rows whose frequency is remembered after they were evicted, a slot; 4 bytes each.
  double ghosts = 1;
  // Slots that may be looked at for each victim, and for a batch at least. Where the whole pool is
  // within that, victims are exactly the first in the order of eviction; in larger pools they are
  // among the first 1/slots_a_victim of it.
  int64_t slots_a_victim = 32;
  int64_t slots_a_batch = 32768;
};

// Distinct ids of one table.
struct TableIds {
  int32_t table;
  const int64_t* ids;
  int64_t count;
};

// What must be done so that a batch is resident: first what is evicted is taken from its slots,
// then what is loaded is put there (a slot may be in both lists).
struct Moves {
  std::vector<RowKey> evicted;
  std::vector<int64_t> evicted_slots;
  std::vector<uint8_t> evicted_dirty;  // 1: must be written back
  std::vector<RowKey> loaded;          // in the order of the batch
  std::vector<int64_t> loaded_slots;
  // The capacity with which the batch would fit beside the others that are pinned.
  int64_t slots_needed = 0;
};

// A batch goes through announce, admit, consume, release: its ids are known; its rows have slots
// and are pinned; a forward has used them; they may be evicted. Batches from outside the sequence
// (admit_now) start in the middle. Any number of batches may be pinned at once.
//
// Rows that are not pinned are evicted in this order: those of which no use is announced, the least
// frequently used first (see FrequencyClock); then those whose next announced use is farthest away.
// Frequency changes in consume() only, so what look-ahead does and takes back leaves no trace in
// it.
//
// Every call either happens or throws and changes nothing, unless it says otherwise. Errors in how
// it is used are std::invalid_argument; OutOfMemory, std::bad_alloc and std::length_error come from
// the calls that need memory: announce, both admits, consume, take_back, drop.
//
// Threads: one user at a time.
class Residency {
 public:
  static constexpr size_t kMostTables = UINT16_MAX;

  // table_rows[t] is the number of ids of static table t, or -1: dynamic.
  Residency(const std::vector<int64_t>& table_rows, int64_t capacity,
            const ResidencyPolicy& policy = {});
  Residency(const Residency&) = delete;
  Residency& operator=(const Residency&) = delete;

  // Bytes that a residency has from the start; its indices and what is announced come on top.
  static uint64_t fixed_bytes(const std::vector<int64_t>& table_rows, int64_t capacity,
                              const ResidencyPolicy& policy = {});

  // The next batch of the sequence will use these rows. Returns its number; numbers start at 1 and
  // rise by one. An id that comes twice throws, and all announcements are forgotten.
  int64_t announce(std::span<const TableIds> parts);
  // Forgets all batches that are announced and not admitted; their numbers do not return.
  void retract();
  // Forgets the first of them; its rows keep their later uses.
  void retract_first();

  // Makes the rows of the first announced batch resident and pins them. False where they do not fit
  // beside what is pinned: then nothing has changed but moves.slots_needed.
  bool admit(int64_t batch, Moves& moves);
  // The same for a batch that was not announced; its rows keep their announced uses. Returns a
  // negative number for it, or 0 where it does not fit.
  int64_t admit_now(std::span<const TableIds> parts, Moves& moves);
  // The capacity with which such a batch would fit beside what is pinned. Ids are distinct.
  int64_t slots_needed(std::span<const TableIds> parts) const;

  // Of an admitted batch: how many rows, and their slots in the order in which they were given.
  int64_t count(int64_t batch) const;
  void slots(int64_t batch, int64_t* out) const;

  // Rows in these slots, which a batch has pinned, exist nowhere (any more): they will, and be
  // dirty, once a batch with them is consumed, and are forgotten when all that pin them have ended.
  void mark_new(const int64_t* slots, int64_t n);

  // A forward uses an admitted batch. Once a batch. The new rows that exist from now on are added
  // to `born`.
  void consume(int64_t batch, std::vector<RowKey>* born = nullptr);
  bool consumed(int64_t batch) const;
  // Consumed batches that were not released.
  int64_t held() const;
  // The row in this slot exists from now on, and is dirty. Whether it was new.
  bool make_exist(int64_t slot);
  // The rows of an admitted batch, or of slots, differ from what lies below.
  void mark_dirty(int64_t batch);
  void mark_dirty(const int64_t* slots, int64_t n);
  // They do not any more.
  void mark_clean(const int64_t* slots, int64_t n);
  // Rows that became dirty, or did so again, are of the epoch at that time, from 1 to 255. Ends
  // one; the last begins the first again, with rows that are of none.
  uint8_t end_epoch();
  bool last_epoch() const { return epoch_ == UINT8_MAX; }
  // Whether a row became dirty in this epoch.
  bool touched() const { return touched_; }
  bool dirty_since(int64_t slot, uint8_t epoch) const {
    return is_dirty(slot) && rows_[slot].flags >> kEpochAt > epoch;
  }
  // A consumed batch ends. Rows of it that were marked as new since, and that no other batch pins,
  // are forgotten.
  void release(int64_t batch);
  // An admitted batch that was not consumed ends, in any order with others. Its new rows that no
  // other batch pins are forgotten; `dropped` receives their slots.
  void take_back(int64_t batch, std::vector<int64_t>& dropped);

  // Slots from `limit` on are used no more, as far down as the first that is pinned; rows in them
  // are evicted. May be called again for the rest. A batch must fit below limit() from now on.
  void narrow(int64_t limit, Moves& moves);

  // Forgets rows without writing them back. Slots are distinct, hold rows, and are not pinned.
  void drop(const int64_t* slots, int64_t n);

  // slots[i] becomes the slot of ids[i], or -1. No row becomes more recent or frequent.
  void find(int32_t table, const int64_t* ids, int64_t n, int64_t* slots) const;
  std::vector<int64_t> find(std::span<const RowKey> keys) const;

  // Calls f(int64_t slot, RowKey, bool dirty) for every resident row, slots rising. f may mark
  // rows.
  template <class F>
  void for_each(F f) const {
    for (int64_t s = 0; s < used_; ++s) {
      if (rows_[s].pins != kFree)
        f(s, RowKey{ids_[s], rows_[s].table}, (rows_[s].flags & kDirty) != 0);
    }
  }

  // The same from `slot` on, which it moves behind what it has seen, until f has taken `most`:
  // calls bool f(int64_t slot, RowKey, bool dirty, int64_t taken). Returns how many it took.
  template <class F>
  int64_t list(int64_t& slot, int64_t most, F f) const {
    int64_t taken = 0;
    for (; slot < used_ && taken < most; ++slot) {
      if (rows_[slot].pins == kFree) continue;
      taken +=
          f(slot, RowKey{ids_[slot], rows_[slot].table}, (rows_[slot].flags & kDirty) != 0, taken);
    }
    return taken;
  }

  bool is_pinned(int64_t slot) const { return rows_[slot].pins && rows_[slot].pins != kFree; }
  bool is_dirty(int64_t slot) const { return (rows_[slot].flags & kDirty) != 0; }
  bool is_new(int64_t slot) const { return (rows_[slot].flags & kNew) != 0; }
  int64_t capacity() const { return capacity_; }
  // Slots that may be used: the capacity, unless it was narrowed.
  int64_t limit() const { return limit_; }
  int64_t resident() const { return used_ - free_count_; }
  int64_t pinned() const { return resident() - unpinned_; }
  int64_t announced() const { return static_cast<int64_t>(announced_.size()); }
  // The number that the next call of announce() returns.
  int64_t next_batch() const { return next_batch_; }

  // Slots that a row was ever in, without those that were given back.
  int64_t used() const { return std::min(used_, limit_); }

  // All memory, scratch space included.
  uint64_t memory_bytes() const;
  // Without that of slots that were never used, which has no pages.
  uint64_t used_bytes() const;
  // What it takes of the machine, in whole pages.
  uint64_t resident_bytes() const;

  // Forgets all rows, batches and frequencies. Numbers of batches go on.
  void clear();

 private:
  // The announced uses of a row that has any.
  struct Uses {
    uint32_t next = 0;  // batch number; 0: none is announced
    uint32_t last = 0;  // number of the latest occurrence; meaningless where next is 0
  };

  // What is known of a slot. The sweep for victims reads these one after the other.
  struct Row {
    Uses uses;
    uint16_t pins;  // kFree: no row is here
    uint16_t score;
    uint16_t table;
    uint16_t flags;
  };
  static_assert(sizeof(Row) == 16);

  static constexpr uint16_t kFree = UINT16_MAX;
  static constexpr uint16_t kDirty = 1;
  static constexpr uint16_t kNew = 2;      // exists nowhere yet
  static constexpr uint16_t kLeaving = 4;  // named in the drop that is under way
  static constexpr int kEpochAt = 8;       // from this bit on, the epoch in which it became dirty

  struct Part {
    int32_t table;
    int64_t count;
  };
  struct Announced {
    std::vector<Part> parts;
    Buffer<int64_t> ids;
    uint32_t first = 0;  // number of its first occurrence
  };
  struct Admitted {
    Buffer<uint32_t> slots;
    bool consumed = false;
  };

  struct Layout;
  static int64_t ghost_entries(int64_t capacity, const ResidencyPolicy& policy);
  static uint64_t most_array_bytes(int64_t capacity);
  static Layout layout(const std::vector<int64_t>& table_rows, int64_t capacity,
                       const ResidencyPolicy& policy);

  uint64_t beside_slots() const;
  void check_parts(std::span<const TableIds> parts) const;
  Admitted& admitted(int64_t batch, const char* what);
  const Admitted& admitted(int64_t batch, const char* what) const;
  void check_slots(const int64_t* slots, int64_t n, const char* what) const;

  Uses& uses(int64_t number) {
    return number < capacity_ ? rows_[number].uses : awaited_[number - capacity_];
  }
  HOTBED_INLINE void prefetch(int64_t number) const {
    if (number < capacity_) {
      __builtin_prefetch(rows_ + number, 1);
    } else {
      __builtin_prefetch(awaited_.data() + (number - capacity_), 1);
    }
  }
  uint32_t& next_of(uint32_t occurrence) { return next_[occurrence & (next_.size() - 1)]; }

  // How many unpinned rows stand where this one does in the order of eviction.
  uint32_t& peers(const Row& row) {
    return row.uses.next ? known_[row.uses.next & (known_.size() - 1)] : unknown_[row.score];
  }
  void pin(Row& row) {
    if (row.pins++) return;
    --peers(row);
    --unpinned_;
  }
  void unpin(Row& row) {
    if (--row.pins) return;
    ++peers(row);
    ++unpinned_;
  }

  void become_dirty(Row& row) {
    row.flags = static_cast<uint16_t>((row.flags & kLeaving) | kDirty | epoch_ << kEpochAt);
    touched_ = true;
  }

  void mark_dirty(Row& row) {  // also one that is new still
    uint16_t others = row.flags & (kNew | kLeaving);
    become_dirty(row);
    row.flags |= others;
  }

  void make_room_for_uses(int64_t occurrences);
  void make_room_awaited(int64_t more);
  void number_rows(std::span<const TableIds> parts, int64_t* numbers);
  void forget_fresh(std::span<const TableIds> parts, const int64_t* numbers);
  void forget_uses(int32_t table, int64_t* ids, int64_t n);
  void end(int64_t batch, const Admitted& ends);
  int64_t pin_present(const int64_t* numbers, int64_t n, const Announced* batch);
  void unpin_present(const int64_t* numbers, int64_t n, uint32_t next);
  bool assign_slots(std::span<const TableIds> parts, const Announced* batch, int64_t number,
                    Moves& moves);
  void leave_awaited(const int64_t* numbers, int64_t n, int64_t absent);
  void choose_victims(int64_t count);
  void make_room_to_vacate(int64_t rows);
  void vacate(Moves* moves);
  int64_t take_free_slot();
  void load(std::span<const TableIds> parts, const Announced* batch, Moves& moves);
  template <class F>
  void for_rows(const Buffer<uint32_t>& slots, F f);
  void lower_scores();

  int64_t capacity_;
  int64_t limit_ = capacity_;
  ResidencyPolicy policy_;
  RowMap map_;  // -> slot, or capacity_ + place in awaited_
  FrequencyClock clock_;
  Ghosts ghosts_;

  Mapping memory_;         // rows, ids, ghosts, the arrays of the map
  uint64_t released_ = 0;  // bytes of it that were given back
  Row* rows_ = nullptr;
  int64_t* ids_ = nullptr;  // of the row in a slot; of a free slot: the next free one
  int64_t used_ = 0;        // slots from here on were never used
  int64_t free_head_ = -1;
  int64_t free_count_ = 0;  // below used_
  int64_t unpinned_ = 0;
  int64_t new_ = 0;   // rows that are marked so
  int64_t hand_ = 0;  // where the next sweep starts
  uint8_t epoch_ = 1;
  bool touched_ = false;

  // Announced batches and the chains of occurrences. Every id of every announced batch has an
  // occurrence number; next_ tells in which batch its row comes again.
  int64_t next_batch_ = 1;
  std::deque<Announced> announced_;
  uint32_t next_occurrence_ = 0;
  int64_t live_occurrences_ = 0;
  std::vector<uint32_t> next_;     // a ring by occurrence
  std::vector<Uses> awaited_;      // of rows that are announced and not resident
  std::vector<int64_t> idle_;      // places in awaited_ to be used again, plus capacity_
  std::vector<uint32_t> known_;    // unpinned rows by next use, a ring by batch number
  std::vector<uint32_t> unknown_;  // unpinned rows without one, by score

  std::map<int64_t, Admitted> admitted_;
  int64_t next_unannounced_ = -1;

  // Scratch, kept because a batch is like the one before.
  Buffer<int64_t> numbers_;                    // of the ids of a batch
  Buffer<Uses> coming_;                        // of the rows that are being loaded
  Buffer<int64_t> coming_ids_;                 // of one table
  std::vector<uint32_t> leaving_;              // slots
  Buffer<uint32_t> grouped_;                   // leaving_ by table
  std::vector<int64_t> table_begin_;           // in grouped_
  Buffer<int64_t> gone_ids_;                   // of rows of one table that the map forgets
  Buffer<int64_t> moved_ids_, moved_numbers_;  // of those that become awaited
};

}  // namespace hotbed
