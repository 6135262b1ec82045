// A table whose rows lie in a row space.
#include <algorithm>
#include <numeric>

#include "table/table.hpp"
#include "tiers/row_space.hpp"

namespace hotbed {

void Table::live_in(std::shared_ptr<RowSpace> space, int32_t number) {
  lose_snapshot();
  space_ = std::move(space);
  number_ = number;
  weights_.share(space_->weights());
  ids_.share(space_->ids());
  for (size_t k = 0; k < states_.size(); ++k) states_[k].plane.share(space_->state(k));
  if (steps_) steps_->share(*space_->steps());
  allocated_ = true;
}

void Table::leave() {
  lose_snapshot();
  space_.reset();
  allocated_ = false;
}

void Table::write_tiered(const int64_t* ids, int64_t n, const uint8_t* weights,
                         const void* const* states, const int64_t* last) {
  // Of duplicates the last one.
  std::vector<int64_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  bool rising = std::adjacent_find(ids, ids + n, std::greater_equal<>()) == ids + n;
  if (!rising) {
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return ids[a] < ids[b]; });
    size_t kept = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (i + 1 < n && ids[order[i + 1]] == ids[order[i]]) continue;
      order[kept++] = order[i];
    }
    order.resize(kept);
  }
  auto count = static_cast<int64_t>(order.size());
  std::vector<int64_t> unique(count);
  for (int64_t i = 0; i < count; ++i) unique[i] = ids[order[i]];
  std::vector<Buffer<uint8_t>> kept;
  auto chosen = [&](const void* rows, int64_t bytes) -> const void* {
    if (rising || !rows) return rows;
    Buffer<uint8_t> values(count * bytes);
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(values.data() + i * bytes, static_cast<const uint8_t*>(rows) + order[i] * bytes,
                  bytes);
    }
    kept.push_back(std::move(values));
    return kept.back().data();
  };
  const void* rows = chosen(weights, weights_.row_bytes());
  std::vector<const void*> of_states;
  for (size_t k = 0; states && k < states_.size(); ++k) {
    of_states.push_back(chosen(states[k], states_[k].plane.row_bytes()));
  }
  const void* steps = chosen(steps_ ? last : nullptr, sizeof(int64_t));
  if (catch_up && !last) catch_up->settle(*this, unique.data(), count);
  space_->write(number_, unique.data(), count, rows, states ? of_states.data() : nullptr,
                static_cast<const int64_t*>(steps));
  if (!initial_.has_padding || !rows) return;
  auto padding = std::find(unique.begin(), unique.end(), initial_.padding_id) - unique.begin();
  if (padding == count) return;
  const uint8_t* row = static_cast<const uint8_t*>(rows) + padding * weights_.row_bytes();
  padding_row_.assign(row, row + weights_.row_bytes());
}

}  // namespace hotbed
