"""An error of a codec on one rank is an error on all, after which training goes on as if it had not been."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dist.test_new_codec import Flipped, batch_of, made
from dist.worlds import run
from torch import Tensor
from torch.distributed.algorithms.join import Join

import hotbed as hb
from hotbed.dist import CODECS, PeerError, Plan, Replicated, RowWise, TableWise


class Broken(Exception):
    """An error of the codec's own."""


class Breaking(Flipped):
    """Raise in a method, where one is named, once."""

    broken = ""
    error: type[Exception] = Broken

    def _try(self, method: str) -> None:
        if self.broken == method:
            self.broken = ""
            raise self.error(f"cannot {method}")

    def row_bytes(self, width: int, dtype: torch.dtype) -> int:
        self._try("row_bytes")
        return super().row_bytes(width, dtype)

    def encode_rows(self, rows: Tensor, out: Tensor) -> None:
        self._try("encode_rows")
        super().encode_rows(rows, out)

    def decode_rows(self, encoded: Tensor, out: Tensor) -> None:
        self._try("decode_rows")
        super().decode_rows(encoded, out)


WAYS = "rows", "gradients"


def training(world: int, shared_memory: bool) -> tuple[Any, Any]:
    """A model and its optimizer."""
    model = made()
    kinds = {"a": RowWise(), "b": TableWise(1), "c": RowWise(), "d": Replicated()}
    plan = Plan(model.tables.values(), world, kinds)
    hb.distribute(model, plan, rows="rows", gradients="gradients", shared_memory=shared_memory)
    return model, hb.optim.Adagrad(model.parameters(), lr=0.1)


def loss_of(model: Any, rank: int) -> Tensor:
    return (torch.cat([*model(batch_of(rank)).values()], 1) ** 2).sum()


def train(model: Any, optimizer: Any, rank: int) -> None:
    """Two backwards, so that two lookups wait, and a step."""
    for of_rank in (rank, 1 - rank):
        loss_of(model, of_rank).backward()
    optimizer.step()
    optimizer.zero_grad()


def reach_all_ranks(rank: int, world: int, shared_memory: bool) -> None:
    codecs = {name: Breaking() for name in WAYS}
    CODECS.update(codecs)
    model, optimizer = training(world, shared_memory)
    for way, codec in codecs.items():
        for method in ("encode_rows", "decode_rows", "row_bytes"):
            for error in (Broken, hb.TableError):
                if way == "gradients":
                    loss_of(model, 1 - rank).backward()
                    loss_of(model, rank).backward()
                both = method == "row_bytes"  # which knows of no rows
                codec.broken, codec.error = method if rank or both else "", error
                with pytest.raises(error if rank or both else PeerError) as raised:
                    loss_of(model, rank) if way == "rows" else optimizer.step()
                text = f"cannot {method}"
                if not rank and not both:
                    text = f"Rank 1 could not go on: {error.__name__}: {text}"
                assert str(raised.value) == text, (way, method)
                optimizer.zero_grad()
                train(model, optimizer, rank)
    twin, its_optimizer = training(world, shared_memory)
    for _ in range(12):
        train(twin, its_optimizer, rank)
    for name in model.tables:
        assert torch.equal(model.rows(name).values, twin.rows(name).values), name


@pytest.mark.process
@pytest.mark.parametrize("shared_memory", [True, False])
def test_errors_of_codecs_reach_all_ranks(shared_memory: bool) -> None:
    run(2, reach_all_ranks, shared_memory)


def reach_those_that_have_batches(rank: int, world: int, way: str, method: str) -> None:
    codecs = {name: Breaking() for name in WAYS}
    CODECS.update(codecs)
    found = []
    for broken in (method, ""):
        model, optimizer = training(world, shared_memory=True)
        codecs[way].broken = broken if rank else ""
        with Join(hb.dist.joinables(model)):
            if rank == 0 and broken:
                with pytest.raises(
                    PeerError, match=f"^Rank 1 could not go on: Broken: cannot {method}$"
                ):
                    train(model, optimizer, rank)
                optimizer.zero_grad()
            if rank == 0:
                train(model, optimizer, rank)
        assert not codecs[way].broken
        found.append([model.rows(name).values for name in model.tables])
    assert all(map(torch.equal, *found))


@pytest.mark.process
@pytest.mark.parametrize("method", ["encode_rows", "decode_rows"])
@pytest.mark.parametrize("way", WAYS)
def test_errors_of_a_rank_that_has_ended_reach_the_others(way: str, method: str) -> None:
    run(2, reach_those_that_have_batches, way, method)
