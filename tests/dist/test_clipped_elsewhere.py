"""Clipped gradients at ranks without batches: memory hosts, and ranks that have ended in Join. These give up
what the others have given up, before anybody asks for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dist.test_sharded import assert_same_rows, batch_of, collection, loss_of
from dist.worlds import run
from torch.distributed.algorithms.join import Join

import hotbed as hb

TABLES = 40
"""More than one word of a handshake tells of."""
IDS = torch.tensor([1, 2])


def begin(hosts: bool, rank: int) -> hb.EmbeddingCollection:
    """All rows lie on rank 1, a memory host if `hosts`."""
    tables = [hb.Table(f"t{n}", 4, 100) for n in range(TABLES)]
    plan = hb.dist.Plan(tables, 2, {table.name: hb.dist.TableWise(1) for table in tables})
    model = hb.EmbeddingCollection(tables, seed=1)
    hb.distribute(model, plan, memory_host=hosts and rank == 1)
    return model


def loss_of_all(model: Any, number: int) -> torch.Tensor:
    found = model({f"t{n}": IDS + number for n in range(TABLES)})
    return torch.stack([some.sum() for some in found.values()]).sum()


def overflow(model: Any, optimizer: Any) -> None:
    """Step 1 is clipped, and its loss infinite; the others are not clipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
    for number in range(4):
        loss = loss_of_all(model, 0) * (float("inf") if number == 1 else 1)
        scaler.scale(loss).backward()
        if number == 1:
            scaler.unscale_(optimizer)
            hb.nn.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == (64.0 if number == 0 else 32.0), number


def scaled(rank: int, world: int, hosts: bool) -> None:
    model = begin(hosts, rank)
    optimizer = hb.optim.SGD(model.parameters(), lr=1.0)
    if hosts and rank:
        hb.dist.serve_rows(model, optimizer)
    elif hosts:
        overflow(model, optimizer)
        hb.dist.release_hosts(model)
    else:
        with Join(hb.dist.joinables(model)):
            if rank == 0:
                overflow(model, optimizer)
    assert model.table("t0").rule.steps == 3


@pytest.mark.process
@pytest.mark.parametrize("hosts", [True, False])
def test_an_overflow_that_was_clipped_costs_one_step(hosts: bool) -> None:
    run(2, scaled, hosts)


def given_up(rank: int, world: int, to_none: bool) -> None:
    """Rank 1 hosts all rows. Every second step is clipped."""
    whole, own = collection(), collection()
    tables = list(own.tables.values())
    plan = hb.dist.Plan(tables, 2, {table.name: hb.dist.TableWise(1) for table in tables})
    hb.distribute(own, plan, memory_host=rank == 1)
    optimizers = [hb.optim.SGD(model.parameters(), lr=0.1) for model in (whole, own)]
    if rank:
        hb.dist.serve_rows(own, optimizers[1])
        return
    for number in range(5):
        for model, optimizer in zip((whole, own), optimizers, strict=True):
            loss_of(model(batch_of(number, slice(None))), 1).backward()
            if number % 2:
                hb.nn.clip_grad_value_(model.parameters(), 2.0)
            optimizer.step()
            model.zero_grad(set_to_none=to_none)
    assert_same_rows(own, whole)
    hb.dist.release_hosts(own)


@pytest.mark.process
@pytest.mark.parametrize("to_none", [True, False])
def test_hosts_step_nothing_twice(to_none: bool) -> None:
    run(2, given_up, to_none)


def erased(rank: int, world: int) -> None:
    model = begin(True, rank)
    optimizer = hb.optim.SGD(model.parameters(), lr=1.0)
    if rank:
        with pytest.MonkeyPatch.context() as patch:
            fail_once(patch, type(model.table("t0")))  # as a tier may
            hb.dist.serve_rows(model, optimizer)
        return
    loss_of_all(model, 0).backward()
    hb.nn.clip_grad_norm_(model.parameters(), 0.5)
    with pytest.raises(hb.TableError, match="while a gradient waits for them"):
        model.erase("t0", IDS)
    optimizer.step()
    optimizer.zero_grad()
    for change in (lambda: model.erase("t39", IDS), lambda: model.assign("t39", IDS, ROWS)):
        with pytest.raises(hb.dist.PeerError, match="Rank 1 could not go on.*disk is full"):
            change()
        change()
    assert torch.equal(model.lookup("t39", IDS), ROWS)
    assert model.erase("t39", IDS) == 2
    hb.dist.release_hosts(model)


ROWS = torch.ones(2, 4)


def fail_once(patch: pytest.MonkeyPatch, kind: Any) -> None:
    for name in ("erase", "assign"):
        real = getattr(kind, name)
        failed: list[object] = []

        def fails(self: Any, *given: Any, real: Any = real, failed: list[object] = failed) -> Any:
            if not failed:
                failed.append(self)
                raise hb.StorageError("the disk is full")
            return real(self, *given)

        patch.setattr(kind, name, fails)


@pytest.mark.process
def test_hosts_erase_after_clipping_and_tell_what_fails() -> None:
    run(2, erased)


def on_one_rank(rank: int, world: int) -> None:
    """A step that was refused is refused again until both ranks have given up the gradient."""
    model = begin(False, rank)
    optimizer = hb.optim.SGD(model.parameters(), lr=1.0)
    loss_of_all(model, rank).backward()
    hb.nn.clip_grad_norm_(model.parameters(), 0.5)
    if rank:
        model.zero_grad()
    before = model.rows("t0").values
    for _ in range(2):
        with pytest.raises(hb.dist.PeerError, match="Rank 1 has given up the clipped gradient of"):
            optimizer.step()
    assert torch.equal(model.rows("t0").values, before)


@pytest.mark.process
def test_a_refused_step_stays_refused() -> None:
    run(2, on_one_rank)


def many_values(rank: int, world: int) -> None:
    """A step tells of so many gradients that a handshake has no room for what was clipped."""
    model = begin(True, rank)
    optimizer = hb.optim.SGD(model.parameters(), lr=1.0)
    if rank:
        hb.dist.serve_rows(model, optimizer)
        return
    before = model.lookup("t39", IDS)
    loss_of_all(model, 0).backward()
    hb.nn.clip_grad_value_(model.parameters(), 0.5)
    for _ in range(30):  # a value of each for each table
        loss_of_all(model, 0).backward()
    optimizer.step()
    torch.testing.assert_close(model.lookup("t39", IDS), before - 30.5, rtol=1e-6, atol=0)
    optimizer.zero_grad()
    for _ in range(30):
        loss_of_all(model, 0).backward()
    optimizer.step()
    torch.testing.assert_close(model.lookup("t39", IDS), before - 60.5, rtol=1e-6, atol=0)
    hb.dist.release_hosts(model)


@pytest.mark.process
def test_what_was_clipped_beside_many_values() -> None:
    run(2, many_values)
