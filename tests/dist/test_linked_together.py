"""Linked saves that several ranks make together, each of its own SSD."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dist.test_saving_together import load, optimizer_of, steps, values_of
from dist.test_sharded import collection, plan_of
from dist.worlds import run

import hotbed as hb
from hotbed.checkpoint import CheckpointError
from hotbed.checkpoint.inspect import verified
from hotbed.dist import PeerError


def over_ssd(folder: str) -> hb.EmbeddingCollection:
    """The same collection, whose rows lie over an SSD."""
    model = collection()
    features = {"item": "item", "more": "item", "user": "user", "word": "word"}
    return hb.EmbeddingCollection(
        [*model.tables.values()],
        features,
        seed=3,
        storage=hb.Storage(host="2MB", ssd=Path(folder) / "rows"),
    )


def save(rank: int, world: int, path: str, deal: str, untouched: str) -> None:
    model = over_ssd(path)
    hb.distribute(model, plan_of(model, deal, world), timeout=20)
    optimizer = optimizer_of(model, untouched)
    steps(model, optimizer, range(3), rank, world)
    saved = hb.save(f"{path}/run", model, optimizer, step=3, linked=True)
    linked = list(Path(saved.path).glob(f"log-{rank}-0/*.rows"))
    assert bool(linked) or (deal, rank) == ("last", 0)
    files = hb.save(f"{path}/files", model, optimizer, step=3)
    assert saved.rows == files.rows
    steps(model, optimizer, range(3, 6), rank, world)
    if rank == 0:
        assert not any(fault for _, _, fault in verified(saved.path))


def load_over_ssd(rank: int, world: int, path: str, deal: str, untouched: str, rows: bool) -> None:
    """`rows`: whether some are read, and none come with their files."""
    model = over_ssd(f"{path}/again")
    hb.distribute(model, plan_of(model, deal, world), timeout=20)
    optimizer = optimizer_of(model, untouched)
    steps(model, optimizer, range(2), rank, world)
    hb.load(f"{path}/run", model, optimizer)
    own = Path(path, "again", "rows", f"rank-{rank}" if world > 1 else "")
    shared = [one for one in own.rglob("*.rows") if one.stat().st_nlink > 1]
    assert bool(shared) != rows or (deal, rank) == ("last", 0)
    steps(model, optimizer, range(3, 6), rank, world)
    expected = collection()
    steps(expected, optimizer_of(expected, untouched), range(6), 0, 1)
    assert all(map(torch.equal, values_of(model), values_of(expected)))


@pytest.mark.process
@pytest.mark.parametrize("untouched", ["lazy", "exact"])
@pytest.mark.parametrize(
    ("before", "after", "rows"),
    [
        # Of a dynamic table cut by row nothing tells whose rows are whose.
        ((2, "mixed"), (3, "row"), True),
        ((2, "row"), (2, "row"), True),
        ((3, "column"), (2, "modulo"), True),
        ((2, "last"), (2, "last"), False),
        ((1, "last"), (3, "mixed"), True),
    ],
)
def test_other_ranks_go_on(
    before: tuple[int, str],
    after: tuple[int, str],
    rows: bool,
    untouched: str,
    tmp_path: Path,
) -> None:
    run(before[0], save, str(tmp_path), before[1], untouched)
    run(after[0], load, str(tmp_path / "run"), after[1], untouched)
    run(after[0], load_over_ssd, str(tmp_path), after[1], untouched, rows)
    packed = hb.checkpoint.pack(tmp_path / "run")
    assert not [*Path(packed).glob("log-*")]
    assert not any(fault for _, _, fault in verified(packed))
    run(after[0], load, str(tmp_path / "run"), after[1], untouched)


def one_cannot_link(rank: int, world: int, path: str) -> None:
    model = over_ssd(path)
    hb.distribute(model, plan_of(model, "row", world), timeout=20)
    optimizer = optimizer_of(model, "lazy")
    steps(model, optimizer, range(2), rank, world)
    hb.save(f"{path}/run", model, optimizer, step=2)
    patch = pytest.MonkeyPatch()

    def fail(*arguments: Any, **more: Any) -> Any:
        raise OSError(5, "the disk is gone")

    if rank == 1:
        patch.setattr("hotbed.checkpoint.begun.link_rows", fail)
    error, text = (OSError, "disk") if rank == 1 else (PeerError, "Rank 1.*disk")
    with pytest.raises(error, match=text):
        hb.save(f"{path}/run", model, optimizer, step=3, linked=True)
    patch.undo()
    steps(model, optimizer, range(2, 4), rank, world)
    hb.save(f"{path}/run", model, optimizer, step=4, linked=True)
    torch.distributed.barrier()
    assert [one.step for one in hb.checkpoint.list(f"{path}/run")] == [2, 4]


@pytest.mark.process
def test_one_that_fails_is_told(tmp_path: Path) -> None:
    run(2, one_cannot_link, str(tmp_path))


def nothing_to_link(rank: int, world: int, path: str) -> None:
    model = collection()
    hb.distribute(model, plan_of(model, "row", world), timeout=20)
    with pytest.raises((CheckpointError, PeerError), match="no table lies over one"):
        hb.save(path, model, step=0, linked=True)
    hb.save(path, model, step=1)


@pytest.mark.process
def test_all_hear_that_there_is_no_ssd(tmp_path: Path) -> None:
    run(2, nothing_to_link, str(tmp_path))
