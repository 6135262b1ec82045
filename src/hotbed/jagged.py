"""`Jagged`: a batch of bags of different lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data._utils.collate import default_collate_fn_map

from hotbed.arrays import ID_DTYPES, describe, id_tensor, real_tensor
from hotbed.errors import InputError

__all__ = ["Jagged"]


class Jagged:
    """A batch of bags of different lengths: bag i is ``values[offsets[i]:offsets[i + 1]]``.

    Args:
        values: (N,) ids, int64 or int32. As the output of an unpooled table: (N, dim) vectors.
        offsets: (B + 1,) int64 or int32, rising from 0 to N. Give offsets or lengths, not both.
        lengths: (B,) ids in each bag; they sum to N.
        weights: (N,) one weight an id, or None.

    Each may be a NumPy array or a list instead. The sums are checked when the batch is looked up,
    where the feature's name is known. It collates in a DataLoader (the bags of all samples, one after
    the other), pickles, and moves by ``to`` and ``pin_memory``.

    Raises:
        InputError: kinds, ranks, dtypes or numbers that do not go together.
    """

    __slots__ = ("values", "offsets", "weights")

    values: Tensor
    offsets: Tensor
    weights: Tensor | None

    def __init__(
        self,
        values: Any,
        offsets: Any = None,
        *,
        lengths: Any = None,
        weights: Any = None,
    ) -> None:
        if (offsets is None) == (lengths is None):
            raise InputError("Jagged takes offsets=(B + 1,) or lengths=(B,): exactly one of them.")
        if not isinstance(values, Tensor):
            values = id_tensor("Jagged", values)
        if values.dim() < 1:
            raise InputError(f"Jagged: values must be a tensor (N,), got {describe(values)}.")
        name, boundary = ("offsets", offsets) if lengths is None else ("lengths", lengths)
        if not isinstance(boundary, Tensor):
            boundary = id_tensor("Jagged", boundary, name)
        if boundary.dim() != 1 or boundary.dtype not in ID_DTYPES:
            raise InputError(
                f"Jagged: {name} must be a 1-D int64 tensor, got {describe(boundary)}."
            )
        if lengths is not None:
            counts = boundary
            boundary = counts.new_zeros(len(counts) + 1, dtype=torch.int64)
            torch.cumsum(counts, 0, out=boundary[1:])
        elif len(boundary) == 0:
            raise InputError("Jagged: offsets must have one entry more than there are bags, got 0.")
        if weights is not None and not isinstance(weights, Tensor):
            weights = real_tensor("Jagged", "weights", weights)
        if weights is not None and weights.shape != values.shape[:1]:
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
        """``Jagged.from_lists([[1, 2, 2], [], [7]])``; a bag may be a tensor or an array, too."""
        values, lengths = _flattened("ids", bags)
        ids = id_tensor("Jagged.from_lists", values)
        if weights is None:
            return cls(ids, lengths=lengths)
        flat, counts = _flattened("weights", weights)
        if counts != lengths:
            raise InputError("Jagged.from_lists: every bag needs as many weights as ids.")
        given = real_tensor("Jagged.from_lists", "weights", flat)
        return cls(ids, lengths=lengths, weights=given.to(torch.float32))

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


def _flattened(what: str, bags: Iterable[Any]) -> tuple[list[Any], list[int]]:
    """The elements of all bags, and how many each has."""
    try:
        lists = [bag.tolist() if hasattr(bag, "tolist") else list(bag) for bag in bags]
        return [element for bag in lists for element in bag], [len(bag) for bag in lists]
    except TypeError:
        raise InputError(
            f"Jagged.from_lists takes a list of lists of {what}, got {describe(bags)}."
        ) from None
