"""Memory hosts that cannot be, that are used as ranks that train, or that are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dist.test_memory_hosts import USERS, begin, train, trained
from dist.test_sharded import assert_same_rows, batch_of, collection, loss_of
from dist.worlds import run
from torch import nn

import hotbed as hb
from hotbed.dist import PeerError


def refused(rank: int, world: int) -> None:
    with pytest.raises(hb.TableError, match="Rank 0 cannot be a memory host"):
        hb.distribute(collection(), memory_host=rank == 0)
    given: Any = "yes"
    with pytest.raises(hb.TableError, match="memory_host must be True or False"):
        hb.distribute(collection(), memory_host=given)
    for call in (hb.dist.serve_rows, hb.dist.release_hosts):
        with pytest.raises(hb.TableError, match="is not distributed"):
            call(collection())
    with pytest.raises((hb.PlanError, PeerError), match="no tables for memory hosts"):
        hb.distribute(nn.Linear(2, 1), memory_host=rank == 2)
    model = begin(rank, 2)
    with pytest.raises(hb.TableError, match="were 2 for an earlier one"):
        begin(rank, 3)
    assert isinstance(model, hb.EmbeddingCollection)


@pytest.mark.process
def test_roles_that_cannot_be() -> None:
    run(3, refused)


def measured(rank: int, world: int) -> None:
    model = collection()
    hb.distribute(
        model, hb.dist.Measured(hb.dist.Rates())
    )  # by which all ranks keep rows and train
    model = collection()
    plan = hb.dist.Measured(hb.dist.Rates(), {"item": hb.dist.Traffic(12, 24, 20)})
    hb.distribute(model, plan, memory_host=rank == 1)
    optimizer = hb.optim.SGD(model.parameters(), lr=0.1)
    if rank == 1:
        hb.dist.serve_rows(model, optimizer)
        return
    train(model, optimizer, range(2), 0, 1)
    assert_same_rows(model, trained(range(2), "SGD"))
    hb.dist.release_hosts(model)


@pytest.mark.process
def test_measured_plans_give_rows_to_hosts() -> None:
    run(2, measured)


def other_optimizer(rank: int, world: int) -> None:
    model = begin(rank, 1)
    given: Callable[..., Any] = hb.optim.SGD if rank == 0 else hb.optim.Adagrad
    optimizer = given(model.parameters(), lr=0.1)
    if rank == 1:
        hb.dist.serve_rows(model, optimizer)
        return
    loss_of(model(batch_of(0, slice(None))), 1).backward()
    before = model.lookup("user", USERS)
    for _ in range(2):
        with pytest.raises(PeerError, match=r"Rank 1 .*another optimizer.*type Adagrad"):
            optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(hb.IdError, match="1000"):
        model(batch_of(0, slice(None)) | {"item": torch.tensor([[1000, 1]] * 12)})
    assert torch.equal(model.lookup("user", USERS), before)
    with pytest.raises(hb.TableError, match="memory hosts have no loaders"):
        hb.dist.owned([], model)
    hb.dist.release_hosts(model)


@pytest.mark.process
def test_a_host_with_another_optimizer_trains_nothing() -> None:
    run(2, other_optimizer)


def forward_on_a_host(rank: int, world: int) -> None:
    model = begin(rank, 1)
    optimizer = hb.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        PeerError if rank == 0 else hb.TableError, match="A forward is for ranks with"
    ):
        model(batch_of(0, slice(None)))
    if rank == 1:
        hb.dist.serve_rows(model, optimizer)
        return
    train(model, optimizer, range(2), 0, 1)
    assert_same_rows(model, trained(range(2), "SGD"))
    hb.dist.release_hosts(model)


@pytest.mark.process
def test_a_host_has_no_batches() -> None:
    run(2, forward_on_a_host)


def killed(rank: int, world: int, who: int, folder: str) -> None:
    model = begin(rank, 2)
    optimizer = hb.optim.SGD(model.parameters(), lr=0.1)
    if who == rank:
        die_in_a_handshake(model.ranks, 7)
    try:
        if rank == 2:
            hb.dist.serve_rows(model, optimizer)
        else:
            train(model, optimizer, range(50), rank, 2)
    except PeerError as error:
        Path(folder, str(rank)).write_text(str(error))
    os._exit(1)  # as a script that raises ends


def die_in_a_handshake(ranks: Any, number: int) -> None:
    gather = ranks._gathered
    left = [number]

    def die(own: torch.Tensor) -> torch.Tensor:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        found: torch.Tensor = gather(own)
        return found

    ranks._gathered = die


@pytest.mark.process
@pytest.mark.parametrize("who", [1, 2])
def test_a_rank_that_is_killed_ends_the_others(who: int, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=f"rank {who} is gone"):
        run(3, killed, who, str(tmp_path))
    told = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert told.keys() == {"0", "1", "2"} - {str(who)}
    for text in told.values():
        assert "Another rank ended" in text and "steps have left them" in text
