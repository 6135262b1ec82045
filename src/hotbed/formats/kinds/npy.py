"""NumPy's .npy files, one a table, as distributed-embeddings' ``get_weights`` gives them to be saved.

``NAME.npy`` (rows, dim), by id; of a dynamic table beside it ``NAME.ids.npy`` (rows,).
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence

import numpy as np

from hotbed.files import appearing_folder
from hotbed.formats.mapped import Numbers, mapped, synced
from hotbed.formats.tables import (
    FileTable,
    FormatError,
    Found,
    Hints,
    fault_of,
    name_of,
    plain,
    table_of,
)
from hotbed.formats.writing import file_name, fill, shapes_of, widened

__all__ = ["Npy"]


class Npy:
    hints: tuple[str, ...] = ()
    endings: tuple[str, ...] = (".npy",)

    def is_in(self, folder: str) -> bool:
        return any(name.endswith(".npy") for name in os.listdir(folder))

    def read(self, path: str, hints: Hints) -> Found:
        if os.path.isdir(path):
            names = [name for name in sorted(os.listdir(path)) if name.endswith(".npy")]
            files = {name[:-4]: plain(os.path.join(path, name), path) for name in names}
        else:
            stem = os.path.basename(path).removesuffix(".npy")
            files = {stem: plain(path)}
            beside = f"{path.removesuffix('.npy')}.ids.npy"
            if os.path.lexists(beside):
                files[f"{stem}.ids"] = plain(beside, os.path.dirname(os.path.abspath(path)))
        tables, skipped = [], {}
        arrays = {stem: _opened(file) for stem, file in files.items()}
        for stem, array in arrays.items():
            if stem.endswith(".ids") and stem.removesuffix(".ids") in arrays:
                continue
            ids = arrays.get(f"{stem}.ids")
            if fault := fault_of(array, static=ids is None):
                skipped[stem] = fault
            else:
                tables.append(table_of(files[stem], stem, array, ids))
        return Found(tables, skipped)

    def write(self, path: str, tables: Sequence[FileTable]) -> None:
        if path.endswith(".npy"):
            raise FormatError(
                f"{path} would be a folder of .npy files. Name one, with --format npy."
            )
        tables = widened(tables)
        with appearing_folder(path) as folder:
            files = {
                name: (os.path.join(folder, file_name(name, ".npy")), *shape)
                for name, shape in shapes_of(tables).items()
            }
            rooms = {
                name: mapped(file, dtype, shape, _header(name_of(dtype), shape))
                for name, (file, dtype, shape) in files.items()
            }
            fill(tables, rooms)
            for file, _, _ in files.values():
                synced(file)


def _opened(path: str) -> Numbers:
    try:
        with np.errstate(all="ignore"):  # a shape in a header may be of any size
            array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # whatever a header can make NumPy raise
        text = " ".join(str(error).split())[:200].rstrip(".")
        raise FormatError(f"{path} is no array of numbers that can be read: {text}.") from None
    if not isinstance(array, np.ndarray):
        array.close()
        raise FormatError(f"{path} is no .npy file, but an archive of several.")
    return Numbers(array)


def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    out = io.BytesIO()
    about = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(out, about)
    return out.getvalue()


FORMAT = Npy()
