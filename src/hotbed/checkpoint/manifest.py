"""checkpoint.json: what a checkpoint holds, and how its files are to be."""

from __future__ import annotations

import os
import re
from typing import Any

from hotbed.checkpoint.files import CheckpointError, read_json_sealed
from hotbed.checkpoint.folder import MANIFEST

__all__ = ["FORMAT", "VERSION", "read_manifest"]

FORMAT, VERSION = "hotbed checkpoint", 1

_FILE = re.compile(r"(dense|rows-[0-9]+-[0-9]+)\.safetensors")


def read_manifest(folder: str) -> dict[str, Any]:
    """The manifest, whose entries have the types that they should. Others than those of this version are
    passed over.

    Raises:
        CheckpointError: it is missing, damaged, of a later version, or none.
    """
    path = os.path.join(folder, MANIFEST)
    manifest, sealed = read_json_sealed(path)
    match manifest:
        case {"format": "hotbed checkpoint", "version": int(version)}:
            if not sealed:
                raise CheckpointError(f"{path} is damaged, or was changed. Copy or save it again.")
            if version > VERSION:
                raise CheckpointError(
                    f"{path} is of version {version}; this Hotbed reads {VERSION} and before. Update it."
                )
        case _:
            raise CheckpointError(f"{path} is no manifest of a checkpoint, or damaged.")
    if fault := _fault(manifest):
        raise CheckpointError(f"{path} is no manifest of a checkpoint: {fault}.")
    if manifest["base"] is not None:
        raise CheckpointError(
            f"{path} tells what has changed since {manifest['base']!r}, which this Hotbed cannot read. "
            "Update it."
        )
    return dict(manifest)


def _fault(manifest: dict[str, Any]) -> str:
    match manifest:
        case {
            "step": int(),
            "base": _,
            "tables": dict(tables),
            "files": list(files),
            "values": dict(),
        }:
            pass
        case _:
            return "it lacks entries"
    for stem, table in tables.items():
        match table:
            case {
                "rows": int() | None,
                "dim": int(),
                "dtype": str(),
                "key": str() | None as key,
                "rule": dict() | None,
            } if key is None or re.fullmatch("[0-9a-f]{16}", key):
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
                case {"count": int(), "columns": [int(first), int(last)]} if stem in tables:
                    if 0 <= first < last <= tables[stem]["dim"]:
                        continue
            return f"{name} has rows of {stem!r}, which is no such table"
    return ""
