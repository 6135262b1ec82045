"""Note of `hotbed train` beside the rows of a run: how the log wrote its ids, and whether something is
lost with the rows.

A note is about the very logs that it names, by their manifests' checksums. Rows that any other run
writes there have another log, so they never pass for what was noted.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from pathlib import Path

from hotbed.checkpoint.errors import CheckpointError
from hotbed.checkpoint.files import read_json_sealed, write_json_sealed
from hotbed.checkpoint.linked import linked_files, number_of
from hotbed.places.tiered.folder import is_own, logs_in

__all__ = [
    "forget_note",
    "holds_file",
    "ids_are_hexadecimal",
    "is_of_a_run",
    "rows_may_go",
    "write_note",
]

_NAME = "hotbed-run.json"


def is_of_a_run(name: str) -> bool:
    """Whether a file of this name, relative to the folder of --ssd, is of a run's."""
    first = Path(name).parts[:1]
    return bool(first) and (first[0] == _NAME or is_own(first[0]))


def holds_file(folder: str, name: str) -> bool:
    """Whether a file of this name, relative to `folder`, is of a run that has left rows there."""
    return is_of_a_run(name) and bool(logs_in(Path(folder)))


def write_note(folder: str, *, may_go: bool, of_logs: bool = True) -> None:
    """Note, in place of what was noted, what the ids in the logs here are.

    Args:
        of_logs: ids are those of click logs, which write them in hexadecimal.
        may_go: nothing is lost with the rows: they are saved elsewhere, or no step was taken.

    Raises:
        OSError: it cannot be written.
    """
    forget_note(folder)
    note: dict[str, object] = {"logs": _sums_of_logs(folder), "may_go": may_go}
    note["ids"] = "hexadecimal" if of_logs else "decimal"
    write_json_sealed(os.path.join(folder, _NAME), note)


def forget_note(folder: str) -> None:
    """Remove the note."""
    if _noted(folder) is not None:
        os.unlink(os.path.join(folder, _NAME))


def rows_may_go(folder: str, saved_in: Collection[str] = ()) -> bool:
    """Whether a run has noted that nothing is lost with the rows here, or the logs here have none, or none
    but those of linked checkpoints.

    Args:
        saved_in: where these are, see `hotbed.checkpoint.linked.linked_files`.
    """
    if (_of_these_logs(folder) or {}).get("may_go") is True:
        return True
    logs = logs_in(Path(folder))
    rows = {file for log in logs for file in log.iterdir() if file.name not in ("lock", "manifest")}
    if not rows or not saved_in:
        return bool(logs) and not rows
    saved = {file for path in saved_in for file in linked_files(path)}
    return all(number_of(file) in saved for file in rows)


def ids_are_hexadecimal(folder: str) -> bool:
    """Whether the ids here are those of click logs, which have 8 hexadecimal digits."""
    return (_of_these_logs(folder) or {}).get("ids") == "hexadecimal"


def _of_these_logs(folder: str) -> dict[str, object] | None:
    note = _noted(folder)
    logs = _sums_of_logs(folder)
    return note if note is not None and logs and note.get("logs") == logs else None


def _noted(folder: str) -> dict[str, object] | None:
    try:
        note, sealed = read_json_sealed(os.path.join(folder, _NAME))
    except (CheckpointError, OSError):
        return None
    return note if sealed and isinstance(note, dict) else None


def _sums_of_logs(folder: str) -> dict[str, str]:
    """Name → digest of the manifest, which has the log's own number. (Its CRC32C would be the same for
    every manifest, as they end with their own.)"""
    logs = logs_in(Path(folder))
    return {log.name: _digest((log / "manifest").read_bytes()) for log in logs}


def _digest(contents: bytes) -> str:
    return hashlib.blake2b(contents, digest_size=16).hexdigest()
