"""Versions of a bundle: what has changed since it was exported, beside it.

::

    DIR/
        bundle.json ...                 the bundle, which stays as it is
        versions/BASE/                  of the bundle whose model_version is BASE; others are left-overs
            00000012.3000-1a2b3c4d/     number and model_version
                version.json            its manifest, see `hotbed.serve.bundles.manifests.VersionEntry`
                dense.onnx              the dense part with its weights
                tables/N.K.ids.npy      of table N, a layer that version K has made: changed ids, rising
                tables/N.K.rows.npy     their rows, as the bundle stores them; scales and default likewise
                topk/user.onnx          of a two-tower model: the users' tower with its weights
                topk/vectors.npy        vectors of the bundle's items, of these rows and weights
            pinned.json                 the version to serve in place of the newest

A version has all files that it needs beside the bundle's: layers of earlier ones are hard links, so that any
version can be removed. It is written to a folder whose name ends with ``.part`` and renamed when it is on
the disk, and its files do not change. Any number of processes may read versions while one writes them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from hotbed.files import appearing
from hotbed.paths import path_text
from hotbed.serve.bundles.bundle import (
    DENSE,
    ITEM_VECTORS,
    USER,
    VERSIONS,
    Bundle,
    BundleError,
    FileEntry,
)
from hotbed.serve.bundles.item_search import ItemVectors
from hotbed.serve.bundles.manifests import VersionEntry, check_contents, read_bundle, read_version
from hotbed.serve.bundles.reading import BundleTable, MappedRows

__all__ = [
    "Layers",
    "ServedItems",
    "Version",
    "current",
    "fault_of_sizes",
    "folder_of",
    "has_versions_alone",
    "name_of",
    "open_layers",
    "pin",
    "pinned",
    "unpin",
    "versions_of",
]

_NAME = re.compile(r"([0-9]{8,})\.(\S+)")
_PINNED = "pinned.json"


class Version(NamedTuple):
    """A version of a bundle, by its name."""

    model_version: str
    """What answers carry."""
    number: int
    """Rises from version to version; 0: the bundle as it was exported."""
    base: str
    """`model_version` of the bundle."""
    folder: str
    """Absolute path of its files; of number 0 that of the bundle."""


class ServedItems(NamedTuple):
    """Items of a two-tower model in a version."""

    vectors: ItemVectors
    users: bytes
    """The users' tower, as ONNX."""


class Layers(NamedTuple):
    """Contents of a version, which stay readable when its files are removed."""

    version: Version
    about: Bundle
    """Manifest of the bundle: inputs, lookups, outputs."""
    tables: Mapping[str, BundleTable]
    """By their names in the model's state_dict."""
    dense: bytes
    """The dense part, as ONNX."""
    items: ServedItems | None
    """None: the version has none."""


def folder_of(folder: str, base: str) -> str:
    """Return where the versions of a bundle lie. `base`: its model_version."""
    return os.path.join(os.path.abspath(folder), VERSIONS, base)


def has_versions_alone(folder: str) -> bool:
    """Return True for a folder in which nothing lies but versions of a bundle, and what belongs to them."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return all(
        name == _PINNED or name.endswith(".part") or _NAME.fullmatch(name) is not None
        for name in names
    )


def name_of(number: int, model_version: str) -> str:
    """Return the name of a version's folder."""
    return f"{number:08d}.{model_version}"


def versions_of(folder: str | os.PathLike[str]) -> list[Version]:
    """Return the versions of a bundle, the newest last; the first is the bundle as it was exported.

    Only names are read, so it can be called often.

    Raises:
        BundleError: `folder` is no bundle.
    """
    path = os.path.abspath(path_text(folder, "folder"))
    base = read_bundle(path)["model_version"]
    found = [Version(base, 0, base, path)]
    where = folder_of(path, base)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(where):
            if (match := _NAME.fullmatch(name)) and not name.endswith(".part"):
                found.append(Version(match[2], int(match[1]), base, os.path.join(where, name)))
    return sorted(found, key=lambda version: version.number)


def current(folder: str | os.PathLike[str]) -> Version:
    """Return the version to serve: the pinned one, else the newest. It costs a listing of names.

    Raises:
        BundleError: `folder` is no bundle.
    """
    found = versions_of(folder)
    wanted = pinned(folder)
    return next((each for each in reversed(found) if each.model_version == wanted), found[-1])


def open_layers(folder: str | os.PathLike[str], version: Version) -> Layers:
    """Return the contents of a version: rows mapped into memory, and the dense part.

    Raises:
        BundleError: the version is damaged; or it, or its bundle, was removed or replaced meanwhile: ask
            `current` again.
    """
    path = os.path.abspath(path_text(folder, "folder"))
    about = read_bundle(path)
    try:
        layers: dict[str, list[MappedRows]] = {
            stem: [MappedRows(path, entry)] for stem, entry in about["tables"].items()
        }
        files = about["files"]
        if version.number:
            manifest = _manifest_of(version, about)
            files = manifest["files"]
            for stem, entries in manifest["tables"].items():
                layers[stem] += [MappedRows(version.folder, entry) for entry in entries]
        with open(os.path.join(version.folder, DENSE), "rb") as file:
            dense = file.read()
        items = _items_of(path, about, version, files)
    except (OSError, ValueError) as error:
        raise BundleError(
            f"Version {version.model_version} of {path} cannot be read: {error}"
        ) from error
    # Files that are mapped stay, so that it is enough to look again when all are.
    if not read_bundle(path)["model_version"] == about["model_version"] == version.base:
        raise BundleError(f"{path} was replaced while it was opened. Open its current version.")
    check_contents(os.path.join(version.folder, DENSE), dense, DENSE, files)
    if items is not None:
        check_contents(os.path.join(version.folder, USER), items.users, USER, files)
    tables = {stem: BundleTable(mapped) for stem, mapped in layers.items()}
    return Layers(version, about, tables, dense, items)


def _items_of(
    folder: str, about: Bundle, version: Version, files: list[FileEntry]
) -> ServedItems | None:
    """Return the items of a version. `files`: the version's."""
    topk = about.get("topk")
    if topk is None or not any(each["name"] == ITEM_VECTORS for each in files):
        return None
    with open(os.path.join(version.folder, USER), "rb") as file:
        users = file.read()
    return ServedItems(ItemVectors(folder, topk, version.folder), users)


def _manifest_of(version: Version, about: Bundle) -> VersionEntry:
    manifest = read_version(version.folder)
    names = (manifest["base"], manifest["model_version"], manifest["number"])
    if names != (version.base, version.model_version, version.number):
        raise BundleError(f"{version.folder} is another version than its name says.")
    if unknown := manifest["tables"].keys() - about["tables"].keys():
        raise BundleError(
            f"{version.folder} has a table {min(unknown)!r}, which the bundle has not."
        )
    if fault := fault_of_sizes(version.folder, manifest["files"]):
        raise BundleError(fault)
    return manifest


def fault_of_sizes(folder: str, files: list[FileEntry]) -> str:
    """Which file is missing or of another size; empty for none."""
    for each in files:
        path = os.path.join(folder, each["name"])
        try:
            size = os.stat(path).st_size
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}"
        if size != each["bytes"]:
            return f"{path} has {size:,} bytes, and its manifest says {each['bytes']:,}."
    return ""


def pin(folder: str | os.PathLike[str], version: str) -> Version:
    """Have all servers of a bundle serve a version, until `unpin`. It stays on the disk meanwhile.

    Args:
        version: its `model_version`; that of the bundle is the state in which it was exported.

    Returns:
        The version.

    Raises:
        BundleError: there is no such version.
        OSError: it cannot be written.
    """
    path = os.path.abspath(path_text(folder, "folder"))
    base = read_bundle(path)["model_version"]
    _find(path, version)
    where = folder_of(path, base)
    os.makedirs(where, exist_ok=True)
    with appearing(os.path.join(where, _PINNED)) as part:
        with open(part, "w", encoding="utf-8") as file:
            json.dump({"version": version}, file)
            file.flush()
            os.fsync(file.fileno())
    try:
        return _find(path, version)  # it may have been removed as too old meanwhile
    except BundleError:
        unpin(path)
        raise


def _find(folder: str, version: str) -> Version:
    there = versions_of(folder)
    for each in reversed(there):
        if each.model_version == version:
            return each
    names = ", ".join(each.model_version for each in there)
    raise BundleError(f"{folder} has no version {version[:40]!r}. It has {names}.")


def unpin(folder: str | os.PathLike[str]) -> None:
    """Have servers of a bundle serve the newest version again; does nothing where none is pinned.

    Raises:
        BundleError: `folder` is no bundle.
        OSError: it cannot be removed.
    """
    path = os.path.abspath(path_text(folder, "folder"))
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder_of(path, read_bundle(path)["model_version"]), _PINNED))


def pinned(folder: str | os.PathLike[str]) -> str | None:
    """Return the `model_version` that is pinned; None: the newest is served.

    Raises:
        BundleError: `folder` is no bundle.
    """
    path = os.path.abspath(path_text(folder, "folder"))
    where = folder_of(path, read_bundle(path)["model_version"])
    try:
        with open(os.path.join(where, _PINNED), encoding="utf-8") as file:
            found = json.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise BundleError(
            f"{where}/{_PINNED} cannot be read: {error}. Pin a version again."
        ) from None
    match found:
        case {"version": str(version)}:
            return version
    raise BundleError(f"{where}/{_PINNED} names no version. Pin one again.")
