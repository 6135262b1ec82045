"""Chains of checkpoints for others: made into a whole one, and read as what has changed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.arrays import integer
from hotbed.checkpoint.chain import Link, chain_of, fault_of_chain
from hotbed.checkpoint.chain_rows import ids_of_chain, removed_in, rows_of_chain
from hotbed.checkpoint.deltas import new_uid
from hotbed.checkpoint.errors import CheckpointError, DamagedError
from hotbed.checkpoint.folder import complete_in, opened, root_of
from hotbed.checkpoint.manifest import VERSION, dense_file, read_manifest
from hotbed.checkpoint.new import new_folder
from hotbed.checkpoint.rows import Piece, write_files
from hotbed.checkpoint.single import manifest_with
from hotbed.checkpoint.tensors import read_tensors, write_tensors
from hotbed.errors import InputError
from hotbed.text import brief

__all__ = ["ChangedRows", "Changes", "changes", "merge"]


def merge(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    progress: Callable[[int], None] | None = None,
) -> str:
    """Write a whole checkpoint that is loaded as one that holds changes, with its bases, is.

    Rows are read and written some megabytes at a time; of those that have changed 8 bytes a row are held.

    Args:
        path: a checkpoint, or a folder of them, of which the latest is read.
        out: a folder of checkpoints; it is made if there is none.
        progress: called with the bytes that were written since.

    Returns:
        Its folder.

    Raises:
        CheckpointError: there is no such checkpoint, or it or a base is damaged.
        InputError: `path` or `out` is no path.
        OSError: it cannot be written.
    """
    with opened(path) as folder:
        manifest = read_manifest(folder)
        links = chain_of(folder, manifest)
        if fault := fault_of_chain(links):
            raise DamagedError(fault)
        with new_folder(root_of(out, "out"), manifest["step"]) as new:
            dense = dense_file(manifest)
            tensors = read_tensors(os.path.join(folder, dense["name"]), dense)
            written = write_tensors(os.path.join(new.path, dense["name"]), tensors)
            rows = write_files(new.path, _told(_pieces(links), progress))
            files = [{**dense, **written}, *rows]
            tables = {
                stem: {**entry, "removed": None} for stem, entry in manifest["tables"].items()
            }
            about = {k: v for k, v in manifest.items() if k not in ("crc32c", "linked")}
            about |= {"version": VERSION, "uid": new_uid(), "base": None}
            return new.complete({**about, "tables": tables, "files": files})


def _pieces(links: list[Link]) -> Iterator[Piece]:
    entries = links[0].manifest["tables"]
    columns = {stem: slice(0, entry["dim"]) for stem, entry in entries.items()}
    as_stored = [stem for stem, entry in entries.items() if entry["rule"]]
    for _, rows in rows_of_chain(links, columns, as_stored, again=True):
        own = rows.tensors if rows.is_copy else {n: t.clone() for n, t in rows.tensors.items()}
        yield rows.stem, rows.columns, own


def _told(pieces: Iterator[Piece], progress: Callable[[int], None] | None) -> Iterator[Piece]:
    for piece in pieces:
        yield piece
        if progress is not None:
            progress(sum(tensor.nbytes for tensor in piece[2].values()))


class ChangedRows(NamedTuple):
    """Some rows of a table, as they are now."""

    ids: NDArray[np.int64]
    """(n,)"""
    weights: NDArray[np.generic]
    """(n, dim) in the dtype of the table; float32 of bfloat16, which NumPy has not."""
    states: Mapping[str, NDArray[np.generic]]
    """(n, dim) or (n, 1) each, by name; empty if the checkpoint has none."""
    steps: NDArray[np.int64] | None
    """(n,) of a table with ``untouched="exact"``: the step up to which each row is current."""


class Changes:
    """Iterates over the rows of a table that have changed between two checkpoints of a run, as `ChangedRows`
    of some megabytes, each row once; rows that a save wrote whole are among them, changed or not.

    Attributes:
        path: folder of the later checkpoint, which must stay while it is read.
        step, since: steps of both.
        erased: (n,) int64, rising: ids of rows that the earlier one may have had and the later one has not.
    """

    def __init__(
        self, links: list[Link], table: str, since: int, erased: NDArray[np.int64]
    ) -> None:
        self.path, self.step = links[0].folder, links[0].manifest["step"]
        self.since, self.erased = since, erased
        self._links, self._table = links, table

    def __iter__(self) -> Iterator[ChangedRows]:
        entry = self._links[0].manifest["tables"][self._table]
        columns = {self._table: slice(0, entry["dim"])}
        as_stored = [self._table] if entry["rule"] else []
        with opened(self.path):
            for _, rows in rows_of_chain(self._links, columns, as_stored):
                own = rows.tensors
                states = {
                    name.removeprefix("states/"): _array(tensor)
                    for name, tensor in own.items()
                    if name.startswith("states/")
                }
                steps = own["steps"].numpy() if "steps" in own else None
                if len(own["ids"]):
                    yield ChangedRows(own["ids"].numpy(), _array(own["weights"]), states, steps)


def changes(path: str | os.PathLike[str], table: str, since: int) -> Changes:
    """Return what has changed in a table since another checkpoint of the same run, for feature stores and
    servers.

    Args:
        path: a checkpoint, or a folder of them, of which the latest is read.
        table: its name in the model's ``state_dict``.
        since: the step of an earlier checkpoint beside it. Where each later one holds changes (``delta=True``
            of `hotbed.save`), only those are read, else all rows.

    Raises:
        CheckpointError: there is no such checkpoint or table, or a file is missing or damaged.
        InputError: an argument is no path, no name or no step.
    """
    if (step := integer(since)) is None:
        raise InputError(f"since is {brief(since)}; give the step of an earlier checkpoint.")
    with opened(path) as folder:
        links = chain_of(folder, manifest_with(folder, table))
        earlier = _checkpoint_of_step(folder, step)
        later = [*itertools.takewhile(lambda link: link.folder != earlier, links)]
        if all(link.manifest["tables"][table]["removed"] is not None for link in later):
            went = [removed_in(link, [table])[table] for link in later]
            own = [_ids(later, table)]
            return Changes(later, table, step, _without(torch.cat(went), torch.cat(own)))
        with opened(earlier):
            before = _ids(chain_of(earlier, read_manifest(earlier)), table)
        return Changes(links, table, step, _without(before, _ids(links, table)))


def _checkpoint_of_step(folder: str, step: int) -> str:
    """The latest one before `folder` in its run."""
    found = complete_in(os.path.dirname(folder))
    before = found[: found.index(folder)] if folder in found else []
    steps = [read_manifest(one)["step"] for one in before]
    for one, its_step in zip(reversed(before), reversed(steps), strict=True):
        if its_step == step:
            return one
    there = ", ".join(map(str, steps)) or "none"
    raise CheckpointError(
        f"Before {folder} there is no checkpoint of step {step}. There are {there}."
    )


def _ids(links: list[Link], table: str) -> Tensor:
    found = [torch.empty(0, dtype=torch.int64, device="cpu")]
    if table in links[0].manifest["tables"]:
        found += ids_of_chain(links, table)
    return torch.cat(found)


def _without(ids: Tensor, others: Tensor) -> NDArray[np.int64]:
    return np.setdiff1d(ids.numpy(), others.numpy())


def _array(tensor: Tensor) -> NDArray[np.generic]:
    found: NDArray[np.generic] = (
        tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    ).numpy()
    return found
