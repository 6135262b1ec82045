"""Every kind of input becomes `Bags`: flat ids, offsets or a fixed length, optional weights.

Kind, rank and dtype are checked here; the values of ids and offsets are checked by the core, once,
when the batch is resolved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotbed.errors import InputError

__all__ = ["Jagged", "Bags", "read_bags", "split_keyed"]

_ID_DTYPES = (torch.int64, torch.int32)
_KINDS = "a LongTensor (B,) or (B, K), a hotbed.Jagged, a jagged nested tensor, a sparse CSR or COO tensor"


class Jagged:
    """A batch of bags of different lengths: bag i is ``values[offsets[i]:offsets[i + 1]]``.

    Args:
        values: (N,) ids, int64 or int32. As the output of an unpooled table: (N, dim) vectors.
        offsets: (B + 1,) int64, rising from 0 to N. Give offsets or lengths, not both.
        lengths: (B,) ids in each bag; they sum to N.
        weights: (N,) one weight an id, or None.

    The sums are checked when the batch is looked up, where the feature's name is known.
    """

    __slots__ = ("values", "offsets", "weights")

    values: Tensor
    offsets: Tensor
    weights: Tensor | None

    def __init__(
        self,
        values: Tensor,
        offsets: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        if (offsets is None) == (lengths is None):
            raise InputError("Jagged takes offsets=(B + 1,) or lengths=(B,): exactly one of them.")
        if not isinstance(values, Tensor) or values.dim() < 1:
            raise InputError(f"Jagged: values must be a tensor (N,), got {_describe(values)}.")
        boundary: Any = offsets if lengths is None else lengths
        if (
            not isinstance(boundary, Tensor)
            or boundary.dim() != 1
            or boundary.dtype not in _ID_DTYPES
        ):
            name = "offsets" if lengths is None else "lengths"
            raise InputError(
                f"Jagged: {name} must be a 1-D int64 tensor, got {_describe(boundary)}."
            )
        if lengths is not None:
            offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
            torch.cumsum(lengths, 0, out=offsets[1:])
        elif len(boundary) == 0:
            raise InputError("Jagged: offsets must have one entry more than there are bags, got 0.")
        assert offsets is not None
        if weights is not None and weights.shape != values.shape[:1]:
            raise InputError(
                f"Jagged: {tuple(weights.shape)} weights for {tuple(values.shape)} values; "
                "one weight an id is needed."
            )
        self.values = values
        self.offsets = offsets.to(torch.int64)
        self.weights = weights

    @classmethod
    def from_lists(
        cls, bags: Iterable[Sequence[int]], weights: Iterable[Sequence[float]] | None = None
    ) -> Jagged:
        """``Jagged.from_lists([[1, 2, 2], [], [7]])``"""
        lists = [list(bag) for bag in bags]
        values = torch.tensor([i for bag in lists for i in bag], dtype=torch.int64)
        lengths = torch.tensor([len(bag) for bag in lists], dtype=torch.int64)
        if weights is None:
            return cls(values, lengths=lengths)
        flat = torch.tensor([w for bag in weights for w in bag], dtype=torch.float32)
        return cls(values, lengths=lengths, weights=flat)

    @classmethod
    def concatenate(cls, parts: Sequence[Jagged]) -> Jagged:
        """The bags of all parts, one part after the other; what a DataLoader collates with."""
        if not parts:
            raise InputError("Jagged.concatenate: there is nothing to concatenate.")
        weighted = [part.weights is not None for part in parts]
        if any(weighted) and not all(weighted):
            raise InputError("Jagged.concatenate: some parts have weights and some have none.")
        return cls(
            torch.cat([part.values for part in parts]),
            lengths=torch.cat([part.lengths for part in parts]),
            weights=torch.cat([part.weights for part in parts if part.weights is not None])
            if all(weighted)
            else None,
        )

    @property
    def lengths(self) -> Tensor:
        """(B,) values in each bag."""
        return self.offsets[1:] - self.offsets[:-1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, bag: int) -> Tensor:
        """The values of one bag."""
        if not -len(self) <= bag < len(self):
            raise IndexError(f"Jagged: bag {bag} of {len(self)}")
        begin, end = self.offsets[bag % len(self)], self.offsets[bag % len(self) + 1]
        return self.values[int(begin) : int(end)]

    def to(self, *args: Any, **kwargs: Any) -> Jagged:
        """The same bags on another device, as ``Tensor.to``; dtypes stay."""
        return self._map(lambda t: t.to(*args, **kwargs))

    def pin_memory(self) -> Jagged:
        return self._map(lambda t: t.pin_memory())

    def _map(self, move: Any) -> Jagged:
        weights = None if self.weights is None else move(self.weights)
        return Jagged(move(self.values), move(self.offsets), weights=weights)

    def __getstate__(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.values, self.offsets, self.weights

    def __setstate__(self, state: tuple[Tensor, Tensor, Tensor | None]) -> None:
        self.values, self.offsets, self.weights = state

    def __repr__(self) -> str:
        weighted = ", weighted" if self.weights is not None else ""
        return f"Jagged({len(self)} bags, values {tuple(self.values.shape)}{weighted})"


def _collate_jagged(batch: Sequence[Jagged], *, collate_fn_map: Any = None) -> Jagged:
    return Jagged.concatenate(batch)


def _register_collate() -> None:
    from torch.utils.data._utils.collate import default_collate_fn_map

    default_collate_fn_map[Jagged] = _collate_jagged


_register_collate()


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
    """Leading shape of the pooled output where it is not (bags,)."""
    jagged: bool
    """Unpooled, the output is a Jagged with these offsets."""


def read_bags(feature: str, value: Any, compute_dtype: torch.dtype, combiner: str | None) -> Bags:
    """Reads one feature's input of any kind.

    Raises:
        InputError: a kind, rank or dtype that cannot be ids; the message names the feature.
    """
    if isinstance(value, Tensor):
        pooled = combiner != "none"
        if value.layout is torch.strided and not value.is_nested:
            return _read_dense(feature, value, pooled)
        if value.layout is torch.jagged:
            return _read_nested(feature, value)
        if value.layout in (torch.sparse_csr, torch.sparse_coo):
            return _read_sparse(feature, value, compute_dtype, combiner)
        raise InputError(
            f"Feature {feature!r}: a tensor of layout {value.layout} is not understood; "
            f"give {_KINDS}."
        )
    if isinstance(value, Jagged):
        return _read_jagged(
            feature, value.values, value.offsets, value.weights, compute_dtype, combiner
        )
    if callable(getattr(value, "values", None)) and callable(getattr(value, "offsets", None)):
        weights = getattr(value, "weights_or_none", lambda: None)()
        return _read_jagged(
            feature, value.values(), value.offsets(), weights, compute_dtype, combiner
        )
    raise InputError(f"Feature {feature!r}: got {_describe(value)}; give {_KINDS}.")


def _read_dense(feature: str, value: Tensor, pooled: bool) -> Bags:
    _check_ids(feature, value)
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
    fixed = shape[-1]
    bags = 1
    for extent in shape[:-1]:
        bags *= extent
    lead = (shape[:-1] if rank > 2 else None) if pooled else shape
    return Bags(ids, None, fixed, bags, None, shape[0], lead, False)


def _read_jagged(
    feature: str,
    values: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    compute_dtype: torch.dtype,
    combiner: str | None,
) -> Bags:
    _check_ids(feature, values)
    if values.dim() != 1:
        raise InputError(
            f"Feature {feature!r}: the values of a Jagged must be ids (N,), "
            f"got shape {tuple(values.shape)}."
        )
    if weights is not None:
        weights = _check_weights(feature, weights, len(values), compute_dtype, combiner)
    bags = len(offsets) - 1
    offsets = offsets.to(torch.int64).contiguous()
    return Bags(values.contiguous(), offsets, 0, bags, weights, bags, None, True)


def _read_nested(feature: str, value: Tensor) -> Bags:
    if value.dim() != 2:
        raise InputError(
            f"Feature {feature!r}: a nested tensor of ids must have 2 dimensions, got {value.dim()}."
        )
    if value.lengths() is not None:  # type: ignore[operator]
        value = value.contiguous()
    return _read_jagged(feature, value.values(), value.offsets(), None, torch.float32, None)  # type: ignore[operator]


def _read_sparse(
    feature: str, value: Tensor, compute_dtype: torch.dtype, combiner: str | None
) -> Bags:
    if value.dim() != 2:
        raise InputError(
            f"Feature {feature!r}: a sparse tensor must be (B, ids), got shape {tuple(value.shape)}."
        )
    if value.layout is torch.sparse_csr:
        offsets, ids, weights = value.crow_indices(), value.col_indices(), value.values()
    else:
        samples, ids = value._indices().unbind(0)
        weights = value._values()
        if len(samples) > 1 and bool((samples[1:] < samples[:-1]).any()):
            order = torch.argsort(samples, stable=True)
            samples, ids, weights = samples[order], ids[order], weights[order]
        counts = torch.bincount(samples, minlength=value.shape[0])
        offsets = torch.zeros(value.shape[0] + 1, dtype=torch.int64)
        torch.cumsum(counts, 0, out=offsets[1:])
    return _read_jagged(feature, ids, offsets, weights, compute_dtype, combiner)


def _check_ids(feature: str, ids: Tensor) -> None:
    if ids.dtype not in _ID_DTYPES:
        raise InputError(
            f"Feature {feature!r}: ids must be int64 or int32, got "
            f"{str(ids.dtype).removeprefix('torch.')}; convert them with .long()."
        )
    if ids.device.type != "cpu":
        raise InputError(
            f"Feature {feature!r}: ids are on {ids.device}, the tables on the CPU; move the batch."
        )


def _check_weights(
    feature: str, weights: Tensor, count: int, compute_dtype: torch.dtype, combiner: str | None
) -> Tensor:
    if combiner not in ("sum", "mean", "sqrtn"):
        raise InputError(
            f"Feature {feature!r}: weights need a table whose combiner is sum, mean or sqrtn, "
            f"not {combiner}."
        )
    if weights.dim() != 1 or len(weights) != count:
        raise InputError(
            f"Feature {feature!r}: {tuple(weights.shape)} weights for {count} ids; one an id is needed."
        )
    return weights.to(compute_dtype).contiguous()


def split_keyed(value: Any) -> dict[str, Jagged] | None:
    """A KeyedJaggedTensor-like object (keys(), values(), offsets(), feature after feature) as a dict.

    None where `value` is no such thing.
    """
    if not all(callable(getattr(value, name, None)) for name in ("keys", "values", "offsets")):
        return None
    values = value.values()
    if not isinstance(values, Tensor):
        return None
    keys, offsets = list(value.keys()), value.offsets()
    weights = getattr(value, "weights_or_none", lambda: None)()
    if not keys or (len(offsets) - 1) % len(keys):
        raise InputError(
            f"A keyed jagged input with {len(keys)} keys has {len(offsets) - 1} lengths, "
            "which is no multiple."
        )
    batch = (len(offsets) - 1) // len(keys)
    parts = {}
    for i, key in enumerate(keys):
        own = offsets[i * batch : (i + 1) * batch + 1]
        begin, end = int(own[0]), int(own[-1])
        if not 0 <= begin <= end <= len(values):
            raise InputError(
                f"Feature {key!r}: offsets run from {begin} to {end}, with {len(values)} values."
            )
        own_weights = None if weights is None else weights[begin:end]
        parts[key] = Jagged(values[begin:end], own - begin, weights=own_weights)
    return parts


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    if dataclasses.is_dataclass(value):
        return type(value).__name__
    return f"{type(value).__name__} {value!r}"[:80]
