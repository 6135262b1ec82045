"""Vectors of a bundle, by the ids of a batch."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import DTypeLike, NDArray
from typing_extensions import Self

from hotbed import _core
from hotbed.errors import IdError
from hotbed.serve.bundles.bundle import BundleError, LookupEntry, TableEntry
from hotbed.serve.bundles.defaults import Default, FirstValues, OneVector
from hotbed.serve.bundles.mapped import mapped
from hotbed.serve.bundles.row_formats import ROW_FORMATS

__all__ = [
    "BundleTable",
    "FetchedTable",
    "Ids",
    "MappedRows",
    "ReadTable",
    "looked_up",
]

COMBINERS = {name: number for number, name in enumerate(("none", "sum", "mean", "sqrtn", "max"))}
STORED_AS = {name: number for number, name in enumerate(("float32", "float16", "int8", "int4"))}
"""Numbers that the core has for them."""


class MappedRows:
    """Rows of a table in one bundle, whose files are mapped into memory.

    Args:
        folder: the bundle's.
        about: what its manifest says of the table.

    Raises:
        BundleError: a file is damaged, or is not what the manifest says.
        OSError: as of files.
    """

    def __init__(self, folder: str, about: TableEntry) -> None:
        self.about, self._folder = about, folder
        how, count, dim = ROW_FORMATS[about["stored_as"]], about["rows"], about["dim"]
        self.rows = self._mapped("rows", how.dtype, (count, how.columns(dim)))
        """(rows, columns), as they are stored."""
        self.default: Default
        """Of ids without row."""
        if (first := about.get("first")) is not None:
            self.default = FirstValues(first, dim)
        else:
            self.default = OneVector(self._mapped("default", np.float32, (dim,)))
        self.scales = None
        """(rows, 2): scale and offset, of rows in few bits."""
        if how.scale_dtype is not None:
            self.scales = self._mapped("scales", how.scale_dtype, (count, 2))
        self.ids = None if about["static"] else self._mapped("ids", np.int64, (count,))
        """(rows,) int64, rising, of a dynamic table."""

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Return the arrays that there are, by the names of their files: rows, default, scales and ids."""
        default = self.default.vector
        found = {"rows": self.rows, "default": default, "scales": self.scales, "ids": self.ids}
        return {part: each for part, each in found.items() if each is not None}

    def _mapped(self, part: str, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[np.generic]:
        return mapped(os.path.join(self._folder, f"{self.about['files']}.{part}.npy"), dtype, shape)

    def expect_few_in_memory(self) -> None:
        """Have the system read a row alone where it is not in memory, and not what lies beside it."""
        for part in (self.rows, self.scales):
            pages = getattr(part, "_mmap", None)
            if isinstance(pages, mmap.mmap):
                pages.madvise(mmap.MADV_RANDOM)


class BundleTable:
    """A table as it is served. Several threads may read it at once.

    Args:
        layers: rows of a bundle, and then those that changed since, oldest first, whose ids are told.
        name: of the table, for errors. Default: that of its files.

    Raises:
        BundleError: rows of the layers have different dims.
    """

    def __init__(self, layers: Sequence[MappedRows], name: str | None = None) -> None:
        self.layers = tuple(layers)
        self.about = about = layers[0].about
        self.name = about["files"] if name is None else name
        for layer in self.layers:
            if layer.about["dim"] != about["dim"]:
                raise BundleError(
                    f"Table {self.name!r}: rows of {about['files']} have {about['dim']} columns, and newer "
                    f"ones of {layer.about['files']} {layer.about['dim']}."
                )
        self.core = _core.ServedTable(
            [
                (STORED_AS[each.about["stored_as"]], each.rows, each.scales, each.ids)
                for each in self.layers
            ],
            self.layers[0].default.core,
            about["rows"] if about["static"] else None,
        )

    def __deepcopy__(self, memo: dict[int, object]) -> BundleTable:
        """Return this one: it does not change."""
        return self

    def __reduce__(self) -> NoReturn:
        """Raise TypeError: files are not pickled."""
        raise TypeError(
            f"Rows of {self.name!r} lie in files that are mapped here. Pickle the model that they are of."
        )

    def rows(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the (n, dim) float32 rows of (n,) ids; those without a row have the default.

        Raises:
            IdError: an id is outside of a static table.
        """
        (found,) = looked_up([Ids(self, ids, None, "none", None)])
        return found.view(np.float32)


class FetchedTable:
    """Rows of some ids of a table, of which each has one.

    Args:
        about: the table.
        ids: (n,), rising.
        rows: (n, dim).
    """

    def __init__(
        self, about: TableEntry, ids: NDArray[np.int64], rows: NDArray[np.float32]
    ) -> None:
        self.about, self.name = about, about["files"]
        none = np.zeros(about["dim"], np.float32)
        layer = (STORED_AS["float32"], rows, None, ids)
        self.core = _core.ServedTable([layer], none, None)


ReadTable = BundleTable | FetchedTable
"""What rows are looked up in."""


class Ids(NamedTuple):
    """Ids of one table, and how their rows become vectors."""

    table: ReadTable
    ids: NDArray[np.int64]
    """Of any shape without combiner, each has a vector; else (n,), of all bags."""
    offsets: NDArray[np.int64] | None
    """(B + 1,) where bags begin and end; None without combiner."""
    combiner: str
    """none, sum, mean, sqrtn or max."""
    padding_idx: int | None
    """This id is none."""
    dtype: str = "float32"
    """Of the vectors."""

    @classmethod
    def of(
        cls,
        lookup: LookupEntry,
        table: ReadTable,
        ids: NDArray[np.int64],
        offsets: NDArray[np.int64] | None,
    ) -> Self:
        """Return ids of a lookup of a bundle, whose vectors are those that the dense part takes."""
        how = lookup["combiner"], lookup["padding_idx"], lookup["dtype"]
        return cls(table, ids, offsets, *how)


def looked_up(lookups: Sequence[Ids]) -> list[NDArray[np.generic]]:
    """Return for each its vectors, (B, dim), or where there are no offsets (``*ids.shape, dim``).

    Rows of a bag are added in their order. Large batches use the threads that torch uses.

    Raises:
        IdError: an id is outside of a static table; the range is named.
        TypeError, ValueError: ids or offsets are not int64, or offsets do not rise from 0 to the number of
            ids.
    """
    found: list[NDArray[np.generic]] = []
    asked = []
    for table, ids, offsets, combiner, padding, _ in lookups:
        shape = ids.shape if offsets is None else (len(offsets) - 1,)
        vectors = np.empty((*shape, table.about["dim"]), np.float32)
        found.append(vectors)
        if not ids.flags.c_contiguous:
            ids = np.ascontiguousarray(ids)
        asked.append((table.core, ids, offsets, COMBINERS[combiner], padding, vectors))
    refused = _core.look_up(asked)
    if refused is not None:
        number, position = refused
        table, id_ = lookups[number].table, lookups[number].ids.flat[position]
        raise IdError(f"Table {table.name!r}: id {id_} is outside [0, {table.about['rows']}).")
    for number, each in enumerate(lookups):
        if each.dtype != "float32":
            found[number] = found[number].astype(each.dtype)
    return found
