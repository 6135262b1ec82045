"""Changes of tables since checkpoints that were saved from them or loaded into them."""

from __future__ import annotations

import contextlib
import os
import secrets
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.checkpoint.chain import chain_of, fault_of
from hotbed.checkpoint.entries import Base, FileEntry, Manifest, TableEntry
from hotbed.checkpoint.errors import CheckpointError
from hotbed.checkpoint.folder import is_complete, latest, opened
from hotbed.checkpoint.manifest import read_manifest
from hotbed.checkpoint.stores import store_of
from hotbed.checkpoint.tensors import write_tensors
from hotbed.table.live import LiveTable

__all__ = [
    "MadeFrom",
    "base_in",
    "mark",
    "mark_since",
    "new_uid",
    "refuse_unknown",
    "remember",
    "removed_since",
    "same_rows",
    "write_removed",
]

_MOST_BASES = 8
"""Checkpoints since which changes are known, a table; the ids that went since the oldest take memory."""

_marks: weakref.WeakKeyDictionary[LiveTable, dict[str, int]] = weakref.WeakKeyDictionary()
"""By the uid of a checkpoint, the core's mark of the moment in which rows were those of it."""


class MadeFrom(NamedTuple):
    """A checkpoint that a new one is to tell changes of."""

    folder: str
    manifest: Manifest

    @property
    def entry(self) -> Base:
        return {"name": os.path.basename(self.folder), "uid": str(self.manifest["uid"])}


def new_uid() -> str:
    """Return a number of its own for a checkpoint."""
    return secrets.token_hex(16)


@contextlib.contextmanager
def base_in(root: str, base: str | None, delta: bool | int = True) -> Iterator[MadeFrom | None]:
    """For a ``with`` statement, in which nobody removes it: the checkpoint to hold changes of; None: the new
    one is to be whole.

    Args:
        root: folder of the run.
        base: a checkpoint, as it was given to `hotbed.save`; None: the latest is meant, if it can be one.
        delta: as it was given; a number: then none with as many links is meant.

    Raises:
        CheckpointError: `base` is none of this folder, or damaged.
    """
    if base is None and (is_complete(root) or latest(root) is None):
        yield None
        return
    with opened(root if base is None else base) as folder:
        manifest, fault = None, fault_of(folder)
        if not fault:
            manifest = read_manifest(folder)
            fault = "" if "uid" in manifest else _WITHOUT_UID
        if os.path.dirname(folder) != store_of(root).resolved(root):
            fault = f"it does not lie in {root}. A base stays beside those that hold changes of it."
        if fault and base is not None:
            raise CheckpointError(f"base={base!r} cannot be one: {fault}")
        manifest = None if fault else manifest
        if manifest is not None and base is None and not isinstance(delta, bool):
            manifest = manifest if len(chain_of(folder, manifest)) < delta else None
        yield None if manifest is None else MadeFrom(folder, manifest)


_WITHOUT_UID = 'an earlier Hotbed has saved it, with no "uid". Save a whole one first.'


def mark(tables: Iterable[LiveTable]) -> dict[LiveTable, int]:
    """Return a mark of this moment in the changes of each table, which is held; 0 where they are not
    known."""
    return {table: table.core.mark_changes() for table in tables}


def remember(marks: Mapping[LiveTable, int], uid: str) -> None:
    """Note that rows were those of a checkpoint at these marks."""
    for table, found in marks.items():
        if not found:
            continue
        before = {
            other: mark
            for other, mark in _marks.get(table, {}).items()
            if other != uid and table.core.knows_changes(mark)
        }
        known = dict([*before.items(), (uid, found)][-_MOST_BASES:])
        _marks[table] = known
        table.core.forget_changes_before(min(known.values()))


def mark_since(table: LiveTable, uid: str) -> int:
    """Return the core's mark since which the rows of a table differ from those of a checkpoint; 0: that is
    not known."""
    found = _marks.get(table, {}).get(uid, 0)
    return found if found and table.core.knows_changes(found) else 0


def same_rows(before: TableEntry | None, now: TableEntry, table: LiveTable) -> bool:
    """Return True if rows that have not changed since a checkpoint would be saved with the same bits now.

    Args:
        before: of the checkpoint; None: it has no such table.
        now: of the one that is being saved.
    """
    if before is None or (now["rule"] is None and table.follows):  # current weights all move
        return False
    rules = []
    for rule in (before["rule"], now["rule"]):
        moving = {"steps", "history"}
        rules.append(rule and {k: v for k, v in rule.items() if k not in moving})
    own = {"rule", "removed"}
    described = [{k: v for k, v in one.items() if k not in own} for one in (before, now)]
    return rules[0] == rules[1] and described[0] == described[1]


def refuse_unknown(made_from: MadeFrom, stems: Iterable[str]) -> None:
    """Raise CheckpointError if there are tables of which it is not known what has changed."""
    for stem in sorted(stems):
        raise CheckpointError(
            f"Table {stem!r}: it is not known what has changed since {made_from.folder}. It is known of rows "
            "in memory that this process has saved to that checkpoint or loaded from it, while they keep "
            "their optimizer. delta=True saves other tables whole."
        )


def write_removed(folder: str, writer: int, removed: Mapping[str, Tensor]) -> list[FileEntry]:
    """Write ids that are no more, by table. Returns what the manifest says of the file."""
    tensors = {stem: ids for stem, ids in removed.items() if len(ids)}
    if not tensors:
        return []
    name = f"removed-{writer}.safetensors"
    written = write_tensors(os.path.join(folder, name), tensors)
    return [{"name": name, "rows": {}, **written}]


def removed_since(table: LiveTable, since: int) -> Tensor:
    """(n,) int64: ids of the whole table whose rows went since a mark."""
    ids = torch.as_tensor(table.core.erased_since(since), dtype=torch.int64)
    return table.spec.origin.ids_in_table(ids)
