"""Ids and rows that a user gives, checked."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from hotbed.arrays import id_tensor, is_one_of, real_tensor
from hotbed.errors import IdError, InputError, TableError
from hotbed.tables import Table
from hotbed.text import brief

__all__ = [
    "Missing",
    "any_ids",
    "checked_ids",
    "checked_missing",
    "checked_rows",
    "not_for_graphs",
    "refuse_absent",
    "refuse_half_loaded",
    "refuse_other_layout",
    "refuse_outside",
    "refuse_to_erase",
    "refuse_tracing",
]

Missing = Literal["initial", "error"]
"""Behaviour of a lookup for ids that have no row."""


_KEYS = torch._C._TorchDispatchModeKey
_RECORDING = (_KEYS.PROXY, _KEYS.FAKE)
_is_tracing, _count_modes = torch._C._is_tracing, torch._C._len_torch_dispatch_stack


def refuse_tracing(name: str) -> None:
    """Raises TableError where torch records what is called, or computes on tensors without data. A trace
    would keep the rows of this one batch as constants."""
    if _is_tracing():
        caller = "torch.jit.trace"
    elif _count_modes() and any(torch._C._get_dispatch_mode(key) is not None for key in _RECORDING):
        caller = "torch.export (or make_fx, FakeTensorMode)"
    else:
        return
    raise not_for_graphs(name, caller)


def not_for_graphs(name: str, caller: str) -> TableError:
    """Return the error of a table that `caller`, of torch, cannot go through."""
    return TableError(
        f"Table {name!r}: {caller} cannot go through tables, whose rows are found by id outside of torch. "
        "Trace the dense part of the model, and hand it the vectors that tables give."
    )


def any_ids(spec: Table, given: object) -> Tensor:
    """(n,) int64 ids, on the host, that may be those of a table or not.

    Raises:
        InputError, TableError: they are none, or have no data.
    """
    refuse_tracing(spec.name)
    ids = id_tensor(f"Table {spec.name!r}", given)
    if ids.dim() != 1:
        raise InputError(f"Table {spec.name!r}: ids must be 1-D, got shape {tuple(ids.shape)}.")
    return ids.to(dtype=torch.int64, device="cpu").contiguous()


def checked_ids(spec: Table, given: object) -> Tensor:
    """(n,) int64 ids of a table, on the host.

    Raises:
        IdError, InputError: they are none.
    """
    ids = any_ids(spec, given)
    refuse_outside(spec, ids)
    return ids


def refuse_outside(spec: Table, ids: Tensor) -> None:
    """Raises IdError unless all of some int64 ids are of a table."""
    origin = spec.origin
    if spec.rows is not None and ids.numel():
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= spec.rows:
            wrong = origin.ids_in_table(low if low < 0 else high)
            raise IdError(
                f"Table {spec.name!r}: id {wrong} is outside [0, {origin.rows}). Pass rows=None for "
                "open-ended ids."
            )
    elif origin.owns is not None and not bool((own := origin.owns(ids)).all()):
        raise IdError(
            f"Table {spec.name!r}: id {int(ids[~own][0])} belongs to another part of the table."
        )


def checked_rows(spec: Table, ids: Tensor, given: object) -> Tensor:
    """(n, dim) values for the rows of n ids.

    Raises:
        InputError, TableError: they are none.
    """
    values = real_tensor(f"Table {spec.name!r}", "rows", given).detach()
    if not len(ids) and values.shape == (0,):  # as of an empty list
        values = values.reshape(0, spec.dim)
    if values.shape != (len(ids), spec.dim):
        raise TableError(
            f"Table {spec.name!r}: {len(ids)} ids need values of shape ({len(ids)}, {spec.dim}), got "
            f"{tuple(values.shape)}."
        )
    return values


def checked_missing(missing: Missing) -> bool:
    """Return True if a lookup must refuse ids that have no row.

    Raises:
        InputError: `missing` is none of what there is.
    """
    if not is_one_of(missing, get_args(Missing)):
        raise InputError(f"lookup: missing must be 'initial' or 'error', got {brief(missing)}.")
    return missing == "error"


def refuse_absent(spec: Table, ids: Tensor, found: Tensor) -> None:
    """Raises IdError unless all of (n,) ids have rows, as `found` (n,) says."""
    if bool(found.all()):
        return
    raise IdError(
        f"Table {spec.name!r}: {int((~found).sum())} of {len(ids)} ids have no row, such as "
        f"{int(ids[~found][0])}. missing='initial' reads their first values. Ids of text are those that the "
        "loader gave it: of hotbed.data.hash_ids, or hotbed.data.criteo_ids for a CriteoLog's."
    )


def refuse_to_erase(spec: Table, has_gradient: bool) -> None:
    """Raises TableError where a gradient of a table waits for its step."""
    if has_gradient:
        raise TableError(
            f"Table {spec.name!r}: rows cannot be erased while a gradient waits for them. Call zero_grad() "
            "first, after step()."
        )


def refuse_half_loaded(spec: Table, failed: str) -> None:
    """Raises TableError where a load of a table has `failed` in its middle."""
    if failed:
        raise TableError(
            f"Table {spec.name!r} is half loaded: {failed} Its rows are those of no checkpoint, so they are "
            "not looked up, trained or saved. Load a whole checkpoint by hotbed.load, or make the model anew."
        )


def refuse_other_layout(spec: Table, data: Tensor, plane: Tensor) -> None:
    """Raises TableError unless what was put in place of a handle's data fits the plane."""
    if data.shape == plane.shape and data.dtype == plane.dtype:
        return
    theirs, own = (str(one.dtype).removeprefix("torch.") for one in (data, plane))
    raise TableError(
        f"Table {spec.name!r}: the data of its parameter were replaced by {theirs} {tuple(data.shape)}; the "
        f"table keeps {own} {tuple(plane.shape)}. Choose the row dtype with Table(dtype=...)."
    )
