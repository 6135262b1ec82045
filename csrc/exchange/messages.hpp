// Sizes of messages between ranks, and where their pieces are: for each rank a message, in it a
// piece for each shard that the owner among the two keeps, each at a multiple of kWord bytes.
#pragma once

#include <cstdint>
#include <vector>

#include "batch/pool.hpp"
#include "exchange/layout.hpp"

namespace hotbed {

constexpr int64_t kWord = 8;
constexpr int64_t kMostIds = int64_t{1} << 32;  // of a table that a rank asks for

inline int64_t rounded(int64_t bytes) { return (bytes + kWord - 1) / kWord * kWord; }
inline uint8_t* bytes(void* at) { return static_cast<uint8_t*>(at); }
inline const uint8_t* bytes(const void* at) { return static_cast<const uint8_t*>(at); }

// `piece(requester, shard)`: bytes, 0 where nothing travels. `to_owners`: it does from who asks to
// who owns, else back.
template <class Piece>
MessageSizes message_sizes(const ExchangeLayout& layout, bool to_owners, const Piece& piece) {
  std::vector<int64_t> as_requester(layout.ranks), as_owner(layout.ranks);
  for (int r = 0; r < layout.ranks; ++r) {
    for (int s : layout.kept_by[r]) as_requester[r] += piece(layout.rank, s);
    for (int s : layout.kept_by[layout.rank]) as_owner[r] += piece(r, s);
  }
  return to_owners ? MessageSizes{as_requester, as_owner} : MessageSizes{as_owner, as_requester};
}

// Where the pieces of this rank's shards are in messages of or for each rank, of the first shard
// for each rank, then of the next; nowhere where nothing travels.
template <class Piece>
std::vector<Vectors> piece_places(const ExchangeLayout& layout, const Messages& messages,
                                  const Piece& piece) {
  std::vector<Vectors> places;
  places.reserve(layout.kept_by[layout.rank].size() * layout.ranks);
  Messages next = messages;
  for (int s : layout.kept_by[layout.rank]) {
    for (int r = 0; r < layout.ranks; ++r) {
      int64_t size = piece(r, s);
      places.push_back(size ? Vectors{next[r], layout.shards[s].width} : Vectors{});
      next[r] = bytes(next[r]) + size;
    }
  }
  return places;
}

}  // namespace hotbed
