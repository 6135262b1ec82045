"""`Jagged`: a batch of bags of different lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data._utils.collate import default_collate_fn_map

from hotbed.errors import InputError

__all__ = ["ID_DTYPES", "Jagged", "describe"]

ID_DTYPES = (torch.int64, torch.int32)


class Jagged:
    """A batch of bags of different lengths: bag i is ``values[offsets[i]:offsets[i + 1]]``.

    Args:
        values: (N,) ids, int64 or int32. As the output of an unpooled table: (N, dim) vectors.
        offsets: (B + 1,) int64 or int32, rising from 0 to N. Give offsets or lengths, not both.
        lengths: (B,) ids in each bag; they sum to N.
        weights: (N,) one weight an id, or None.

    The sums are checked when the batch is looked up, where the feature's name is known. It
    collates in a DataLoader (the bags of all samples, one after the other), pickles, and moves by
    ``to`` and ``pin_memory``.

    Raises:
        InputError: kinds, ranks, dtypes or numbers that do not go together.
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
            raise InputError(f"Jagged: values must be a tensor (N,), got {describe(values)}.")
        name, boundary = ("offsets", offsets) if lengths is None else ("lengths", lengths)
        if (
            not isinstance(boundary, Tensor)
            or boundary.dim() != 1
            or boundary.dtype not in ID_DTYPES
        ):
            raise InputError(
                f"Jagged: {name} must be a 1-D int64 tensor, got {describe(boundary)}."
            )
        if lengths is not None:
            boundary = boundary.new_zeros(len(lengths) + 1, dtype=torch.int64)
            torch.cumsum(lengths, 0, out=boundary[1:])
        elif len(boundary) == 0:
            raise InputError("Jagged: offsets must have one entry more than there are bags, got 0.")
        if weights is not None and (
            not isinstance(weights, Tensor) or weights.shape != values.shape[:1]
        ):
            raise InputError(
                f"Jagged: one weight an id is needed, a tensor of shape ({len(values)},); got "
                f"{describe(weights)}."
            )
        self.values = values
        self.offsets = boundary.to(torch.int64)
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
        weight_lists = [list(bag) for bag in weights]
        if [len(bag) for bag in weight_lists] != [len(bag) for bag in lists]:
            raise InputError("Jagged.from_lists: every bag needs as many weights as ids.")
        flat = torch.tensor([w for bag in weight_lists for w in bag], dtype=torch.float32)
        return cls(values, lengths=lengths, weights=flat)

    @classmethod
    def concatenate(cls, parts: Sequence[Jagged]) -> Jagged:
        """The bags of all parts, one part after the other; what a DataLoader collates with."""
        if not parts:
            raise InputError("Jagged.concatenate: there is nothing to concatenate.")
        weights = [part.weights for part in parts if part.weights is not None]
        if weights and len(weights) != len(parts):
            raise InputError("Jagged.concatenate: some parts have weights and some have none.")
        return cls(
            torch.cat([part.values for part in parts]),
            lengths=torch.cat([part.lengths for part in parts]),
            weights=torch.cat(weights) if weights else None,
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

    def __iter__(self) -> Iterator[Tensor]:
        return (self[bag] for bag in range(len(self)))

    def to(self, *args: Any, **kwargs: Any) -> Jagged:
        """The same bags on another device, as ``Tensor.to``.

        Raises:
            InputError: a dtype; the values and offsets are what they are.
        """
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is not None:
            raise InputError(f"Jagged.to moves to a device; it cannot become {dtype}.")
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Jagged:
        """The same bags in page-locked memory."""
        return self._map(lambda t: t.pin_memory())

    def _map(self, move: Callable[[Tensor], Tensor]) -> Jagged:
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


default_collate_fn_map[Jagged] = _collate_jagged


def describe(value: Any) -> str:
    """What a value is, for an error message."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {value!r}"[:80]
