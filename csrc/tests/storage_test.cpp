// Storage: how budgets are divided, and what a layout that does not fit leaves.
#include "storage/storage.hpp"

#include "check.hpp"
#include "space_fixture.hpp"

using namespace hotbed;

TEST(a_layout_that_does_not_fit_leaves_rows_where_they_are) {
  auto item = make_table("item", 400), user = make_table("user", -1);
  std::vector<std::shared_ptr<Table>> tables = {item, user};
  MakeLowest none = [](const std::vector<RecordGroup>& groups) {
    return std::vector<std::shared_ptr<Tier>>(groups.size());
  };
  Storage storage({60'000, 60'000}, none);
  storage.lay_out(tables);
  CHECK(!item->unallocated() && item->space() == user->space());
  std::vector<float> rows(300 * 3, 8);
  for (int64_t id = 0; id < 300; ++id) user->write(&id, 1, rows.data(), nullptr, nullptr);
  user->add_state("wide", 1000, 0);  // 300 of its records take 1.2 MB
  CHECK_THROWS(storage.lay_out(tables), TierError);
  CHECK(user->unallocated() && user->size() == 300);
  CHECK_THROWS(storage.lay_out(tables), TierError);
  user->clear_states();
  user->add_state("sum", 1, kState);
  storage.lay_out(tables);
  CHECK_EQ(user->stored_ids().size(), 300u);
  float row[3];
  for (int64_t id = 0; id < 300; ++id) {
    user->copy_rows(&id, 1, row, nullptr, nullptr);
    CHECK(row[0] == 8 && row[2] == 8);
  }
}

TEST(a_flush_reaches_the_disk) {
  auto user = make_table("user", -1);
  std::shared_ptr<MapTier> lowest;
  Storage storage({60'000, 60'000}, [&](const std::vector<RecordGroup>& groups) {
    lowest = std::make_shared<MapTier>(groups[0].record_bytes);
    return std::vector<std::shared_ptr<Tier>>{lowest};
  });
  storage.lay_out({user});
  int64_t id = 7;
  float row[] = {1, 2, 3};
  user->write(&id, 1, row, nullptr, nullptr);
  CHECK_EQ(lowest->rows(0), 0);
  storage.flush();
  CHECK(lowest->rows(0) == 1 && lowest->syncs == 1);
}

TEST(more_tables_than_a_space_numbers_get_two) {
  std::vector<std::shared_ptr<Table>> tables;
  for (size_t t = 0; t <= Residency::kMostTables; ++t) tables.push_back(make_table("many", 5));
  Storage storage({30'000'000, 30'000'000}, [](const std::vector<RecordGroup>& groups) {
    return std::vector<std::shared_ptr<Tier>>(groups.size());
  });
  storage.lay_out(tables);
  CHECK_EQ(storage.spaces().size(), 2u);
  CHECK(tables.back()->space() != tables.front()->space() && tables.back()->number() == 0);
  std::vector<float> row(3, 8), read(3);
  int64_t id = 4;
  tables.back()->write(&id, 1, row.data(), nullptr, nullptr);
  tables.back()->copy_rows(&id, 1, read.data(), nullptr, nullptr);
  CHECK(read == row);
}

TEST(small_tables_beside_large_ones_get_what_a_batch_needs) {
  auto small = make_table("small", 3), wide = make_table("wide", -1),
       large = make_table("large", -1);
  wide->add_state("more", 60, 0);
  small->clear_states();
  std::vector<std::shared_ptr<Table>> tables = {small, wide, large};
  MakeLowest none = [](const std::vector<RecordGroup>& groups) {
    return std::vector<std::shared_ptr<Tier>>(groups.size());
  };
  Storage storage({100'000, 100'000}, none);
  storage.lay_out(tables);
  CHECK_EQ(small->space()->capacity(), 3);
  int64_t of_wide = wide->space()->capacity(), of_large = large->space()->capacity();
  CHECK(of_wide > 100 && of_large > 100);
  // What is asked for is what suffices, and a byte less is not.
  std::vector<OverBudget::Need> needs = {{wide->space().get(), 400}, {large->space().get(), 500}};
  uint64_t budget = storage.compute_budget_for(needs).total();
  for (uint64_t bytes : {budget, budget - 1}) {
    auto a = make_table("small", 3), b = make_table("wide", -1), c = make_table("large", -1);
    b->add_state("more", 60, 0);
    a->clear_states();
    Storage other({bytes, 100'000}, none);
    other.lay_out({a, b, c});
    CHECK_EQ(b->space()->capacity() >= 400 && c->space()->capacity() >= 500, bytes == budget);
  }
  Storage tiny({5'000, 100'000}, none);
  std::string said = CHECK_THROWS(tiny.lay_out({make_table("a", -1)}), BudgetTooSmall);
  CHECK(said.find("needs at least") != std::string::npos);
}

// A lowest tier whose index grows as it is told.
struct GrowingTier : MapTier {
  using MapTier::MapTier;
  uint64_t index = 1'000;
  uint64_t index_bytes() const override { return index; }
  uint64_t memory_bytes() const override { return 4'000 + index; }
};

TEST(what_the_index_of_the_ssd_takes_slots_give_back) {
  for (bool three : {false, true}) {
    auto user = make_table("user", -1);
    user->add_state("more", 60, 0);
    std::shared_ptr<GrowingTier> lowest;
    Storage storage({100'000, three ? 150'000u : 0u}, [&](const auto& groups) {
      lowest = std::make_shared<GrowingTier>(groups[0].record_bytes);
      return std::vector<std::shared_ptr<Tier>>{lowest};
    });
    storage.lay_out({user});
    RowSpace& space = *user->space();
    auto use = [&](int64_t id) {
      TableIds part{0, &id, 1};
      int64_t slot, batch = space.admit_now({&part, 1}, &slot);
      CHECK(batch);
      space.consume(batch, false);
      auto* row = reinterpret_cast<float*>(space.weights().row(slot));
      CHECK(row[0] == kFirst || row[0] == static_cast<float>(id));
      row[0] = static_cast<float>(id);
      space.mark_dirty(batch);
      space.end(batch);
    };
    int64_t reckoned = space.limit();
    for (int64_t id = 0; id < 2 * reckoned; ++id) use(id);
    int64_t wide = space.limit();  // bookkeeping takes more than was reckoned, and is grown now
    CHECK(three ? wide == reckoned : wide > reckoned * 3 / 4 && wide < reckoned);
    if (!three) CHECK(storage.memory_bytes() <= 100'000);
    for (int64_t id = 0; id < 2 * wide; ++id) use(id);
    CHECK_EQ(space.limit(), wide);
    lowest->index += 200;  // less than is worth the while
    use(0);
    CHECK_EQ(space.limit(), wide);
    lowest->index += 50'000;
    for (int64_t id = 0; id < 2 * wide; ++id) use(id);
    CHECK_EQ(space.limit() < wide, !three);  // else the host's rows make way
    // The keys of slots that went keep theirs.
    CHECK(storage.memory_bytes() < 120'000 + (three ? 150'000u : 0u));
    lowest->index += 200'000;  // more than there is
    use(1);
    if (!three) CHECK_EQ(space.limit(), 1);
    uint64_t needed = storage.compute_budget_for({{&space, 500}}).total();
    CHECK_EQ(needed > 250'000, !three);
    for (int64_t id = 0; id < 2 * wide; ++id) {
      float row[3];
      user->copy_rows(&id, 1, row, nullptr, nullptr);
      CHECK_EQ(row[0], static_cast<float>(id));
    }
  }
}

TEST(hosts_count_rows_since_the_last_layout) {
  auto item = make_table("item", 400), user = make_table("user", -1);
  user->add_state("more", 1, 0);
  std::vector<std::shared_ptr<Table>> tables = {item, user};
  MakeLowest none = [](const std::vector<RecordGroup>& groups) {
    return std::vector<std::shared_ptr<Tier>>(groups.size());
  };
  Storage storage({60'000, 60'000}, none);
  CHECK_EQ(storage.host_traffic().rows_written, 0u);
  storage.lay_out(tables);
  CHECK_EQ(storage.spaces().size(), 2u);
  std::vector<int64_t> ids(20);
  for (int64_t i = 0; i < 20; ++i) ids[i] = i;
  std::vector<float> rows(20 * 3, 8);
  item->write(ids.data(), 20, rows.data(), nullptr, nullptr);
  user->write(ids.data(), 10, rows.data(), nullptr, nullptr);
  CHECK_EQ(storage.host_traffic().rows_written, 30u);
  CHECK_EQ(storage.host_traffic().rows_read, 0u);
  for (const auto& table : tables) table->copy_rows(ids.data(), 20, rows.data(), nullptr, nullptr);
  CHECK_EQ(storage.host_traffic().rows_read, 30u);
  CHECK_EQ(storage.lowest_traffic().rows_read, 0u);  // there is none
  storage.lay_out(tables, true);                     // the rows move into new tiers
  CHECK_EQ(storage.host_traffic().rows_written, 30u);
  CHECK_EQ(storage.host_traffic().rows_read, 0u);
}
