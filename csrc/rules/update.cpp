#include "rules/update.hpp"

#include <omp.h>

#include <algorithm>
#include <bit>
#include <mutex>

#include "base/random.hpp"
#include "kernels/kernels.hpp"

namespace hotbed {

namespace {

// A chunk is large enough to hide its scheduling and small enough to share evenly.
constexpr int64_t kChunkElements = 16384;
// Less work than this runs on the calling thread: waking a team costs some microseconds.
constexpr int64_t kSerialElements = 8192;

struct Chunk {
  int32_t task;
  int64_t begin, end;
};

// Splits tasks of count[i] rows of width[i] elements.
template <class Task, class Count, class Width>
std::vector<Chunk> split(std::span<Task> tasks, Count count, Width width, int64_t& total) {
  std::vector<Chunk> chunks;
  total = 0;
  for (size_t t = 0; t < tasks.size(); ++t) {
    int64_t rows = count(tasks[t]), columns = width(tasks[t]);
    int64_t step = std::max<int64_t>(1, kChunkElements / std::max<int64_t>(1, columns));
    for (int64_t begin = 0; begin < rows; begin += step) {
      chunks.push_back({static_cast<int32_t>(t), begin, std::min(rows, begin + step)});
    }
    total += rows * columns;
  }
  return chunks;
}

// Slots to positions, open addressing; only for arrays that may hold duplicates.
class SlotPositions {
 public:
  explicit SlotPositions(int64_t count)
      : mask_(std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(8, 2 * count))) - 1),
        slot_(mask_ + 1, -1),
        position_(mask_ + 1) {}

  // The position of a slot, which becomes `fresh` if the slot is new.
  int64_t place(int64_t slot, int64_t fresh) {
    uint64_t at = mix(static_cast<uint64_t>(slot) + kGolden) & mask_;
    while (slot_[at] != -1 && slot_[at] != slot) at = (at + 1) & mask_;
    if (slot_[at] == -1) {
      slot_[at] = slot;
      position_[at] = fresh;
    }
    return position_[at];
  }

 private:
  uint64_t mask_;
  std::vector<int64_t> slot_, position_;
};

}  // namespace

void update(std::span<const RowUpdate> tables) {
  int64_t total = 0, widest = 0;
  auto chunks = split(
      tables, [](const RowUpdate& u) { return u.count; }, [](const RowUpdate& u) { return u.dim; },
      total);
  for (const RowUpdate& u : tables) widest = std::max(widest, u.dim);
  auto run = kernels().update_rows;
  auto count = static_cast<int64_t>(chunks.size());
#pragma omp parallel if (total > kSerialElements)
  {
    std::vector<float> scratch(static_cast<size_t>(widest));
#pragma omp for schedule(dynamic)
    for (int64_t c = 0; c < count; ++c) {
      const Chunk& chunk = chunks[static_cast<size_t>(c)];
      const RowUpdate& u = tables[static_cast<size_t>(chunk.task)];
      for (int64_t i = chunk.begin; u.changed && i < chunk.end; ++i) {
        __builtin_prefetch(u.changed + u.slots[i], 1);  // they lie anywhere
      }
      run(u, chunk.begin, chunk.end, scratch.data());
      for (int64_t i = chunk.begin; u.changed && i < chunk.end; ++i) {
        uint8_t& mark = u.changed[u.slots[i]];
        if (mark != u.epoch) mark = u.epoch;  // a hot row's stays clean
      }
    }
  }
}

NonFinite find_non_finite(std::span<const GradientView> arrays) {
  int64_t total = 0;
  auto chunks = split(
      arrays, [](const GradientView& a) { return a.count; },
      [](const GradientView&) { return int64_t{1}; }, total);
  auto find = kernels().first_non_finite;
  auto count = static_cast<int64_t>(chunks.size());
  int64_t first = count;  // the chunk of the first finding; chunks are in order of (array, element)
  int64_t element = -1;
  std::mutex mutex;
#pragma omp parallel for schedule(static) if (total > kSerialElements)
  for (int64_t c = 0; c < count; ++c) {
    const Chunk& chunk = chunks[static_cast<size_t>(c)];
    const GradientView& array = arrays[static_cast<size_t>(chunk.task)];
    const char* start =
        static_cast<const char*>(array.values) + chunk.begin * (array.is_double ? 8 : 4);
    int64_t found = find(start, array.is_double, chunk.end - chunk.begin);
    if (found < 0) continue;
    std::lock_guard lock(mutex);
    if (c < first) {
      first = c;
      element = chunk.begin + found;
    }
  }
  if (first == count) return {};
  return {chunks[static_cast<size_t>(first)].task, element};
}

bool has_duplicates(const int64_t* slots, int64_t count) {
  SlotPositions positions(count);
  for (int64_t i = 0; i < count; ++i) {
    if (positions.place(slots[i], i) != i) return true;
  }
  return false;
}

template <class C>
SummedRows<C> sum_duplicates(const int64_t* slots, const C* values, int64_t count, int64_t dim) {
  SummedRows<C> result;
  SlotPositions positions(count);
  // rows[start[k] .. start[k + 1]) are the gradient rows of unique slot k, in the order given.
  std::vector<int64_t> position(static_cast<size_t>(count)), start,
      rows(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    auto fresh = static_cast<int64_t>(result.slots.size());
    int64_t at = positions.place(slots[i], fresh);
    if (at == fresh) result.slots.push_back(slots[i]);
    position[static_cast<size_t>(i)] = at;
  }
  auto unique = static_cast<int64_t>(result.slots.size());
  start.assign(static_cast<size_t>(unique) + 1, 0);
  for (int64_t at : position) ++start[static_cast<size_t>(at) + 1];
  for (size_t k = 0; k < static_cast<size_t>(unique); ++k) start[k + 1] += start[k];
  std::vector<int64_t> next(start.begin(), start.end() - 1);
  for (int64_t i = 0; i < count; ++i) {
    rows[static_cast<size_t>(next[static_cast<size_t>(position[static_cast<size_t>(i)])]++)] = i;
  }
  result.values.resize(static_cast<uint64_t>(unique * dim));
#pragma omp parallel for schedule(static) if (count * dim > kSerialElements)
  for (int64_t k = 0; k < unique; ++k) {
    C* out = result.values.data() + k * dim;
    for (int64_t r = start[static_cast<size_t>(k)]; r < start[static_cast<size_t>(k) + 1]; ++r) {
      const C* row = values + rows[static_cast<size_t>(r)] * dim;
      if (r == start[static_cast<size_t>(k)]) {
        std::copy(row, row + dim, out);
      } else {
        for (int64_t j = 0; j < dim; ++j) out[j] += row[j];
      }
    }
  }
  return result;
}

template SummedRows<float> sum_duplicates(const int64_t*, const float*, int64_t, int64_t);
template SummedRows<double> sum_duplicates(const int64_t*, const double*, int64_t, int64_t);

}  // namespace hotbed
