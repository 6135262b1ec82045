"""Gradients that wait on ranks wait as in one process: for a step, past it, beside older batches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from dist.worlds import run
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import hotbed as hb
from hotbed.dist import Plan, RowWise, TableWise

RULES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"momentum": 0.5}),
    ("Adam", {}),
    ("Adam", {"untouched": "exact"}),
    ("FTRL", {}),
]


class Both:
    """One process with all samples, and ranks, of which rank 0 has the ids."""

    def __init__(self, rank: int, world: int, rule: str, options: dict[str, Any]) -> None:
        self.rank, self.world = rank, world
        self.whole, self.own = (
            hb.EmbeddingCollection([hb.Table("user", 2, 10, "sum")], seed=3) for _ in range(2)
        )
        kind = RowWise() if world % 2 == 0 else TableWise(1)
        hb.distribute(self.own, Plan([*self.own.tables.values()], world, {"user": kind}))
        self.models = self.whole, self.own
        self.optimizers = [
            getattr(hb.optim, rule)(model.parameters(), lr=0.125, **options)
            for model in self.models
        ]

    def forward(self, ids: Sequence[int]) -> list[Tensor]:
        mine = ids if self.rank == 0 else ()
        given = [(self.whole, ids, self.world), (self.own, mine, 1)]
        return [
            model({"user": hb.Jagged(list(some), lengths=[len(some)] + [0] * (samples - 1))})[
                "user"
            ]
            for model, some, samples in given
        ]

    def backward(self, vectors: Sequence[Tensor]) -> None:
        whole, own = vectors
        whole.sum().backward()
        (self.world * own.sum()).backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero(self, *, to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=to_none)

    def assert_equal(self) -> None:
        whole, own = (model.rows("user").values for model in self.models)
        assert torch.equal(whole, own)
        steps = {float(model.table("user").rule.steps) for model in self.models}
        assert len(steps) == 1, steps


def older_batches(rank: int, world: int) -> None:
    for rule, options in RULES:
        both = Both(rank, world, rule, options)
        both.backward(both.forward([1, 2, 5, 6]))
        both.step()
        both.zero()
        older = both.forward([1, 2])
        both.backward(both.forward([5, 6]))
        both.step()
        both.zero()
        both.assert_equal()
        both.backward(older)
        both.step()
        both.assert_equal()


def without_rows(rank: int, world: int) -> None:
    for (rule, options), batches in itertools.product(RULES, (1, 2)):
        both = Both(rank, world, rule, options)
        for ids in ([1, 2], [], [1]):
            for _ in range(batches):
                both.backward(both.forward(ids))
            both.step()
            both.zero()
        both.assert_equal()
        both.backward(both.forward([3]))
        both.zero(to_none=False)
        both.step()  # counts, as in torch
        both.zero()
        both.step()  # does not
        both.assert_equal()


def past_a_step(rank: int, world: int) -> None:
    for (rule, options), clips in itertools.product(RULES, (False, True)):
        both = Both(rank, world, rule, options)
        both.backward(both.forward([1, 2]))
        for _ in range(2):
            if clips:
                for model in both.models:
                    hb.nn.clip_grad_norm_(model.parameters(), 0.5)
            both.step()
        both.step()
        both.backward(both.forward([2, 3]))  # adds to what waits
        both.step()
        both.assert_equal()
        both.zero()
        both.step()  # of nothing
        both.backward(both.forward([4]))
        both.step()
        both.assert_equal()


def past_the_end(rank: int, world: int) -> None:
    """The last rank has no batch, and learns from the others that they have called zero_grad()."""
    both = Both(rank, world, "Adam", {})
    whole, own = both.optimizers
    with Join(hb.dist.joinables(both.own)):
        for number in range(0 if rank == world - 1 else 4):
            ids = [number, number + 1] if rank == 0 else []
            (
                world * both.own({"user": hb.Jagged(ids, lengths=[len(ids)])})["user"].sum()
            ).backward()
            hb.nn.clip_grad_norm_(both.own.parameters(), 0.5)
            own.step()
            if number != 1:
                own.zero_grad()
    for number in range(4):
        both.whole({"user": hb.Jagged([number, number + 1], lengths=[2])})["user"].sum().backward()
        hb.nn.clip_grad_norm_(both.whole.parameters(), 0.5)
        whole.step()
        if number != 1:
            whole.zero_grad()
    rows = [model.rows("user").values for model in both.models]
    torch.testing.assert_close(*rows, rtol=1e-6, atol=1e-7)


def clipped_by_torch(rank: int, world: int) -> None:
    both = Both(rank, world, "Adam", {})
    both.backward(both.forward([1, 2]))
    parameters = list(both.own.parameters())
    for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
        with pytest.raises(hb.TableError, match="hotbed.nn.clip_grad_norm_"):
            clip(parameters, 0.5, foreach=False)
    both.step()
    both.assert_equal()


@pytest.mark.process
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "what", [older_batches, without_rows, past_a_step, past_the_end, clipped_by_torch]
)
def test_gradients_wait_as_in_one_process(what: Any, world: int) -> None:
    run(world, what)
