"""What `hotbed.distribute` refuses on all ranks before anything changes; a forward of before it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from dist.test_arguments_of_ranks import Model, refused
from dist.worlds import run
from torch import Tensor, nn

import hotbed as hb
from hotbed.dist import PeerError, Plan, RowWise


def other_buffer(
    rank: int, world: int, buffers: list[list[tuple[str, Tensor]]], words: str
) -> None:
    model = Model()
    for name, buffer in buffers[rank]:
        model.one.register_buffer(name, buffer)
    refused(PeerError, words, lambda: hb.distribute(model))


@pytest.mark.process
@pytest.mark.parametrize(
    ("buffers", "words"),
    [
        ([[("b", torch.zeros(3))], [("b", torch.zeros(4))]], "buffer 'one.b' is float32 (3,) on"),
        ([[("b", torch.zeros(3))], [("b", torch.zeros(3).int())]], "int32 (3,) on rank 1"),
        ([[], [("b", torch.zeros(3))]], "buffer 'one.b' is missing on rank 0"),
        (
            [
                [("b", torch.zeros(3)), ("c", torch.zeros(3))],
                [("c", torch.zeros(3)), ("b", torch.zeros(3))],
            ],
            "the order of buffers",
        ),
    ],
)
def test_buffers_differ(buffers: Any, words: str) -> None:
    run(2, other_buffer, buffers, words)


def other_strides(rank: int, world: int) -> None:
    model = Model()
    if rank:
        model.one.weight = nn.Parameter(model.one.weight.detach().t().contiguous().t())
    refused(PeerError, "float32 (4, 4), strides (1, 4) on rank 1", lambda: hb.distribute(model))


@pytest.mark.process
def test_strides_differ() -> None:
    run(2, other_strides)


class Size:
    """A size of buckets that no rank, or one, can read."""

    def __init__(self, is_wrong: bool) -> None:
        self.is_wrong = is_wrong

    def __mul__(self, other: int) -> int:
        if self.is_wrong:
            raise TypeError("no size")
        return other


def wrong_value(rank: int, world: int, culprits: list[int]) -> None:
    model = Model()
    before = {name: value.clone() for name, value in model.one.state_dict().items()}
    kind = hb.TableError if rank in culprits else PeerError
    ddp = {"bucket_cap_mb": Size(rank in culprits)}
    begin = time.monotonic()
    refused(
        kind, "DistributedDataParallel refuses a value of", lambda: hb.distribute(model, ddp=ddp)
    )
    assert time.monotonic() - begin < 15, "a rank has waited for the timeout"
    for name, value in model.one.state_dict().items():
        assert torch.equal(value, before[name])
    hb.distribute(model)  # nothing was cut
    model(torch.tensor([1, 2])).sum().backward()


@pytest.mark.process
@pytest.mark.parametrize("culprits", [[0, 1], [0], [1]])
def test_values_of_ddp_that_torch_refuses(culprits: list[int]) -> None:
    run(2, wrong_value, culprits)


def pending(rank: int, world: int) -> None:
    """A gradient on one rank alone is told to all, and is still there."""
    model = Model()
    if rank:
        model.tables({"a": torch.tensor([1])})["a"].sum().backward()
    kind = hb.TableError if rank else PeerError
    refused(kind, "Table 'a' has a gradient, which would be lost", lambda: hb.distribute(model))
    assert (model.tables.parameter("a").grad is not None) == bool(rank)
    model.zero_grad()
    hb.distribute(model)


@pytest.mark.process
def test_a_gradient_that_would_be_lost() -> None:
    run(2, pending)


def forward_before(rank: int, world: int, rows: int | None, is_weighted: bool) -> None:
    tables = [hb.Table("a", 64, rows)]
    model = hb.EmbeddingCollection(tables, seed=1)
    weights = torch.ones(4, requires_grad=True) if is_weighted else None
    bags = hb.Jagged(torch.arange(4) * 7, torch.tensor([0, 2, 4]), weights=weights)
    vectors = model({"a": bags})["a"]
    hb.distribute(model, Plan(tables, world, {"a": RowWise()}))
    refused(hb.TableError, "Look the batch up again", vectors.sum().backward)
    assert weights is None or weights.grad is None
    model({"a": bags})["a"].sum().backward()


@pytest.mark.process
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("rows", [None, 50_000])
def test_a_backward_of_before(rows: int | None, is_weighted: bool) -> None:
    run(2, forward_before, rows, is_weighted)
