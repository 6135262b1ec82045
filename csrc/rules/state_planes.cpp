#include "rules/state_planes.hpp"

namespace hotbed {

namespace {

consteval bool is_in_order() {
  for (size_t k = 0; k < std::size(kRuleKinds); ++k) {
    if (kRuleKinds[k].rule != static_cast<Rule>(k)) return false;
  }
  return true;
}
static_assert(is_in_order());

}  // namespace

const RuleKind& kind_of(Rule rule) { return kRuleKinds[static_cast<int>(rule)]; }

std::vector<StatePlane> state_planes(const RuleOptions& o, double initial_accumulator_value) {
  std::vector<StatePlane> planes;
  for (const StateKind& state : kind_of(o.rule).states) {
    if (!state.name || (state.only_with && !(o.*state.only_with))) continue;
    double first = state.is_accumulator ? initial_accumulator_value : 0;
    planes.push_back({state.name, state.one_per_row, first});
  }
  return planes;
}

}  // namespace hotbed
