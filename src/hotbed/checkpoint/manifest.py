"""checkpoint.json: what a checkpoint holds, and how its files are to be."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import cast

from hotbed.checkpoint.entries import FileEntry, LinkedLog, Manifest, SizedFile, Source
from hotbed.checkpoint.errors import CheckpointError, DamagedError
from hotbed.checkpoint.files import read_json_sealed
from hotbed.checkpoint.manifest_faults import fault_of_entries
from hotbed.checkpoint.names import MANIFEST
from hotbed.checkpoint.stores import store_of

__all__ = [
    "FORMAT",
    "MANIFEST",
    "LINKED_VERSION",
    "VERSION",
    "all_files",
    "dense_file",
    "fault_of_files",
    "read_manifest",
    "sources",
]

FORMAT, VERSION = "hotbed checkpoint", 1
LINKED_VERSION = 2
"""Of one with linked files, which readers of version 1 would pass over."""


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
            if version > LINKED_VERSION:
                raise CheckpointError(
                    f"{path} is of version {version}; this Hotbed reads {LINKED_VERSION} and before. Update "
                    "it."
                )
        case _:
            raise DamagedError(f"{path} is no manifest of a checkpoint, or damaged.")
    if fault := fault_of_entries(manifest):
        raise DamagedError(f"{path} is no manifest of a checkpoint: {fault}.")
    return cast(Manifest, manifest)  # as `fault_of_entries` has found


def sources(manifest: Manifest) -> list[Source]:
    """Return what has rows of tables."""
    return [*manifest["files"], *manifest.get("linked", ())]


def all_files(files: Iterable[FileEntry], logs: Iterable[LinkedLog]) -> list[SizedFile]:
    """Return files of a manifest and those of logs, with their paths below its folder."""
    found: list[SizedFile] = [{"name": f["name"], "bytes": f["bytes"]} for f in files]
    for log in logs:
        found += [
            {"name": os.path.join(log["name"], f["name"]), "bytes": f["bytes"]}
            for f in log["files"]
        ]
    return found


def fault_of_files(folder: str, files: Iterable[SizedFile]) -> str:
    """Which of some files of a manifest is missing, no plain file or of another size; empty for none."""
    return store_of(folder).fault_of_files(folder, files)


def dense_file(manifest: Manifest) -> FileEntry:
    """Return the manifest's entry of the file that holds all tensors but rows."""
    return next(file for file in manifest["files"] if file["name"] == "dense.safetensors")
