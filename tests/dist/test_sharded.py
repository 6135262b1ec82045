"""Tables that ranks share train as one process does on all their batches together, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dist.worlds import run

import hotbed as hb
from hotbed.dist import ColumnWise, Plan, Replicated, RowWise, Sharding, TableWise
from hotbed.dist.distribute import check_tables, share_tables
from hotbed.dist.ranks import Ranks
from hotbed.tables import Table

DEALS: dict[str, Callable[[Table, int], Sharding]] = {
    "last": lambda table, world: TableWise(world - 1),
    "row": lambda table, world: RowWise(),
    "modulo": lambda table, world: RowWise("modulo"),
    "column": lambda table, world: ColumnWise(tuple(range(world))),
    "replicated": lambda table, world: Replicated(),
    "mixed": lambda table, world: DEALS["row" if table.dim % 2 else "column"](table, world),
}


def plan_of(model: hb.EmbeddingCollection, deal: str, world: int) -> Plan:
    tables = [*model.tables.values()]
    return Plan(tables, world, {table.name: DEALS[deal](table, world) for table in tables})


RULES = ["SGD", "Adagrad", "Adam", "FTRL"]


def collection() -> hb.EmbeddingCollection:
    tables = [
        hb.Table("item", 4, 61, "mean", init=hb.init.XavierUniform(), padding_idx=60),
        hb.Table("user", 7, None, "sum", padding_idx=-3),
        hb.Table("word", 5, 61, "none", torch.float16),
    ]
    features = {"item": "item", "more": "item", "user": "user", "word": "word"}
    return hb.EmbeddingCollection(tables, features, seed=3)


def batch_of(number: int, samples: slice) -> dict[str, Any]:
    """Of 12 samples, some; bags that are pooled by mean have 2 ids, so that all sums are exact."""
    drawn = torch.Generator().manual_seed(number)
    whole = {
        "item": torch.randint(0, 61, (12, 2), generator=drawn),
        "more": torch.randint(0, 9, (12, 4), generator=drawn),
        "user": torch.randint(-20, 90, (12, 3), generator=drawn) * 2**33,
        "word": torch.randint(0, 61, (12,), generator=drawn),
    }
    return {name: ids[samples] for name, ids in whole.items()}


def assert_same_rows(
    own: hb.EmbeddingCollection, whole: hb.EmbeddingCollection, about: Any = None
) -> None:
    """Of all tables, to the bit, whose ids come in one order."""
    for name in whole.tables:
        for expected, found in zip(whole.rows(name), own.rows(name), strict=True):
            assert torch.equal(found, expected), (name, about)


def loss_of(vectors: dict[str, torch.Tensor], scale: float) -> torch.Tensor:
    """Of exact products and sums only, so that the gradients' bits are those of every order."""
    weights = (1, 2, 0.5, 4)
    pairs = zip(vectors.values(), weights, strict=True)
    return scale * torch.stack([(v.float() * w).sum() for v, w in pairs]).sum()


def train(rank: int, world: int, deal: str, rule: str, untouched: str) -> None:
    whole, own = collection(), collection()
    ranks = Ranks(shared_memory=untouched == "lazy")
    check_tables(own, plan_of(own, deal, world), ranks)
    share_tables(own, plan_of(own, deal, world), ranks)
    options = {"lr": 0.1, "untouched": untouched}
    optimizers = [getattr(hb.optim, rule)(m.parameters(), **options) for m in (whole, own)]
    samples = slice(12 * rank // world, 12 * (rank + 1) // world)
    for number in range(8):
        expected = whole(batch_of(number, slice(None)))
        found = own(batch_of(number, samples))
        for name, vectors in found.items():
            assert torch.equal(vectors, expected[name][samples]), (name, number)
        loss_of(expected, 1).backward()
        loss_of(found, world).backward()  # gradients are means over ranks
        if number % 3:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    ids = {"item": torch.arange(61), "word": torch.arange(61)}
    ids["user"] = torch.arange(-25 + rank, 95) * 2**33
    for name, some in ids.items():
        assert torch.equal(own.lookup(name, some), whole.lookup(name, some)), name
    assert ranks.sent["ids"] > 0 or world == 1 or deal == "last" and rank == world - 1


def train_all(rank: int, world: int, cases: list[tuple[str, str, str]]) -> None:
    for case in cases:
        try:
            train(rank, world, *case)
        except BaseException as error:
            raise AssertionError(f"{case} on rank {rank} of {world}") from error


@pytest.mark.process
@pytest.mark.parametrize("world", [1, 2, 3])
def test_it_trains_as_one_process(world: int) -> None:
    cases = [(d, r, u) for d in DEALS for r in RULES for u in ("lazy", "exact")]
    cases = [c for c in cases if not (c[1] == "FTRL" and c[2] == "exact")]
    run(world, train_all, cases)


def without_a_loss(rank: int, world: int, shared_memory: bool) -> None:
    whole, own = collection(), collection()
    hb.distribute(own, plan_of(own, "mixed", world), shared_memory=shared_memory)
    optimizers = [hb.optim.SGD(m.parameters(), lr=0.1) for m in (whole, own)]
    halves = [slice(12 * r // world, 12 * (r + 1) // world) for r in range(world)]
    for number in range(6):
        expected = whole(batch_of(number, slice(None)))
        found = own(batch_of(number, halves[rank]))
        having = [r for r in range(world) if number < 2 or (r + number) % 2]
        losses = [loss_of({n: v[halves[r]] for n, v in expected.items()}, 1) for r in having]
        sum(losses).backward()
        if rank in having:
            loss_of(found, world).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_rows(own, whole)


@pytest.mark.process
@pytest.mark.parametrize("shared_memory", [False, True])
def test_a_rank_without_a_loss_adds_nothing(shared_memory: bool) -> None:
    run(2, without_a_loss, shared_memory)
