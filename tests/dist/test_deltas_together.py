"""What ranks save of what has changed, any number of ranks loads with its bases."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from dist.test_saving_together import load, optimizer_of, steps
from dist.test_sharded import batch_of, collection, plan_of
from dist.worlds import run

import hotbed as hb
from hotbed.checkpoint import CheckpointError
from hotbed.checkpoint.inspect import contents


def save_some(rank: int, world: int, path: str, deal: str, untouched: str) -> None:
    """Four checkpoints, the last of step 3, and one that is no base of others."""
    model = collection()
    hb.distribute(model, plan_of(model, deal, world))
    optimizer = optimizer_of(model, untouched)
    bases = []
    for number in range(4):
        if number:
            steps(model, optimizer, range(number - 1, number), rank, world)
        saved = hb.save(path, model, optimizer, step=number, delta=True)
        bases.append(saved.base and os.path.basename(saved.base))
        hb.save(path + "-elsewhere", model, optimizer, step=number, keep=1)
    assert bases == [None, *(f"step-{number:012d}" for number in range(3))]
    assert None not in {one["removed"] for one in contents(path)["tables"]}


def go_on(rank: int, world: int, path: str, untouched: str) -> None:
    """Other ranks go on with the chain, and erase rows."""
    model = collection()
    hb.distribute(model, plan_of(model, "row", world))
    optimizer = optimizer_of(model, untouched)
    before = hb.load(path, model, optimizer)
    dynamic = next(name for name, table in model.tables.items() if table.rows is None)
    model.erase(dynamic, model.rows(dynamic).ids[::2])
    steps(model, optimizer, range(3, 4), rank, world)
    saved = hb.save(path, model, optimizer, step=4, delta=True)
    assert saved.base == before.path
    found = {name: model.rows(name) for name in model.tables}
    if rank == 0:
        alone = collection()
        hb.load(path, alone, optimizer_of(alone, untouched))
        for name, (ids, values) in found.items():
            assert torch.equal(alone.rows(name).ids, ids)
            assert torch.equal(alone.rows(name).values, values)


@pytest.mark.process
@pytest.mark.parametrize("untouched", ["lazy", "exact"])
@pytest.mark.parametrize(
    ("before", "after"),
    [((2, "mixed"), (3, "row")), ((3, "column"), (2, "modulo")), ((2, "replicated"), (1, "last"))],
)
def test_other_ranks_go_on_from_a_chain(
    before: tuple[int, str], after: tuple[int, str], untouched: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "run")
    run(before[0], save_some, path, before[1], untouched)
    assert_changes_have_states(path, untouched)
    run(after[0], load, path, after[1], untouched)
    run(after[0], go_on, path, untouched)


def assert_changes_have_states(path: str, untouched: str) -> None:
    """Changes are whole rows, with the states that a load gives them, or has yet to bring up to date."""
    model = collection()
    optimizer = optimizer_of(model, untouched)
    hb.load(path, model, optimizer)
    for name, saved in zip(model.tables, optimizer.state_dict()["state"].values(), strict=True):
        at = {id: row for row, id in enumerate(saved["ids"].tolist())}
        names = {key for key, value in saved.items() if getattr(value, "dim", int)() == 2}
        for some in hb.checkpoint.changes(path, name, since=0):
            assert names and {*some.states} == names
            rows = [at[id] for id in some.ids.tolist()]
            assert (some.steps is None) == (untouched == "lazy")
            for state, values in some.states.items():
                found, wanted = torch.from_numpy(values), saved[state][rows]
                assert found.shape == wanted.shape
                assert untouched == "exact" or torch.equal(found, wanted), (name, state)


def refused(rank: int, world: int, path: str) -> None:
    """A base of which one rank does not know what has changed."""
    model = collection()
    hb.distribute(model, plan_of(model, "row", world))
    optimizer = optimizer_of(model, "lazy")
    steps(model, optimizer, range(1), rank, world)
    saved = hb.save(path, model, optimizer, step=1)
    if rank == 1:
        for name in model.tables:
            for own in model.table(name).place.tables_here(model.table(name)):
                own.core.forget_changes()
    with pytest.raises(CheckpointError, match="it is not known what has changed"):
        hb.save(path, model, optimizer, step=2, base=saved.path)
    assert hb.save(path, model, optimizer, step=2, delta=True).base is None
    with pytest.raises(CheckpointError, match="delta=True on rank 0 and False on rank 1"):
        hb.save(path, model, optimizer, step=3, delta=rank == 0)
    model(batch_of(0, slice(0, 4)))


@pytest.mark.process
def test_what_one_rank_does_not_know_is_refused_on_all(tmp_path: Path) -> None:
    run(2, refused, str(tmp_path / "run"))
