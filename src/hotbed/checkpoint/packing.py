"""Checkpoints with linked files, made into portable ones."""

from __future__ import annotations

import contextlib
import fcntl
import os
import warnings
from collections.abc import Callable, Iterator

from hotbed.checkpoint.entries import Manifest
from hotbed.checkpoint.errors import CheckpointError
from hotbed.checkpoint.files import write_json_sealed
from hotbed.checkpoint.folder import opened
from hotbed.checkpoint.linked import linked_rows
from hotbed.checkpoint.manifest import MANIFEST, VERSION, read_manifest
from hotbed.checkpoint.manifest_faults import fault_of_entries
from hotbed.checkpoint.names import NEXT
from hotbed.checkpoint.rows import Piece, write_files
from hotbed.checkpoint.stores import store_of
from hotbed.checkpoint.stores.local_files import held, remove_others, sync_folder
from hotbed.paths import path_text

__all__ = ["pack"]


def pack(path: str | os.PathLike[str], *, progress: Callable[[int], None] | None = None) -> str:
    """Write the rows of linked files of a checkpoint, which ``hotbed.save(..., linked=True)`` makes, to files
    of its own, and remove the links. It stays what it is, also for those that hold changes since it; others
    read it by docs/format.md alone, and a copy takes no more than its rows. One without links is left alone.

    Rows are read and written some megabytes at a time; where each lies takes some 12 bytes a row.

    Args:
        path: a checkpoint, or a folder of them, of which the latest is meant.
        progress: called with the bytes that were written since.

    Returns:
        Its folder.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged or on object storage, or is read.
        InputError: `path` is no path.
        OSError: it cannot be written; it is as it was.
    """
    store_of(path_text(path)).refuse_links(
        "hotbed.checkpoint.pack replaces hard links", "A checkpoint there is portable as it is."
    )
    with opened(path) as folder:
        pass  # and let it go, as this one changes it
    try:
        with held(folder, fcntl.LOCK_EX | fcntl.LOCK_NB) as there:
            if not there:
                raise CheckpointError(f"{folder} was removed meanwhile.")
            _pack(folder, progress)
    except BlockingIOError:
        raise CheckpointError(
            f"{folder} is being read. Pack it when that has ended, or make a copy: hotbed checkpoint merge "
            f"{folder} --out DIR"
        ) from None
    return folder


def _pack(folder: str, progress: Callable[[int], None] | None) -> None:
    manifest = read_manifest(folder)
    logs = manifest.get("linked", [])
    remove_others(folder, {file["name"] for file in (*manifest["files"], *logs)})
    if not logs:
        return
    numbers = [f["name"].split("-")[1] for f in manifest["files"] if f["name"].startswith("rows-")]
    writer = 1 + max(map(int, numbers), default=-1)
    try:
        files = [
            *manifest["files"],
            *write_files(folder, _pieces(folder, manifest, progress), writer),
        ]
        about = {k: v for k, v in manifest.items() if k not in ("crc32c", "linked")}
        about |= {"version": VERSION, "files": files}
        if fault := fault_of_entries(about):
            raise CheckpointError(f"{folder} cannot be packed: {fault}. It is as it was.")
        write_json_sealed(os.path.join(folder, NEXT), about)
        sync_folder(folder)
        os.replace(os.path.join(folder, NEXT), os.path.join(folder, MANIFEST))
    except BaseException:
        with contextlib.suppress(OSError):
            remove_others(folder, {file["name"] for file in (*manifest["files"], *logs)})
        raise
    sync_folder(folder)
    try:
        remove_others(folder, {file["name"] for file in files})
    except OSError as error:
        warnings.warn(
            f"{folder} is packed, and files that it needs no more could not be removed: {error}",
            stacklevel=4,
        )


def _pieces(
    folder: str, manifest: Manifest, progress: Callable[[int], None] | None
) -> Iterator[Piece]:
    for _, rows in linked_rows(folder, manifest, manifest["tables"]):
        yield rows.stem, rows.columns, rows.tensors
        if progress is not None:
            progress(sum(tensor.nbytes for tensor in rows.tensors.values()))
