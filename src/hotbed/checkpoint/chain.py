"""A checkpoint of changes, and the ones that it was made from."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from hotbed.checkpoint.entries import FileEntry, Manifest, SizedFile
from hotbed.checkpoint.errors import CheckpointError, DamagedError
from hotbed.checkpoint.manifest import all_files, fault_of_files, read_manifest

__all__ = ["Chains", "Link", "chain_of", "fault_of", "fault_of_chain", "is_of_removed"]


class Link(NamedTuple):
    """A checkpoint of a chain."""

    folder: str
    manifest: Manifest


def chain_of(folder: str, manifest: Manifest) -> list[Link]:
    """Return a checkpoint and its bases, the newest first; the last is whole.

    Raises:
        DamagedError: a base is missing, damaged, or another one than it was made from.
    """
    return list(_links(Link(folder, manifest), read_manifest, _fault_of_base))


def _links(
    link: Link, read: Callable[[str], Manifest], fault_of_base: Callable[[Link, Manifest], str]
) -> Iterator[Link]:
    """Yield the links of a chain, the newest first. Raises CheckpointError where the next one is none."""
    seen = {link.folder}
    while True:
        yield link
        if (base := link.manifest["base"]) is None:
            return
        made_from = os.path.join(os.path.dirname(link.folder), base["name"])
        try:
            found = read(made_from)
        except CheckpointError as error:
            raise DamagedError(f"{_since(link)}, which cannot be read: {error}") from None
        if fault := fault_of_base(link, found):
            raise DamagedError(fault)
        if made_from in seen:
            raise DamagedError(f"{link.folder} is a base of itself.")
        seen.add(made_from)
        link = Link(made_from, found)


def _since(link: Link) -> str:
    base = link.manifest["base"]
    assert base is not None
    return f"{link.folder} holds what has changed since {base['name']}"


def _fault_of_base(link: Link, found: Manifest) -> str:
    """How a checkpoint is another than the base of a link; empty if it is that."""
    base = link.manifest["base"]
    assert base is not None
    if found.get("uid") != base["uid"]:
        return f"{_since(link)}, and another checkpoint is there now. Copy the one that it was made from."
    fault = _other_tables(link.manifest, found)
    return fault and f"{_since(link)}, where {fault}."


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


class Chains:
    """Checkpoints and their bases, as far as manifests and the sizes of files tell. Of each what is there is
    looked at once, so one of these is made for a question, and not kept."""

    def __init__(self) -> None:
        self._manifests: dict[str, Manifest | CheckpointError] = {}
        self._of_files: dict[str, str] = {}
        self._of_bases: dict[str, str] = {}

    def _manifest(self, folder: str) -> Manifest:
        if folder not in self._manifests:
            try:
                read = read_manifest(folder)
                own = all_files(read["files"], read.get("linked", ()))
                self._of_files[folder] = fault_of_files(folder, own)
                self._manifests[folder] = {**read, "files": [], "values": {}}
            except CheckpointError as error:
                self._manifests[folder] = error
        found = self._manifests[folder]
        if isinstance(found, CheckpointError):
            raise found
        return found

    def _fault_of_base(self, link: Link, base: Manifest) -> str:
        if link.folder not in self._of_bases:
            self._of_bases[link.folder] = _fault_of_base(link, base)
        return self._of_bases[link.folder]

    def _walk(self, folder: str) -> Iterator[str]:
        """Yield the folders of a chain, as `_links`."""
        first = Link(folder, self._manifest(folder))
        return (link.folder for link in _links(first, self._manifest, self._fault_of_base))

    def fault(self, folder: str) -> str:
        """Why a checkpoint cannot be read, as far as that tells, its own fault or that of a base; empty for a
        whole one."""
        try:
            return next(filter(None, (self._of_files[one] for one in self._walk(folder))), "")
        except CheckpointError as error:
            return str(error)

    def bases(self, folder: str) -> set[str]:
        """Return the folders of the bases, as far as they can be told."""
        found: list[str] = []
        with contextlib.suppress(CheckpointError):
            found.extend(self._walk(folder))
        return {*found} - {folder}


def fault_of(folder: str) -> str:
    """As `Chains.fault`, of one checkpoint."""
    return Chains().fault(folder)


def fault_of_chain(links: Iterable[Link], stems: Collection[str] | None = None) -> str:
    """Which file is missing, no plain file or of another size; empty for none.

    Args:
        stems: tables whose rows matter; None: all files do.
    """
    for link in links:
        if fault := fault_of_files(link.folder, _files_with(link, stems)):
            return fault
    return ""


def _files_with(link: Link, stems: Collection[str] | None) -> list[SizedFile]:
    """Files with rows of some tables, or that went; None: all."""
    files, logs = link.manifest["files"], link.manifest.get("linked", [])
    if stems is not None:
        files = [f for f in files if is_of_removed(f) or not {*f["rows"]}.isdisjoint(stems)]
        logs = [log for log in logs if not {*log["rows"]}.isdisjoint(stems)]
    return all_files(files, logs)


def is_of_removed(file: FileEntry) -> bool:
    """Return True if a file has ids of rows that are no more."""
    return file["name"].startswith("removed-")
