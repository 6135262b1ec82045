// What a log may take: never more than it says, and never less of a larger budget.
#include "log/log_sizes.hpp"

#include <vector>

#include "check.hpp"
#include "log/io_engine.hpp"
#include "log/log_writer.hpp"

using namespace hotbed;

TEST(a_log_takes_no_more_than_it_says) {
  const std::vector<std::vector<int64_t>> stores = {
      {16}, {768}, {20'000}, {16, 768}, std::vector<int64_t>(40, 64), {1 << 20}};
  for (const auto& record_bytes : stores) {
    uint64_t before = 0;
    for (uint64_t budget = 1; budget < uint64_t{1} << 34; budget += 1 + budget / 50) {
      LogSizes sizes(budget, record_bytes);
      uint64_t buffers =
          LogWriter::buffers(sizes.append_bytes, sizes.buffer_bytes, record_bytes.size());
      CHECK(IoEngine::kArenas * sizes.arena_bytes + buffers * sizes.buffer_bytes <= sizes.bytes);
      CHECK(sizes.bytes >= before);
      CHECK(sizes.arena_bytes % 4096 == 0 && sizes.buffer_bytes % 4096 == 0);
      before = sizes.bytes;
    }
  }
}

TEST(a_small_budget_is_left_to_rows) {
  const std::vector<int64_t> record_bytes = {768};
  for (uint64_t budget : {4u << 20, 13u << 20, 64u << 20}) {
    CHECK(LogSizes(budget, record_bytes).bytes <= budget / 9);
  }
  CHECK(LogSizes(300'000, record_bytes).bytes < 180'000);
  CHECK(LogSizes(uint64_t{8} << 30, record_bytes).bytes >= 16u << 20);  // what a fast disk needs
}
