#include "rules/catch_up.hpp"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "base/random.hpp"
#include "kernels/kernels.hpp"
#include "rules/state_planes.hpp"

namespace hotbed {

namespace {

// What replay leaves out is below this share of the largest learning rate in the gap.
constexpr double kNegligible = 1e-9;
// Up to this many steps are replayed one by one.
constexpr size_t kFewSteps = 8;
// The scales of a segment span at most this ratio: within a tenth of their middle.
constexpr double kSegmentSpan = 1.2;
// Last steps are fetched this many rows ahead: they lie anywhere.
constexpr int64_t kAhead = 32;
// Replay asks this seldom whether the rest is negligible.
constexpr int64_t kCheckEvery = 8;
// Rows a chunk; a row may cost a microsecond.
constexpr int64_t kChunkRows = 64;

// Works out what rows have to make up for, and keeps the last answer: neighbours often share it.
class Planner {
 public:
  Planner(const RuleOptions& options, const History& history)
      : options_(options), history_(history) {}

  const MissedSteps& since(int64_t from) {
    if (from == planned_) return missed_;
    missed_ = {};
    missed_.across = history_.since(from);
    missed_.last = history_.last();
    bool replayed = replays(kind_of(options_.rule));
    if (replayed && from > 0) plan_replay(from);  // a row never touched has no first moment
    planned_ = from;
    return missed_;
  }

 private:
  void plan_replay(int64_t from) {
    change_.clear();
    scale_.clear();
    floor_.clear();
    keep_.clear();
    const auto& runs = history_.runs();
    bool by_largest = kind_of(options_.rule).missed == Missed::replays_largest;
    double ratio = history_.largest_ratio();
    double first = 1, second = 1;                       // decay of the moments since the gap began
    double power1 = 0, power2 = 0, of1 = -1, of2 = -1;  // beta^step, and of which betas
    int64_t step = from + 1;
    bool faded = false;
    for (size_t r = history_.run_of(step); r < runs.size() && !faded; ++r) {
      const History::Run& run = runs[r];
      const Hyperparameters& h = run.hyper;
      if (h.beta1 != of1) power1 = std::pow(of1 = h.beta1, static_cast<double>(step - 1));
      if (h.beta2 != of2) power2 = std::pow(of2 = h.beta2, static_cast<double>(step - 1));
      for (; step < run.first_step + run.count; ++step) {
        power1 *= h.beta1;
        power2 *= h.beta2;
        first *= h.beta1;
        second *= h.beta2;
        change_.push_back(h.lr / (1 - power1) * first);
        if (by_largest) {
          scale_.push_back(second);
        } else {
          scale_.push_back(std::sqrt((options_.amsgrad ? 1 : second) / (1 - power2)));
        }
        floor_.push_back(h.eps);
        keep_.push_back(run.one.ww);
        if (step % kCheckEvery != 0) continue;
        // All later changes together, each at most the size of a settled step.
        double denominator = by_largest ? second : (options_.amsgrad ? 1 : std::sqrt(second));
        double rest =
            history_.largest_size() * first / denominator / (1 - power1) * ratio / (1 - ratio);
        if (rest <= kNegligible) {
          faded = true;
          ++step;
          break;
        }
      }
    }
    // A change at step k is shrunk by the decoupled decay of all steps after k.
    double after = history_.since(step - 1).ww;
    for (size_t k = change_.size(); k-- > 0;) {
      change_[k] *= after;
      after *= keep_[k];
    }
    if (!by_largest && change_.size() > kFewSteps) return plan_segments();
    missed_.replayed = static_cast<int64_t>(change_.size());
    missed_.change = change_.data();
    missed_.scale = scale_.data();
    missed_.floor = floor_.data();
  }

  void plan_segments() {
    segments_.clear();
    for (size_t begin = 0, end = 0; begin < change_.size(); begin = end) {
      double low = scale_[begin], high = low;
      for (end = begin + 1; end < change_.size() && floor_[end] == floor_[begin]; ++end) {
        double wider_low = std::min(low, scale_[end]), wider_high = std::max(high, scale_[end]);
        if (wider_high > kSegmentSpan * wider_low) break;
        low = wider_low;
        high = wider_high;
      }
      ReplaySegment segment{(low + high) / 2, floor_[begin], {}};
      for (size_t k = begin; k < end; ++k) {
        double ratio = 1 - scale_[k] / segment.center, term = change_[k];
        for (double& sum : segment.term) {
          sum += term;
          term *= ratio;
        }
      }
      segments_.push_back(segment);
    }
    missed_.segment_count = static_cast<int64_t>(segments_.size());
    missed_.segments = segments_.data();
  }

  const RuleOptions& options_;
  const History& history_;
  int64_t planned_ = -1;
  MissedSteps missed_;
  std::vector<double> change_, scale_, floor_, keep_;
  std::vector<ReplaySegment> segments_;
};

}  // namespace

void catch_up(const RowUpdate& u, const History& history) {
  int64_t now = history.steps();
  auto run = kernels().catch_up_row;
  auto element = static_cast<int64_t>(size_of(u.dtype));
  int64_t state_element = u.dtype == DType::f64 ? 8 : 4;
  int64_t state_bytes[kMaxStates] = {};
  auto planes = state_planes(u.options, 0);
  for (size_t k = 0; k < planes.size(); ++k) {
    state_bytes[k] = state_element * (planes[k].one_per_row ? 1 : u.dim);
  }
  // Rows with the same last step follow each other, so that they share a plan.
  std::vector<std::pair<int64_t, int64_t>> behind;  // last step, slot
  for (int64_t i = 0; i < u.count; ++i) {
    int64_t slot = u.slots ? u.slots[i] : i;
    if (u.slots && i + kAhead < u.count && u.slots[i + kAhead] >= 0) {
      __builtin_prefetch(u.last_step + u.slots[i + kAhead]);
    }
    if (slot >= 0 && u.last_step[slot] < now) behind.emplace_back(u.last_step[slot], slot);
  }
  std::sort(behind.begin(), behind.end());
  auto rows = static_cast<int64_t>(behind.size());
  int64_t chunks = (rows + kChunkRows - 1) / kChunkRows;
#pragma omp parallel if (chunks > 1)
  {
    Planner planner(u.options, history);
    std::vector<float> scratch(static_cast<size_t>(u.dim));
#pragma omp for schedule(dynamic)
    for (int64_t c = 0; c < chunks; ++c) {
      int64_t end = std::min(rows, (c + 1) * kChunkRows);
      for (int64_t i = c * kChunkRows; i < end; ++i) {
        auto [from, slot] = behind[static_cast<size_t>(i)];
        const MissedSteps& missed = planner.since(from);
        void* states[kMaxStates] = {};
        for (size_t k = 0; k < planes.size(); ++k) {
          states[k] = static_cast<char*>(u.states[k]) + slot * state_bytes[k];
        }
        int64_t id = u.ids ? u.ids[slot] : slot;
        run(u.options, missed, u.dtype, u.dim,
            static_cast<char*>(u.weights) + slot * u.dim * element, states,
            row_stream(u.table_key, u.origin, id, static_cast<uint64_t>(now) + 1), scratch.data());
        u.last_step[slot] = now;
        if (u.changed) u.changed[slot] = u.epoch;
      }
    }
  }
}

int64_t oldest_step(const int64_t* last_step, int64_t rows, int64_t none) {
  int64_t oldest = none;
#pragma omp parallel for reduction(min : oldest) schedule(static) if (rows > (1 << 16))
  for (int64_t i = 0; i < rows; ++i) {
    int64_t step = last_step[i];
    oldest = step > 0 && step < oldest ? step : oldest;
  }
  return oldest;
}

}  // namespace hotbed
