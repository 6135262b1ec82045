"""Checkpoints by several writers, each with a part of the tables, loaded whole and in other parts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_in import PLACES, storage_of
from torch import nn

import hotbed as hb
from hotbed import _core
from hotbed.checkpoint import CheckpointError, merge_columns, rows
from hotbed.checkpoint.inspect import contents, differences, verified
from hotbed.checkpoint.manifest import FORMAT, VERSION, read_manifest
from hotbed.checkpoint.new import new_folder
from hotbed.checkpoint.rows import write_rows
from hotbed.checkpoint.rules import rule_of
from hotbed.checkpoint.tables import entry_of
from hotbed.checkpoint.tensors import write_tensors
from hotbed.modules.owner import tables_of
from hotbed.tables import Table, columns_of, ids_of, rows_of

Cut = Callable[[Table], list[Table]]


def by_id(table: Table, count: int) -> list[Table]:
    if table.rows is None:
        return [ids_of(table, lambda ids, n=n: ids % count == n) for n in range(count)]
    return [rows_of(table, n, count) for n in range(count)]


def by_columns(table: Table, ends: Sequence[int]) -> list[Table]:
    ends = [0, *(end for end in ends if end < table.dim), table.dim]
    return [columns_of(table, *pair) for pair in zip(ends, ends[1:], strict=False)]


CUTS: dict[str, Cut] = {
    "whole": lambda table: [table],
    "two by id": lambda table: by_id(table, 2),
    "more than rows": lambda table: by_id(table, 40),
    "columns": lambda table: by_columns(table, [1]),
    "other columns": lambda table: by_columns(table, [2, 3]),
    "both": lambda table: [p for half in by_id(table, 2) for p in by_columns(half, [2])],
}


def model_of(table: Table, storage: hb.Storage | None = None) -> Any:
    return nn.ModuleDict({"m": hb.EmbeddingCollection([table], seed=3, storage=storage)})


def optimizer_of(model: Any, rule: str, untouched: str) -> Any:
    return getattr(hb.optim, rule)(model.parameters(), lr=0.05, untouched=untouched)


def trained(table: Table, rule: str, untouched: str) -> tuple[Any, Any]:
    model = model_of(table)
    optimizer = optimizer_of(model, rule, untouched)
    for step in range(4):
        drawn = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 23, (6, 2), generator=drawn)
        model["m"]({"t": ids})["t"].float().sin().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def by_writers(folder: Path, models: Sequence[Any]) -> Path:
    """A checkpoint to which each model has written its part."""
    with new_folder(str(folder), 1) as new:
        dense = write_tensors(f"{new.path}/dense.safetensors", {})
        files = [{"name": "dense.safetensors", **dense, "rows": {}}]
        for writer, model in enumerate(models):
            every = tables_of(model).items()
            rows = ((stem, t, some) for stem, t in every for some in t.records(current=False))
            files += write_rows(new.path, rows, writer=writer)
        entries = {
            stem: entry_of(table, rule_of(table)) for stem, table in tables_of(models[0]).items()
        }
        values = {"model": {"dict": []}, "optimizers": [], "schedulers": [], "loaders": []}
        about = {"format": FORMAT, "version": VERSION, "step": 1, "base": None, "model": None}
        new.complete({**about, "tables": entries, "files": files[::-1], "values": values})
    return Path(new.path)


def records(model: Any) -> dict[int, tuple[Any, ...]]:
    """Id in the whole table → weights, states, steps as they are stored."""
    table = model["m"].table("t")
    found = {}
    for chunk in table.records(current=False):
        ids = table.spec.origin.ids_in_table(chunk.ids).tolist()
        states = [state.unbind() for state in chunk.states or ()]
        steps = [None] * len(ids) if chunk.steps is None else chunk.steps.tolist()
        for at, row in enumerate(ids):
            found[row] = (chunk.weights[at], [s[at] for s in states], steps[at])
    return found


def is_part(
    own: dict[int, tuple[Any, ...]], whole: dict[int, tuple[Any, ...]], part: Table
) -> bool:
    first = part.origin.column
    columns = slice(first, first + part.dim)

    def cut(value: torch.Tensor) -> torch.Tensor:
        return value[columns] if len(value) == part.origin.dim else value

    for row, (weights, states, step) in own.items():
        wanted, their_states, their_step = whole[row]
        assert torch.equal(weights, cut(wanted)) and step == their_step
        assert all(torch.equal(s, cut(w)) for s, w in zip(states, their_states, strict=True))
    return True


@settings(max_examples=examples(20, 600))
@given(
    static=st.booleans(),
    dim=st.sampled_from([1, 2, 5]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.float64]),
    rule=st.sampled_from([("SGD", "lazy"), ("RowwiseAdagrad", "lazy"), ("Adam", "exact")]),
    written=st.sampled_from(sorted(CUTS)),
    read=st.sampled_from(sorted(CUTS)),
    places=st.tuples(*[st.sampled_from(PLACES)] * 2),
    passes=st.booleans(),
)
def test_any_parts_from_any_place_into_any(
    static: bool,
    dim: int,
    dtype: torch.dtype,
    rule: tuple[str, str],
    written: str,
    read: str,
    places: tuple[str, str],
    passes: bool,
) -> None:
    table = Table("t", dim, rows=23 if static else None, dtype=dtype)
    model, optimizer = trained(table, *rule)
    expected = records(model)
    with (
        tempfile.TemporaryDirectory() as scratch,
        pytest.MonkeyPatch.context() as patch,
    ):
        folder = Path(scratch)
        patch.setattr(rows, "FILE_BYTES", 1)
        if passes:
            patch.setattr(_core, "available_memory", lambda: 8000)
        hb.save(folder / "first", model, optimizer, step=1)

        def loaded(of: Path, part: Table, place: str, name: str) -> tuple[Any, Any]:
            own = model_of(part, storage_of(place, folder / name))
            stepped = optimizer_of(own, *rule)
            hb.load(of, own, stepped, strict=False)
            assert is_part(records(own), expected, part)
            return own, stepped

        writers = [
            loaded(folder / "first", part, places[0], f"w{number}")
            for number, part in enumerate(CUTS[written](table))
        ]
        second = by_writers(folder / "second", [model for model, _ in writers])
        assert not [fault for _, _, fault in verified(str(second)) if fault]
        found = 0
        for number, part in enumerate(CUTS[read](table)):
            own, _ = loaded(second, part, places[1], f"r{number}")
            found += len(records(own)) * part.dim
        assert found == len(expected) * dim


def test_whole_tables_are_equal_again(tmp_path: Path) -> None:
    table = Table("t", 5)
    model, optimizer = trained(table, "Adam", "exact")
    first = hb.save(tmp_path / "first", model, optimizer, step=1).path
    parts = []
    for part in CUTS["both"](table):
        own = model_of(part)
        parts.append((own, optimizer_of(own, "Adam", "exact")))
        hb.load(first, *parts[-1])
    second = by_writers(tmp_path / "second", [own for own, _ in parts])
    again = model_of(table)
    hb.load(second, again, optimizer_of(again, "Adam", "exact"), strict=False)
    third = hb.save(tmp_path / "third", again, step=1, states=False).path
    model_only = hb.save(tmp_path / "fourth", model, step=1, states=False).path
    (both,) = differences(third, model_only)
    assert (both.only_first, both.only_second, both.changed) == (0, 0, 0) and both.equal > 10
    for path in (first, str(second)):
        (about,) = contents(path)["tables"]
        assert about["saved_rows"] == both.equal


def test_a_part_has_the_padding_of_its_table(tmp_path: Path) -> None:
    table = Table("t", 4, rows=10, padding_idx=3)
    hb.save(tmp_path, model_of(table), step=0)
    part = rows_of(table, 1, 2)
    assert part.padding_idx == 1
    hb.load(tmp_path, model_of(part))


def test_columns_that_do_not_fit_together(tmp_path: Path) -> None:
    table = Table("t", 5, rows=23)
    model, optimizer = trained(table, "RowwiseAdagrad", "lazy")
    hb.save(tmp_path / "first", model, optimizer, step=1)
    parts = []
    for part in CUTS["columns"](table):
        own = model_of(part)
        parts.append((own, optimizer_of(own, "RowwiseAdagrad", "lazy")))
        hb.load(tmp_path / "first", *parts[-1])
    again = model_of(table)
    stepped = optimizer_of(again, "RowwiseAdagrad", "lazy")

    with pytest.raises(CheckpointError, match="some columns of 'm.t' have more rows than others"):
        read_manifest(str(by_writers(tmp_path / "half", [parts[0][0]])))

    own, optimizer = parts[1]
    own["m"]({"t": torch.tensor([[3]])})["t"].sum().backward()
    optimizer.step()
    torn = by_writers(tmp_path / "torn", [own for own, _ in parts])
    with pytest.raises(
        CheckpointError, match="'m.t' do not fit together: some of a row have other"
    ):
        hb.load(torn, again, stepped, strict=False)
    hb.load(torn, model_of(table), strict=False)  # without states there is nothing to differ

    pieces = joined_pieces(torn)
    for number, piece in enumerate(pieces):
        own = {name: piece.tensors[name][number:] for name in ("ids", "weights")}
        pieces[number] = piece._replace(tensors=own)
    with pytest.raises(ValueError, match="some rows have not all of them"):
        merge_columns._joined("m.t", slice(0, 5), pieces, {"states/sum"})
    halves = [
        rows.TableRows("t", columns, {"ids": ids, "weights": torch.ones(2, 2)})
        for columns, ids in (
            (slice(0, 2), torch.tensor([1, 1])),
            (slice(2, 4), torch.tensor([2, 2])),
        )
    ]
    singles = [
        half._replace(tensors={name: tensor[n : n + 1] for name, tensor in half.tensors.items()})
        for half in halves
        for n in range(2)
    ]
    for pieces in (halves, singles):  # twice in a file, and in two files
        with pytest.raises(ValueError, match="or twice"):
            merge_columns._joined("t", slice(0, 4), pieces, set())


def joined_pieces(folder: Path) -> list[Any]:
    manifest = read_manifest(str(folder))
    found = [piece for _, piece in rows.read_rows(str(folder), manifest, ["m.t"])]
    return sorted(found, key=lambda piece: piece.columns.start)
