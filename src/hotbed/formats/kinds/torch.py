"""A ``state_dict`` that torch.save wrote, read without unpickling anything but tensors."""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from typing import IO

import torch
from torch import Tensor

from hotbed.files import appearing
from hotbed.formats.mapped import mapped, refusal_to_map, synced
from hotbed.formats.state_dicts import found_in
from hotbed.formats.tables import FileTable, FormatError, Found, Hints, plain
from hotbed.formats.writing import fill, shapes_of

__all__ = ["TorchFile"]

_ZIP = b"PK\3\4"
_INNER = ("state_dict", "model_state_dict", "model")
"""Names under which training scripts save one beside other things."""


class TorchFile:
    hints: tuple[str, ...] = ()
    endings: tuple[str, ...] = (".pt", ".pth", ".bin", ".ckpt")

    def is_in(self, folder: str) -> bool:
        return False

    def read(self, path: str, hints: Hints) -> Found:
        loaded = _loaded(plain(path))
        for name in _INNER:
            if isinstance(loaded, Mapping) and isinstance(loaded.get(name), Mapping):
                loaded = loaded[name]
        if not isinstance(loaded, Mapping):
            raise FormatError(f"{path} holds no state_dict, but {type(loaded).__name__!r}.")
        tensors = {str(name): value for name, value in loaded.items() if isinstance(value, Tensor)}
        skipped = {str(name): "is no tensor" for name in loaded if str(name) not in tensors}
        return found_in(path, tensors, skipped)

    def write(self, path: str, tables: Sequence[FileTable]) -> None:
        shapes = shapes_of(tables)
        beside = os.path.dirname(os.path.abspath(path))
        with appearing(path) as part, tempfile.TemporaryDirectory(dir=beside) as scratch:
            rooms = {
                name: mapped(os.path.join(scratch, str(at)), *shape)
                for at, (name, shape) in enumerate(shapes.items())
            }
            fill(tables, rooms)
            torch.save(rooms, part)
            synced(part)


def _is_archive(file: IO[bytes]) -> bool:
    try:
        return zipfile.is_zipfile(file)
    except zipfile.BadZipFile:
        return False


def _loaded(path: str) -> object:
    with open(path, "rb") as file:
        maps = _is_archive(file)  # the format since torch 1.6
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        begin = file.read(len(_ZIP))
    if not size:
        raise FormatError(f"{path} is empty.")
    if begin == _ZIP and not maps:
        raise FormatError(
            f"{path} is cut off: it begins as a file of torch.save, and its end is missing. Copy or save it "
            "again."
        )
    try:
        if maps:
            with zipfile.ZipFile(path) as archive:
                packed = any(member.compress_type for member in archive.infolist())
                unpacked = sum(member.file_size for member in archive.infolist())
            if packed or unpacked > size:
                raise ValueError("it is a compressed archive, and torch.save does not compress")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=maps)
    except (
        Exception
    ) as error:  # whatever a file can make torch raise; of a length in it, MemoryError
        if refusal := refusal_to_map(path, error):
            raise FormatError(refusal) from None
        text = (
            " ".join((str(error) or type(error).__name__).split())
            .partition(". ")[0][:200]
            .rstrip(".")
        )
        raise FormatError(
            f"{path} cannot be read by torch.load(weights_only=True): {text}. Save model.state_dict() alone; "
            "other objects are not unpickled, as they may run any code."
        ) from None


FORMAT = TorchFile()
