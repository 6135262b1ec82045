"""Looking at checkpoints: whether one is whole, what it holds, what two have in common."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotbed.checkpoint.files import CheckpointError, read_tensors
from hotbed.checkpoint.folder import opened
from hotbed.checkpoint.manifest import read_manifest
from hotbed.checkpoint.single import read

__all__ = ["Difference", "contents", "differences", "verified"]


def verified(path: str) -> Iterator[tuple[str, int, str]]:
    """(file, bytes, fault) of each file of a checkpoint, read in full; the fault is empty where there is
    none.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest is damaged.
    """
    with opened(path) as folder:
        manifest = read_manifest(folder)
        for file in manifest["files"]:
            fault = ""
            try:
                tensors = read_tensors(os.path.join(folder, file["name"]), file)
                fault = _fault(manifest, file, tensors)
            except CheckpointError as error:
                fault = str(error)
            yield file["name"], file["bytes"], fault


def _fault(manifest: dict[str, Any], file: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    for stem, part in file["rows"].items():
        table, (first, last) = manifest["tables"][stem], part["columns"]
        wanted = {
            "ids": ((part["count"],), "int64"),
            "weights": ((part["count"], last - first), table["dtype"]),
        }
        for name, (shape, dtype) in wanted.items():
            found = tensors.get(f"{stem}/{name}")
            if found is None or tuple(found.shape) != shape or str(found.dtype) != f"torch.{dtype}":
                return f"{file['name']} has no {name} of {stem!r} as its manifest says"
        ids, rows = tensors[f"{stem}/ids"], table["rows"]
        if rows is not None and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
            return f"{file['name']} has an id of {stem!r} outside [0, {rows})"
    return ""


def contents(path: str) -> dict[str, Any]:
    """What a checkpoint holds, as JSON values: the folder, the step, tables and files."""
    with opened(path) as folder:
        manifest = read_manifest(folder)
        tables = []
        for stem, table in manifest["tables"].items():
            parts = [file["rows"][stem] for file in manifest["files"] if stem in file["rows"]]
            rule = table["rule"] or {}
            tables.append(
                {
                    "table": stem,
                    "rows": table["rows"],
                    "saved_rows": sum(part["count"] for part in parts),
                    "dim": table["dim"],
                    "dtype": table["dtype"],
                    "rule": rule.get("name"),
                    "untouched": rule.get("untouched"),
                    "steps": rule.get("steps"),
                }
            )
        return {
            "path": folder,
            "step": manifest["step"],
            "tables": tables,
            "files": len(manifest["files"]),
            "bytes": sum(file["bytes"] for file in manifest["files"]),
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
    names: dict[str, list[str]] = {}
    for path in (first, second):
        for table in contents(path)["tables"]:
            names.setdefault(table["table"], []).append(path)
    for name, paths in names.items():
        (ids, marks), (others, their_marks) = (
            _marks(path, name) if path in paths else (torch.empty(0, dtype=torch.int64),) * 2
            for path in (first, second)
        )
        at = torch.searchsorted(ids, others).clamp_(max=max(0, len(ids) - 1))
        both = ids[at] == others if len(ids) else torch.zeros(len(others), dtype=torch.bool)
        equal = int((marks[at[both]] == their_marks[both]).sum())
        shared = int(both.sum())
        yield Difference(name, len(ids) - shared, len(others) - shared, shared - equal, equal)


def _marks(path: str, table: str) -> tuple[Tensor, Tensor]:
    """Ids, rising, and a number for the bits of each row."""
    ids, marks = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
    for chunk in read(path, table):
        bits = chunk.weights.contiguous().view(torch.int16).long() & 0xFFFF
        mark = torch.zeros(len(bits), dtype=torch.int64)
        for column in bits.unbind(1):
            mark = (mark ^ column) * 0x100000001B3  # FNV-1a, 16 bits at a time
        ids.append(chunk.ids)
        marks.append(mark)
    together, order = torch.cat(ids).sort()
    return together, torch.cat(marks)[order]
