"""New versions of a bundle, made of checkpoints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.checkpoint.chain import Link
from hotbed.checkpoint.deltas import new_uid
from hotbed.checkpoint.files import write_json_sealed
from hotbed.checkpoint.folder import order_of
from hotbed.checkpoint.stores.local_files import sync_folder
from hotbed.files import appearing_folder
from hotbed.serve.bundles.bundle import (
    DENSE,
    TABLES,
    VERSION,
    Bundle,
    BundleError,
    FileEntry,
    TableEntry,
)
from hotbed.serve.bundles.dense_weights import dense_in, with_weights
from hotbed.serve.bundles.layers import StoredRows
from hotbed.serve.bundles.manifests import (
    VERSION_FORMAT,
    VERSION_MANIFEST,
    VersionEntry,
    files_in,
    read_bundle,
    read_whole,
)
from hotbed.serve.bundles.versions import Version, folder_of, name_of
from hotbed.serve.following.checkpoint_rows import CheckpointTable, ServedTable, write_changes
from hotbed.serve.following.followed_items import write_followed_items
from hotbed.serve.following.same_model import refuse_other_model

__all__ = ["Layer", "Stack", "Written", "since_of", "write_version"]


class Layer(NamedTuple):
    """A layer of changed rows on the disk."""

    folder: str
    entry: TableEntry


class Stack(NamedTuple):
    """Contents of the version over which the next one is made."""

    number: int
    """Of the version; 0: the bundle."""
    tables: Mapping[str, Sequence[Layer]]
    """By table, layers over the rows of the bundle, the oldest first."""
    files: Mapping[str, FileEntry]
    """By name, what is known of files of layers."""
    checkpoint: str | None
    """`uid` of the checkpoint whose rows these are; None: it has none, or is not known."""
    step: int | None
    """Of the bundle, where `number` is 0."""


class Written(NamedTuple):
    """Result of `write_version`."""

    version: Version
    manifest: VersionEntry
    rows: int
    """Rows that differ from those of the version before."""


def since_of(stack: Stack, links: Sequence[Link]) -> str | None:
    """Return the `uid` of the checkpoint among a checkpoint and its bases whose rows are served; None: there
    is none, or it is not known."""
    known = [link.manifest.get("uid") for link in links]
    if stack.checkpoint is not None:
        return stack.checkpoint if stack.checkpoint in known else None
    if stack.number or stack.step is None:
        return None
    # A run that went back may have been at that step twice: its folders tell it.
    steps = [link for link in links if link.manifest["step"] == stack.step]
    if len(steps) == 1 and order_of(steps[0].folder)[0] == 0:
        return steps[0].manifest.get("uid")
    return None


def write_version(bundle: str, about: Bundle, stack: Stack, links: Sequence[Link]) -> Written:
    """Write the version of a bundle that has the rows and weights of a checkpoint.

    Args:
        bundle: its absolute path.
        about: its manifest.
        stack: the version before.
        links: the checkpoint, which nobody removes meanwhile, and its bases.

    Raises:
        BundleError: the checkpoint is of another model, or has numbers that are not finite; or the bundle was
            replaced.
        CheckpointError: the checkpoint is damaged.
        OSError: the version cannot be written.
    """
    source, base = links[0].manifest, about["model_version"]
    state = dense_in(links[0].folder, source)
    refuse_other_model(about, links[0].folder, source, state)
    number, uid = stack.number + 1, source.get("uid")
    model_version = f"{source['step']}-{(uid or new_uid())[:8]}"
    target = os.path.join(folder_of(bundle, base), name_of(number, model_version))
    contents = read_whole(bundle, DENSE, about["files"])
    parameters = about.get("parameters", {})
    dense = with_weights(os.path.join(bundle, DENSE), contents, parameters, state)
    rows = 0
    with appearing_folder(target) as folder:
        os.mkdir(os.path.join(folder, TABLES))
        tables: dict[str, list[TableEntry]] = {}
        linked: dict[str, FileEntry] = {}
        for stem, entry in about["tables"].items():
            before = stack.tables.get(stem, ())
            layers = [StoredRows(bundle, entry), *(StoredRows(*each) for each in before)]
            served = ServedTable(layers, _only(bundle, about, entry))
            table = CheckpointTable(stem, links, since_of(stack, links))
            new = write_changes(folder, f"{entry['files']}.{number}", served, table)
            for each in before:
                linked |= _link(each, folder, stack.files)
            tables[stem] = [*(each.entry for each in before), *([new] if new else [])]
            rows += new["rows"] if new else 0
        with open(os.path.join(folder, DENSE), "xb") as file:
            file.write(dense)
        write_followed_items(folder, bundle, about, tables, state)
        manifest: VersionEntry = {
            "format": VERSION_FORMAT,
            "version": VERSION,
            "base": base,
            "model_version": model_version,
            "number": number,
            "step": source["step"],
            "checkpoint": {"name": os.path.basename(links[0].folder), "uid": uid},
            "tables": tables,
            "files": [*linked.values(), *files_in(folder, linked)],
        }
        write_json_sealed(os.path.join(folder, VERSION_MANIFEST), manifest)
        for path, _, _ in os.walk(folder):
            sync_folder(path)
        if read_bundle(bundle)["model_version"] != base:
            raise BundleError(f"{bundle} was replaced meanwhile.")
    sync_folder(os.path.dirname(target))
    return Written(Version(model_version, number, base, target), manifest, rows)


def _only(bundle: str, about: Bundle, entry: TableEntry) -> NDArray[np.int64] | None:
    name = f"{entry['files']}.only.npy"
    if not any(file["name"] == name for file in about["files"]):
        return None
    found: NDArray[np.int64] = np.load(os.path.join(bundle, name))
    return found


def _link(layer: Layer, folder: str, files: Mapping[str, FileEntry]) -> dict[str, FileEntry]:
    """Give a version the files of a layer. Returns what is known of them."""
    prefix = f"{layer.entry['files']}."
    known = {}
    for name in os.listdir(os.path.join(layer.folder, TABLES)):
        path = f"{TABLES}/{name}"
        if path.startswith(prefix):
            source, target = (os.path.join(each, path) for each in (layer.folder, folder))
            try:
                os.link(source, target)
            except OSError:  # a file system without hard links
                shutil.copyfile(source, target)
                continue
            if path in files:
                known[path] = files[path]
    return known
