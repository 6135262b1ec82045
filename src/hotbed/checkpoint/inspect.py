"""Looking at checkpoints: whether one is whole, what it holds, what two have in common."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from hotbed.checkpoint.chain import Link, chain_of
from hotbed.checkpoint.chain_rows import removed_in
from hotbed.checkpoint.entries import TableEntry
from hotbed.checkpoint.errors import CheckpointError
from hotbed.checkpoint.folder import MANIFEST, opened
from hotbed.checkpoint.linked import linked_bytes, linked_rows
from hotbed.checkpoint.manifest import all_files, read_manifest, sources
from hotbed.checkpoint.rows import TableRows, fault_of_ids, rows_in
from hotbed.checkpoint.single import differs, read, repeated
from hotbed.checkpoint.tensors import read_views

__all__ = ["Contents", "Difference", "TableContents", "contents", "differences", "verified"]


def verified(path: str) -> Iterator[tuple[str, int, str]]:
    """(file, bytes, fault) of each file of a checkpoint and of its bases, read in full; the fault is empty
    where there is none. Holds 8 bytes a row of one of them, to find rows that are there twice.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest is damaged.
    """
    with opened(path) as folder:
        for link in chain_of(folder, read_manifest(folder)):
            yield from _verified(link)


def _verified(link: Link) -> Iterator[tuple[str, int, str]]:
    folder, manifest = link
    seen: dict[tuple[str, int], list[Tensor]] = {}
    for file in manifest["files"]:
        fault = ""
        try:
            path = os.path.join(folder, file["name"])
            tensors = read_views(path, file)
            for stem in file["rows"]:
                rows = rows_in(path, manifest, file, stem, tensors)
                fault = fault or _fault(path, manifest["tables"][stem], rows)
                seen.setdefault((stem, rows.columns.start), []).append(rows.tensors["ids"].clone())
        except CheckpointError as error:
            fault = str(error)
        yield file["name"], file["bytes"], fault
    yield from _verified_logs(link, seen)
    try:
        removed_in(link, manifest["tables"])
    except CheckpointError as error:
        yield MANIFEST, 0, str(error)
    for (stem, _), ids in seen.items():
        if (twice := repeated(ids)) is not None:
            yield MANIFEST, 0, f"{folder} has the row {twice} of {stem!r} twice"


def _verified_logs(
    link: Link, seen: dict[tuple[str, int], list[Tensor]]
) -> Iterator[tuple[str, int, str]]:
    """As `_verified`, of linked files: log by log. Adds ids that each has to `seen`."""
    folder, manifest = link
    for log in manifest.get("linked", ()):
        fault, only = "", manifest.copy()
        only["linked"] = [log]
        try:
            for path, rows in linked_rows(folder, only, log["rows"]):
                fault = fault or _fault(path, manifest["tables"][rows.stem], rows)
                seen.setdefault((rows.stem, rows.columns.start), []).append(rows.tensors["ids"])
        except CheckpointError as error:
            fault = str(error)
        yield log["name"], sum(file["bytes"] for file in log["files"]), fault


def _fault(path: str, table: TableEntry, rows: TableRows) -> str:
    return differs(path, table, rows) or fault_of_ids(
        path, rows.stem, rows.tensors["ids"], table["rows"]
    )


class TableContents(TypedDict):
    """One table of a checkpoint."""

    table: str
    rows: int | None
    saved_rows: int
    dim: int
    dtype: str
    rule: str | None
    untouched: str | None
    steps: int | None
    removed: int | None
    """Ids that went since the base, of a table of which only what has changed since is saved."""


def stored_rows(path: str) -> dict[str, int]:
    """Return how many rows of each table `hotbed.checkpoint.read` finds; of a checkpoint of changes their ids
    are read for it."""
    found = contents(path)
    if found["base"] is None:
        return {table["table"]: table["saved_rows"] for table in found["tables"]}
    return {
        table["table"]: sum(len(chunk.ids) for chunk in read(found["path"], table["table"]))
        for table in found["tables"]
    }


class Contents(TypedDict):
    """Contents of a checkpoint."""

    path: str
    step: int
    base: str | None
    tables: list[TableContents]
    files: int
    bytes: int
    linked_bytes: int
    """Of files that are hard links; see `LinkedBytes`."""
    kept_bytes: int
    bytes_with_bases: int


def contents(path: str) -> Contents:
    """Return what a checkpoint holds, as JSON values: the folder, the step, tables and files."""
    with opened(path) as folder:
        manifest = read_manifest(folder)
        tables: list[TableContents] = []
        for stem, table in manifest["tables"].items():
            parts = [one["rows"][stem] for one in sources(manifest) if stem in one["rows"]]
            rule = table["rule"]
            tables.append(
                {
                    "table": stem,
                    "rows": table["rows"],
                    "saved_rows": sum(p["count"] for p in parts if p["columns"][0] == 0),
                    "dim": table["dim"],
                    "dtype": table["dtype"],
                    "rule": rule and rule["name"],
                    "untouched": rule and rule["untouched"],
                    "steps": rule and rule.get("steps"),
                    "removed": table["removed"],
                }
            )
        linked = linked_bytes(folder, manifest)
        return {
            "path": folder,
            "step": manifest["step"],
            "base": manifest["base"] and manifest["base"]["name"],
            "tables": tables,
            "files": len(manifest["files"]),
            "bytes": sum(file["bytes"] for file in manifest["files"]),
            "linked_bytes": linked.linked_bytes,
            "kept_bytes": linked.kept_bytes,
            "bytes_with_bases": sum(
                file["bytes"]
                for one in chain_of(folder, manifest)
                for file in all_files(one.manifest["files"], one.manifest.get("linked", ()))
            ),
        }


class Difference(NamedTuple):
    """How the rows of one table differ between two checkpoints."""

    table: str
    only_first: int
    only_second: int
    changed: int
    """Rows that both have, with other weights."""
    equal: int


def differences(first: str, second: str) -> Iterator[Difference]:
    """Table by table, of those in either. Holds 16 bytes a row.

    Raises:
        CheckpointError: there is no checkpoint, or one is damaged.
    """
    with opened(first) as one, opened(second) as other:
        tables = [read_manifest(folder)["tables"] for folder in (one, other)]
        for name in dict.fromkeys([*tables[0], *tables[1]]):
            ids, marks = _marks(one, name, name in tables[0])
            others, their_marks = _marks(other, name, name in tables[1])
            at = torch.searchsorted(ids, others).clamp_(max=max(0, len(ids) - 1))
            both = (
                ids[at] == others
                if len(ids)
                else torch.zeros(len(others), dtype=torch.bool, device="cpu")
            )
            equal = int((marks[at[both]] == their_marks[both]).sum())
            shared = int(both.sum())
            yield Difference(name, len(ids) - shared, len(others) - shared, shared - equal, equal)


def _marks(path: str, table: str, there: bool) -> tuple[Tensor, Tensor]:
    """Ids, rising, and a number for the bits of each row."""
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    ids, marks = [none], [none]
    if not there:
        return ids[0], marks[0]
    for chunk in read(path, table):
        bits = chunk.weights.contiguous().view(torch.int16).long() & 0xFFFF
        mark = torch.zeros(len(bits), dtype=torch.int64, device="cpu")
        for column in bits.unbind(1):
            mark = (mark ^ column) * 0x100000001B3  # FNV-1a, 16 bits at a time
        ids.append(chunk.ids)
        marks.append(mark)
    together, order = torch.cat(ids).sort()
    return together, torch.cat(marks)[order]
