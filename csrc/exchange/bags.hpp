// Bags on their way to the owners of their rows, who pool them; vectors of these bags back; and
// gradients of the vectors to the owners. As exchange.hpp, it computes sizes and places, reads and
// writes messages, and sends nothing itself.
//
// A table of the layout is here one feature: a table that several features read is in it once for
// each. Owners sum what they have of a bag; who asks adds these sums up, where rows are split, and
// divides.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/memory.hpp"
#include "batch/batch.hpp"
#include "batch/pool.hpp"
#include "exchange/layout.hpp"

namespace hotbed {

// Bags of this rank, the ids of each feature ordered by their owners and, of one owner, as they
// come. Ids of padding are left out.
class OrderedBags {
 public:
  // `features` of a batch that was checked, one for each table of the layout.
  OrderedBags(std::shared_ptr<const ExchangeLayout> layout, const Batch& given,
              const std::vector<int>& features);

  // None.
  explicit OrderedBags(std::shared_ptr<const ExchangeLayout> layout);
  OrderedBags(const OrderedBags&) = delete;

  struct Feature {
    Combiner combiner = Combiner::sum;
    int64_t bags = 0;
    std::vector<int64_t> counts;  // ids of each owner; where rows are not split, of all
    Buffer<int64_t> ids;
    Buffer<int32_t> lengths;  // (owners, bags); none: all bags are equally long
    // What the sum of a bag is divided by, as in pool(): its length, or the root of that; 0: it is
    // empty.
    template <class T>
    T divisor(int64_t bag) const;
  };

  // What other ranks must know: of each feature its counts, then twice its bags, and one more where
  // there are lengths.
  std::vector<int64_t> numbers() const;

  // Writes the ids of a feature, and the bag of each.
  void write_positions(int feature, int64_t* ids, int64_t* of_bags) const;
  // What gradients of the ids of each bag are multiplied by, in the compute type.
  std::vector<double> inverses(int feature) const;

  const std::shared_ptr<const ExchangeLayout> layout;
  std::vector<Feature> features;
};

// One batch, once all ranks have told their numbers. Immutable. What is "here" is, in this order,
// of each shard of this rank what each rank asks of it.
class BagExchange {
 public:
  // `numbers`: of each rank those of its OrderedBags. Throws std::invalid_argument where they
  // cannot be.
  BagExchange(std::shared_ptr<const ExchangeLayout> layout, const int64_t* numbers);

  // How many numbers a rank tells.
  static int64_t width(const ExchangeLayout& layout) {
    return layout.number_of.back() + static_cast<int64_t>(layout.tables.size());
  }

  // -- ids, and lengths, to their owners --------------------------------------------------------
  MessageSizes id_sizes() const;
  void write_ids(const OrderedBags& own, const Messages& messages) const;
  struct Here {
    int64_t ids;
    int64_t bags;
    bool has_offsets;
  };
  std::vector<Here> here() const;
  // Writes the ids as the shards call them, and bags + 1 offsets for each that has some.
  void read_ids(const OrderedBags& own, const Messages& messages, int64_t* ids,
                int64_t* offsets) const;

  // -- vectors back -----------------------------------------------------------------------------
  MessageSizes vector_sizes() const;
  std::vector<Vectors> vector_places(const Messages& messages) const;
  // Writes the vectors of this rank's bags, one Vectors a feature.
  void read_vectors(const OrderedBags& own, const Messages& messages,
                    const std::vector<Vectors>& out) const;

  // -- gradients of vectors to the owners -------------------------------------------------------
  // `chosen`: for each feature whether something travels. Without data a gradient is zero. They are
  // divided by the number of ranks, which is less work than to divide sums of all their ids.
  MessageSizes given_sizes(const std::vector<bool>& chosen) const;
  void write_given(const OrderedBags& own, const std::vector<bool>& chosen,
                   const std::vector<Vectors>& given, const Messages& messages) const;
  std::vector<Vectors> given_places(const std::vector<bool>& chosen,
                                    const Messages& messages) const;

  // Vectors that a shard has for a rank: none where it owns no id of a split table.
  int64_t vectors(int rank, int shard) const;

  const std::shared_ptr<const ExchangeLayout> layout;

 private:
  struct Asked {
    int64_t begin;  // of the ids for the shard, among those of the feature
    int64_t count;
    int64_t bags;
    bool has_lengths;
  };
  const Asked& asked(int rank, int shard) const {
    return asked_[rank * layout->shards.size() + shard];
  }
  // Whether the owner of a shard answers a rank.
  bool answers(int shard, int rank) const {
    return !layout->shards[shard].replica || layout->shards[shard].rank == rank;
  }
  bool is_split(int shard) const {
    return layout->tables[layout->shards[shard].table].owner_rule.has_value();
  }
  int64_t lengths_bytes(int rank, int shard) const;
  int64_t id_bytes(int rank, int shard) const;
  int64_t piece_bytes(int rank, int shard) const;
  int64_t answer_bytes(int rank, int shard) const {
    return answers(shard, rank) ? piece_bytes(rank, shard) : 0;
  }
  const std::vector<int>& mine() const { return layout->kept_by[layout->rank]; }

  std::vector<Asked> asked_;
};

}  // namespace hotbed
