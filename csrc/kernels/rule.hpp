// The optimizer rules as data: what a rule keeps for a row, what one step of it needs to know, and
// what one call updates. A rule is declared here, in kRuleKinds; its arithmetic lies in
// kernels/rules.inl, its formula in docs/optimizers.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

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

// The options by name.
inline constexpr struct {
  const char* name;
  bool RuleOptions::* member;
} kOptions[] = {
    {"momentum", &RuleOptions::momentum},
    {"nesterov", &RuleOptions::nesterov},
    {"amsgrad", &RuleOptions::amsgrad},
    {"centered", &RuleOptions::centered},
    {"maximize", &RuleOptions::maximize},
    {"plain_eps", &RuleOptions::plain_eps},
    {"decoupled_weight_decay", &RuleOptions::decoupled_weight_decay},
};
static_assert((sizeof(Rule) + std::size(kOptions) + 3) / 4 * 4 == sizeof(RuleOptions));

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

// The numbers by name.
inline constexpr struct {
  const char* name;
  double Hyperparameters::* member;
} kNumbers[] = {
    {"lr", &Hyperparameters::lr},
    {"momentum", &Hyperparameters::momentum},
    {"dampening", &Hyperparameters::dampening},
    {"beta1", &Hyperparameters::beta1},
    {"beta2", &Hyperparameters::beta2},
    {"alpha", &Hyperparameters::alpha},
    {"eps", &Hyperparameters::eps},
    {"weight_decay", &Hyperparameters::weight_decay},
    {"lr_decay", &Hyperparameters::lr_decay},
    {"lr_power", &Hyperparameters::lr_power},
    {"l1", &Hyperparameters::l1},
    {"l2", &Hyperparameters::l2},
    {"l2_shrinkage", &Hyperparameters::l2_shrinkage},
    {"beta", &Hyperparameters::beta},
};
static_assert(sizeof(double) * std::size(kNumbers) == sizeof(Hyperparameters));

// How missed steps without a gradient are made up for at once; see docs/optimizers.md.
enum class Missed {
  unknown,          // they cannot be: the rule has no untouched="exact"
  linear,           // weight and buffer are multiplied by a matrix
  replays,          // the changes by the first moment are added up, over the root of the last state
  replays_largest,  // likewise, over the last state itself
  last_step,        // the weight is a function of its states and the numbers of the last step
};

// A state that a rule declares: dim values a row, or one.
struct StateKind {
  const char* name = nullptr;  // torch's name where torch has the state; nullptr: there is none
  bool one_per_row = false;
  bool is_accumulator = false;              // begins at the initial accumulator value, not at 0
  bool RuleOptions::* only_with = nullptr;  // there with this option only
};

struct RuleKind {
  Rule rule;
  const char* name;
  StateKind states[kMaxStates];  // in the order of RowUpdate::states
  Missed missed = Missed::unknown;
  double Hyperparameters::* second = nullptr;  // decay of the states that fade by it
  bool follows_l2 = false;                     // L2 in the gradient leaves missed steps linear
};

inline constexpr RuleKind kRuleKinds[] = {
    {.rule = Rule::sgd,
     .name = "sgd",
     .states = {{.name = "momentum_buffer", .only_with = &RuleOptions::momentum}},
     .missed = Missed::linear,
     .follows_l2 = true},
    {.rule = Rule::adagrad,
     .name = "adagrad",
     .states = {{.name = "sum", .is_accumulator = true}},
     .missed = Missed::linear},
    {.rule = Rule::rowwise_adagrad,
     .name = "rowwise_adagrad",
     .states = {{.name = "sum", .one_per_row = true, .is_accumulator = true}},
     .missed = Missed::linear},
    {.rule = Rule::adam,
     .name = "adam",
     .states = {{.name = "exp_avg"},
                {.name = "exp_avg_sq"},
                {.name = "max_exp_avg_sq", .only_with = &RuleOptions::amsgrad}},
     .missed = Missed::replays,
     .second = &Hyperparameters::beta2},
    {.rule = Rule::rowwise_adam,
     .name = "rowwise_adam",
     .states = {{.name = "exp_avg"},
                {.name = "exp_avg_sq", .one_per_row = true},
                {.name = "max_exp_avg_sq",
                 .one_per_row = true,
                 .only_with = &RuleOptions::amsgrad}},
     .missed = Missed::replays,
     .second = &Hyperparameters::beta2},
    {.rule = Rule::adamax,
     .name = "adamax",
     .states = {{.name = "exp_avg"}, {.name = "exp_inf"}},
     .missed = Missed::replays_largest,
     .second = &Hyperparameters::beta2},
    {.rule = Rule::adadelta,
     .name = "adadelta",
     .states = {{.name = "square_avg"}, {.name = "acc_delta"}},
     .missed = Missed::linear,
     .second = &Hyperparameters::alpha},
    {.rule = Rule::rmsprop,
     .name = "rmsprop",
     .states = {{.name = "square_avg"},
                {.name = "grad_avg", .only_with = &RuleOptions::centered},
                {.name = "momentum_buffer", .only_with = &RuleOptions::momentum}},
     .missed = Missed::linear,
     .second = &Hyperparameters::alpha},
    {.rule = Rule::ftrl,
     .name = "ftrl",
     .states = {{.name = "accumulator", .is_accumulator = true}, {.name = "linear"}},
     .missed = Missed::last_step},
};

// The declaration of a rule.
const RuleKind& kind_of(Rule rule);

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
      nullptr;                 // per slot, the step up to which the row is current; may be nullptr
  uint8_t* changed = nullptr;  // per slot, becomes `epoch` where a row changes; may be nullptr
  uint8_t epoch = 0;
};

}  // namespace hotbed
