"""Tables of a checkpoint by themselves, for those who look into them or make them elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.checkpoint.files import CheckpointError, write_tensors
from hotbed.checkpoint.folder import finish, new_folder, opened
from hotbed.checkpoint.manifest import FORMAT, VERSION, read_manifest
from hotbed.checkpoint.rows import read_rows
from hotbed.tables import DTYPES, MAX_DIM

__all__ = ["Chunk", "read", "write"]


class Chunk(NamedTuple):
    """Some rows of a table."""

    ids: Tensor
    """(n,) int64"""
    weights: Tensor
    """(n, dim)"""
    states: Mapping[str, Tensor] = {}
    """(n, dim) or (n, 1) each."""
    steps: Tensor | None = None
    """(n,) int64, of a table with ``untouched="exact"``: the step up to which each row is current."""


def read(path: str | os.PathLike[str], table: str) -> Iterator[Chunk]:
    """The rows of one table, some megabytes at a time, in the order of the files.

    Args:
        path: a checkpoint, or a folder of them, of which the latest is read.
        table: its name in the model's ``state_dict``; ``hotbed checkpoint show`` lists them.

    Raises:
        CheckpointError: there is no such checkpoint or table, or a file is damaged.
    """
    with opened(os.fspath(path)) as folder:
        manifest = read_manifest(folder)
        if table not in manifest["tables"]:
            known = ", ".join(manifest["tables"]) or "none"
            raise CheckpointError(f"{folder} has no table {table!r}. It has {known}.")
        for file, rows in read_rows(folder, manifest["files"], [table]):
            if rows.columns != slice(0, manifest["tables"][table]["dim"]):
                raise CheckpointError(f"{file} has some columns of {table!r} only.")
            if not {"ids", "weights"} <= {*rows.tensors}:
                raise CheckpointError(f"{file} has no rows of {table!r} as its manifest says.")
            rule = manifest["tables"][table]["rule"] or {"states": []}
            named = {name: rows.tensors[f"states/{name}"] for name, _ in rule["states"]}
            steps = rows.tensors.get("steps")
            yield Chunk(rows.tensors["ids"], rows.tensors["weights"], named, steps)


def write(
    path: str | os.PathLike[str],
    tables: Mapping[str, Iterable[tuple[Tensor, Tensor]]],
    *,
    rows: Mapping[str, int] | None = None,
    step: int = 0,
) -> str:
    """Writes a checkpoint that holds tables and nothing else, for `hotbed.load` with ``strict=False``.

    Args:
        path: a folder of checkpoints; it is made if there is none.
        tables: by the name in the model's ``state_dict``, chunks of ids (n,) int64 and weights (n, dim), each
            id once. They are read one by one.
        rows: how many rows static tables have; the others are dynamic.
        step: of the checkpoint.

    Returns:
        Its folder.

    Raises:
        CheckpointError: a chunk is no such thing, or has another dim or dtype than the one before it.
        OSError: it cannot be written.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise CheckpointError(f"step must be an integer from 0 on, got {step!r}.")
    rows = rows or {}
    entries, files = {}, []
    with new_folder(os.fspath(path), step) as folder:
        dense = write_tensors(os.path.join(folder, "dense.safetensors"), {})
        files.append({"name": "dense.safetensors", **dense, "rows": {}})
        for name, chunks in tables.items():
            first: Tensor | None = None
            for ids, weights in chunks:
                _check(name, ids, weights, first, rows.get(name))
                first = weights[:0] if first is None else first
                file = f"rows-0-{len(files) - 1}.safetensors"
                tensors = {f"{name}/ids": ids, f"{name}/weights": weights}
                part = {"count": len(ids), "columns": [0, weights.shape[1]]}
                written = write_tensors(os.path.join(folder, file), tensors)
                files.append({"name": file, **written, "rows": {name: part}})
            if first is None:
                raise CheckpointError(f"Table {name!r} has no chunk that says how wide it is.")
            entries[name] = {
                "rows": rows.get(name),
                "dim": first.shape[1],
                "dtype": str(first.dtype).removeprefix("torch."),
                "combiner": None,
                "padding_idx": None,
                "init": None,
                "key": None,
                "rule": None,
                "removed": None,
            }
        values = {"model": {"dict": []}, "optimizers": [], "schedulers": [], "loaders": []}
        about = {"format": FORMAT, "version": VERSION, "step": step, "base": None}
        finish(folder, {**about, "tables": entries, "files": files, "values": values})
    return folder


def _check(name: str, ids: Tensor, weights: Tensor, first: Tensor | None, rows: int | None) -> None:
    fits = (
        isinstance(ids, Tensor)
        and isinstance(weights, Tensor)
        and ids.dtype == torch.int64
        and weights.dtype in DTYPES
        and ids.dim() == 1
        and weights.dim() == 2
        and len(ids) == len(weights)
        and 0 < weights.shape[1] <= MAX_DIM
    )
    if not fits:
        raise CheckpointError(
            f"Table {name!r}: a chunk must be ids (n,) int64 and weights (n, dim) of a floating-point dtype."
        )
    if first is not None and (weights.shape[1], weights.dtype) != (first.shape[1], first.dtype):
        raise CheckpointError(f"Table {name!r}: its chunks differ in dim or dtype.")
    if rows is not None and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
        raise CheckpointError(f"Table {name!r}: an id is outside [0, {rows}).")
