// The compute tier of tables whose rows do not all fit there.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/integers.hpp"
#include "base/memory.hpp"
#include "base/plane.hpp"
#include "base/tier.hpp"
#include "tiers/record_layout.hpp"
#include "tiers/residency.hpp"
#include "tiers/row_changes.hpp"
#include "tiers/row_planes.hpp"
#include "tiers/space_table.hpp"

namespace hotbed {

// What tiers have done so far; counts are rows unless they say otherwise.
struct TierCounters {
  int64_t used = 0;     // rows of consumed batches
  int64_t missed = 0;   // of them, those that had to be brought up
  int64_t created = 0;  // of those missed, those that were nowhere yet
  int64_t written_back = 0;
  int64_t evicted = 0;
  int64_t scratch_reads = 0;  // read past the compute tier, by evaluation and from outside
  int64_t move_ns = 0;        // time spent on bringing rows up and writing them back
  int64_t waited_ns = 0;      // of that, while a forward waited
  int64_t batches_ahead = 0;  // consumed batches that look-ahead had made resident
  int64_t batches = 0;        // consumed batches
};

class RowSpace;

// Where the rows of some tables were at one moment.
struct SpaceMoment {
  // By slot: the number of the table whose row is to be copied from there, and 1; else 0.
  Mapping in_slots;
  int64_t slots = 0;
  // Rows that have no place.
  std::vector<RowKey> held_back;
  std::vector<uint8_t> held_back_records;
  // All others, where those are left out.
  std::unique_ptr<TierSnapshot> below;

  uint16_t* numbers() const { return reinterpret_cast<uint16_t*>(in_slots.data()); }
};

// Copies rows before they change, or leave their slots.
class SlotKeeper {
 public:
  virtual ~SlotKeeper() = default;
  virtual void begin(SpaceMoment moment) = 0;
  // Rows in these slots are about to change or leave.
  virtual void keep(const int64_t* slots, int64_t n) noexcept = 0;
  // They are about to be written to the tier below as they are.
  virtual void leave_out(const int64_t* slots, int64_t n) noexcept = 0;
};

// A batch that does not fit beside what is pinned; nothing has changed.
struct OverBudget : std::runtime_error {
  struct Need {
    const RowSpace* space;
    int64_t slots;
  };
  // The first of the needs is the one that is not met.
  explicit OverBudget(std::vector<Need> needs);
  std::vector<Need> needs;  // of every space that the batch has rows in
};

// Planes over a fixed number of slots, shared by tables of equal records; whatever is not there
// lies in the tier below, or nowhere yet and is its first values.
//
// Threads: any number. Planes are not guarded: rows of a batch that was consumed and not released
// belong to the training thread, all others to the call that moves rows, which is one at a time.
class RowSpace {
 public:
  // Tables are numbered by their order. `below` has records of layout.bytes(). `planes`: where rows
  // lie, of a layout without steps; null: in planes of its own.
  RowSpace(const RecordLayout& layout, std::vector<const SpaceTable*> tables, int64_t capacity,
           std::shared_ptr<Tier> below, std::shared_ptr<RowPlanes> planes = nullptr);

  const RecordLayout& layout() const { return layout_; }
  int64_t capacity() const { return residency_.capacity(); }
  // Slots that may be used: the capacity, or what `allowed` has left of it.
  int64_t limit() const;
  // Asked before rows move, and told what is taken beside rows: how many slots there may be from
  // now on, never more than before. What others take of the budget grows, and then memory of slots
  // is given back.
  void allow(std::function<int64_t(uint64_t)> allowed) { allowed_ = std::move(allowed); }
  Tier& below() const { return *below_; }
  RowPlanes* planes() const { return planes_.get(); }

  const Plane& weights() const { return weights_; }
  const Plane& ids() const { return ids_; }
  const Plane& state(size_t k) const { return states_[k]; }
  const Plane* steps() const { return layout_.steps ? &steps_ : nullptr; }

  // The way of a batch; see Residency. Slots come in the order in which ids were given.
  int64_t announce(std::span<const TableIds> parts);
  void retract_all();
  // Whether it was admitted: not where it does not fit beside what is pinned, nor while another
  // that was announced before it is neither admitted nor forgotten; then nothing has changed.
  // Throws TierError, every row being safe; the batch is to be retracted then.
  bool admit(int64_t batch, int64_t* slots);
  // Returns the number of a batch that was not announced, or 0 where it does not fit. Throws
  // TierError, every row being safe.
  int64_t admit_now(std::span<const TableIds> parts, int64_t* slots);
  // With how many slots it would fit.
  int64_t slots_needed(std::span<const TableIds> parts);
  // With how many slots a stream like that of so far gets along that looks `ahead` batches ahead:
  // the largest batch so often as batches may hold rows at once. Gradients that wait for a step
  // hold those of theirs, and twice as many as now may: accumulating has perhaps only begun.
  int64_t slots_for_stream(int64_t ahead);
  // Slots that batches hold.
  int64_t pinned();
  // Of pinned slots, those of rows that exist nowhere yet become -1.
  void leave_out_new(int64_t* slots, int64_t n);
  // These only leave a message, so they never wait for rows that are on their way.
  void retract(int64_t batch);  // one that was announced, unless it was admitted or forgotten
  void consume(int64_t batch, bool ahead);
  void mark_dirty(int64_t batch);
  void mark_dirty(const int64_t* slots, int64_t n);
  void end(int64_t batch);  // releases it, or takes it back if it was not consumed

  // Rows wherever they lie, as they are stored. weights (n x dim), states (one array each) and last
  // may be null. A row that is nowhere leaves them alone, and found[i] says so.
  void read(int32_t table, const int64_t* ids, int64_t n, void* weights, void* const* states,
            int64_t* last, bool* found);
  // All rows that are stored: those that differ from what lies below by slot, then as the tier
  // below scans. While it lives rows stay where they are: who would move or change some waits,
  // look-ahead not for long, and throws TierError in the thread that asked for the scan.
  // `since`: a mark that is known, of the changes after which rows are wanted (and some that only
  // moved); 0: all.
  std::unique_ptr<RecordScan> scan(std::span<const int32_t> tables, uint64_t since = 0);
  // Has the rows of some tables kept as they are now, until end_snapshot(); `since`: as of scan().
  // Those that the training thread changes in slots are its own to tell of. Throws TierError,
  // OutOfMemory.
  void begin_snapshot(std::shared_ptr<SlotKeeper> keeper, std::span<const int32_t> tables,
                      uint64_t since);
  void end_snapshot(const SlotKeeper* keeper);
  bool has_snapshots() const { return !planes_ && below_->has_snapshots(); }
  // As RowChanges::mark(); 0 where the tier below cannot tell when a row was written. As long as
  // nothing changes it is the same.
  uint64_t mark_changes();
  bool knows_changes(uint64_t mark);
  // Overwrites parts of rows; what is not given stays, or is as of a new row. Ids are distinct. Of
  // whole rows (weights, states and last steps) nothing is read. Throws TierError; some of the rows
  // may have been written then, each of them whole.
  void write(int32_t table, const int64_t* ids, int64_t n, const void* weights,
             const void* const* states, const int64_t* last);
  // Rows are nowhere any more; ids without one are passed over. Those in slots that batches have
  // pinned are first values again and stay there for as long. How many rows of a dynamic table
  // went.
  int64_t erase(int32_t table, const int64_t* ids, int64_t n);
  void erase_all(int32_t table);

  // Rows that exist, and their ids rising; with `resident` also of rows in slots that are first
  // values still.
  int64_t rows(int32_t table);
  std::vector<int64_t> stored_ids(int32_t table, bool resident = false);
  bool stores_any(int32_t table);
  void stores(int32_t table, const int64_t* ids, int64_t n, bool* found);

  // Writes every dirty row to the tier below.
  void flush();
  // Whether no row is in a slot, or waits for one.
  bool is_empty();
  // The tier below has got rows by itself, while this is empty.
  void note_rows_below();

  TierCounters counters();
  uint64_t memory_bytes();
  static uint64_t slot_bytes(const RecordLayout& layout);
  // What a space has for records on their way is such a part of its slots.
  static constexpr int64_t kStagingShare = 32;

 private:
  struct Message {
    enum Kind { retract, consume, dirty_batch, dirty_slots, end } kind;
    int64_t batch = 0;
    bool ahead = false;
    std::vector<int64_t> slots;
  };

  class Moving;
  class Scan;
  struct Scanning {
    std::thread::id thread;
    uint64_t process;  // by its forks
    bool operator==(const Scanning&) const = default;
  };

  std::unique_lock<std::mutex> may_move(bool ahead = false);
  void keep(const std::vector<int64_t>& slots) const;
  void refuse_forgotten(uint64_t since) const;
  void forget(int32_t table, std::span<const RowKey> rows, const std::vector<int64_t>& slots);
  std::vector<RowKey> held_back_sorted() const;
  void find_stored(int32_t table, const int64_t* ids, int64_t n, bool* found) const;
  void note_size(std::span<const TableIds> parts);
  void post(Message message);
  void drain();
  void carry_out(const Message& message);
  void retract_forgotten();
  void write_held_back();
  void narrow();
  uint64_t bookkeeping_bytes() const;
  void write_back(const Moves& moves, int64_t& written, uint8_t* records, int64_t part);
  void move(int64_t batch, Moves& moves);
  void gather(const int64_t* slots, int64_t n, uint8_t* records) const;
  void scatter(const uint8_t* records, const int64_t* slots, int64_t n);
  void fill_new(const std::vector<RowKey>& keys, const std::vector<int64_t>& slots);
  void new_record(const SpaceTable& table, const int64_t* id, uint8_t* record) const;
  void read_below(std::span<const RowKey> keys, uint8_t* records, bool* found);
  std::vector<int64_t> stored(int32_t table, bool resident = false) const;

  // Rows that are moved between planes and records at once, where one by one would do.
  int64_t rows_at_once() const { return planes_ ? records_at_once() : 16; }

  // Records that are under way at once: enough to keep a disk busy, few enough to stay small, three
  // times as many being such a part of the slots at most.
  static constexpr int64_t kRecordsAtOnce = 8192;
  int64_t records_at_once() const { return hotbed::rows_at_once(kRecordsAtOnce, record_bytes_); }
  int64_t at_once() const {
    return std::clamp<int64_t>(capacity() / (3 * kStagingShare), 1, records_at_once());
  }

  RecordLayout layout_;
  int64_t record_bytes_;
  std::vector<const SpaceTable*> tables_;
  std::shared_ptr<Tier> below_;
  std::shared_ptr<RowPlanes> planes_;
  Plane weights_, ids_, steps_;
  std::vector<Plane> states_;

  // Who holds moving_ moves rows: between slots and the tier below, decisions of residency_ being
  // carried out. Taken before mutex_, so that ids can be announced while rows are on their way.
  std::mutex moving_;
  std::vector<Scanning> scanning_;                    // one for each scan, under moving_
  std::vector<std::shared_ptr<SlotKeeper>> keepers_;  // under moving_
  std::condition_variable scanned_;
  std::function<int64_t(uint64_t)> allowed_;
  // Records on their way: of two parts that come, and one that leaves. Made beforehand, as rows
  // that leave must have it.
  Mapping staging_;
  uint8_t* staging(int64_t which) { return staging_.data() + which * at_once() * record_bytes_; }
  // Rows that were evicted and could not be written: kept until they can.
  std::vector<RowKey> held_back_;
  std::vector<uint8_t> held_back_records_;
  std::atomic<uint64_t> held_back_bytes_{0};

  mutable std::mutex mutex_;  // of all that follows
  Residency residency_;
  TierCounters counters_;
  struct Brought {
    int64_t missed = 0, created = 0;
  };
  std::map<int64_t, Brought> brought_;  // for batches that are not consumed yet
  std::set<int64_t> forgotten_;  // announced batches that are to be retracted when they are first
  std::vector<int64_t> born_;    // by table: rows of dynamic tables that exist
  uint64_t generation_ = RowChanges::next_generation();
  std::array<uint64_t, 256> moments_{};  // of the tier below at the end of each epoch
  uint64_t mark_ = 0;                    // the latest; 0: rows went since, or there is none
  int64_t largest_ = 0;  // rows of the largest batch so far, whether it found room or not

  std::mutex inbox_mutex_;
  std::vector<Message> inbox_;
};

}  // namespace hotbed
