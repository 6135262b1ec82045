#include "step/table_rule.hpp"

#include <cmath>
#include <limits>
#include <thread>

#include "check.hpp"

using namespace hotbed;

namespace {

RuleOptions options_of(Rule rule) {
  RuleOptions options;
  options.rule = rule;
  return options;
}

std::shared_ptr<Table> make_table(int64_t rows, int64_t dim, DType dtype = DType::f32) {
  InitialSpec initial = initial_spec(Initial::constant, 0.5, 0, 0, 0, 42);
  return std::make_shared<Table>("item", rows, dim, dtype, initial);
}

float* row(const Table& table, int64_t slot) {
  return reinterpret_cast<float*>(table.weight_plane().row(slot));
}

Hyperparameters adam() {
  Hyperparameters hyper;
  hyper.lr = 0.1;
  hyper.beta1 = 0.9;
  hyper.beta2 = 0.99;
  hyper.eps = 1e-8;
  hyper.weight_decay = 0.1;
  return hyper;
}

}  // namespace

TEST(sgd_sums_duplicates_and_leaves_other_rows) {
  auto table = make_table(10, 3);
  TableRule rule(table, options_of(Rule::sgd), 0, false);
  std::vector<int64_t> slots = {4, 7, 4};
  std::vector<float> grads = {1, 2, 3, 10, 20, 30, 1, 1, 1};
  Hyperparameters hyper;
  hyper.lr = 0.5;
  std::vector<TableStep> steps = {{&rule, slots.data(), grads.data(), 3, hyper, false}};
  Step step(steps, {});
  CHECK(step.decide().array < 0 && rule.steps() == 0);
  step.apply();
  for (int64_t slot = 0; slot < 10; ++slot) {
    for (int j = 0; j < 3; ++j) {
      float sum = slot == 4 ? grads[j] + 1 : slot == 7 ? grads[3 + j] : 0;
      CHECK(row(*table, slot)[j] == 0.5f - 0.5f * sum);
    }
  }
  CHECK(rule.steps() == 1);
}

TEST(a_fault_is_found_before_anything_is_written) {
  auto first = make_table(5, 2), second = make_table(5, 2);
  TableRule a(first, options_of(Rule::adagrad), 0.1, false);
  TableRule b(second, options_of(Rule::adagrad), 0.1, false);
  std::vector<int64_t> slots = {3, 1};
  std::vector<float> good = {1, 1, 1, 1}, bad = {1, 1, 1, std::numeric_limits<float>::quiet_NaN()};
  Hyperparameters hyper;
  hyper.lr = 0.1;
  std::vector<TableStep> steps = {{&a, slots.data(), good.data(), 2, hyper, false},
                                  {&b, slots.data(), bad.data(), 2, hyper, false}};
  StepFault fault = Step(steps, {}).decide();
  CHECK(fault.array == 1 && fault.element == 3 && fault.slot == 1);
  std::vector<double> dense = {0, std::numeric_limits<double>::infinity()};
  std::vector<GradientView> views = {{dense.data(), 2, true}};
  steps.pop_back();
  fault = Step(steps, views).decide();
  CHECK(fault.array == 1 && fault.element == 1 && fault.slot == -1);
  CHECK(row(*first, 3)[0] == 0.5f && a.steps() == 0);
  slots[1] = 5;
  bool thrown = false;
  try {
    Step(steps, {}).decide();
  } catch (const std::out_of_range&) {
    thrown = true;
  }
  CHECK(thrown && row(*first, 3)[0] == 0.5f);
}

TEST(another_rule_takes_the_states) {
  auto table = make_table(6, 2);
  TableRule first(table, options_of(Rule::adam), 0, true);
  CHECK(table->states().size() == 2 && table->catch_up && table->last_step());
  TableRule second(table, options_of(Rule::adagrad), 0.25, false);
  CHECK(!first.holds_table() && second.holds_table());
  CHECK(table->states().size() == 1 && !table->catch_up && !table->last_step());
  CHECK(*reinterpret_cast<float*>(table->states()[0].plane.row(5)) == 0.25f);
}

TEST(reading_from_several_threads_equals_writing) {
  auto table = make_table(64, 5);
  RuleOptions options = options_of(Rule::adam);
  options.decoupled_weight_decay = true;
  TableRule rule(table, options, 0, true);
  Hyperparameters hyper = adam();
  std::vector<float> grads(64 * 5, 0.3f);
  for (int64_t s = 0; s < 40; ++s) {
    hyper.lr = 0.1 / static_cast<double>(1 + s / 7);
    std::vector<int64_t> slots;
    for (int64_t slot = s % 3; slot < 32; slot += 3 + s % 5) slots.push_back(slot);
    std::vector<TableStep> steps = {
        {&rule, slots.data(), grads.data(), static_cast<int64_t>(slots.size()), hyper, false}};
    Step step(steps, {});
    CHECK(step.decide().array < 0 && rule.steps() == s);
    step.apply();
  }
  std::vector<int64_t> all(64);
  for (int64_t slot = 0; slot < 64; ++slot) all[static_cast<size_t>(slot)] = slot;
  std::vector<std::vector<float>> seen(3, std::vector<float>(64 * 5));
  std::vector<std::thread> readers;
  for (auto& out : seen) {
    readers.emplace_back([&] { table->catch_up->read(*table, all.data(), 64, out.data()); });
  }
  for (auto& reader : readers) reader.join();
  rule.catch_up_rows(all.data(), 64);
  for (int64_t slot = 0; slot < 64; ++slot) {
    CHECK(table->last_step()[slot] == 40);
    for (int j = 0; j < 5; ++j) {
      for (auto& out : seen) CHECK(out[static_cast<size_t>(slot * 5 + j)] == row(*table, slot)[j]);
    }
  }
  // A row that no batch touched has only shrunk.
  double expected = 0.5;
  for (int64_t s = 0; s < 40; ++s) expected *= 1 - 0.1 / static_cast<double>(1 + s / 7) * 0.1;
  CHECK(std::abs(row(*table, 60)[2] - expected) < 1e-7);
}

TEST(states_round_trip) {
  auto table = make_table(8, 3, DType::f64);
  TableRule rule(table, options_of(Rule::rowwise_adam), 0, false);
  std::vector<int64_t> slots = {6, 2};
  std::vector<double> mean = {1, 2, 3, 4, 5, 6}, square = {7, 8};
  const void* in[] = {mean.data(), square.data()};
  table->write(slots.data(), 2, nullptr, in, nullptr);
  std::vector<double> mean_out(6), square_out(2);
  void* out[] = {mean_out.data(), square_out.data()};
  table->copy_rows(slots.data(), 2, nullptr, out, nullptr);
  CHECK(mean_out == mean && square_out == square);
}
