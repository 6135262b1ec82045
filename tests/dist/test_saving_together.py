"""What ranks save together, any number of ranks loads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from dist.test_sharded import batch_of, collection, loss_of, plan_of
from dist.worlds import run
from effort import examples

import hotbed as hb
from hotbed.checkpoint import CheckpointError
from hotbed.checkpoint.inspect import verified
from hotbed.dist import PeerError


def optimizer_of(model: hb.EmbeddingCollection, untouched: str) -> Any:
    return hb.optim.Adam(model.parameters(), lr=0.1, untouched=untouched)


def steps(model: Any, optimizer: Any, numbers: range, rank: int, world: int) -> None:
    samples = slice(12 * rank // world, 12 * (rank + 1) // world)
    for number in numbers:
        loss_of(model(batch_of(number, samples)), world).backward()
        optimizer.step()
        optimizer.zero_grad()


def values_of(model: hb.EmbeddingCollection) -> list[torch.Tensor]:
    found = [model.rows(name) for name in model.tables]
    return [tensor for rows in found for tensor in rows]


def save(rank: int, world: int, path: str, deal: str, untouched: str) -> None:
    model = collection()
    hb.distribute(model, plan_of(model, deal, world))
    optimizer = optimizer_of(model, untouched)
    steps(model, optimizer, range(3), rank, world)
    saved = hb.save(path, model, optimizer, step=3)
    assert saved.step == 3
    assert saved.rows == sum(
        model.count(n) * (world if is_cut(model, n) else 1) for n in model.tables
    )
    steps(model, optimizer, range(3, 6), rank, world)
    if rank == 0:
        assert not any(fault for _, _, fault in verified(hb.checkpoint.latest(path)))


def is_cut(model: hb.EmbeddingCollection, name: str) -> bool:
    """Whether each rank has some columns of each row."""
    shares = model.table(name).place.shards  # type: ignore[attr-defined]
    return any(share.part.origin.column for share in shares)


def load(rank: int, world: int, path: str, deal: str, untouched: str) -> None:
    torch.manual_seed(rank)
    model = collection()
    hb.distribute(model, plan_of(model, deal, world))
    optimizer = optimizer_of(model, untouched)
    restored = hb.load(path, model, optimizer)
    assert restored.step == 3 and not restored.missing and not restored.unexpected
    steps(model, optimizer, range(3, 6), rank, world)
    expected = collection()
    other = optimizer_of(expected, untouched)
    steps(expected, other, range(6), 0, 1)
    assert all(map(torch.equal, values_of(model), values_of(expected)))
    steps_taken = [model.table(name).rule.steps for name in model.tables]
    assert steps_taken == [6, 6, 6]
    only_rows = collection()
    hb.distribute(only_rows, plan_of(only_rows, "row", world))
    hb.load(path, only_rows)
    expected = collection()
    steps(expected, optimizer_of(expected, untouched), range(3), 0, 1)
    assert all(map(torch.equal, values_of(only_rows), values_of(expected)))


@pytest.mark.process
@pytest.mark.parametrize("untouched", ["lazy", "exact"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, "mixed"), (3, "row")),
        ((3, "column"), (2, "modulo")),
        ((3, "replicated"), (1, "last")),
        ((1, "last"), (3, "mixed")),
        ((2, "last"), (2, "replicated")),
    ],
)
def test_other_ranks_go_on(
    before: tuple[int, str], after: tuple[int, str], untouched: str, tmp_path: Path
) -> None:
    run(before[0], save, str(tmp_path), before[1], untouched)
    run(after[0], load, str(tmp_path), after[1], untouched)
    if after[0] != 1:
        return
    model = collection()  # one process that shares nothing
    optimizer = optimizer_of(model, untouched)
    hb.load(tmp_path, model, optimizer)
    steps(model, optimizer, range(3, 6), 0, 1)
    expected = collection()
    steps(expected, optimizer_of(expected, untouched), range(6), 0, 1)
    assert all(map(torch.equal, values_of(model), values_of(expected)))


def behind(rank: int, world: int, deal: str) -> None:
    model = collection()
    hb.distribute(model, plan_of(model, deal, world))
    optimizer = optimizer_of(model, "exact")
    steps(model, optimizer, range(2), rank, world)
    states = [optimizer.state_dict()]
    torch.distributed.broadcast_object_list(states)
    steps(model, optimizer, range(2, 5), rank, world)
    before = values_of(model)
    optimizer.load_state_dict(states[0])
    assert all(map(torch.equal, values_of(model), before))
    assert [model.table(name).rule.steps for name in model.tables] == [2, 2, 2]


@pytest.mark.process
@pytest.mark.parametrize("deal", ["row", "column", "replicated"])
def test_loading_states_leaves_rows_that_are_behind_as_they_read(deal: str) -> None:
    run(2, behind, deal)


class Position:
    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def own_state(rank: int, world: int, path: str) -> None:
    model = collection()
    hb.distribute(model)
    optimizer = optimizer_of(model, "lazy")
    steps(model, optimizer, range(2), rank, world)
    torch.manual_seed(17 + rank)
    hb.save(path, model, optimizer, step=2, loader=Position(100 + rank))
    drawn = torch.rand(3)
    position = Position(0)
    hb.load(path, model, optimizer, loader=position)
    assert position.at == 100 + rank
    assert torch.equal(torch.rand(3), drawn)


def faults(rank: int, world: int, path: str) -> None:
    model = collection()
    hb.distribute(model, plan_of(model, "mixed", world))
    optimizer = optimizer_of(model, "lazy")
    steps(model, optimizer, range(2), rank, world)
    hb.save(path, model, optimizer, step=2)
    there = sorted(os.listdir(path))
    with pytest.raises((CheckpointError, PeerError), match="step must be"):
        hb.save(path, model, optimizer, step=-1 if rank == 0 else 3)
    if rank == 1:
        import hotbed.checkpoint.rows as rows

        written = rows.write_tensors  # type: ignore[attr-defined]
        rows.write_tensors = full  # type: ignore[attr-defined]
    with pytest.raises((OSError, PeerError), match="No space left"):
        hb.save(path, model, optimizer, step=3)
    if rank == 1:
        rows.write_tensors = written  # type: ignore[attr-defined]
    torch.distributed.barrier()
    assert sorted(os.listdir(path)) == there
    before = values_of(model)
    hb.load(path, model, optimizer)
    assert all(map(torch.equal, values_of(model), before))
    loss_of(model(batch_of(1, slice(0, 4))), 1).backward()
    with pytest.raises(CheckpointError, match="a gradient waits"):
        hb.save(path, model, optimizer, step=4)
    optimizer.zero_grad()
    hb.save(path, model, optimizer, step=4, keep=1)
    assert hb.checkpoint.latest(path) is not None
    torch.distributed.barrier()
    assert len(os.listdir(path)) == 1
    with pytest.raises((CheckpointError, PeerError), match="no folder"):
        hb.load(f"{path}/nothing", model)


def full(*arguments: Any, **options: Any) -> Any:
    raise OSError(28, "No space left on device")


@pytest.mark.process
def test_each_rank_has_its_position_and_random_states(tmp_path: Path) -> None:
    run(2, own_state, str(tmp_path))


@pytest.mark.process
@pytest.mark.parametrize("again", range(examples(1, 20)))
def test_faults_of_one_rank_while_saving(again: int, tmp_path: Path) -> None:
    run(2, faults, str(tmp_path))


def half_loaded(rank: int, world: int, path: str) -> None:
    """Rank 1 fails when it has changed something, too, or before it has."""
    from hotbed.checkpoint import loading, restoring

    model = collection()
    hb.distribute(model, plan_of(model, "mixed", world))
    optimizer = optimizer_of(model, "lazy")
    steps(model, optimizer, range(2), rank, world)
    hb.save(path, model, optimizer, step=2)
    expected = values_of(model)
    for module, name in ((restoring, "rows_of_chain"), (loading, "read_manifest")):
        real = getattr(module, name)
        if rank == 1:
            setattr(module, name, full)
        with pytest.raises((CheckpointError, PeerError), match="No space left"):
            try:
                hb.load(path, model, optimizer)
            except OSError as error:  # of the manifest
                raise CheckpointError(str(error)) from error
        setattr(module, name, real)
        with pytest.raises(hb.TableError, match="half loaded: hotbed.load of"):
            model(batch_of(1, slice(0, 4)))
        with pytest.raises(hb.TableError, match="half loaded"):
            optimizer.step()
        with pytest.raises(hb.TableError, match="half loaded"):
            hb.save(path, model, optimizer, step=4, keep=1)
        hb.load(path, model, optimizer)
        assert all(map(torch.equal, values_of(model), expected))
    steps(model, optimizer, range(2, 4), rank, world)


@pytest.mark.process
def test_all_ranks_refuse_what_one_has_half_loaded(tmp_path: Path) -> None:
    run(2, half_loaded, str(tmp_path))


def export(rank: int, world: int, path: str) -> None:
    model = collection()
    hb.distribute(model)
    for write in (
        lambda: hb.export(model, path, sample=batch_of(0, slice(0, 12))),
        lambda: hb.serve.quantized(model),
    ):
        with pytest.raises(hb.PlanError, match="shared by 2 ranks. Save the model, and export"):
            write()


def test_shared_tables_are_not_exported(tmp_path: Path) -> None:
    run(2, export, str(tmp_path / "bundle"))
