"""Every kind of input becomes `Bags`: flat ids, offsets or a fixed length, optional weights.

Kind, rank and dtype are checked here; the values of ids and offsets are checked by the core, or the
device, once, when the batch is resolved. `hotbed.inputs` lists the kinds.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard, overload

import torch
from torch import Tensor

from hotbed.arrays import ID_DTYPES, describe, id_tensor, is_array, real_tensor
from hotbed.errors import HotbedError, IdError, InputError
from hotbed.jagged import Jagged

__all__ = ["Bags", "FlatIds", "Jagged", "core_input", "input_fault", "read_bags", "split_keyed"]

_KINDS = (
    "a LongTensor (B,) or (B, K), or an array or lists of such ints, a hotbed.Jagged, a jagged nested "
    "tensor, a sparse CSR or COO tensor"
)
_WEIGHED = ("sum", "mean", "sqrtn")
_CPU = torch.device("cpu")


class Bags(NamedTuple):
    """A feature's input in the form the core takes."""

    ids: Tensor
    """(N,) contiguous int64 or int32."""
    offsets: Tensor | None
    """(bags + 1,) contiguous int64, or None: every bag has `fixed` ids."""
    fixed: int
    bags: int
    weights: Tensor | None
    """(N,) contiguous, of the table's compute type."""
    batch: int
    """Samples; differs from bags for inputs of three and more dimensions."""
    shape: tuple[int, ...] | None
    """Leading shape of the output where it is not (bags,)."""
    jagged: bool
    """Unpooled, the output is a Jagged with these offsets."""

    def on_host(self) -> Bags:
        """Ids and offsets where the core reads them, without weights."""
        offsets = None if self.offsets is None else self.offsets.cpu()
        return self._replace(ids=self.ids.cpu(), offsets=offsets, weights=None)


class FlatIds(Sequence[Bags]):
    """Inputs of many features with one vector an id, whose ids lie one after the other.

    Attributes:
        ids: (N,) contiguous int64.
        counts: ids of each feature.
    """

    def __init__(self, ids: Tensor, counts: list[int]) -> None:
        self.ids, self.counts = ids, counts

    def __len__(self) -> int:
        return len(self.counts)

    @overload
    def __getitem__(self, at: int) -> Bags: ...
    @overload
    def __getitem__(self, at: slice) -> list[Bags]: ...
    def __getitem__(self, at: int | slice) -> Bags | list[Bags]:
        if isinstance(at, slice):
            return list(self)[at]
        count = self.counts[at]
        begin = sum(self.counts[: at % len(self.counts)])
        return Bags(self.ids[begin : begin + count], None, 1, count, None, count, None, False)

    def __iter__(self) -> Iterator[Bags]:
        for ids in self.ids.split(self.counts):  # type: ignore[no-untyped-call]
            count = ids.shape[0]
            yield Bags(ids, None, 1, count, None, count, None, False)


def read_bags(
    feature: str,
    value: object,
    compute_dtype: torch.dtype,
    combiner: str | None,
    device: torch.device = _CPU,
) -> Bags:
    """Reads one feature's input of any kind.

    Args:
        device: of the tables. Inputs may lie there, or on the host.

    Raises:
        InputError: a kind, rank or dtype that cannot be ids; the message names the feature.
    """
    if isinstance(value, Tensor):
        _check_places(feature, (value,), device)
        if value.layout is torch.strided and not value.is_nested:
            return _read_dense(feature, value, combiner != "none")
        if value.layout is torch.jagged:
            return _read_nested(feature, value)
        if value.layout is torch.sparse_csr or value.layout is torch.sparse_coo:
            return _read_sparse(feature, value, compute_dtype, combiner)
        nested = " of a nested tensor" if value.is_nested else ""
        raise InputError(
            f"Feature {feature!r}: the layout {value.layout}{nested} is not understood; give {_KINDS}."
        )
    if isinstance(value, Jagged):
        return _read_jagged(
            feature, value.values, value.offsets, value.weights, compute_dtype, combiner, device
        )
    if _has_methods(value, "values", "offsets"):
        if _has_methods(value, "keys") and len(value.keys()) != 1:
            raise InputError(
                f"Feature {feature!r}: a keyed input of {len(value.keys())} keys; give it in place of "
                "the whole dict, or one key of it."
            )
        weights = getattr(value, "weights_or_none", lambda: None)()
        return _read_jagged(
            feature, value.values(), value.offsets(), weights, compute_dtype, combiner, device
        )
    if is_array(value):
        return _read_dense(feature, value, combiner != "none")
    raise InputError(f"Feature {feature!r}: got {describe(value)}; give {_KINDS}.")


def _read_dense(feature: str, given: object, pooled: bool) -> Bags:
    value = _ids(feature, given)
    rank = value.dim()
    if rank == 1:
        count = value.shape[0]
        return Bags(value.contiguous(), None, 1, count, None, count, None, False)
    if rank == 0:
        raise InputError(
            f"Feature {feature!r}: a single id without a batch dimension; give a tensor (B,)."
        )
    shape = tuple(value.shape)
    ids = value.reshape(-1).contiguous()
    lead = (shape[:-1] if rank > 2 else None) if pooled else shape
    return Bags(ids, None, shape[-1], math.prod(shape[:-1]), None, shape[0], lead, False)


def _read_jagged(
    feature: str,
    given: object,
    offsets: object,
    weights: object,
    compute_dtype: torch.dtype,
    combiner: str | None,
    device: torch.device | None = None,
) -> Bags:
    """`device`: of the tables, to hold parts of an input to; None where all came as one tensor."""
    values = _ids(feature, given)
    if device is not None:
        _check_places(feature, (values, offsets, weights), device)
    if values.dim() != 1:
        raise InputError(
            f"Feature {feature!r}: the values of a Jagged must be ids (N,), "
            f"got shape {tuple(values.shape)}."
        )
    edges = _offsets(f"Feature {feature!r}", offsets)
    weighed = None
    if weights is not None:
        weighed = _weights(feature, weights, len(values), compute_dtype, combiner)
    bags = len(edges) - 1
    return Bags(values.contiguous(), edges, 0, bags, weighed, bags, None, True)


def _read_nested(feature: str, value: Any) -> Bags:
    if value.dim() != 2:
        raise InputError(
            f"Feature {feature!r}: a nested tensor of ids must have 2 dimensions, got {value.dim()}."
        )
    if value.lengths() is not None:
        # A narrowed view: its bags do not follow one another in the values.
        bags = value.unbind()
        return _read_jagged(
            feature,
            value.values()[:0] if not bags else torch.cat(bags),
            torch.nn.functional.pad(value.lengths().cumsum(0), (1, 0)),
            None,
            torch.float32,
            None,
        )
    return _read_jagged(feature, value.values(), value.offsets(), None, torch.float32, None)


def _read_sparse(
    feature: str, value: Tensor, compute_dtype: torch.dtype, combiner: str | None
) -> Bags:
    if value.dim() != 2 or value.dense_dim() != 0:
        raise InputError(
            f"Feature {feature!r}: a sparse tensor must be (B, ids) of scalars, got shape "
            f"{tuple(value.shape)} with {value.dense_dim()} dense dimensions."
        )
    if value.requires_grad and torch.is_grad_enabled():
        raise InputError(
            f"Feature {feature!r}: a sparse tensor cannot pass a gradient on to its values; give "
            "hotbed.Jagged(ids, offsets, weights=...)."
        )
    if value.layout is torch.sparse_csr:
        offsets, ids, weights = value.crow_indices(), value.col_indices(), value.values()
        return _read_jagged(feature, ids, offsets, weights, compute_dtype, combiner)
    samples, ids = value._indices().unbind(0)
    weights = value._values()
    batch = value.shape[0]
    if len(samples):
        if int(samples.min()) < 0 or int(samples.max()) >= batch:
            raise InputError(
                f"Feature {feature!r}: a sparse tensor of {batch} samples has an entry for sample "
                f"{int(samples.max()) if int(samples.min()) >= 0 else int(samples.min())}."
            )
        if bool((samples[1:] < samples[:-1]).any()):
            order = torch.argsort(samples, stable=True)
            samples, ids, weights = samples[order], ids[order], weights[order]
    counts = torch.bincount(samples, minlength=batch)
    offsets = counts.new_zeros(batch + 1)
    torch.cumsum(counts, 0, out=offsets[1:])
    return _read_jagged(feature, ids, offsets, weights, compute_dtype, combiner)


def _ids(feature: str, ids: object) -> Tensor:
    if isinstance(ids, Tensor) and ids.dtype in ID_DTYPES and ids.layout is torch.strided:
        return ids
    return id_tensor(f"Feature {feature!r}", ids)


def _check_places(feature: str, parts: Iterable[object], device: torch.device) -> None:
    for part in parts:
        if isinstance(part, Tensor) and part.device.type != "cpu" and part.device != device:
            raise InputError(
                f"Feature {feature!r}: ids are on {part.device}, the tables on {_place(device)}; move "
                "the batch."
            )


def _place(device: torch.device) -> str:
    return "the CPU" if device.type == "cpu" else str(device)


def _offsets(what: str, given: object) -> Tensor:
    offsets = given if isinstance(given, Tensor) else id_tensor(what, given, "offsets")
    if (
        offsets.dim() != 1
        or offsets.dtype not in ID_DTYPES
        or offsets.layout is not torch.strided
        or len(offsets) == 0
    ):
        raise InputError(
            f"{what}: offsets must be an int64 tensor (B + 1,), got {describe(offsets)}."
        )
    return offsets.to(torch.int64).contiguous()


def _weights(
    feature: str, given: object, count: int, compute_dtype: torch.dtype, combiner: str | None
) -> Tensor:
    if combiner not in _WEIGHED:
        raise InputError(
            f"Feature {feature!r}: weights need a table whose combiner is sum, mean or sqrtn, "
            f"not {combiner}; give the ids without weights."
        )
    weights = real_tensor(f"Feature {feature!r}", "weights", given)
    if weights.shape != (count,):
        raise InputError(
            f"Feature {feature!r}: weights must be {count} numbers, one an id, "
            f"got {describe(weights)}."
        )
    return weights.to(compute_dtype).contiguous()


class _Keyed(Protocol):
    """A KeyedJaggedTensor, or one feature of it."""

    def keys(self) -> Collection[str]: ...
    def values(self) -> Tensor: ...
    def offsets(self) -> Tensor: ...


def _has_methods(value: object, *names: str) -> TypeGuard[_Keyed]:
    return all(callable(getattr(value, name, None)) for name in names)


def split_keyed(value: object) -> dict[str, Jagged] | None:
    """A KeyedJaggedTensor-like object (keys(), values(), offsets(), feature after feature) as a dict.

    None where `value` is no such thing.

    Raises:
        InputError: keys, offsets and values that do not go together.
    """
    if not _has_methods(value, "keys", "values", "offsets"):
        return None
    values = value.values()
    if not isinstance(values, Tensor) and not is_array(values):
        return None
    keys, offsets = list(value.keys()), value.offsets()
    weights = getattr(value, "weights_or_none", lambda: None)()
    if len(set(keys)) != len(keys):
        raise InputError(f"A keyed input has a key twice: {', '.join(map(repr, keys))}.")
    if getattr(value, "variable_stride_per_key", lambda: False)():
        strides: list[int] = operator.methodcaller("stride_per_key")(value)
        sizes = zip(keys, strides, strict=True)
        raise InputError(
            "A keyed input has batches of different sizes: "
            f"{', '.join(f'{size} of {key!r}' for key, size in sizes)}. All keys must have as many "
            "samples; look those of other sizes up in a collection of their own."
        )
    offsets = _offsets("A keyed input", offsets)
    if offsets.is_meta:
        raise InputError(
            "A keyed input has its offsets on meta, without data, so it cannot be split by key. Make it "
            "where the tables are."
        )
    if not keys or (len(offsets) - 1) % len(keys):
        raise InputError(
            f"A keyed input has {len(keys)} keys and {len(offsets) - 1} lengths; every key must have "
            "as many, one a sample."
        )
    batch = (len(offsets) - 1) // len(keys)
    edges = offsets[::batch].tolist() if batch else [int(offsets[0])] * (len(keys) + 1)
    if edges[0] != 0 or edges[-1] != len(values):
        raise InputError(
            f"Feature {keys[-1 if edges[0] == 0 else 0]!r}: the offsets of a keyed input must run "
            f"from 0 to {len(values)}, the number of values; they run from {edges[0]} to {edges[-1]}."
        )
    parts = {}
    for i, (key, begin, end) in enumerate(zip(keys, edges[:-1], edges[1:], strict=True)):
        if not 0 <= begin <= end <= len(values):
            raise InputError(
                f"Feature {key!r}: offsets run from {begin} to {end}, with {len(values)} values."
            )
        own = offsets[i * batch : (i + 1) * batch + 1]
        own_weights = None if weights is None else weights[begin:end]
        parts[key] = Jagged(values[begin:end], own - begin, weights=own_weights)
    return parts


def core_input(
    table: int, combiner: int, bag: Bags
) -> tuple[int, int, int, int, int, int, int, int, int]:
    """One feature's input as the core takes it."""
    ids, offsets, fixed, count, weights, _, _, _ = bag
    return (
        table,
        combiner,
        ids.data_ptr(),
        4 if ids.dtype is torch.int32 else 8,
        ids.shape[0],
        0 if offsets is None else offsets.data_ptr(),
        fixed,
        count,
        0 if weights is None else weights.data_ptr(),
    )


def input_fault(
    kind: int, table: str, feature: str, bag: Bags, bag_at: int, value: int, bound: int
) -> HotbedError:
    """The error for an input that the core, or a device, found bad; arguments are InputFault's."""
    sample = bag_at if bag.bags == bag.batch else bag_at * bag.batch // bag.bags
    where = f"Table {table!r}, feature {feature!r}"
    if kind == 1:
        return IdError(
            f"{where}, sample {sample}: id {value} is outside [0, {bound}). "
            "Pass rows=None for open-ended ids."
        )
    if kind == 2:
        return InputError(f"{where}: offsets must start at 0, they start at {value}.")
    if kind == 3:
        return InputError(
            f"{where}, sample {sample}: offsets must rise, but {value} follows {bound} "
            f"(a length of {value - bound})."
        )
    return InputError(
        f"{where}: offsets end at {value} (the sum of the lengths), but there are {bound} values."
    )
