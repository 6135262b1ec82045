#include "batch/claim.hpp"

#include <algorithm>

namespace hotbed {

Claim::Claim(const std::vector<TableBatch*>& parts) {
  for (TableBatch* part : parts) {
    const std::shared_ptr<RowSpace>& space = part->table->space();
    auto at = std::find_if(shares_.begin(), shares_.end(),
                           [&](const Share& share) { return share.space == space; });
    if (at == shares_.end()) at = shares_.insert(at, Share{space, {}, 0, false});
    at->parts.push_back(part);
  }
}

Claim::~Claim() {
  for (Share& share : shares_) {
    if (share.admitted) {
      share.space->end(share.batch);
    } else {
      share.retract();
    }
  }
}

std::vector<TableIds> Claim::Share::ids() const {
  std::vector<TableIds> all;
  for (const TableBatch* part : parts) {
    all.push_back({part->table->number(), part->unique_ids.data(), part->unique});
  }
  return all;
}

int64_t Claim::Share::count() const {
  int64_t total = 0;
  for (const TableBatch* part : parts) total += part->unique;
  return total;
}

void Claim::Share::hand_out(const std::vector<int64_t>& slots) const {
  auto from = slots.begin();
  for (TableBatch* part : parts) {
    part->unique_slots.resize(part->unique);
    std::copy_n(from, part->unique, part->unique_slots.data());
    from += part->unique;
  }
}

void Claim::announce() {
  for (Share& share : shares_) share.batch = share.space->announce(share.ids());
}

bool Claim::admit() {
  for (Share& share : shares_) {
    if (share.admitted) continue;
    std::vector<int64_t> slots(share.count());
    try {
      if (!share.space->admit(share.batch, slots.data())) return false;
    } catch (...) {
      share.retract();  // what comes later need not wait for it
      throw;
    }
    share.admitted = true;
    share.hand_out(slots);
  }
  return admitted_ = true;
}

void Claim::Share::retract() {
  if (batch) space->retract(batch);
  batch = 0;
}

void Claim::admit_now() {
  for (Share& share : shares_) {
    if (share.admitted) continue;
    share.retract();
    std::vector<int64_t> slots(share.count());
    share.batch = share.space->admit_now(share.ids(), slots.data());
    if (!share.batch) throw OverBudget(needs(share));
    share.admitted = true;
    share.hand_out(slots);
  }
  admitted_ = true;
}

std::vector<OverBudget::Need> Claim::needs(const Share& first) const {
  std::vector<OverBudget::Need> all;
  for (const Share& share : shares_) {
    OverBudget::Need need{share.space.get(), share.space->slots_needed(share.ids())};
    all.insert(&share == &first ? all.begin() : all.end(), need);
  }
  return all;
}

void Claim::leave_out_new() {
  for (Share& share : shares_) {
    for (TableBatch* part : share.parts) {
      share.space->leave_out_new(part->unique_slots.data(), part->unique);
    }
  }
}

void Claim::consume(bool ahead) {
  for (Share& share : shares_) {
    share.space->consume(share.batch, ahead);
    for (const TableBatch* part : share.parts) {
      part->table->uses.add(part->unique_ids.data(), part->counts.data(), part->unique);
    }
  }
}

void Claim::mark_dirty() {
  for (Share& share : shares_) share.space->mark_dirty(share.batch);
}

}  // namespace hotbed
