"""Layers of rows on their way to the disk: changed rows of a table with their ids, rising."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.serve.bundles.bundle import TableEntry
from hotbed.serve.bundles.defaults import Default
from hotbed.serve.bundles.mapped import found_in, new_mapped
from hotbed.serve.bundles.reading import MappedRows
from hotbed.serve.bundles.row_formats import ROW_FORMATS, Stored

__all__ = [
    "NewLayer",
    "StoredRows",
    "bytes_of_row",
    "decoded_bits",
    "encoded_bits",
    "merge_layers",
]

AT_ONCE = 1 << 16
"""Rows that are copied in one go."""


class StoredRows(MappedRows):
    """Rows of a bundle or a layer, found and compared as they are stored."""

    def __len__(self) -> int:
        return self.about["rows"]

    def find(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return where the rows of (n,) ids lie, and which have one."""
        if self.ids is None:
            return ids, (ids >= 0) & (ids < len(self))
        return found_in(np.asarray(self.ids, np.int64), ids)

    def bits(self, at: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the (n, bytes) of rows with their scales."""
        return _bits(self.rows[at], None if self.scales is None else self.scales[at])


def _bits(rows: NDArray[np.generic], scales: NDArray[np.generic] | None) -> NDArray[np.uint8]:
    parts = [rows] if scales is None else [rows, scales]
    return np.concatenate([np.ascontiguousarray(each).view(np.uint8) for each in parts], 1)


def bytes_of_row(about: TableEntry) -> int:
    """Return the bytes of a row of a table with its scales."""
    how = ROW_FORMATS[about["stored_as"]]
    scales = 0 if how.scale_dtype is None else 2 * np.dtype(how.scale_dtype).itemsize
    return how.columns(about["dim"]) * np.dtype(how.dtype).itemsize + scales


def encoded_bits(about: TableEntry, weights: Tensor) -> NDArray[np.uint8]:
    """Return (n, bytes): (n, dim) float32 rows with their scales as a table stores them."""
    stored = ROW_FORMATS[about["stored_as"]].encoded(weights)
    return _bits(stored.rows.numpy(), None if stored.scales is None else stored.scales.numpy())


def decoded_bits(about: TableEntry, bits: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the (n, dim) rows that are read of (n, bytes) as a table stores them."""
    rows, scales = _parts(about, bits)
    stored = Stored(torch.from_numpy(rows), None if scales is None else torch.from_numpy(scales))
    found: NDArray[np.float32] = (
        ROW_FORMATS[about["stored_as"]].decoded(stored, about["dim"]).numpy()
    )
    return found


def _parts(
    about: TableEntry, bits: NDArray[np.uint8]
) -> tuple[NDArray[np.generic], NDArray[np.generic] | None]:
    """Return rows, and their scales, of (n, bytes) as a table stores them."""
    how = ROW_FORMATS[about["stored_as"]]
    split = how.columns(about["dim"]) * np.dtype(how.dtype).itemsize
    rows = np.ascontiguousarray(bits[:, :split]).view(how.dtype)
    if how.scale_dtype is None:
        return rows, None
    return rows, np.ascontiguousarray(bits[:, split:]).view(how.scale_dtype)


class NewLayer:
    """A layer that is being written: rows come in any order, each once, and take 16 bytes each in memory. It
    is used by a ``with`` statement, at the end of which nothing is left but what `finish` has written.

    Args:
        folder: the version's.
        files: what the names of its files begin with.
        base: entry of the table in the bundle.
    """

    def __init__(self, folder: str, files: str, base: TableEntry) -> None:
        self._folder, self._files, self._base = folder, files, base
        self._width = bytes_of_row(base)
        self._ids: list[NDArray[np.int64]] = []
        path = os.path.join(folder, f"{files}.unsorted")
        self._unsorted = open(path, "w+b", buffering=1 << 20)

    def __enter__(self) -> NewLayer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._unsorted.close()
        os.unlink(self._unsorted.name)

    def add(self, ids: NDArray[np.int64], bits: NDArray[np.uint8]) -> None:
        """Add (n,) ids and their (n, bytes) rows as they are stored."""
        if len(ids):
            self._ids.append(ids.copy())
            self._unsorted.write(np.ascontiguousarray(bits).data)

    def finish(self, default: Default) -> TableEntry | None:
        """Write the layer. Returns its entry in the manifest; None, and nothing is written: it has no rows.

        Args:
            default: of the table.
        """
        if not self._ids:
            return None
        ids = np.concatenate(self._ids)
        order = np.argsort(ids)
        ids = ids[order]
        self._unsorted.flush()
        unsorted = np.memmap(self._unsorted, np.uint8, "r", shape=(len(ids), self._width))
        write = _LayerFiles(self._folder, self._files, self._base, len(ids))
        for begin in range(0, len(ids), AT_ONCE):
            some = slice(begin, begin + AT_ONCE)
            write.rows(some, unsorted[order[some]])
        return write.finish(ids, default)


class _LayerFiles:
    """Files of a layer of which the number of rows is known."""

    def __init__(self, folder: str, files: str, base: TableEntry, count: int) -> None:
        self._prefix, how = os.path.join(folder, files), ROW_FORMATS[base["stored_as"]]
        self._entry: TableEntry = {**base, "files": files, "rows": count, "static": False}
        shape = count, how.columns(base["dim"])
        self._rows = new_mapped(f"{self._prefix}.rows.npy", how.dtype, shape)
        self._scales = None
        if how.scale_dtype is not None:
            self._scales = new_mapped(f"{self._prefix}.scales.npy", how.scale_dtype, (count, 2))

    def rows(self, some: slice, bits: NDArray[np.uint8]) -> None:
        """Write rows as they are stored."""
        rows, scales = _parts(self._entry, bits)
        self._rows[some] = rows
        if self._scales is not None and scales is not None:
            self._scales[some] = scales

    def finish(self, ids: NDArray[np.int64], default: Default) -> TableEntry:
        """Write the rest."""
        np.save(f"{self._prefix}.ids.npy", ids)
        if default.vector is not None:
            np.save(f"{self._prefix}.default.npy", default.vector)
        return self._entry


def merge_layers(folder: str, files: str, layers: Sequence[StoredRows]) -> TableEntry:
    """Write one layer in place of several, some megabytes at a time; of each id the newest one counts. Some
    40 bytes a row are in memory.

    Args:
        folder: of the new layer.
        files: what the names of its files begin with.
        layers: the oldest first, all with ids.

    Returns:
        Its entry in a manifest.

    Raises:
        OSError: it cannot be written.
    """
    newest_first = layers[::-1]
    every = np.concatenate([np.asarray(each.ids) for each in newest_first])
    ids, first = np.unique(every, return_index=True)  # the first of equal ones: of the newest layer
    del every
    ends = np.cumsum([len(each) for each in newest_first])
    write = _LayerFiles(folder, files, layers[0].about, len(ids))
    for begin in range(0, len(ids), AT_ONCE):
        some = first[begin : begin + AT_ONCE]
        layer_of = np.searchsorted(ends, some, side="right")
        bits = np.empty((len(some), bytes_of_row(layers[0].about)), np.uint8)
        for number in np.unique(layer_of):
            own = layer_of == number
            end, layer = ends[number], newest_first[number]
            bits[own] = layer.bits(some[own] - (end - len(layer)))
        write.rows(slice(begin, begin + len(some)), bits)
    return write.finish(ids, layers[-1].default)
