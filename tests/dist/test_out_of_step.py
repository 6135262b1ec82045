"""Ranks that do other things than each other say, each of them, what all are waiting for."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from dist.test_declarations import Model
from dist.worlds import run

import hotbed as hb
from hotbed.dist import PeerError
from hotbed.dist.distribute import sharing_of
from hotbed.dist.errors import PeerLost
from hotbed.dist.timeouts import BACKWARD

SECONDS = 4.0
IDS = torch.tensor([[1], [2]])
LOOKUP = r"a lookup of tables 'item', 'user' \(exchange \d+\)"
STEP = r"a step of tables 'item', 'user' \(exchange \d+\)"
FORWARD = rf"(?:a forward|{LOOKUP})"
"""Ranks meet before the first forwards, and then in lookups."""
BACK = rf"loss\.backward\(\), where gradients of dense layers travel, after {LOOKUP}"


def trained(**options: Any) -> tuple[Any, Any]:
    """A model after a step of all."""
    model = hb.distribute(Model(), "basic", timeout=SECONDS, **options)
    optimizer = hb.optim.Adam(model.parameters(), lr=0.1)
    model(IDS).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def all_say(rank: int, world: int, mine: str, others: str, error: BaseException) -> None:
    """`mine`: what rank 0 waits in."""
    text = str(error)
    for other in range(world):
        waits = mine if other == 0 else others
        assert re.search(rf"[Rr]ank {other} waits in {waits}", text), (rank, text)
    assert "Timed out" in text or "too long" in text or "has left" in text, text
    assert "as 1 steps have left them" in text


def with_dense(rank: int, world: int, shared_memory: bool, chosen: list[int]) -> None:
    def one_forward_more(model: Any, optimizer: Any) -> None:
        model(IDS)

    def a_skipped_backward(model: Any, optimizer: Any) -> None:
        optimizer.step()

    def an_exception_caught(model: Any, optimizer: Any) -> None:
        with pytest.raises(ZeroDivisionError):
            model(IDS) / (1 // 0)
        model(IDS).sum().backward()

    cases: list[tuple[Callable[[Any, Any], None], str]] = [
        (one_forward_more, FORWARD),
        (a_skipped_backward, STEP),
        (an_exception_caught, FORWARD),
    ]
    for odd, waits in [cases[number] for number in chosen]:
        model, optimizer = trained(shared_memory=shared_memory)
        loss = model(IDS).sum() if odd is not an_exception_caught or rank else None
        with pytest.raises(RuntimeError) as raised:
            if rank == 0:
                odd(model, optimizer)
            else:
                assert loss is not None
                loss.backward()
        all_say(rank, world, waits, BACK, raised.value)
        if rank == 0:
            assert isinstance(raised.value, PeerLost)
        # Whatever comes next says the same, at once.
        with pytest.raises(PeerLost) as again:
            optimizer.step()
        all_say(rank, world, waits, BACK, again.value)
        torch_dist.barrier()


@pytest.mark.process
@pytest.mark.parametrize(
    ("world", "shared_memory", "chosen"), [(2, True, [0, 1, 2]), (3, True, [1]), (2, False, [0])]
)
def test_dense_layers_wait_elsewhere(world: int, shared_memory: bool, chosen: list[int]) -> None:
    run(world, with_dense, shared_memory, chosen)


def tables_only(rank: int, world: int) -> None:
    model = hb.EmbeddingCollection([hb.Table("item", 4, 61)], seed=3)
    hb.distribute(model, "basic", timeout=SECONDS)
    optimizer = hb.optim.Adam(model.parameters(), lr=0.1)
    vectors = model({"item": IDS})["item"]
    vectors.sum().backward()
    lookup, step = (rf"a {kind} of table 'item' \(exchange \d+\)" for kind in ("lookup", "step"))
    said = (step, lookup) if rank else (lookup, step)
    with pytest.raises(
        PeerError, match=rf"Rank \d is at {said[1]} while rank {rank} is at {said[0]}"
    ):
        if rank == 0:
            model({"item": IDS})
        else:
            optimizer.step()
    # Rank 0 is alone with something.
    error: Any = None
    if rank == 0:
        with pytest.raises(PeerLost) as raised:
            model.state_dict()
        error = raised.value
    torch_dist.barrier()
    if rank == 0:
        assert re.search(
            r"Rank 0 waits in a copy of rows of table 'item' \(exchange \d+\)", str(error)
        )
        assert "rank 1 waits in none of Hotbed's calls" in str(error)
        assert (
            "called by all ranks: take them out of `if rank == 0`, or save with hotbed.save"
            in str(error)
        )
    else:
        with pytest.raises(PeerError, match=r"[Rr]ank 0 is at a copy of rows of table 'item'"):
            model({"item": IDS})
        with pytest.raises(PeerLost, match=r"[Rr]ank 0 waits in a copy of rows of table 'item'"):
            model({"item": IDS})


@pytest.mark.process
@pytest.mark.parametrize("world", [2, 3])
def test_tables_wait_elsewhere(world: int) -> None:
    run(world, tables_only)


def in_a_block(rank: int, world: int) -> None:
    """As `hotbed.train.fit` does, of which the error of a backward is one of Hotbed's."""
    model, _ = trained()
    loss = model(IDS).sum()
    sharing = sharing_of(model)
    assert sharing is not None
    with pytest.raises(PeerLost, match=rf"[Rr]ank {rank} waits in {BACK if rank else FORWARD}"):
        if rank == 0:
            model(IDS)
        with sharing.ranks.listening(BACKWARD):
            loss.backward()


@pytest.mark.process
def test_a_backward_inside_of_fit() -> None:
    run(2, in_a_block)


def not_on_all(rank: int, world: int, called: str) -> None:
    late = world - 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hotbed.dist.loaders._SECONDS", SECONDS)
        if rank == late:
            torch_dist.barrier()
        text = rf"[Rr]ank {late} did not call {called} in 4 s, where the others wait"
        with pytest.raises(PeerError, match=text):
            hb.dist.even([1]) if called == "hotbed.dist.even" else hb.distribute(
                Model(), timeout=SECONDS
            )
        if rank != late:
            torch_dist.barrier()
    trained()  # together
    assert next(iter(hb.dist.even([5]))) == 5


@pytest.mark.process
@pytest.mark.parametrize(
    ("world", "called"),
    [(2, "hotbed.distribute"), (3, "hotbed.distribute"), (2, "hotbed.dist.even")],
)
def test_what_is_not_called_on_all(world: int, called: str) -> None:
    run(world, not_on_all, called)
