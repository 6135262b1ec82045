"""A checkpoint of changes, and the ones that it was made from."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import NamedTuple

from hotbed.checkpoint.entries import FileEntry, Manifest
from hotbed.checkpoint.files import CheckpointError, DamagedError
from hotbed.checkpoint.manifest import fault_of_files, read_manifest

__all__ = ["Link", "bases_of", "chain_of", "fault_of", "fault_of_chain", "is_of_removed"]


class Link(NamedTuple):
    """A checkpoint of a chain."""

    folder: str
    manifest: Manifest


def chain_of(folder: str, manifest: Manifest) -> list[Link]:
    """Return a checkpoint and its bases, the newest first; the last is whole.

    Raises:
        DamagedError: a base is missing, damaged, or another one than it was made from.
    """
    links, seen = [Link(folder, manifest)], {manifest.get("uid")}
    while (base := links[-1].manifest["base"]) is not None:
        made_from = os.path.join(os.path.dirname(folder), base["name"])
        what = f"{links[-1].folder} holds what has changed since {base['name']}"
        try:
            found = read_manifest(made_from)
        except CheckpointError as error:
            raise DamagedError(f"{what}, which cannot be read: {error}") from None
        if found.get("uid") != base["uid"] or base["uid"] in seen:
            raise DamagedError(
                f"{what}, and another checkpoint is there now. Copy the one that it was made from."
            )
        if fault := _other_tables(links[-1].manifest, found):
            raise DamagedError(f"{what}, where {fault}.")
        seen.add(base["uid"])
        links.append(Link(made_from, found))
    return links


def _other_tables(manifest: Manifest, base: Manifest) -> str:
    """How tables of which a manifest tells changes are others in its base; empty if they are not."""
    for stem, entry in manifest["tables"].items():
        if entry["removed"] is None:
            continue
        if stem not in base["tables"]:
            return f"there is no table {stem!r}"
        other = base["tables"][stem]
        rules = [rule and (rule["name"], rule["states"]) for rule in (entry["rule"], other["rule"])]
        if (entry["dim"], entry["dtype"]) != (other["dim"], other["dtype"]) or rules[0] != rules[1]:
            return f"rows of table {stem!r} are others"
    return ""


def fault_of(folder: str) -> str:
    """Why a checkpoint cannot be read, as far as manifests and the sizes of files tell, its own and those of
    its bases; empty for a whole one. Bytes of other files are not read."""
    try:
        return fault_of_chain(chain_of(folder, read_manifest(folder)))
    except CheckpointError as error:
        return str(error)


def fault_of_chain(links: Iterable[Link], stems: Collection[str] | None = None) -> str:
    """Which file is missing, no plain file or of another size; empty for none.

    Args:
        stems: tables whose rows matter; None: all files do.
    """
    for link in links:
        wanted = link.manifest["files"] if stems is None else _files_with(link, stems)
        if fault := fault_of_files(link.folder, wanted):
            return fault
    return ""


def _files_with(link: Link, stems: Collection[str]) -> list[FileEntry]:
    return [
        file
        for file in link.manifest["files"]
        if is_of_removed(file) or any(stem in stems for stem in file["rows"])
    ]


def is_of_removed(file: FileEntry) -> bool:
    """Return True if a file has ids of rows that are no more."""
    return file["name"].startswith("removed-")


def bases_of(folder: str) -> set[str]:
    """Return the folders of the bases of a checkpoint, as far as they can be told."""
    try:
        return {link.folder for link in chain_of(folder, read_manifest(folder))[1:]}
    except CheckpointError:
        return set()
