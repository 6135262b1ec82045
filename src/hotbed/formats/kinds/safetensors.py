"""safetensors files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from hotbed.checkpoint.tensors import DTYPES, header_of
from hotbed.files import appearing
from hotbed.formats.mapped import into, refusal_to_map, synced
from hotbed.formats.state_dicts import found_in
from hotbed.formats.tables import FileTable, FormatError, Found, Hints, plain
from hotbed.formats.writing import fill, shapes_of

__all__ = ["SafetensorsFile"]


_RESERVED = "__metadata__"


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, rows: slice, /) -> Tensor: ...


class _Opened(Protocol):
    """The file that ``safetensors.safe_open`` returns."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str, /) -> _Slice: ...


class _Lazy:
    """A tensor in a file."""

    def __init__(self, file: _Opened, name: str) -> None:
        self._file, self._name = file, name
        part = file.get_slice(name)
        self.shape = tuple(part.get_shape())
        self.dtype: torch.dtype | str = DTYPES.get(part.get_dtype(), part.get_dtype())

    def __getitem__(self, rows: slice) -> Tensor:
        return self._file.get_slice(self._name)[rows.start : rows.stop]


class SafetensorsFile:
    hints: tuple[str, ...] = ()
    endings: tuple[str, ...] = (".safetensors",)

    def is_in(self, folder: str) -> bool:
        return False

    def read(self, path: str, hints: Hints) -> Found:
        from safetensors import SafetensorError, safe_open

        try:
            file: _Opened = safe_open(plain(path), framework="pt")
            return found_in(path, {name: _Lazy(file, name) for name in file.keys()}, {})
        except SafetensorError as error:
            raise FormatError(f"{path} is no safetensors file that can be read: {error}.") from None
        except (MemoryError, OSError, RuntimeError) as error:
            if refusal := refusal_to_map(path, error):
                raise FormatError(refusal) from None
            raise

    def write(self, path: str, tables: Sequence[FileTable]) -> None:
        shapes = shapes_of(tables)
        if _RESERVED in shapes:
            raise FormatError(
                f"{path}: a safetensors file cannot hold a table {_RESERVED!r}, a name of the format: "
                "rename it, or choose another --format."
            )
        first, begins = header_of(shapes)
        with appearing(path) as part:
            with open(part, "wb") as out:
                out.write(first)
            rooms = {name: into(part, *shapes[name], begin) for name, begin in begins.items()}
            fill(tables, rooms)
            synced(part)


FORMAT = SafetensorsFile()
