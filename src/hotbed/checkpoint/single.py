"""Tables of a checkpoint by themselves, for those who look into them or make them elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.arrays import id_tensor, iterated
from hotbed.checkpoint.chain import chain_of
from hotbed.checkpoint.chain_rows import ids_of_chain, rows_of_chain
from hotbed.checkpoint.entries import Manifest, TableEntry
from hotbed.checkpoint.errors import CheckpointError
from hotbed.checkpoint.folder import opened, root_of
from hotbed.checkpoint.manifest import FORMAT, VERSION, read_manifest
from hotbed.checkpoint.new import check_step, new_folder
from hotbed.checkpoint.rows import FILE_BYTES, Piece, TableRows, write_files
from hotbed.checkpoint.tensors import write_tensors
from hotbed.errors import InputError
from hotbed.tables import DTYPES, MAX_DIM
from hotbed.text import brief

__all__ = ["Chunk", "contains", "differs", "manifest_with", "read", "repeated", "write"]


class Chunk(NamedTuple):
    """Some rows of a table."""

    ids: Tensor
    """(n,) int64"""
    weights: Tensor
    """(n, dim)"""
    states: Mapping[str, Tensor] = {}
    """(n, dim) or (n, 1) each."""
    steps: Tensor | None = None
    """(n,) int64, for a table with ``untouched="exact"``: the step up to which each row is current."""


def read(path: str | os.PathLike[str], table: str) -> Iterator[Chunk]:
    """Yield the rows of one table, some megabytes at a time, in the order of the files.

    Args:
        path: a checkpoint, or a folder of them, of which the latest is read.
        table: its name in the model's ``state_dict``; ``hotbed checkpoint show`` lists them.

    Raises:
        CheckpointError: there is no such checkpoint or table, or a file is damaged.
        InputError: `path` is no path, or `table` no name.
    """
    with opened(path) as folder:
        manifest = manifest_with(folder, table)
        columns = {table: slice(0, manifest["tables"][table]["dim"])}
        as_stored = [table] if manifest["tables"][table]["rule"] else []
        for file, rows in rows_of_chain(chain_of(folder, manifest), columns, as_stored):
            if fault := differs(file, manifest["tables"][table], rows):
                raise CheckpointError(f"{fault}.")
            named = {
                name: rows.tensors[part] for name, part, _ in _states_of(manifest["tables"][table])
            }
            steps = rows.tensors.get("steps")
            yield Chunk(rows.tensors["ids"], rows.tensors["weights"], named, steps)


def manifest_with(folder: str, table: str) -> Manifest:
    """Return the manifest of a checkpoint that has a table of that name.

    Raises:
        CheckpointError: it has none.
        InputError: the name is no text.
    """
    if not isinstance(table, str):
        raise InputError(f"table is {brief(table)}; give its name in the model's state_dict.")
    manifest = read_manifest(folder)
    if table not in manifest["tables"]:
        known = ", ".join(manifest["tables"]) or "none"
        raise CheckpointError(f"{folder} has no table {table!r}. It has {known}.")
    return manifest


def contains(path: str | os.PathLike[str], table: str, ids: object) -> Tensor:
    """Return (n,) bool: True for each of (n,) ids of which a checkpoint has a row, as `read` finds it.

    Of a static table it may have rows that no batch ever had: their first values. Ids are read, and little
    else.

    Raises:
        CheckpointError, InputError: as `read`; or they are no ids.
    """
    wanted = id_tensor("checkpoint.contains", ids).to(dtype=torch.int64, device="cpu")
    found = torch.zeros(wanted.shape, dtype=torch.bool, device="cpu")
    with opened(path) as folder:
        for own in ids_of_chain(chain_of(folder, manifest_with(folder, table)), table):
            found |= torch.isin(wanted, own)
    return found


def differs(file: str, table: TableEntry, rows: TableRows) -> str:
    """How rows of a file are not as a manifest says of their table; empty if they are."""
    weights, stem = rows.tensors["weights"], rows.stem
    if str(weights.dtype) != f"torch.{table['dtype']}":
        return f"{file} has weights of {stem!r} that are {weights.dtype}, and not {table['dtype']}"
    for _, part, one_a_row in _states_of(table):
        found = rows.tensors.get(part)
        if found is None or found.shape[1] != (1 if one_a_row else weights.shape[1]):
            return f"{file} has no {part} of {stem!r} as its manifest says"
    if table["rule"] and table["rule"]["untouched"] == "exact" and "steps" not in rows.tensors:
        return f"{file} has no steps of {stem!r}"
    return ""


def _states_of(table: TableEntry) -> list[tuple[str, str, bool]]:
    """(name, tensor, whether it is one number a row)"""
    states = table["rule"]["states"] if table["rule"] else []
    return [(str(name), f"states/{name}", width == 1) for name, width in states]


def write(
    path: str | os.PathLike[str],
    tables: Mapping[str, Iterable[tuple[Tensor, Tensor]]],
    *,
    rows: Mapping[str, int] | None = None,
    step: int = 0,
) -> str:
    """Write a checkpoint that holds tables and nothing else, for `hotbed.load` with ``strict=False``.

    Args:
        path: a folder of checkpoints; it is made if there is none.
        tables: by the name in the model's ``state_dict``, chunks of ids (n,) int64 and weights (n, dim), each
            id once. They are read one by one; of the ids of one table up to 16 bytes a row are held.
        rows: how many rows static tables have; the others are dynamic.
        step: of the checkpoint.

    Returns:
        Its folder.

    Raises:
        CheckpointError: a chunk is no such thing, or has another dim or dtype than the one before it, or an
            id comes twice.
        InputError: `path` is no path.
        OSError: it cannot be written.
    """
    check_step(step)
    if not isinstance(tables, Mapping) or not all(isinstance(name, str) for name in tables):
        raise CheckpointError("tables must be a dict of names to chunks of ids and weights.")
    if not isinstance(rows, Mapping | None):
        raise CheckpointError(f"rows must be a dict of names to numbers, got {brief(rows)}.")
    for name, count in (rows or {}).items():
        if name not in tables:
            raise CheckpointError(f"rows= names a table {name!r}, of which there are no chunks.")
        if isinstance(count, bool) or not isinstance(count, int) or not 0 < count < 2**48:
            raise CheckpointError(
                f"Table {name!r} has rows={count!r}; it must be a positive number."
            )
    entries: dict[str, TableEntry] = {}
    with new_folder(root_of(path), step) as new:
        dense = write_tensors(os.path.join(new.path, "dense.safetensors"), {})
        files = [
            {"name": "dense.safetensors", **dense, "rows": {}},
            *write_files(new.path, _pieces(tables, rows or {}, entries)),
        ]
        values = {"model": {"dict": []}, "optimizers": [], "schedulers": [], "loaders": []}
        about = {"format": FORMAT, "version": VERSION, "step": step, "base": None}
        return new.complete({**about, "tables": entries, "files": files, "values": values})


def _pieces(
    tables: Mapping[str, Iterable[tuple[Tensor, Tensor]]],
    rows: Mapping[str, int],
    entries: dict[str, TableEntry],
) -> Iterator[Piece]:
    """Copies of chunks, as whoever makes them may fill the same tensors again, no larger than a file. What
    the manifest says of each table is added to `entries`."""
    for name, chunks in tables.items():
        first: Tensor | None = None
        held: list[Tensor] = []
        given = iterated(chunks)
        if given is None:
            raise CheckpointError(
                f"Table {name!r}: give its rows in chunks, a list of (ids, weights), not {brief(chunks)}."
            )
        for chunk in given:
            ids, weights = _checked(name, chunk, first, rows.get(name))
            first = weights[:0] if first is None else first
            held.append(ids.clone())
            dim = weights.shape[1]
            most = max(1, FILE_BYTES // (8 + dim * weights.itemsize))
            for begin in range(0, max(1, len(ids)), most):
                some = slice(begin, begin + most)
                yield (
                    name,
                    slice(0, dim),
                    {"ids": ids[some].clone(), "weights": weights[some].clone()},
                )
        if first is None:
            raise CheckpointError(f"Table {name!r} has no chunk that says how wide it is.")
        if (twice := repeated(held)) is not None:
            raise CheckpointError(f"Table {name!r} has the id {twice} twice. Give each id once.")
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


def repeated(ids: list[Tensor]) -> int | None:
    """An id that is twice in parts (n,) int64, which it takes; None: each is there once."""
    together = torch.cat(ids).numpy()
    ids.clear()
    together.sort()
    twice = together[1:][together[1:] == together[:-1]]
    return int(twice[0]) if len(twice) else None


def _checked(
    name: str, chunk: object, first: Tensor | None, rows: int | None
) -> tuple[Tensor, Tensor]:
    """Ids and weights of a chunk. `first`: weights of the first one, of which no row is looked at."""
    match chunk:
        case (Tensor() as ids, Tensor() as weights) if (
            all(t.layout is torch.strided and t.device.type != "meta" for t in (ids, weights))
            and ids.dtype == torch.int64
            and weights.dtype in DTYPES
            and ids.dim() == 1
            and weights.dim() == 2
            and len(ids) == len(weights)
            and 0 < weights.shape[1] <= MAX_DIM
        ):
            pass
        case _:
            raise CheckpointError(
                f"Table {name!r}: a chunk must be ids (n,) int64 and weights (n, dim) of a floating-point "
                "dtype."
            )
    if first is not None and (weights.shape[1], weights.dtype) != (first.shape[1], first.dtype):
        raise CheckpointError(f"Table {name!r}: its chunks differ in dim or dtype.")
    if rows is not None and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
        worst = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise CheckpointError(f"Table {name!r}: the id {worst} is outside [0, {rows}).")
    return ids, weights
