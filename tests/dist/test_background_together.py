"""Saves in the background that several ranks make together, all of one instant."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.test_background import gated
from dist.test_saving_together import load, optimizer_of, steps
from dist.test_sharded import collection, plan_of
from dist.worlds import run

import hotbed as hb
from hotbed.checkpoint import CheckpointError, begun
from hotbed.checkpoint.rows import write_rows
from hotbed.checkpoint.tensors import write_tensors
from hotbed.dist import PeerError


def save(rank: int, world: int, path: str, deal: str, untouched: str, delta: bool) -> None:
    model = collection()
    hb.distribute(model, plan_of(model, deal, world), timeout=20)
    optimizer = optimizer_of(model, untouched)
    steps(model, optimizer, range(2), rank, world)
    hb.save(path, model, optimizer, step=2)
    steps(model, optimizer, range(2, 3), rank, world)
    with gated(2) as gate:
        saving = hb.save(path, model, optimizer, step=3, blocking=False, delta=delta)
        again = hb.save(path, model, optimizer, step=4, blocking=False, skip=True)
        assert again is saving
        steps(model, optimizer, range(3, 5), rank, world)
        gate.let(3 + rank)
        dynamic = next(name for name, table in model.tables.items() if table.rows is None)
        model.erase(dynamic, torch.arange(9))
        steps(model, optimizer, range(5, 6), rank, world)
        gate.open()
        saved = saving.wait()
    assert bool(saved.base) == delta and saved.path.endswith("step-000000000003")
    assert saved == saving.wait()
    steps(model, optimizer, range(6, 7), rank, world)
    assert hb.checkpoint.list(path)[-1].state == "whole"


@pytest.mark.process
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("untouched", ["lazy", "exact"])
@pytest.mark.parametrize(
    ("before", "after"), [((2, "mixed"), (3, "row")), ((3, "column"), (1, "last"))]
)
def test_other_ranks_go_on(
    before: tuple[int, str], after: tuple[int, str], untouched: str, delta: bool, tmp_path: Path
) -> None:
    run(before[0], save, str(tmp_path), before[1], untouched, delta)
    run(after[0], load, str(tmp_path), after[1], untouched)


def one_fails(rank: int, world: int, path: str, failing: int) -> None:
    model = collection()
    hb.distribute(model, plan_of(model, "row", world), timeout=20)
    optimizer = optimizer_of(model, "lazy")
    steps(model, optimizer, range(2), rank, world)
    hb.save(path, model, optimizer, step=2)
    patch = pytest.MonkeyPatch()

    def fail(*arguments: Any, **more: Any) -> Any:
        raise OSError(5, "the disk is gone")

    if rank == failing:
        patch.setattr(begun, "write_rows", fail)
    began = time.monotonic()
    saving = hb.save(path, model, optimizer, step=3, blocking=False)
    steps(model, optimizer, range(2, 4), rank, world)
    error, text = (OSError, "disk") if rank == failing else (PeerError, f"Rank {failing}.*disk")
    with pytest.raises(error, match=text):
        saving.wait()
    patch.undo()
    assert time.monotonic() - began < 10
    unheard = hb.save(path, model, optimizer, step=4, blocking=False)
    unheard.wait()
    steps(model, optimizer, range(4, 5), rank, world)
    torch.distributed.barrier()
    assert [one.step for one in hb.checkpoint.list(path)] == [2, 4]


@pytest.mark.process
@pytest.mark.parametrize("failing", [0, 1])
def test_one_that_fails_is_told(failing: int, tmp_path: Path) -> None:
    run(2, one_fails, str(tmp_path / "run"), failing)


def unheard(rank: int, world: int, path: str) -> None:
    """The next save of all says that the one before has failed on one."""
    model = collection()
    hb.distribute(model, plan_of(model, "row", world), timeout=20)
    optimizer = optimizer_of(model, "lazy")
    patch = pytest.MonkeyPatch()
    if rank == 1:
        patch.setattr(begun, "write_rows", lambda *_, **__: 1 / 0)
    saving = hb.save(path, model, optimizer, step=0, blocking=False)
    while not saving.done():
        time.sleep(0.01)
    patch.undo()
    with pytest.raises((CheckpointError, PeerError), match="step 0 in the background has failed"):
        hb.save(path, model, optimizer, step=1, blocking=False)
    hb.save(path, model, optimizer, step=2)
    assert [one.step for one in hb.checkpoint.list(path)] == [2]


@pytest.mark.process
def test_the_next_save_tells_all(tmp_path: Path) -> None:
    run(2, unheard, str(tmp_path / "run"))


def one_is_killed(rank: int, world: int, path: str, killed: int) -> None:
    model = collection()
    hb.distribute(model, plan_of(model, "row", world), timeout=3)
    optimizer = optimizer_of(model, "lazy")
    hb.save(path, model, optimizer, step=0)
    with gated(1) as gate:
        saving = hb.save(path, model, optimizer, step=1, blocking=False)
        if rank == killed:
            os._exit(1)
        gate.open()
        with pytest.raises(PeerError, match=f"rank {killed}|reach the others"):
            saving.wait(30)
    assert [one.step for one in hb.checkpoint.list(path) if one.state == "whole"] == [0]
    Path(path, "told").touch()
    os._exit(0)


@pytest.mark.process
def test_a_rank_that_is_gone_ends_the_save(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="is gone"):
        run(2, one_is_killed, str(tmp_path / "run"), 1)
    assert (tmp_path / "run" / "told").exists()


def beside_hosts(rank: int, world: int, path: str, delta: bool) -> None:
    model = collection()
    is_host = rank == world - 1
    hb.distribute(model, plan_of(model, "row", world), timeout=20, memory_host=is_host)
    optimizer = optimizer_of(model, "lazy")
    with gated(2) as gate:
        if is_host:
            over = threading.Event()

            def let() -> None:
                while not over.wait(0.02):
                    gate.let(1)

            threading.Thread(target=let, daemon=True).start()
            hb.dist.serve_rows(model, optimizer)
            over.set()
            return
        steps(model, optimizer, range(2), rank, world - 1)
        hb.save(path, model, optimizer, step=2)
        steps(model, optimizer, range(2, 3), rank, world - 1)
        saving = hb.save(path, model, optimizer, step=3, blocking=False, delta=delta)
        steps(model, optimizer, range(3, 5), rank, world - 1)
        assert not saving.done()
        dynamic = next(name for name, table in model.tables.items() if table.rows is None)
        model.erase(dynamic, torch.arange(9))
        gate.open()
        assert bool(saving.wait().base) == delta
    again = hb.save(f"{path}/again", model, optimizer, step=4, blocking=False)
    assert again.wait().step == 4
    hb.dist.release_hosts(model)


@pytest.mark.process
@pytest.mark.parametrize("delta", [False, True])
def test_beside_memory_hosts(tmp_path: Path, delta: bool) -> None:
    run(3, beside_hosts, str(tmp_path), delta)
    run(2, load, str(tmp_path), "row", "lazy")


def a_host_fails(rank: int, world: int, path: str) -> None:
    model = collection()
    is_host = rank == world - 1
    hb.distribute(model, plan_of(model, "row", world), timeout=20, memory_host=is_host)
    optimizer = optimizer_of(model, "lazy")
    patch = pytest.MonkeyPatch()
    if is_host:
        writes = iter([True])  # the first one fails

        def fail(*arguments: Any, **more: Any) -> Any:
            if next(writes, None):
                raise OSError(5, "the disk is gone")
            return write_rows(*arguments, **more)

        patch.setattr(begun, "write_rows", fail)
        hb.dist.serve_rows(model, optimizer)
        return
    saving = hb.save(path, model, optimizer, step=0, blocking=False)
    steps(model, optimizer, range(2), rank, world - 1)
    with pytest.raises(PeerError, match="Rank 2.*the disk is gone"):
        saving.wait()
    assert hb.save(path, model, optimizer, step=2, blocking=False).wait().step == 2
    hb.dist.release_hosts(model)


@pytest.mark.process
def test_a_memory_host_that_fails_is_told(tmp_path: Path) -> None:
    run(3, a_host_fails, str(tmp_path))


def one_is_slow(rank: int, world: int, path: str) -> None:
    """Longer than the others' timeout, but it lives."""
    model = collection()
    hb.distribute(model, plan_of(model, "row", world), timeout=2)
    optimizer = optimizer_of(model, "lazy")
    patch = pytest.MonkeyPatch()
    if rank == 0:
        write = write_tensors

        def slowly(*arguments: Any) -> Any:
            time.sleep(5)
            return write(*arguments)

        patch.setattr(begun, "write_tensors", slowly)
    saving = hb.save(path, model, optimizer, step=0, blocking=False)
    steps(model, optimizer, range(2), rank, world)
    assert saving.wait(30).step == 0
    patch.undo()
    with pytest.raises(CheckpointError, match="blocking"):
        hb.save(path, model, optimizer, step=1, blocking=rank == 0)
    with pytest.raises(CheckpointError, match=r"calls hotbed.save\(skip=True\)|, and rank 1"):
        hb.save(path, model, optimizer, step=1, blocking=False, skip=rank == 0)
    hb.save(path, model, optimizer, step=2)


@pytest.mark.process
def test_a_slow_rank_is_waited_for(tmp_path: Path) -> None:
    run(2, one_is_slow, str(tmp_path / "run"))
