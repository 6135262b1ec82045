// The optimizer rules as kernels take them: which there are, what one step needs to know, and what
// one call updates. The arithmetic lies in kernels/rules.inl, the formulas in docs/optimizers.md.
#pragma once

#include <cstdint>

#include "base/dtype.hpp"
#include "base/random.hpp"

namespace hotbed {

enum class Rule : int {
  sgd = 0,
  adagrad = 1,
  rowwise_adagrad = 2,
  adam = 3,  // AdamW is adam with decoupled_weight_decay
  rowwise_adam = 4,
  adamax = 5,
  adadelta = 6,
  rmsprop = 7,
  ftrl = 8,
};

constexpr int kRules = 9;
constexpr int kMaxStates = 3;

// What decides which states a row has and which code runs. Fixed for the life of an optimizer.
struct RuleOptions {
  Rule rule = Rule::sgd;
  bool momentum = false;  // sgd, rmsprop: keep a momentum buffer
  bool nesterov = false;  // sgd
  bool amsgrad = false;   // adam, rowwise_adam
  bool centered = false;  // rmsprop
  bool maximize = false;
  bool plain_eps = false;  // adam: eps beside the uncorrected root, as torch's SparseAdam has it
  bool decoupled_weight_decay =
      false;  // shrink the row by lr * weight_decay instead of adding to g

  bool operator==(const RuleOptions&) const = default;
};

// The numbers of one step; a schedule may change any of them between steps.
struct Hyperparameters {
  double lr = 0;
  double momentum = 0;   // sgd, rmsprop
  double dampening = 0;  // sgd
  double beta1 = 0;      // adam, rowwise_adam, adamax
  double beta2 = 0;      // adam, rowwise_adam, adamax
  double alpha = 0;      // decay of the mean square: alpha of rmsprop, rho of adadelta
  double eps = 0;
  double weight_decay = 0;  // L2, added to the gradient unless decoupled
  double lr_decay = 0;      // adagrad, rowwise_adagrad: lr / (1 + (step - 1) * lr_decay)
  double lr_power = -0.5;   // ftrl: never positive; the rate falls as accumulator^lr_power
  double l1 = 0;            // ftrl
  double l2 = 0;            // ftrl
  double l2_shrinkage = 0;  // ftrl
  double beta = 0;          // ftrl

  bool operator==(const Hyperparameters&) const = default;
};

// One table's share of a step. Rows lie dim elements apart. States are double for f64 rows and
// float for all others, and so are the gradient rows.
struct RowUpdate {
  RuleOptions options;
  Hyperparameters hyper;
  void* weights = nullptr;
  DType dtype = DType::f32;
  int64_t dim = 0;
  void* states[kMaxStates] = {};
  const int64_t* slots = nullptr;  // each slot at most once
  const void* grads = nullptr;     // count x dim
  int64_t count = 0;
  const int64_t* ids = nullptr;  // id of each slot of the table; nullptr: the slot is the id
  uint64_t table_key = 0;        // with id, column and step: the bits of stochastic rounding
  Origin origin;                 // of the table
  int64_t step = 0;              // of this update, from 1
  int64_t* last_step =
      nullptr;  // per slot, the step up to which the row is current; may be nullptr
};

}  // namespace hotbed
