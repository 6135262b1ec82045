// Rising ids in memory that others keep, such as a mapped file.
#pragma once

#include <cstdint>
#include <vector>

namespace hotbed {

// Finds ids by two binary searches: over the first id of each block, of which it keeps a copy (1/64
// of the ids), and in one block, 512 bytes. So an id costs at most two pages of the file.
//
// Ids that do not rise, as of a damaged file, may not be found; nothing outside is read.
//
// Threads: find() may run in several.
class SortedIds {
 public:
  SortedIds() = default;
  // Reads an id of each block.
  SortedIds(const int64_t* ids, int64_t count);

  // Writes where each of n ids lies, or -1.
  void find(const int64_t* wanted, int64_t n, int64_t* at) const;

 private:
  const int64_t* ids_ = nullptr;
  int64_t count_ = 0;
  std::vector<int64_t> first_;
};

}  // namespace hotbed
