"""The folder of a saved model: how one takes the place of another, and what is read of it.

::

    model.json             what the model is, and of the files below their bytes and checksums
    dense.N.safetensors    N is 1 or 2: a model is written beside the one that is there, whose files
    tables.N.safetensors   go when the new model.json has taken the place of the old one
    tables.N.2.safetensors and so on: rows come in files of a bounded size
    model.next.json        what will take that place
    saving.json            while that goes on: the files that are new or to go

Other files in it are the user's and stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from hotbed.checkpoint.files import (
    CheckpointError,
    read_json_sealed,
    read_tensors,
    sync_folder,
    write_json_sealed,
    write_tensors,
)
from hotbed.errors import HotbedError
from hotbed.files import new_beside
from hotbed.train.report import OutputError

__all__ = [
    "SavedFolder",
    "check_writable_folder",
    "holds_file",
    "is_own_file",
    "opened",
    "write_folder",
]

_FORMAT = 3
_MANIFEST, _NEXT, _JOURNAL = "model.json", "model.next.json", "saving.json"
_FILES_OF_FORMAT_1 = ("dense.safetensors", "tables.safetensors")


def is_own_file(name: str) -> bool:
    """Whether a file of that name in a saved model's folder is part of it."""
    return name in (_MANIFEST, _JOURNAL) or _comes_and_goes(name)


def holds_file(folder: str, name: str) -> bool:
    """Whether a file of that name is part of the model that is saved in `folder`."""
    try:
        return is_own_file(name) and bool(_files_of(folder))
    except OutputError:
        return False


def _comes_and_goes(name: Any) -> bool:
    known = rf"(dense|tables)(\.[12])?\.safetensors|tables\.[12]\.[0-9]+\.safetensors|{_NEXT}"
    return isinstance(name, str) and re.fullmatch(known, name) is not None


def _dense_file(number: int) -> str:
    return f"dense.{number}.safetensors"


def _tables_file(number: int, count: int) -> str:
    """`count`: of such files, from 1."""
    return f"tables.{number}{'' if count == 1 else f'.{count}'}.safetensors"


# -- writing -----------------------------------------------------------------------------------------


def check_writable_folder(path: str) -> None:
    """Raise OutputError if a model cannot be saved at `path`, before anything is trained.

    An existing folder must be empty or hold a saved model, which will be replaced. Of other files
    beside it nothing is touched.
    """
    there = os.path.exists(path)
    if there and not os.path.isdir(path):
        raise OutputError(f"Cannot save to {path!r}: it is a file.")
    try:
        if there:
            left = {*_unfinished(path), _JOURNAL}
            if not _files_of(path) and set(os.listdir(path)) - left:
                raise OutputError(
                    f"Cannot save to {path!r}: the folder holds other files. Name a new folder."
                )
            _names_of_new(path, 1)
            os.unlink(new_beside(os.path.join(path, _MANIFEST)))
        else:
            os.makedirs(path)
            os.rmdir(path)
    except OSError as error:
        raise _cannot_save(path, error) from None


def write_folder(
    path: str,
    manifest: Mapping[str, Any],
    dense: Mapping[str, Tensor],
    tables: Iterable[Mapping[str, Tensor]],
    most_files: int,
) -> None:
    """Writes a model: what it is as JSON values, and its tensors.

    Whatever ends the process, the model that was there or the new one can be read. Waits while
    another process writes or reads there.

    Args:
        tables: of one file each; at most `most_files` of them.

    Raises:
        OutputError: it cannot be written; what was there is there.
    """
    made = not os.path.exists(path)
    try:
        os.makedirs(path, exist_ok=True)
        with _held(path, fcntl.LOCK_EX):
            _replace(path, manifest, dense, tables, most_files)
    except OSError as error:
        if made:
            with contextlib.suppress(OSError):
                os.rmdir(path)
        raise _cannot_save(path, error) from None


def _replace(
    path: str,
    manifest: Mapping[str, Any],
    dense: Mapping[str, Tensor],
    tables: Iterable[Mapping[str, Tensor]],
    most_files: int,
) -> None:
    _sweep(path)
    first, *names = _names_of_new(path, most_files)
    journal = {"files": [*_files_of(path), first, *names, _NEXT]}

    def written(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        return {"name": name, **write_tensors(os.path.join(path, name), tensors)}

    try:
        write_json_sealed(os.path.join(path, _JOURNAL), journal)
        sync_folder(path)
        # There may be fewer files than there are names.
        files = {
            "dense": written(first, dense),
            "tables": [written(*file) for file in zip(names, tables, strict=False)],
        }
        following = os.path.join(path, _NEXT)
        write_json_sealed(following, {"format": _FORMAT, **manifest, "files": files})
        sync_folder(path)
        os.replace(following, os.path.join(path, _MANIFEST))
        sync_folder(path)
    finally:
        _sweep(path)


def _sweep(path: str) -> None:
    """Removes what is left of a save: files that it noted and the manifest does not name."""
    for name in {*_unfinished(path)} - {*_files_of(path)}:
        # A folder of that name is somebody else's.
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(os.path.join(path, name))
    sync_folder(path)  # or after a failure of power the note could be gone and files not
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(path, _JOURNAL))


def _unfinished(path: str) -> list[str]:
    """The files that a save has noted which has not ended.

    Raises:
        OutputError: the note is not Hotbed's.
    """
    noted = os.path.join(path, _JOURNAL)
    if not os.path.lexists(noted) or (os.path.isfile(noted) and not os.path.getsize(noted)):
        return []
    match _read(path, noted):
        case {"files": list(names)}, True if all(_comes_and_goes(name) for name in names):
            return names
    raise OutputError(f"Cannot save to {path!r}: {noted} is not Hotbed's. Move it away.")


def _files_of(path: str) -> list[str]:
    """The files of the model that is saved there; none if there is none.

    Raises:
        OutputError: there is a manifest that is not Hotbed's, or damaged.
    """
    manifest = os.path.join(path, _MANIFEST)
    if not os.path.lexists(manifest):
        return []
    match _read(path, manifest):
        case {"format": 3, "files": {"dense": {"name": dense}, "tables": list(tables)}}, True:
            names = [dense, *(file.get("name") for file in tables if isinstance(file, dict))]
            if all(map(_comes_and_goes, names)):
                return names
        case {"format": 2, "files": {"dense": {"name": dense}, "tables": {"name": rows}}}, True:
            if _comes_and_goes(dense) and _comes_and_goes(rows):
                return [dense, rows]
        case {"format": 1, "model": str(), "arguments": dict()}, False:
            return list(_FILES_OF_FORMAT_1)
    raise OutputError(
        f"Cannot save to {path!r}: {manifest} is of no saved model, or damaged. Name a new folder."
    )


def _read(path: str, file: str) -> tuple[Any, bool]:
    try:
        return read_json_sealed(file)
    except CheckpointError as error:
        raise OutputError(f"Cannot save to {path!r}: {error}") from None


def _names_of_new(path: str, most_files: int) -> list[str]:
    """Names for the file of the dense layers, and for those of the tables.

    Raises:
        OutputError: such a file is there and of no model.
    """
    number = 2 if _dense_file(1) in _files_of(path) else 1
    tables = (_tables_file(number, count) for count in range(1, most_files + 1))
    names = [_dense_file(number), *tables]
    left = _unfinished(path)
    there = {*os.listdir(path)}
    for name in (*names, _NEXT):
        if name not in left and name in there:
            raise OutputError(
                f"Cannot save to {path!r}: {name} there is no part of the model. Move it away."
            )
    return names


@contextlib.contextmanager
def _held(path: str, how: int) -> Iterator[None]:
    """Keeps other processes from saving (shared) or also from loading (exclusive) meanwhile."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # not every file system can
            fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


def _cannot_save(path: str, error: OSError) -> OSError:
    if isinstance(error, HotbedError):
        return error
    return OutputError(f"Cannot save to {path!r}: {error.strerror}.")


# -- reading -----------------------------------------------------------------------------------------


class SavedFolder(NamedTuple):
    """What is read of a folder."""

    manifest_path: str
    manifest: dict[str, Any]
    """What the model is, as JSON values."""
    dense_path: str
    dense: dict[str, Tensor]
    tables: Iterator[tuple[str, dict[str, Tensor]]]
    """(path, tensors) of each file of rows, read when it is asked for."""


@contextlib.contextmanager
def opened(path: str) -> Iterator[SavedFolder]:
    """For a ``with`` statement, in which nobody replaces the model. Reads every file once, and no more
    bytes than it has.

    Raises:
        CheckpointError: the folder is not there, is incomplete, damaged or of another version; the
            message names the file.
    """
    if not os.path.isdir(path):
        raise CheckpointError(f"There is no folder {path!r}. `hotbed train --save DIR` makes one.")
    try:
        with _held(path, fcntl.LOCK_SH):
            manifest_path = os.path.join(path, _MANIFEST)
            manifest = _manifest_in(manifest_path)
            dense, *tables = [
                (os.path.join(path, file["name"]), file)
                for file in (manifest["files"]["dense"], *manifest["files"]["tables"])
            ]
            rows = ((where, read_tensors(where, file)) for where, file in tables)
            yield SavedFolder(manifest_path, manifest, dense[0], read_tensors(*dense), rows)
    except OSError as error:
        if isinstance(error, HotbedError):
            raise
        raise CheckpointError(f"{path!r} cannot be read: {error.strerror}.") from None


def _manifest_in(path: str) -> dict[str, Any]:
    manifest, sealed = read_json_sealed(path)
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if type(version) is int and version != _FORMAT and (sealed or version == 1):
        raise CheckpointError(
            f"{path} is of format {version}; this version of Hotbed reads {_FORMAT}. Train the model "
            "and save it again."
        )
    if not sealed:
        raise CheckpointError(f"{path} is damaged, or was changed. Copy or save it again.")
    match manifest:
        case {"format": 3, "files": {"dense": {"name": dense}, "tables": list(tables)}}:
            pass
        case _:
            raise CheckpointError(f"{path} is not what `hotbed train --save` writes.")
    names = [dense, *(file.get("name") if isinstance(file, dict) else file for file in tables)]
    number = 2 if dense == _dense_file(2) else 1
    wanted = [_dense_file(number), *(_tables_file(number, at) for at in range(1, len(names)))]
    for name, other in zip(names, wanted, strict=True):
        if name != other:
            raise CheckpointError(
                f"{path} names the file {name!r}, which is none of a saved model."
            )
    return dict(manifest)
