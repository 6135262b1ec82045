"""Rows of tables as files that NumPy maps into memory."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from hotbed.arrays import is_one_of
from hotbed.errors import PlanError
from hotbed.serve.bundles.bundle import ExportError, TableEntry
from hotbed.serve.bundles.defaults import DEFAULTS, first_entry
from hotbed.serve.bundles.mapped import new_mapped
from hotbed.serve.bundles.row_formats import ROW_FORMATS, RowFormat
from hotbed.table.live import LiveTable
from hotbed.table.records import rows_of_widths

__all__ = ["check_forms", "refuse_shared", "write_table"]


def check_forms(rows: str, default: str) -> None:
    """Raise ExportError unless rows can be stored so, and there is such a default."""
    for name, value, known in (("rows", rows, [*ROW_FORMATS]), ("default", default, DEFAULTS)):
        if not is_one_of(value, known):
            raise ExportError(f"{name} is {value!r}. Pass one of {', '.join(known)}.")


def write_table(
    folder: str,
    files: str,
    table: LiveTable,
    how: RowFormat,
    only: Tensor | None,
    default: str,
) -> TableEntry:
    """Write the rows of a table, as the last step has left them, to a bundle. Returns what it says of it.

    Rows pass by some megabytes at a time; of a dynamic table ids take 16 bytes each in memory.

    Args:
        files: what the names of its files begin with.
        only: (n,) int64, rising: of a dynamic table, ids whose rows are wanted. None: all.
        default: "zeros", "mean" (of the rows that are written) or "first".

    Raises:
        ExportError: a number is not finite.
        OSError, StorageError: as of files.
    """
    spec = table.spec
    refuse_shared(table)
    ids = None if spec.rows is not None else _ids(table, only)
    count = spec.rows if spec.rows is not None else len(_some(ids))
    rows = _new(folder, files, "rows", how.dtype, (count, how.columns(spec.dim)))
    scales = None
    if how.scale_dtype is not None:
        scales = _new(folder, files, "scales", how.scale_dtype, (count, 2))
    total = torch.zeros(spec.dim, dtype=torch.float64)
    for at, weights in _weights(table, ids):
        if not bool(torch.isfinite(weights).all()):
            raise ExportError(f"Table {spec.name!r} has a row with a number that is not finite.")
        stored = how.encoded(weights)
        rows[at] = stored.rows.numpy()
        if scales is not None and stored.scales is not None:
            scales[at] = stored.scales.numpy()
        total += weights.double().sum(0)
    entry: TableEntry = {
        "files": files,
        "dim": spec.dim,
        "rows": count,
        "static": ids is None,
        "stored_as": how.name,
    }
    if default == "first" and ids is not None:
        entry["first"] = first_entry(table)
    else:
        mean = default == "mean" and count > 0
        vector = (total / count).float() if mean else torch.zeros(spec.dim)
        _new(folder, files, "default", np.float32, (spec.dim,))[:] = vector.numpy()
    if ids is not None:
        _new(folder, files, "ids", np.int64, (count,))[:] = ids.numpy()
    if only is not None:
        _new(folder, files, "only", np.int64, (len(only),))[:] = only.numpy()
    return entry


def refuse_shared(table: LiveTable) -> None:
    """Raise PlanError where ranks share a table."""
    if table.place.ranks.size > 1:
        raise PlanError(
            f"Table {table.name!r} is shared by {table.place.ranks.size} ranks. Save the model, and export "
            "its checkpoint in one process: hb.export(hb.checkpoint.load_model(path), ...)."
        )


def _some(ids: Tensor | None) -> Tensor:
    assert ids is not None
    return ids


def _ids(table: LiveTable, only: Tensor | None) -> Tensor:
    """Return the ids of a dynamic table that have a row, rising; those in `only`."""
    chunks = [rows.ids.clone() for rows in table.records(states=False)]
    ids = torch.cat(chunks or [torch.empty(0, dtype=torch.int64)]).sort().values
    return ids if only is None else ids[torch.isin(ids, only, assume_unique=True)]


def _weights(
    table: LiveTable, ids: Tensor | None
) -> Iterator[tuple[slice | NDArray[np.int64], Tensor]]:
    """Yield float32 rows, each chunk with where they go: of a static table all, of others those of `ids`."""
    if ids is None:
        assert table.spec.rows is not None
        at_once = rows_of_widths(table.spec.dim, [])
        for begin in range(0, table.spec.rows, at_once):
            some = torch.arange(begin, min(begin + at_once, table.spec.rows))
            yield slice(begin, begin + len(some)), table.lookup(some).float()
        return
    for rows in table.records(states=False):
        assert rows.weights is not None
        at = torch.searchsorted(ids, rows.ids)
        here = ids[at.clamp_(max=max(0, len(ids) - 1))] == rows.ids if len(ids) else at < 0
        yield at[here].numpy(), rows.weights[here].float()


def _new(
    folder: str, files: str, part: str, dtype: DTypeLike, shape: tuple[int, ...]
) -> NDArray[np.generic]:
    return new_mapped(os.path.join(folder, f"{files}.{part}.npy"), dtype, shape)
