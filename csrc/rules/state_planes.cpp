#include "rules/state_planes.hpp"

namespace hotbed {

std::vector<StatePlane> state_planes(const RuleOptions& o, double initial_accumulator_value) {
  std::vector<StatePlane> planes;
  switch (o.rule) {
    case Rule::sgd:
      if (o.momentum) planes.push_back({"momentum_buffer", false, 0});
      break;
    case Rule::adagrad: planes.push_back({"sum", false, initial_accumulator_value}); break;
    case Rule::rowwise_adagrad: planes.push_back({"sum", true, initial_accumulator_value}); break;
    case Rule::adam:
    case Rule::rowwise_adam: {
      bool one_per_row = o.rule == Rule::rowwise_adam;
      planes.push_back({"exp_avg", false, 0});
      planes.push_back({"exp_avg_sq", one_per_row, 0});
      if (o.amsgrad) planes.push_back({"max_exp_avg_sq", one_per_row, 0});
      break;
    }
    case Rule::adamax:
      planes.push_back({"exp_avg", false, 0});
      planes.push_back({"exp_inf", false, 0});
      break;
    case Rule::adadelta:
      planes.push_back({"square_avg", false, 0});
      planes.push_back({"acc_delta", false, 0});
      break;
    case Rule::rmsprop:
      planes.push_back({"square_avg", false, 0});
      if (o.centered) planes.push_back({"grad_avg", false, 0});
      if (o.momentum) planes.push_back({"momentum_buffer", false, 0});
      break;
    case Rule::ftrl:
      planes.push_back({"accumulator", false, initial_accumulator_value});
      planes.push_back({"linear", false, 0});
      break;
  }
  return planes;
}

}  // namespace hotbed
