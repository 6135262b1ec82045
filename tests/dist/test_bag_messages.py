"""Messages of bags between ranks, in one process: owners read what was written for them, and so back."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from dist.test_exchanged_messages import DIM, DTYPES, ROWS, World, addresses
from torch import Tensor

from hotbed import _core
from hotbed.inputs.bags import Bags, core_input
from hotbed.tables import COMBINERS, SUMMED


class Asked:
    """Bags of one rank, of one feature for each table."""

    def __init__(self, world: World, rank: int, combiners: list[str], draw: random.Random) -> None:
        self.count = draw.choice([0, 1, 9])
        self.bags: list[list[Tensor]] = []
        """Without padding."""
        self.combiners, self._kept = combiners, list[Any]()
        cores, inputs = [], []
        for t, (name, dim, dtype, _, padding) in enumerate(world.tables):
            fixed = draw.choice([None, 0, 5])
            lengths = [draw.randint(0, 6) if fixed is None else fixed for _ in range(self.count)]
            ids = torch.tensor([draw.randrange(ROWS) for _ in range(sum(lengths))]).long()
            self.bags.append(
                [some[some != (-1 if padding is None else padding)] for some in ids.split(lengths)]
            )
            offsets = torch.tensor([0, *lengths]).cumsum(0) if fixed is None else None
            given = ids.int() if draw.random() < 0.3 else ids
            bag = Bags(given, offsets, fixed or 0, self.count, None, self.count, None, False)
            zeros = [(dim, 0, 0.0, 0.0, 0.0, 0.0)]
            cores.append(_core.Table.make(name, ROWS, dim, dtype, zeros, 0, padding))
            inputs.append(core_input(t, COMBINERS.index(combiners[t]), bag))
            self._kept.append(bag)
        batch = _core.Batch.make(cores, inputs)
        assert batch.check()[0] == 0
        self.own = _core.OrderedBags(world.layouts[rank], batch, range(len(cores)))

    def divisors(self, t: int) -> Tensor:
        """Of each bag; 1 of empty ones, which have zeros."""
        lengths = torch.tensor([max(1, len(bag)) for bag in self.bags[t]], dtype=torch.float64)
        return {"sum": torch.ones_like(lengths), "mean": lengths, "sqrtn": lengths.sqrt()}[
            self.combiners[t]
        ]


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def owners_batch(world: World, rank: int, exchange: Any, ids: Tensor, offsets: Tensor) -> Any:
    cores = []
    for t, _, _, first, stride, column, width, _ in world.owned(rank):
        rows = world.whole[t][first::stride, column : column + width].contiguous()
        zeros = [(width, 0, 0.0, 0.0, 0.0, 0.0)]
        core = _core.Table.make(f"s{t}", len(rows), width, DTYPES[rows.dtype], zeros, 0, None)
        at = torch.arange(len(rows))
        _core.write(core, at.data_ptr(), len(rows), rows.data_ptr())
        cores.append(core)
    table_of = [at for at in range(len(cores)) for _ in range(world.size)]
    batch = _core.Batch.of_sums(
        cores, table_of, exchange.here(), ids.data_ptr(), offsets.data_ptr()
    )
    assert batch.check()[0] == 0
    batch.resolve(False, True, [])
    batch.find_slots()
    return batch


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(6))
def test_vectors_and_gradients_find_their_ways(size: int, seed: int) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    world = World(size, draw)
    tables = range(len(world.tables))
    combiners = [draw.choice(SUMMED) for _ in tables]
    asked = [Asked(world, rank, combiners, draw) for rank in range(size)]
    told = torch.tensor([one.own.numbers for one in asked])
    assert told.shape[1] == _core.BagExchange.width(world.layouts[0])
    exchanges = [_core.BagExchange(layout, told.data_ptr()) for layout in world.layouts]

    sent = world.messages([exchange.id_sizes() for exchange in exchanges])
    for one, exchange, out in zip(asked, exchanges, sent, strict=True):
        exchange.write_ids(one.own, addresses(out))
    batches, kept = [], []
    for rank, (one, exchange) in enumerate(zip(asked, exchanges, strict=True)):
        shapes = exchange.here()
        ids = torch.empty(sum(n for n, _, _ in shapes)).long()
        offsets = torch.empty(sum(bags + 1 for _, bags, edges in shapes if edges)).long()
        received = world.received(sent, rank)
        exchange.read_ids(one.own, received, ids.data_ptr(), offsets.data_ptr())
        kept.append((ids, offsets))
        batches.append(owners_batch(world, rank, exchange, ids, offsets))

    sent = world.messages([exchange.vector_sizes() for exchange in exchanges])
    for exchange, batch, out in zip(exchanges, batches, sent, strict=True):
        batch.pool(exchange.vector_places(addresses(out)))
    for rank, (one, exchange) in enumerate(zip(asked, exchanges, strict=True)):
        found = [torch.full((one.count, DIM), 9.0, dtype=wide(w.dtype)) for w in world.whole]
        places = [(vectors.data_ptr(), DIM) for vectors in found]
        exchange.read_vectors(one.own, world.received(sent, rank), places)
        for t in tables:
            sums = [world.whole[t][bag].double().sum(0) for bag in one.bags[t]]
            expected = torch.stack([torch.zeros(0, DIM).double().sum(0), *sums])[1:]
            expected = expected / one.divisors(t)[:, None]
            torch.testing.assert_close(found[t].double(), expected, rtol=1e-5, atol=1e-5)

    chosen = [True, True, False, True, True, True]
    given = [
        [torch.randn(one.count, DIM, dtype=wide(whole.dtype)) for whole in world.whole]
        for one in asked
    ]
    sent = world.messages([exchange.given_sizes(chosen) for exchange in exchanges])
    for one, exchange, grads, out in zip(asked, exchanges, given, sent, strict=True):
        # Of the last table nobody has a gradient, and zeros travel.
        places = [(0 if t == tables[-1] else g.data_ptr(), DIM) for t, g in enumerate(grads)]
        exchange.write_given(one.own, chosen, places, addresses(out))
    for rank, (exchange, batch) in enumerate(zip(exchanges, batches, strict=True)):
        shards, uniques = world.owned(rank), batch.unique_counts()
        values = [
            torch.empty(n, shard[6], dtype=wide(world.whole[shard[0]].dtype))
            for n, shard in zip(uniques, shards, strict=True)
        ]
        slots = [torch.empty(n).long() for n in uniques]
        places = exchange.given_places(chosen, world.received(sent, rank))
        batch.reduce(places, addresses(values), addresses(slots))
        for summed, at, (t, _, _, first, stride, column, width, _) in zip(
            values, slots, shards, strict=True
        ):
            expected = torch.zeros(ROWS, width, dtype=torch.float64)
            for one, grads in (
                zip(asked, given, strict=True) if chosen[t] and t != tables[-1] else ()
            ):
                of_bags = grads[t].double() / one.divisors(t)[:, None] / size
                for bag, row in zip(one.bags[t], of_bags, strict=True):
                    expected.index_add_(0, bag, row[column : column + width].expand(len(bag), -1))
            if chosen[t]:
                torch.testing.assert_close(
                    summed.double(), expected[first + stride * at], rtol=1e-5, atol=1e-5
                )


def test_numbers_that_cannot_be_are_refused() -> None:
    layout = World(2, random.Random(1)).layouts[0]
    width = _core.BagExchange.width(layout)
    for number, said in ((-1, "asks for -1 ids or bags"), (2**40, f"asks for {2**40} ids or bags")):
        told = torch.full((2, width), number)
        with pytest.raises(ValueError, match=said):
            _core.BagExchange(layout, told.data_ptr())
    told = torch.zeros((2, width)).long()
    told[1, :2] = torch.tensor([7, 2 * 3])  # 7 ids in 3 bags of one length
    with pytest.raises(ValueError, match="7 ids in 3 bags of one length"):
        _core.BagExchange(layout, told.data_ptr())
