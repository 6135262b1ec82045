#include "index/key_index.hpp"

#include <algorithm>
#include <limits>
#include <random>
#include <thread>
#include <unordered_map>

#include "base/random.hpp"
#include "check.hpp"
#include "testing/pretended_memory.hpp"

using hotbed::KeyIndex;

namespace {

using Oracle = std::unordered_map<int64_t, int64_t>;
using Numbers = std::vector<int64_t>;

constexpr int64_t kLowest = std::numeric_limits<int64_t>::min();
constexpr int64_t kHighest = std::numeric_limits<int64_t>::max();

// Compares everything there is to see of the index with the oracle, by batches of odd sizes.
void check_same(const KeyIndex& index, const Oracle& oracle, const Numbers& absent = {}) {
  CHECK_EQ(index.size(), static_cast<int64_t>(oracle.size()));
  Numbers keys, expected;
  for (auto [key, slot] : oracle) {
    keys.push_back(key);
    expected.push_back(slot);
  }
  for (int64_t key : absent) {
    if (oracle.count(key)) continue;
    keys.push_back(key);
    expected.push_back(-1);
  }
  Numbers slots(keys.size(), -7);
  auto n = static_cast<int64_t>(keys.size());
  for (int64_t begin = 0, batch = 1; begin < n; begin += batch, batch = batch * 3 + 1) {
    index.find(&keys[begin], std::min(batch, n - begin), &slots[begin]);
  }
  CHECK(slots == expected);
  int64_t visited = 0;
  index.for_each([&](int64_t key, int64_t slot) {
    ++visited;
    auto known = oracle.find(key);
    CHECK(known != oracle.end());
    CHECK_EQ(known->second, slot);
  });
  CHECK_EQ(visited, index.size());
}

void insert_like(KeyIndex& index, Oracle& oracle, const Numbers& keys, int64_t first_free) {
  Numbers expected, expected_positions;
  for (int64_t i = 0; i < static_cast<int64_t>(keys.size()); ++i) {
    auto [entry, is_new] =
        oracle.emplace(keys[i], first_free + static_cast<int64_t>(expected_positions.size()));
    expected.push_back(entry->second);
    if (is_new) expected_positions.push_back(i);
  }
  Numbers slots(keys.size(), -7), positions(keys.size(), -7);
  int64_t inserted = index.find_or_insert(keys.data(), static_cast<int64_t>(keys.size()),
                                          slots.data(), first_free, positions.data());
  positions.resize(inserted);
  CHECK(slots == expected);
  CHECK(positions == expected_positions);
}

// The key that mix() turns into this hash: its steps undone in reverse.
int64_t key_of_hash(uint64_t x) {
  auto unshift = [](uint64_t y, int shift) {
    uint64_t value = y;
    for (int known = shift; known < 64; known += shift) value = y ^ (value >> shift);
    return value;
  };
  auto inverse = [](uint64_t odd) {
    uint64_t result = odd;
    for (int step = 0; step < 6; ++step) result *= 2 - odd * result;
    return result;
  };
  x = unshift(x, 31) * inverse(0x94d049bb133111ebull);
  x = unshift(x, 27) * inverse(0xbf58476d1ce4e5b9ull);
  return static_cast<int64_t>(unshift(x, 30));
}

}  // namespace

TEST(replaces_slots_of_present_keys_only) {
  std::mt19937_64 random(5);
  KeyIndex index("the index of table 'item'");
  Oracle oracle;
  Numbers keys;
  for (int i = 0; i < 50000; ++i) keys.push_back(static_cast<int64_t>(random()));
  insert_like(index, oracle, keys, 0);
  for (int round = 0; round < 3; ++round) {
    Numbers asked, slots, expected;
    for (int64_t i = 0; i < 20000; ++i) {
      asked.push_back(i % 5 ? keys[random() % keys.size()] : static_cast<int64_t>(random()));
      slots.push_back(1000000 * (round + 1) + i);
      auto known = oracle.find(asked.back());
      expected.push_back(known == oracle.end() ? -1 : known->second);
      if (known != oracle.end()) known->second = slots.back();
    }
    Numbers previous(asked.size(), -7);
    index.update(asked.data(), static_cast<int64_t>(asked.size()), slots.data(), previous.data());
    CHECK(previous == expected);
    check_same(index, oracle, asked);
  }
}

TEST(an_empty_index_finds_nothing) {
  KeyIndex index;
  Oracle oracle;
  check_same(index, oracle, {0, -1, 1, kLowest, kHighest});
  CHECK_EQ(index.erase(0), -1);
  CHECK_EQ(index.find_or_insert(nullptr, 0, nullptr, 0), 0);
  CHECK_EQ(index.size(), 0);
  CHECK(index.memory_bytes() < 1000);
}

TEST(every_int64_is_a_key) {
  KeyIndex index;
  Oracle oracle;
  Numbers keys = {0, -1, 1, kLowest, kHighest, kLowest + 1, kHighest - 1, int64_t{1} << 32};
  insert_like(index, oracle, keys, 0);
  check_same(index, oracle, {2, -2, 3});
  for (int64_t key : keys) {
    CHECK_EQ(index.erase(key), oracle.at(key));
    CHECK_EQ(index.erase(key), -1);
    oracle.erase(key);
    check_same(index, oracle, keys);
  }
}

TEST(single_inserts_refuse_present_keys) {
  KeyIndex index;
  CHECK(index.insert(5, 7));
  CHECK(!index.insert(5, 8));
  CHECK(index.insert(6, KeyIndex::kSlotLimit - 1));
  check_same(index, {{5, 7}, {6, KeyIndex::kSlotLimit - 1}});
}

TEST(a_key_twice_in_a_batch_gets_one_slot) {
  KeyIndex index;
  Oracle oracle;
  insert_like(index, oracle, {9, 9, 4, 9, 4, 0, 0, -1}, 10);
  CHECK_EQ(oracle.at(-1), 13);
  insert_like(index, oracle, {-1, 3, 3, 4, 2, 3}, 14);
  check_same(index, oracle, {1});
}

TEST(reused_slots_come_first) {
  KeyIndex index;
  Numbers keys = {10, 11, 10, 12, 13, 11, 14}, slots(keys.size()), reused = {77, 5, 40};
  int64_t inserted =
      index.find_or_insert(keys.data(), 7, slots.data(), hotbed::FreshSlots{100, reused.data(), 3});
  CHECK_EQ(inserted, 5);
  CHECK(slots == (Numbers{77, 5, 77, 40, 100, 5, 101}));
}

TEST(random_operations_agree_with_unordered_map) {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    std::mt19937_64 random(seed);
    // From crowded ranges, where most keys return, to wide ones.
    int64_t range = int64_t{1} << (4 + 2 * static_cast<int>(seed));
    auto draw = [&] {
      return static_cast<int64_t>(random() % static_cast<uint64_t>(range)) - range / 2;
    };
    KeyIndex index;
    Oracle oracle;
    int64_t next = 0;
    for (int step = 0; step < 120; ++step) {
      Numbers keys(random() % 2000);
      for (int64_t& key : keys) key = draw();
      if (random() % 5 == 0) {
        Numbers slots(keys.size());
        int64_t present = 0;
        for (size_t i = 0; i < keys.size(); ++i) {
          slots[i] = next + static_cast<int64_t>(i);
          auto known = oracle.find(keys[i]);
          if (known == oracle.end()) continue;
          known->second = slots[i];  // of duplicates the last wins
          ++present;
        }
        next += static_cast<int64_t>(keys.size());
        CHECK_EQ(index.update(keys.data(), static_cast<int64_t>(keys.size()), slots.data()),
                 present);
      } else if (random() % 3 == 0) {
        Numbers expected;
        for (int64_t key : keys) {
          auto known = oracle.find(key);
          expected.push_back(known == oracle.end() ? -1 : known->second);
          if (known != oracle.end()) oracle.erase(known);
        }
        auto before = static_cast<int64_t>(oracle.size());
        int64_t size = index.size();
        Numbers slots = keys;  // in place
        int64_t erased = index.erase(slots.data(), static_cast<int64_t>(keys.size()), slots.data());
        CHECK(slots == expected);
        CHECK_EQ(erased, size - before);
      } else {
        insert_like(index, oracle, keys, next);
        next += static_cast<int64_t>(keys.size());
      }
      if (step % 30 == 29) check_same(index, oracle, keys);
    }
    Numbers absent(1000);
    for (int64_t& key : absent) key = draw();
    check_same(index, oracle, absent);
  }
}

TEST(patterns_of_keys_grow_alike) {
  struct Pattern {
    const char* name;
    int64_t (*key)(int64_t i);
  };
  constexpr int64_t kCount = 150000;  // several splits of every segment
  const Pattern patterns[] = {
      {"sequential", [](int64_t i) { return i; }},
      {"negative", [](int64_t i) { return -i - 1; }},
      {"multiples of 2^32",
       [](int64_t i) { return static_cast<int64_t>(static_cast<uint64_t>(i - kCount / 2) << 32); }},
      {"only high bits",
       [](int64_t i) { return static_cast<int64_t>(static_cast<uint64_t>(i) << 46); }},
      {"multiples of 4096", [](int64_t i) { return i * 4096; }},
      {"from the lowest", [](int64_t i) { return kLowest + i; }},
      {"two fields", [](int64_t i) { return (i % 300) << 40 | i / 300; }},
      {"already mixed", [](int64_t i) { return static_cast<int64_t>(hotbed::mix(i + 1)); }},
  };
  for (const Pattern& pattern : patterns) {
    KeyIndex index;
    Oracle oracle;
    Numbers keys, absent;
    for (int64_t i = 0; i < kCount; ++i) {
      keys.push_back(pattern.key(i));
      if (keys.size() == 8191 || i + 1 == kCount) {
        insert_like(index, oracle, keys, index.size());
        keys.clear();
      }
      absent.push_back(pattern.key(i) + 1);
    }
    CHECK_EQ(index.size(), kCount);
    check_same(index, oracle, absent);
    double bytes_per_key = static_cast<double>(index.memory_bytes()) / kCount;
    if (bytes_per_key > 28) std::cerr << pattern.name << ": " << bytes_per_key << " bytes a key\n";
    CHECK(bytes_per_key <= 28);  // segments are few here; 22 to 24 in large tables
  }
}

TEST(erased_room_is_used_again) {
  KeyIndex index;
  Numbers keys(50000), slots(keys.size());
  for (int round = 0; round < 20; ++round) {
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i) * 20 + round;
    CHECK_EQ(index.find_or_insert(keys.data(), 50000, slots.data(), 0), 50000);
    CHECK_EQ(index.erase(keys.data(), 50000, slots.data()), 50000);
    CHECK_EQ(slots[49999], 49999);
  }
  CHECK_EQ(index.size(), 0);
  CHECK(index.memory_bytes() < 50000 * 45);
}

TEST(slots_are_32_bit) {
  KeyIndex index("the index of table 'item'");
  Oracle oracle;
  insert_like(index, oracle, {1, 2}, KeyIndex::kSlotLimit - 4);
  Numbers keys = {3, 2, 4, 3, 5, 6, 7}, slots(7), positions(7);
  std::string message =
      CHECK_THROWS(index.find_or_insert(keys.data(), 7, slots.data(), KeyIndex::kSlotLimit - 2,
                                        positions.data()),
                   std::length_error);
  CHECK(message.find("table 'item'") != std::string::npos);
  CHECK(message.find("key 5") != std::string::npos);
  CHECK(message.find("4294967294") != std::string::npos);
  check_same(index, oracle, keys);
  CHECK_THROWS(index.insert(9, -1), std::length_error);
  CHECK_THROWS(index.insert(9, KeyIndex::kSlotLimit), std::length_error);
  CHECK_THROWS(index.find_or_insert(keys.data(), 7, slots.data(), -2), std::length_error);
  Numbers present = {1, 2}, outside = {3, KeyIndex::kSlotLimit};
  CHECK_THROWS(index.update(present.data(), 2, outside.data()), std::length_error);
  check_same(index, oracle, keys);
  CHECK_THROWS(index.reserve(KeyIndex::kSlotLimit + 1), std::length_error);
  check_same(index, oracle, keys);
}

TEST(a_bulk_insert_happens_wholly_or_not) {
  KeyIndex index;
  Numbers keys(40000), slots(keys.size());
  Oracle oracle;
  for (size_t i = 0; i < keys.size(); ++i) {
    keys[i] = static_cast<int64_t>(i) * 3;
    slots[i] = static_cast<int64_t>(keys.size() - i);
    oracle[keys[i]] = slots[i];
  }
  keys[39999] = 6;
  std::string message =
      CHECK_THROWS(index.insert(keys.data(), 40000, slots.data()), std::invalid_argument);
  CHECK(message.find("key 6 ") != std::string::npos);
  check_same(index, {}, keys);
  keys[39999] = 39999 * 3;
  index.insert(keys.data(), 40000, slots.data());
  check_same(index, oracle, {1, 2});
}

TEST(running_out_of_memory_changes_nothing) {
  KeyIndex index("the index of table 'item'");
  Oracle oracle;
  Numbers keys(200000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i);
  insert_like(index, oracle, keys, 0);

  hotbed::pretend_memory(1 << 20);
  CHECK_THROWS(index.reserve(100'000'000), hotbed::OutOfMemory);
  // Enough new keys to need a chunk that is large enough to be checked.
  Numbers more(2'500'000), slots(more.size());
  for (size_t i = 0; i < more.size(); ++i) more[i] = static_cast<int64_t>(i) - 1000;
  std::string message = CHECK_THROWS(
      index.find_or_insert(more.data(), static_cast<int64_t>(more.size()), slots.data(), 200000),
      hotbed::OutOfMemory);
  CHECK(message.find("table 'item'") != std::string::npos);
  check_same(index, oracle, more);
  hotbed::pretend_memory(0);
  insert_like(index, oracle, more, 200000);
  check_same(index, oracle);
}

TEST(reserved_memory_is_enough) {
  KeyIndex index;
  index.reserve(1'000'000);
  uint64_t before = index.memory_bytes();
  CHECK(before < 100'000);
  hotbed::pretend_memory(1);
  Numbers keys(1'000'000), slots(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i) << 20;
  CHECK_EQ(index.find_or_insert(keys.data(), 1'000'000, slots.data(), 0), 1'000'000);
  hotbed::pretend_memory(0);
  CHECK(index.memory_bytes() < 24'500'000);
}

TEST(clear_empties_and_the_index_works_on) {
  KeyIndex index;
  Oracle oracle;
  Numbers keys(60000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i) * 7;
  insert_like(index, oracle, keys, 0);
  index.clear();
  CHECK(index.memory_bytes() < 1'000'000);
  check_same(index, {}, keys);
  oracle.clear();
  insert_like(index, oracle, keys, 5);
  check_same(index, oracle);
}

// Keys made to land in one bucket: every one but five lives beyond its home.
TEST(keys_of_one_bucket_are_found_and_erased) {
  KeyIndex index;
  Oracle oracle;
  Numbers filler(9000), keys;
  for (size_t i = 0; i < filler.size(); ++i) filler[i] = -static_cast<int64_t>(i) - 1;
  insert_like(index, oracle, filler, 0);
  for (uint64_t i = 0; i < 1500; ++i) keys.push_back(key_of_hash(i << 40 | 4090));
  CHECK_EQ(hotbed::mix(static_cast<uint64_t>(keys[7])), uint64_t{7} << 40 | 4090);
  insert_like(index, oracle, keys, 9000);
  check_same(index, oracle);
  std::mt19937_64 random(3);
  std::shuffle(keys.begin(), keys.end(), random);
  for (size_t i = 0; i < keys.size(); ++i) {
    CHECK_EQ(index.erase(keys[i]), oracle.at(keys[i]));
    oracle.erase(keys[i]);
    if (i % 300 == 0) check_same(index, oracle, keys);
  }
  check_same(index, oracle, keys);
}

// 16 buckets, and two keys far from home that leave all of them with overflow.
TEST(a_search_ends_though_every_bucket_leads_on) {
  KeyIndex index;
  Oracle oracle;
  for (uint64_t home : {0, 8}) {
    Numbers keys;
    for (uint64_t i = 0; i < 63; ++i) keys.push_back(key_of_hash((i + 100 * home) << 32 | home));
    insert_like(index, oracle, keys, static_cast<int64_t>(100 * home));
    keys.pop_back();
    Numbers erased(keys.size());
    index.erase(keys.data(), 62, erased.data());
    for (int64_t key : keys) oracle.erase(key);
  }
  CHECK(index.memory_bytes() < 2000);
  check_same(index, oracle, {key_of_hash(5), key_of_hash(8), key_of_hash(15)});
  CHECK_EQ(index.erase(key_of_hash(3)), -1);
  insert_like(index, oracle, {key_of_hash(3), key_of_hash(11)}, 7);
  check_same(index, oracle);
}

TEST(keys_that_no_split_separates_are_refused) {
  KeyIndex index;
  Numbers keys(30000), slots(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    keys[i] = key_of_hash(0x123456789abcdef0ull + static_cast<uint64_t>(i));
  }
  Oracle oracle;
  insert_like(index, oracle, {1, 2, 3}, 0);
  std::string message =
      CHECK_THROWS(index.find_or_insert(keys.data(), 30000, slots.data(), 3), std::length_error);
  CHECK(message.find("Hash the ids") != std::string::npos);
  check_same(index, oracle, keys);
}

// From plain pages to huge ones, also where room was set aside in between.
TEST(a_small_index_becomes_a_large_one) {
  for (bool reserved : {false, true}) {
    KeyIndex index;
    std::vector<int64_t> keys(1000), slots(1000);
    for (int64_t first = 0; first < 400'000; first += 1000) {
      for (int64_t i = 0; i < 1000; ++i) keys[i] = (first + i) * 977;
      CHECK_EQ(index.find_or_insert(keys.data(), 1000, slots.data(), first), 1000);
      if (first < 120'000)
        CHECK(index.memory_bytes() < 600'000 + 24 * static_cast<uint64_t>(first));
      if (first == 50'000) CHECK_EQ(index.erase(keys[0]), first);
      if (reserved && first == 100'000) index.reserve(1'000'000);
    }
    for (int64_t k = 0; k < 400'000; ++k) {
      int64_t key = k * 977, slot;
      index.find(&key, 1, &slot);
      CHECK_EQ(slot, k == 50'000 ? -1 : k);
    }
    CHECK(index.memory_bytes() <= KeyIndex::bytes_for(400'000));
  }
}

TEST(bytes_for_is_what_a_grown_index_takes_at_most) {
  KeyIndex index;
  CHECK_EQ(KeyIndex::bytes_for(0), 0u);
  std::vector<int64_t> slots;
  for (int64_t size = 0; size < 300'000;) {
    int64_t more = std::max<int64_t>(1, size / 50);
    Numbers keys(static_cast<size_t>(more));
    for (int64_t i = 0; i < more; ++i) keys[i] = static_cast<int64_t>(hotbed::mix(size + i));
    slots.resize(keys.size());
    index.find_or_insert(keys.data(), more, slots.data(), size);
    size += more;
    CHECK(index.memory_bytes() <= KeyIndex::bytes_for(size));
    CHECK(KeyIndex::bytes_for(size - 1) <= KeyIndex::bytes_for(size));
    CHECK(KeyIndex::bytes_for(size) <= static_cast<uint64_t>(size) * 63 + 1100 || size < 40'000);
  }
  CHECK_EQ(KeyIndex::bytes_for(INT64_MAX), UINT64_MAX);
}

TEST(readers_run_together) {
  KeyIndex index;
  Numbers keys(100000), slots(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(hotbed::mix(i));
  index.find_or_insert(keys.data(), 100000, slots.data(), 0);
  std::vector<Numbers> found(4, Numbers(keys.size()));
  std::vector<std::thread> threads;
  for (Numbers& mine : found) {
    threads.emplace_back([&index, &keys, &mine] {
      index.find(keys.data(), static_cast<int64_t>(keys.size()), mine.data());
      int64_t sum = 0;
      index.for_each([&sum](int64_t, int64_t slot) { sum += slot; });
      CHECK_EQ(sum, int64_t{99999} * 100000 / 2);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Numbers& mine : found) CHECK(mine == slots);
}
