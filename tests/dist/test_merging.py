"""Any number of backwards before a step: as in one process, and what waits stays small."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from dist.test_waiting import Both
from dist.worlds import run
from torch.distributed.algorithms.join import Join

import hotbed as hb
from hotbed.dist import ColumnWise, Plan, Replicated, RowWise, TableWise, merging
from hotbed.dist.errors import PeerError
from hotbed.dist.exchanged_values import Requests

NEXT = 64
"""Batches that wait at most, where each has its backward at once."""


def waiting_of(table: Any) -> Any:
    return table.place.ranks.waiting


def one_rank_has_ids(rank: int, world: int, backwards: int) -> None:
    both = Both(rank, world, "Adam", {})
    waiting = waiting_of(both.own.table("user"))
    chance, most = random.Random(1), 0
    for _ in range(2):
        for _ in range(backwards):
            both.backward(both.forward([chance.randrange(10) for _ in range(3)]))
            most = max(most, len(waiting))
        both.step()
        both.zero()
        both.assert_equal()
    assert most <= NEXT


@pytest.mark.process
@pytest.mark.parametrize(("world", "backwards"), [(2, 61), (2, 62), (2, 63), (2, 200), (3, 70)])
def test_more_backwards_than_one_message_tells_of(world: int, backwards: int) -> None:
    run(world, one_rank_has_ids, backwards)


TABLES = [
    hb.Table("static", 4, 40, "sum"),
    hb.Table("dynamic", 3, combiner="mean"),
    hb.Table("copy", 2, 20, "none"),
    hb.Table("cut", 5, 30, "max", padding_idx=3),
    hb.Table("whole", 2, 30, "sum", dtype=torch.float16),
]


class Kinds:
    """A collection of all kinds of shards, and the same in one process."""

    def __init__(self, world: int, storage: hb.Storage | None = None, **options: Any) -> None:
        self.whole = hb.EmbeddingCollection(TABLES, seed=5)
        self.own = hb.EmbeddingCollection(TABLES, seed=5, storage=storage)
        kinds = {
            "static": RowWise(),
            "dynamic": RowWise(),
            "copy": Replicated(),
            "cut": ColumnWise((1, 0), (3, 2)),
            "whole": TableWise(1),
        }
        hb.distribute(self.own, Plan(TABLES, world, kinds))
        self.models = self.whole, self.own
        self.optimizers = [hb.optim.Adam(m.parameters(), lr=0.125, **options) for m in self.models]
        self.waiting = waiting_of(self.own.table("static"))

    @staticmethod
    def batch(number: int, samples: range) -> dict[str, Any]:
        """Of some samples; which of them are there changes no other."""
        found = {}
        for table in TABLES:
            chance = [random.Random(f"{table.name} {number} {s}") for s in samples]
            ids = [[c.randrange(table.rows or 2**40) for _ in range(2)] for c in chance]
            if table.rows is None:
                ids = [[n % 30 * 2**33 for n in of_sample] for of_sample in ids]
            found[table.name] = torch.tensor(ids, dtype=torch.int64).reshape(len(samples), 2)
        return found

    @staticmethod
    def loss(outputs: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        """With gradients that are exact in any order."""
        used = [v for name, v in sorted(outputs.items()) if number % 5 or name != "cut"]
        return torch.stack([(v.float() * (1 + number % 3)).sum() for v in used]).sum()

    def assert_equal(self) -> None:
        for table in TABLES:
            one, other = (model.rows(table.name) for model in self.models)
            assert torch.equal(one.ids, other.ids), table.name
            assert torch.equal(one.values, other.values), table.name


def all_kinds(rank: int, world: int, backwards: int, folder: str | None) -> None:
    storage = None if folder is None else hb.Storage(host=60_000_000, ssd=folder)
    both = Kinds(world, storage)
    most = 0
    for _ in range(2):
        for number in range(backwards):
            share = range(number % 4) if rank == 0 else range(number % 4, 4)  # none now and then
            both.loss(both.whole(both.batch(number, range(4))), number).backward()
            (world * both.loss(both.own(both.batch(number, share)), number)).backward()
            most = max(most, len(both.waiting))
        for optimizer in both.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        both.assert_equal()
    assert most <= NEXT


@pytest.mark.process
@pytest.mark.parametrize("tiers", [False, True])
def test_every_kind_of_shard_merges_what_waits(tiers: bool, tmp_path: Any) -> None:
    run(2, all_kinds, 130, str(tmp_path) if tiers else None)


def thousand(rank: int, world: int) -> None:
    both = Both(rank, world, "SGD", {})
    place: Any = both.own.table("user").place
    for number in range(1000):
        both.backward(both.forward([number % 10, number % 7]))
        assert len(place.ranks.waiting) <= NEXT
        assert len(both.own.table("user").waiting.shares) <= NEXT
    both.step()
    both.assert_equal()


@pytest.mark.process
def test_a_thousand_backwards() -> None:
    run(2, thousand)


def many_forwards(rank: int, world: int) -> None:
    """All forwards before all backwards: nothing can be merged before, and nothing is lost."""
    both = Both(rank, world, "Adam", {})
    vectors = [both.forward([number % 10]) for number in range(200)]
    assert len(waiting_of(both.own.table("user"))) >= 200
    for some in reversed(vectors):
        both.backward(some)
    del vectors, some
    both.step()
    both.zero()
    both.assert_equal()
    both.backward(both.forward([1]))
    assert len(waiting_of(both.own.table("user"))) == 1
    both.step()
    both.assert_equal()


def older_batch(rank: int, world: int) -> None:
    """One forward whose backward comes after what is younger was merged, twice."""
    both = Both(rank, world, "Adam", {})
    older = both.forward([1, 2])
    for number in range(150):
        both.backward(both.forward([number % 3]))
    both.backward(older)
    both.step()
    both.zero()
    both.assert_equal()


def no_backward(rank: int, world: int) -> None:
    """Losses that are kept, and a rank that leaves its backwards out."""
    both = Both(rank, world, "SGD", {})
    for number in range(100):
        whole, own = both.forward([number % 10])
        whole.sum().backward()
        if rank == 0:
            (world * own.sum()).backward()
    both.step()
    both.assert_equal()


def changed_by_hand(rank: int, world: int) -> None:
    """A gradient is divided by the number of backwards, as loops do that accumulate."""
    both = Both(rank, world, "SGD", {})
    for number in range(128):
        both.backward(both.forward([number % 4]))
    for model in both.models:
        grad = model.parameter("user").grad
        assert grad is not None
        grad.mul_(1 / 128)
    both.step()
    both.assert_equal()


def unscaled(rank: int, world: int) -> None:
    both = Both(rank, world, "SGD", {})
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for number in range(100):
        vectors = both.forward([number % 4])
        scaler.scale(vectors[0].sum()).backward()
        scaler.scale(world * vectors[1].sum()).backward()
    for optimizer in both.optimizers:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    scaler.update()
    both.assert_equal()


def clipped(rank: int, world: int) -> None:
    """In the middle: what was clipped lies at its owners, and more comes to it."""
    both = Both(rank, world, "SGD", {})
    for number in range(140):
        both.backward(both.forward([number % 4]))
        if number == 70:
            for model in both.models:
                hb.nn.clip_grad_value_(model.parameters(), 8.0)
    both.step()
    both.assert_equal()


def dropped(rank: int, world: int) -> None:
    both = Both(rank, world, "SGD", {})
    for number in range(100):
        both.backward(both.forward([number % 4]))
        if number == 80:
            both.zero()
    both.step()
    both.zero()
    both.assert_equal()
    assert len(waiting_of(both.own.table("user"))) <= NEXT


CASES = [
    many_forwards,
    older_batch,
    no_backward,
    changed_by_hand,
    unscaled,
    clipped,
    dropped,
]


@pytest.mark.process
@pytest.mark.parametrize("what", CASES)
def test_merged_gradients_are_gradients(what: Any) -> None:
    run(2, what)


def uneven(rank: int, world: int) -> None:
    """Ranks end at other batches, and all answer until the last has stepped."""
    both = Both(rank, world, "Adam", {})
    own = both.optimizers[1]
    batches = 150 if rank == 0 else 30 * rank
    with Join(hb.dist.joinables(both.own)):
        for number in range(batches):
            ids = [number % 10] if rank == 0 else []
            out = both.own({"user": hb.Jagged(ids, lengths=[len(ids)])})["user"]
            (world * out.sum()).backward()
            if number == 149:
                own.step()
    for number in range(150):
        both.whole({"user": hb.Jagged([number % 10], lengths=[1])})["user"].sum().backward()
    both.optimizers[0].step()
    both.assert_equal()


def evened(rank: int, world: int) -> None:
    both = Both(rank, world, "Adam", {})
    for number in hb.dist.even(range(150 + rank)):
        both.backward(both.forward([number % 10]))
    both.step()
    both.assert_equal()


@pytest.mark.process
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("what", [uneven, evened])
def test_uneven_ranks_merge_together(what: Any, world: int) -> None:
    run(world, what)


def fails(rank: int, world: int) -> None:
    """An owner that cannot look up again: an error on all ranks, and nothing is lost."""
    both = Both(rank, world, "SGD", {})
    place: Any = both.own.table("user").place
    for number in range(61):
        both.backward(both.forward([number % 10]))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:

            def full(requests: Requests) -> None:
                raise hb.OutOfMemory("no memory")

            patch.setattr(merging, "look_up_owned", full)
        with pytest.raises((hb.OutOfMemory, PeerError), match="no memory"):
            both.own({"user": hb.Jagged([1], lengths=[1])})
    for number in range(20):
        both.backward(both.forward([number % 10]))
    both.step()
    both.assert_equal()
    assert place.ranks.steps == 1


@pytest.mark.process
def test_a_failed_merge_loses_nothing() -> None:
    run(2, fails)
