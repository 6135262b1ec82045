"""Messages between ranks, in one process: what is written for an owner is what it reads."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from hotbed import _core

DTYPES = {
    torch.float32: _core.DType.f32,
    torch.float64: _core.DType.f64,
    torch.float16: _core.DType.f16,
}
ROWS, DIM = 50, 6


def addresses(messages: list[Tensor]) -> list[int]:
    return [message.data_ptr() for message in messages]


class World:
    """Some ranks that keep shards of tables of all kinds, and ask each other for rows."""

    def __init__(self, size: int, draw: random.Random) -> None:
        self.size = size
        self.tables: list[tuple[Any, ...]] = []
        self.shards: list[tuple[Any, ...]] = []
        self.whole = []
        for t, kind in enumerate(("replicated", "table", "modulo", "hash", "columns", "grid")):
            dtype = draw.choice([*DTYPES])
            modulo = _core.OwnerRule.modulo
            rules = {"modulo": modulo, "grid": modulo, "hash": _core.OwnerRule.hash}
            owner_rule = rules.get(kind)
            padding = draw.choice([None, 7])
            self.tables.append((f"t{t}", DIM, DTYPES[dtype], owner_rule, padding))
            self.whole.append(torch.randn(ROWS, DIM).to(dtype))
            for rank in range(size):
                rows = (rank, size) if kind == "modulo" else (0, 1)
                columns, owner = (0, DIM), rank if kind in ("modulo", "hash") else 0
                if kind == "grid":  # rows by ranks that are even, or odd, columns among these
                    groups = min(2, size)
                    owner, among = rank % groups, len(range(rank % groups, size, groups))
                    rows, at = (owner, groups), rank // groups
                    columns = DIM * at // among, DIM // among
                if kind == "columns":
                    cut = [DIM * r // size for r in (rank, rank + 1)]
                    columns = cut[0], cut[1] - cut[0]
                    if not columns[1]:
                        continue
                if kind != "table" or rank == size - 1:
                    self.shards.append((t, rank, kind == "replicated", *rows, *columns, owner))
        self.asked = [[self.drawn(draw) for _ in self.tables] for _ in range(size)]
        layouts = [
            _core.ExchangeLayout.make(rank, size, self.tables, self.shards, size)
            for rank in range(size)
        ]
        self.layouts, self.dealt = layouts, []
        self.numbers: list[list[int]] = []
        for layout, asked in zip(layouts, self.asked, strict=True):
            ids, counts = torch.cat(asked), [len(some) for some in asked]
            ordered, new_positions = torch.empty_like(ids), torch.empty_like(ids)
            to = ordered.data_ptr(), new_positions.data_ptr()
            self.numbers.append(layout.order_by_owner(ids.data_ptr(), counts, *to))
            assert torch.equal(ordered.index_select(0, self.absolute(new_positions, counts)), ids)
            self.dealt.append((ordered, new_positions, counts))
        told = torch.tensor(self.numbers)
        self.exchanges = [_core.Exchange(layout, told.data_ptr()) for layout in layouts]

    @staticmethod
    def drawn(draw: random.Random) -> Tensor:
        ids = draw.sample(range(ROWS), draw.choice([0, 1, 5, 30]))
        return torch.tensor(ids, dtype=torch.int64)

    @staticmethod
    def absolute(new_positions: Tensor, counts: list[int]) -> Tensor:
        """Positions within each table as those among all."""
        begins = torch.tensor([0, *counts[:-1]]).cumsum(0)
        return new_positions + begins.repeat_interleave(torch.tensor(counts))

    def messages(self, sizes: list[tuple[list[int], list[int]]]) -> list[list[Tensor]]:
        """Memory for a message of each rank to each; both ends agree on its size."""
        for a in range(self.size):
            for b in range(self.size):
                if a != b:
                    assert sizes[a][0][b] == sizes[b][1][a]
        return [[torch.full((n,), 255, dtype=torch.uint8) for n in out] for out, _ in sizes]

    def received(self, sent: list[list[Tensor]], rank: int) -> list[int]:
        return addresses([sent[other][rank] for other in range(self.size)])

    def ids_at(self, rank: int) -> list[Tensor]:
        """Ids asked of each shard of a rank, by each rank."""
        flat, counts = self.ids[rank], self.exchanges[rank].asked_here()
        return [*flat.split(counts)]

    def send_ids(self) -> None:
        sent = self.messages([exchange.id_sizes() for exchange in self.exchanges])
        for (ordered, *_), exchange, out in zip(self.dealt, self.exchanges, sent, strict=True):
            exchange.write_ids(ordered.data_ptr(), addresses(out))
        self.ids = []
        for rank, exchange in enumerate(self.exchanges):
            ids = torch.empty(sum(exchange.asked_here()), dtype=torch.int64)
            ordered = self.dealt[rank][0]
            exchange.read_ids(ordered.data_ptr(), self.received(sent, rank), ids.data_ptr())
            self.ids.append(ids)

    def owned(self, rank: int) -> list[tuple[Any, ...]]:
        return [self.shards[s] for s in self.layouts[rank].kept_by[rank]]

    def batch_at(self, rank: int) -> Any:
        """Of the shards of a rank, which have the rows of the whole tables."""
        cores = []
        for t, _, _, first, stride, column, width, _ in self.owned(rank):
            rows = self.whole[t][first::stride, column : column + width].contiguous()
            zeros, dtype = [(width, 0, 0.0, 0.0, 0.0, 0.0)], DTYPES[rows.dtype]
            core = _core.Table.make(f"s{t}", len(rows), width, dtype, zeros, 0, None)
            ids = torch.arange(len(rows))
            _core.write(core, ids.data_ptr(), len(rows), rows.data_ptr())
            cores.append(core)
        table_of = [at for at in range(len(cores)) for _ in range(self.size)]
        counts = self.exchanges[rank].asked_here()
        batch = _core.Batch.of_ids(cores, table_of, self.ids[rank].data_ptr(), counts)
        assert batch.check()[0] == 0
        batch.resolve(False, True, [])
        batch.find_slots()
        return batch


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_rows_and_gradients_find_their_ways(size: int, seed: int) -> None:
    torch.manual_seed(seed)
    world = World(size, random.Random(seed))
    world.send_ids()
    batches = [world.batch_at(rank) for rank in range(size)]

    sent = world.messages([exchange.row_sizes() for exchange in world.exchanges])
    for exchange, batch, out in zip(world.exchanges, batches, sent, strict=True):
        wide = torch.empty(exchange.wide_bytes, dtype=torch.uint8)
        batch.pool(exchange.row_places(addresses(out), wide.data_ptr()))
        exchange.narrow(wide.data_ptr(), addresses(out))
    for rank, exchange in enumerate(world.exchanges):
        counts = world.dealt[rank][2]
        rows = [
            torch.empty(n, DIM, dtype=whole.dtype)
            for n, whole in zip(counts, world.whole, strict=True)
        ]
        exchange.read_rows(world.received(sent, rank), addresses(rows))
        ordered = world.dealt[rank][0].split(counts)
        for found, whole, ids in zip(rows, world.whole, ordered, strict=True):
            assert torch.equal(found, whole[ids])

    chosen = [True, True, False, True, True, True]
    given, kept = [], []
    for rank in range(size):
        of_tables = []
        for t, (ids, new_positions) in enumerate(
            zip(world.asked[rank], world.dealt[rank][1].split(world.dealt[rank][2]), strict=True)
        ):
            wide_type = torch.float64 if world.whole[t].dtype is torch.float64 else torch.float32
            grads = (ids[:, None] * 8.0 + torch.arange(DIM) + 100 * rank).to(wide_type)
            slots = new_positions + 1000  # in any order
            kept += [grads, slots]
            n = len(ids) - (t == 1 and len(ids) > 1)  # the last has none
            of_tables.append((slots.data_ptr(), grads.data_ptr(), n, 1000))
        given.append(of_tables)
    sent = world.messages([exchange.given_sizes(chosen, False) for exchange in world.exchanges])
    for exchange, of_tables, out in zip(world.exchanges, given, sent, strict=True):
        exchange.write_given(chosen, False, of_tables, addresses(out))
    for rank, exchange in enumerate(world.exchanges):
        places = exchange.given_places(chosen, False, world.received(sent, rank))
        batch, shards = batches[rank], world.owned(rank)
        uniques = batch.unique_counts()
        values, slots = [], []
        for n, (t, *_, width, _) in zip(uniques, shards, strict=True):
            wide_type = torch.float64 if world.whole[t].dtype is torch.float64 else torch.float32
            values.append(torch.empty(n, width, dtype=wide_type))
            slots.append(torch.empty(n, dtype=torch.int64))
        batch.reduce(places, addresses(values), addresses(slots))
        for found, at, (t, _, _, first, stride, column, width, _) in zip(
            values, slots, shards, strict=True
        ):
            expected = torch.zeros(ROWS, width, dtype=found.dtype)
            for other in range(size if chosen[t] else 0):
                ids = world.asked[other][t]
                ids = ids[: len(ids) - (t == 1 and len(ids) > 1)]
                grads = ids[:, None] * 8.0 + torch.arange(column, column + width) + 100 * other
                expected.index_add_(0, ids, grads.to(found.dtype))
            if chosen[t]:
                assert torch.equal(found, expected[first + stride * at])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_what_one_rank_knows_is_enough_for_its_rows(size: int) -> None:
    world = World(size, random.Random(size))
    for rank, (layout, whole) in enumerate(zip(world.layouts, world.exchanges, strict=True)):
        own = _core.Exchange(layout, world.numbers[rank], whole.asked_here())
        assert own.asked_here() == whole.asked_here()
        assert own.row_sizes() == whole.row_sizes()
        for s in range(len(world.shards)):
            assert own.count(rank, s) == whole.count(rank, s)
            assert own.begin(rank, s) == whole.begin(rank, s)


def test_numbers_of_another_layout_are_refused() -> None:
    world = World(2, random.Random(1))
    numbers, here = world.numbers[0], world.exchanges[0].asked_here()
    for given in ((numbers[1:], here), (numbers, here[1:])):
        with pytest.raises(ValueError, match="numbers of another layout"):
            _core.Exchange(world.layouts[0], *given)


def test_numbers_that_cannot_be_are_refused() -> None:
    layout = World(2, random.Random(1)).layouts[0]
    for number in (-1, 2**40):
        told = torch.full((2, layout.numbers), number)
        with pytest.raises(ValueError, match=f"asks for {number} ids"):
            _core.Exchange(layout, told.data_ptr())


@pytest.mark.parametrize("owner", [-1, 9])
def test_a_shard_without_an_owner_is_refused(owner: int) -> None:
    table = "t", DIM, _core.DType.f32, _core.OwnerRule.modulo, None
    with pytest.raises(ValueError, match="shard 0 has no owner"):
        _core.ExchangeLayout.make(0, 2, [table], [(0, 0, False, 0, 1, 0, DIM, owner)], 2)


def test_a_gradient_of_other_slots_is_refused() -> None:
    world = World(1, random.Random(1))
    exchange, (_, _, counts) = world.exchanges[0], world.dealt[0]
    t = next(t for t, n in enumerate(counts) if n > 1)
    slots, rows = torch.full((counts[t],), 3), torch.zeros(counts[t], DIM)
    given = [
        (slots.data_ptr(), rows.data_ptr(), len(rows), 0) if n == t else (0, 0, 0, 0)
        for n in range(len(counts))
    ]
    chosen = [n == t for n in range(len(counts))]
    out = world.messages([exchange.given_sizes(chosen, False)])[0]
    with pytest.raises(ValueError, match="slot 3 of a gradient"):
        exchange.write_given(chosen, False, given, addresses(out))
