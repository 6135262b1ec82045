"""checkpoint.json: what a checkpoint holds, and how its files are to be."""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections.abc import Iterable, Mapping
from typing import cast

from hotbed.checkpoint.entries import FileEntry, Manifest
from hotbed.checkpoint.files import CheckpointError, DamagedError, read_json_sealed
from hotbed.tables import DTYPES

__all__ = [
    "FORMAT",
    "MANIFEST",
    "VERSION",
    "dense_file",
    "fault_of_files",
    "read_manifest",
]

MANIFEST = "checkpoint.json"

FORMAT, VERSION = "hotbed checkpoint", 1

_DTYPES = {str(dtype).removeprefix("torch.") for dtype in DTYPES}
_FILE = re.compile(r"(dense|rows-[0-9]+-[0-9]+|removed-[0-9]+)\.safetensors")


def read_manifest(folder: str) -> Manifest:
    """The manifest, whose entries have the types that they should. Others than those of this version are
    passed over.

    Raises:
        DamagedError: it is missing, damaged, or none.
        CheckpointError: it is of a later version.
    """
    path = os.path.join(folder, MANIFEST)
    manifest, sealed = read_json_sealed(path)
    match manifest:
        case {"format": "hotbed checkpoint", "version": int(version)}:
            if not sealed:
                raise DamagedError(f"{path} is damaged, or was changed. Copy or save it again.")
            if version > VERSION:
                raise CheckpointError(
                    f"{path} is of version {version}; this Hotbed reads {VERSION} and before. Update it."
                )
        case _:
            raise DamagedError(f"{path} is no manifest of a checkpoint, or damaged.")
    if fault := _fault(manifest):
        raise DamagedError(f"{path} is no manifest of a checkpoint: {fault}.")
    return cast(Manifest, manifest)  # as `_fault` has found


def fault_of_files(folder: str, files: Iterable[FileEntry]) -> str:
    """Which of some files of a manifest is missing, no plain file or of another size; empty for none."""
    for file in files:
        path = os.path.join(folder, file["name"])
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return f"{path} is missing."
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}."
        if not stat.S_ISREG(found.st_mode):
            what = "a link" if stat.S_ISLNK(found.st_mode) else "no plain file"
            return f"{path} is {what}. A checkpoint is plain files."
        if found.st_size != file["bytes"]:
            return (
                f"{path} has {found.st_size:,} bytes and was saved with {file['bytes']:,}. Copy or save it "
                "again."
            )
    return ""


def dense_file(manifest: Manifest) -> FileEntry:
    """Return the manifest's entry of the file that holds all tensors but rows."""
    return next(file for file in manifest["files"] if file["name"] == "dense.safetensors")


def _fault(manifest: object) -> str:
    match manifest:
        case {
            "step": int(),
            "base": dict() | None as base,
            "tables": dict(tables),
            "files": list(files),
            "values": dict(),
        } if _is_uid(cast(Mapping[str, object], manifest).get("uid")):
            if base is not None and not _is_base(base):
                return "what it says of its base is incomplete"
        case _:
            return "it lacks entries"
    for stem, table in tables.items():
        match table:
            case {
                "rows": int() | None,
                "dim": int(),
                "dtype": str(dtype),
                "key": str() | None as key,
                "rule": dict() | None as rule,
                "removed": int() | None as removed,
            } if (
                dtype in _DTYPES
                and (key is None or re.fullmatch("[0-9a-f]{16}", key))
                and (rule is None or _is_rule(rule))
                and (removed is None or (base is not None and removed >= 0))
            ):
                pass
            case _:
                return f"what it says of table {stem!r} is incomplete"
    names = set()
    for file in files:
        match file:
            case {"name": str(name), "bytes": int(), "crc32c": list(), "rows": dict(rows)}:
                if not _FILE.fullmatch(name) or name in names:
                    return f"it names the file {name!r}, which is none of a checkpoint, or twice"
                names.add(name)
            case _:
                return "what it says of a file is incomplete"
        for stem, part in rows.items():
            match part:
                case {"count": int(count), "columns": [int(first), int(last)]} if stem in tables:
                    if count >= 0 and 0 <= first < last <= tables[stem]["dim"]:
                        continue
            return f"{name} has rows of {stem!r}, which is no such table"
    if "dense.safetensors" not in names:
        return "it names no file dense.safetensors"
    more: dict[str, dict[int, int]] = {stem: {0: 0} for stem in tables}  # rows from a column on
    for stem, part in ((stem, part) for file in files for stem, part in file["rows"].items()):
        for column, count in zip(part["columns"], (part["count"], -part["count"]), strict=True):
            more[stem][column] = more[stem].get(column, 0) + count
    for stem, changes in more.items():
        columns = sorted(changes)
        counts = itertools.accumulate(changes[column] for column in columns)
        dim = tables[stem]["dim"]
        if len({n for column, n in zip(columns, counts, strict=True) if column < dim}) > 1:
            return f"some columns of {stem!r} have more rows than others"
    return ""


def _is_uid(uid: object) -> bool:
    """Return True also for none, as earlier versions wrote none."""
    return uid is None or (isinstance(uid, str) and re.fullmatch("[0-9a-f]{32}", uid) is not None)


def _is_base(base: Mapping[object, object]) -> bool:
    match base:
        case {"name": str(name), "uid": str(uid)}:
            plain = os.path.basename(name) == name not in ("", ".", "..") and name.isprintable()
            return plain and _is_uid(uid)
    return False


def _is_rule(rule: Mapping[object, object]) -> bool:
    match rule:
        case {
            "name": str(),
            "options": dict(),
            "untouched": "lazy" | "exact",
            "states": [*states],
            "steps": int(steps),
        }:
            return (
                type(steps) is int
                and steps >= 0
                and all(
                    isinstance(state, list)
                    and [type(part) for part in state] == [str, int]
                    and state[1] > 0
                    for state in states
                )
            )
    return False
