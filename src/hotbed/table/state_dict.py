"""A table's entries in a ``state_dict``: written, and loaded.

``<name>``: (rows, dim) by rising id; ``<name>.ids``: (rows,) int64, of dynamic tables only;
``<name>.key``: the table key, int64. A static and a dynamic table load what the other saved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor

from hotbed.errors import HotbedError, TableError
from hotbed.table.checks import checked_ids
from hotbed.table.live import LiveTable
from hotbed.table.locks import alone

__all__ = ["ENDINGS", "load_table", "refuse_ambiguous_names", "save_table", "signed_key"]

_SAMPLE = 256
"""Rows by which two copies of a table are compared."""

ENDINGS = ("", ".ids", ".key")


def save_table(
    table: LiveTable, destination: dict[str, Tensor], stem: str, keep_vars: bool, with_key: bool
) -> None:
    """Writes a table. Rows of a static table that lie in one place are aliased, as torch does it; those
    of other tables are copied.

    Raises:
        TableError: a copy would not fit in memory.
    """
    if not table.parameter.is_current:
        table.place.refuse_copy_beyond_memory("a state_dict")
    if table.spec.rows is not None and table.parameter.is_current:
        table.check_handle()
        destination[stem] = table.parameter if keep_vars else table.current_weights()
    elif (found := table.rows_of_all("a state_dict", everywhere=False)) is not None:
        ids, destination[stem] = found
        if table.spec.rows is None:
            destination[f"{stem}.ids"] = ids
    if with_key:
        destination[f"{stem}.key"] = torch.tensor(signed_key(table.key), device="cpu")


def load_table(
    table: LiveTable,
    state: Mapping[str, Any],
    stem: str,
    key: int | None,
    missing: list[str],
    errors: list[str],
) -> None:
    """Reads a table. What cannot be loaded is added to `missing` or `errors`, the table as it was.

    Args:
        key: the table key, where it is not in `state`.
    """
    rows, ids, own_key = (state.get(stem + ending) for ending in ENDINGS)
    if own_key is not None:
        key = int(own_key)
    if different := _other_rows(table, rows, ids, key):
        errors.append(f"Table {table.name!r}: {stem} {different}")
        return
    if rows is None:
        missing.append(stem)
        return
    fault = _fault(table, rows, ids)
    if fault is not None:
        errors.append(f"Table {table.name!r}: {stem} {fault}")
        return
    if ids is None:
        ids = torch.arange(rows.shape[0], device="cpu")
    try:
        ids = checked_ids(table.spec, ids)
        table.ready()
    except HotbedError as error:
        errors.append(str(error))
        return
    with alone([table]):
        parts = list(table.place.parts(table, ids, rows))
        try:
            table.raise_deferred()
            for part, own, _ in parts:
                part.core.reserve(len(own))
        except HotbedError as error:
            errors.append(str(error))
            return
        if table.spec.rows is None:
            table.drop_gradient()
        for part, own, some in parts:
            _replace(part, own, some, key)


def _other_rows(table: LiveTable, rows: object, ids: object, key: int | None) -> str:
    """Return what differs if the ranks of a table are given different rows, as far as shapes, keys and a
    sample of rows show; else empty."""
    ranks = table.place.ranks
    if ranks.size == 1:
        return ""
    digests = ranks.values_of_all("a load of rows", [_digest(rows), _digest(ids), str(key)])
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), 0)
    if not other:
        return ""
    return (
        f"is other on rank {other} than on rank 0. load_state_dict() takes the same one on all ranks; as "
        "state_dict() has tables on rank 0 alone, broadcast it first."
    )


def _digest(given: object) -> str:
    if not isinstance(given, Tensor) or not given.dim():
        return type(given).__name__
    sample = given.detach()[:: max(1, len(given) // _SAMPLE)].cpu().contiguous()
    raw = sample.reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tuple(given.shape)} {given.dtype} {hashlib.sha256(raw).hexdigest()}"


def _replace(table: LiveTable, ids: Tensor, rows: Tensor, key: int | None) -> None:
    """As in torch, loading weights leaves an optimizer's states as they are."""
    with alone([table]):
        if key is not None:
            table.set_key(key & 0xFFFFFFFFFFFFFFFF)
        if table.spec.rows is None:
            table.drop_gradient()
            stored = table.stored_ids()
            table.erase(stored[~torch.isin(stored, ids)])
        elif len(ids) < table.spec.rows:
            table.forget_rows()
        table.assign(ids, rows)


def _fault(table: LiveTable, rows: object, ids: object) -> str | None:
    if not isinstance(rows, Tensor):
        return f"must be a tensor, got {type(rows).__name__}."
    if rows.dim() != 2 or rows.shape[1] != table.spec.dim:
        return f"has shape {tuple(rows.shape)}; the table's dim is {table.spec.dim}."
    if not rows.is_floating_point():
        return f"must be floating point, got {str(rows.dtype).removeprefix('torch.')}."
    if ids is None:
        if table.spec.rows is not None and rows.shape[0] != table.spec.rows:
            return f"has {rows.shape[0]} rows, the table {table.spec.rows}."
    elif not isinstance(ids, Tensor) or ids.shape != rows.shape[:1]:
        given = f"{ids.numel()} ids" if isinstance(ids, Tensor) else f"ids of {type(ids).__name__}"
        return f"has {rows.shape[0]} rows and {given}."
    return None


def signed_key(key: int) -> int:
    """The 64-bit key as int64, which is what torch can store."""
    return key - (1 << 64) if key >= 1 << 63 else key


def refuse_ambiguous_names(names: Set[str]) -> None:
    """Raises TableError where a table is named as a part of another in a state_dict."""
    for name in names:
        for ending in ENDINGS[1:]:
            if name + ending in names:
                raise TableError(
                    f"Table {name + ending!r} is named as a part of table {name!r} in a "
                    "state_dict; rename one."
                )
