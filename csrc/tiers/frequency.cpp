#include "tiers/frequency.hpp"

#include <cmath>
#include <cstring>
#include <utility>

namespace hotbed {

namespace {

constexpr double kStepsAnOctave = 8;
// Above this the scores are lowered; a count of 2^64 still fits between here and kScores.
constexpr double kLatest = 3072;

}  // namespace

FrequencyClock::FrequencyClock(double half_life) : steps_a_use_(kStepsAnOctave / half_life) {
  for (uint32_t apart = 0; apart < kGains; ++apart) {
    double gain = kStepsAnOctave * std::log2(1 + std::exp2(-(apart / kStepsAnOctave)));
    gains_[apart] = static_cast<uint32_t>(std::lround(gain * (1u << kFraction)));
  }
}

double FrequencyClock::uses(uint16_t score) const {
  double now = static_cast<double>(now_) / (1u << kFraction);
  return score ? std::exp2((score - now) / 8) : 0;
}

bool FrequencyClock::advance(int64_t uses) {
  time_ += static_cast<double>(uses) * steps_a_use_;
  bool late = time_ >= kLatest;
  if (late) time_ -= kStep;
  now_ = static_cast<uint32_t>(time_ * (1u << kFraction));
  return late;
}

void Ghosts::put(const RowKey& row, uint16_t score) {
  if (!lines_ || !score) return;
  uint64_t hash = hash_of(row);
  uint32_t* entries = line(hash);
  uint32_t wanted = tag(hash);
  int place = 0;
  uint32_t least = UINT32_MAX;
  for (int e = 0; e < kLine; ++e) {
    uint32_t entry = entries[e];
    // The row's own entry, if there is one, goes first of all.
    uint32_t rank = entry >> kScoreBits == wanted ? 0 : 1 + entry % FrequencyClock::kScores;
    place = rank < least ? e : place;
    least = rank < least ? rank : least;
  }
  entries[place] = wanted << kScoreBits | score;
  ++written_;
}

uint16_t Ghosts::take(const RowKey& row) {
  if (!lines_) return 0;
  uint64_t hash = hash_of(row);
  uint32_t* entries = line(hash);
  uint32_t wanted = tag(hash);
  int place = -1;
  for (int e = 0; e < kLine; ++e) place = entries[e] >> kScoreBits == wanted ? e : place;
  return place < 0 ? 0 : std::exchange(entries[place], 0) % FrequencyClock::kScores;
}

void Ghosts::lower() {
  for (int64_t e = 0; e < lines_ * kLine; ++e) {
    if (!entries_[e]) continue;  // pages that were never written stay so
    uint16_t score =
        FrequencyClock::lower(static_cast<uint16_t>(entries_[e] % FrequencyClock::kScores));
    entries_[e] = score ? (entries_[e] >> kScoreBits << kScoreBits | score) : 0;
  }
}

void Ghosts::clear() {
  if (written_) std::memset(entries_, 0, bytes());
}

}  // namespace hotbed
