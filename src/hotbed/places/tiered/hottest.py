"""The most used rows of a run, noted beside its log: a log knows rows and not how often they are used."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hotbed.errors import StorageError
from hotbed.files import appearing

__all__ = ["COUNT", "NAME", "Used", "forget", "note", "noted"]

COUNT = 10
"""Rows of a table that are noted."""


class Used(NamedTuple):
    """An id, and how often batches of training had it: ``uses - excess`` to ``uses`` times."""

    id: int
    uses: int
    excess: int


NAME = "hottest.json"


def note(folder: Path, tables: Mapping[str, Sequence[tuple[int, int, int]]]) -> None:
    """Writes what `noted` reads, in place of what was noted before.

    Raises:
        StorageError: it cannot be written.
    """
    path = folder / NAME
    try:
        with appearing(path) as part:
            Path(part).write_text(json.dumps(tables), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error}.") from None


def noted(folder: Path) -> dict[str, list[Used]]:
    """The rows of each table, most used first; empty if none were noted.

    Raises:
        StorageError: the note is damaged.
    """
    path = folder / NAME
    try:
        tables = json.loads(path.read_text(encoding="utf-8"))
        return {
            name: [Used(int(row), int(uses), int(excess)) for row, uses, excess in rows]
            for name, rows in tables.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise StorageError(f"{path} cannot be read: {error}. Delete it to go on.") from None


def forget(folder: Path) -> None:
    """Delete the note of an earlier run.

    Raises:
        StorageError: it cannot be deleted.
    """
    path = folder / NAME
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{path} cannot be deleted: {error}.") from None
