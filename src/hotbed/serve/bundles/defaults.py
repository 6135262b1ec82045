"""Defaults: rows that ids of a dynamic table read which have none in a bundle."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hotbed import _core
from hotbed.checkpoint.tables import described
from hotbed.init import Kind
from hotbed.serve.bundles.bundle import BundleError, ExportError, FirstEntry
from hotbed.table.live import LiveTable
from hotbed.tables import CORE_DTYPES

__all__ = ["DEFAULTS", "Default", "FirstValues", "OneVector", "first_entry", "moving"]

DEFAULTS = ("zeros", "mean", "first")
"""Zeros, the mean of the table's rows, or what a row starts from in training."""


class Default(Protocol):
    """Rows of ids that have none. Several threads may read it at once."""

    @property
    def core(self) -> object:
        """Return the argument of `_core.ServedTable` for it."""

    @property
    def vector(self) -> NDArray[np.generic] | None:
        """(dim,) float32, where all ids read the same."""

    def rows(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the (n, dim) rows of (n,) ids."""


class OneVector:
    """The same vector of all ids.

    Args:
        vector: (dim,) float32.
    """

    def __init__(self, vector: NDArray[np.generic]) -> None:
        self.core = self.vector = vector

    def rows(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        return np.broadcast_to(np.asarray(self.vector, np.float32), (len(ids), len(self.vector)))


class FirstValues:
    """First values, as they are in training: float32 of the numbers in the table's dtype.

    Args:
        entry: what the manifest says of them.
        dim: of the table.

    Raises:
        BundleError: the entry is damaged.
    """

    vector = None

    def __init__(self, entry: FirstEntry, dim: int) -> None:
        try:
            if entry["bands"][-1]["end"] != dim:
                raise ValueError(f"they are not of {dim} columns")
            bands = [
                (each["end"], int(Kind[each["kind"]]), *map(float, each["numbers"]))
                for each in entry["bands"]
            ]
            dtype = CORE_DTYPES[getattr(torch, entry["dtype"])]
            self.core = bands, int(entry["key"], 16), entry["padding_idx"], dtype
            none = np.empty(0, np.float32), None, np.empty(0, np.int64)
            self._table = _core.ServedTable([(0, *none)], self.core, None)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise BundleError(f"First values of a table are damaged: {error}.") from None
        self._dim = dim

    def rows(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        found = np.empty((len(ids), self._dim), np.float32)
        _core.look_up([(self._table, np.ascontiguousarray(ids), None, 0, None, found)])
        return found


def first_entry(table: LiveTable) -> FirstEntry:
    """Return what a manifest says of the first values of a dynamic table.

    Raises:
        ExportError: its optimizer moves rows that no batch has had, so that training reads others.
    """
    about, rule = described(table.spec), table.rule
    if rule is not None and rule.has_moved_untouched:
        raise ExportError(moving(table.name))
    return {
        "key": f"{table.key:016x}",
        "init": about["init"],
        "bands": [
            {"end": end, "kind": Kind(kind).name, "numbers": [*map(float, numbers)]}
            for end, kind, *numbers in table.spec.bands()
        ],
        "padding_idx": about["padding_idx"],
        "dtype": about["dtype"],
    }


def moving(table: str) -> str:
    """Return the error of first values of a table, by its name, that training does not read."""
    return (
        f"Each step moves all rows of table {table!r}, also those that no batch has had, and "
        'default="first" stays. Pass default="zeros" or "mean".'
    )
