"""Inputs and outputs: the signature of a bundle, and its sample request."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.arrays import ID_DTYPES
from hotbed.files import Json
from hotbed.jagged import Jagged
from hotbed.serve.bundles.bundle import ExportError, InputEntry, LookupEntry, OutputEntry
from hotbed.serve.exporting.lookups import Lookup
from hotbed.table.live import LiveTable

__all__ = [
    "as_rows",
    "check_samples",
    "ids_of",
    "inputs_of",
    "lookups_of_ids",
    "outputs_of",
    "samples_at",
]


def lookups_of_ids(
    lookups: Sequence[Lookup], leaves: Mapping[str, object], tables: Mapping[LiveTable, str]
) -> list[LookupEntry]:
    """Return what a bundle says of lookups.

    Raises:
        ExportError: ids are not those of the sample, but computed by the model.
    """
    entries: list[LookupEntry] = []
    for lookup in lookups:
        at = next((name for name, leaf in leaves.items() if _is_same(leaf, lookup.ids)), None)
        if at is None:
            raise ExportError(
                f"The ids of {lookup.name!r} are computed by the model, and a bundle looks up those of a "
                "request. Compute them where the batch is made."
            )
        spec = lookup.table.spec
        entries.append(
            {
                "input": at,
                "table": tables[lookup.table],
                "combiner": spec.combiner or "none",
                "padding_idx": spec.padding_idx,
                "vectors": lookup.input,
                "dtype": _name(lookup.vectors.dtype),
            }
        )
    return entries


def _is_same(leaf: object, ids: object) -> bool:
    if leaf is ids:
        return True
    return (
        isinstance(leaf, Tensor)
        and isinstance(ids, Tensor)
        and leaf.numel() > 0
        and (leaf.data_ptr(), leaf.shape, leaf.stride())
        == (ids.data_ptr(), ids.shape, ids.stride())
    )


def check_samples(what: str, tensors: Mapping[str, object], count: int) -> None:
    """Raise ExportError unless tensors have a row of each sample. `what` the model does with them."""
    for name, each in tensors.items():
        if isinstance(each, Tensor) and each.shape[:1] != (count,):
            raise ExportError(
                f"The model {what} {name!r}, of shape {tuple(each.shape)}, and there are {count} samples: a "
                "request has a row of each."
            )


def inputs_of(
    leaves: Mapping[str, object], lookups: Sequence[LookupEntry], dense: Collection[str]
) -> list[InputEntry]:
    """Return what a bundle says of what is asked with: leaves whose ids are looked up, and those that the
    dense part takes, whose names `dense` has."""
    entries: list[InputEntry] = []
    combined = {
        name: all(each["combiner"] != "none" for each in lookups if each["input"] == name)
        for name in {each["input"] for each in lookups}
    }
    for name, leaf in leaves.items():
        is_ids = name in combined
        if not is_ids and name not in dense:
            continue
        if isinstance(leaf, Jagged):
            dtype, shape = "int64", [-1]
        else:
            assert isinstance(leaf, Tensor)
            dtype, shape = _name(leaf.dtype), [*leaf.shape[1:]]
            if is_ids and name not in dense and combined[name] and len(shape) == 1:
                shape = [-1]  # bags of any length give a vector each
            if is_ids and (leaf.dtype not in ID_DTYPES or len(shape) > 1):
                raise ExportError(
                    f"The ids of {name!r} are of shape {tuple(leaf.shape)}. Pass (B,) or (B, K)."
                )
        entries.append(
            {
                "name": name,
                "kind": "ids" if is_ids else "numbers",
                "dtype": dtype,
                "shape": shape,
                "dense": name in dense,
            }
        )
    return entries


def outputs_of(outputs: Mapping[str, Tensor]) -> list[OutputEntry]:
    """Return what a bundle says of answers."""
    return [
        {"name": name, "dtype": _name(each.dtype), "shape": [*each.shape[1:]]}
        for name, each in outputs.items()
    ]


def ids_of(leaf: object, lookup: LookupEntry) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Return the ids of a lookup and offsets of its bags, as `hotbed.serve.bundles.reading` takes them."""
    if isinstance(leaf, Jagged):
        return leaf.values.long().cpu().numpy(), leaf.offsets.cpu().numpy()
    assert isinstance(leaf, Tensor)
    ids: NDArray[np.int64] = leaf.long().cpu().numpy()
    if lookup["combiner"] == "none":
        return ids, None
    each = ids[:, None] if ids.ndim == 1 else ids
    return each.reshape(-1), np.arange(len(each) + 1) * each.shape[1]


def samples_at(leaf: object, positions: Tensor, of: int) -> object:
    """Return the samples of a leaf at (n,) positions; what has not `of` samples stays."""
    if isinstance(leaf, Jagged):
        return leaf[positions]
    if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == of:
        return leaf[positions.to(leaf.device)]
    return leaf


def as_rows(named: Mapping[str, object]) -> list[dict[str, Json]]:
    """Return a sample for each entry, as JSON has it."""
    lists = {name: _lists(values) for name, values in named.items()}
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def _lists(values: object) -> list[Json]:
    if isinstance(values, Jagged):
        return [bag.tolist() for bag in values]
    assert isinstance(values, Tensor)
    plain = values.float() if values.dtype == torch.bfloat16 else values
    found: list[Json] = plain.tolist()
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
