// What an optimizer rule keeps for a row beside its weights.
#pragma once

#include <string>
#include <vector>

#include "kernels/rule.hpp"

namespace hotbed {

// One array that a rule keeps beside the weights: dim values a row, or one.
struct StatePlane {
  std::string name;  // torch's name where torch has the state
  bool one_per_row;
  double first_value;
};

// The states of a rule in the order of RowUpdate::states.
std::vector<StatePlane> state_planes(const RuleOptions& options, double initial_accumulator_value);

}  // namespace hotbed
