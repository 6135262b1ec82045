"""`Jagged`: a batch of bags of different lengths."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, SupportsInt, TypeGuard, overload

import torch
from torch import Tensor
from torch.utils.data._utils.collate import default_collate_fn_map

from hotbed.arrays import (
    ID_DTYPES,
    describe,
    id_tensor,
    integer,
    is_array,
    is_dense,
    iterated,
    real_tensor,
)
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

    It is a sequence of B bags: ``len`` is B, iteration gives each bag's values, and so does ``j[i]``.
    A slice, a list, an array or a tensor of positions, or a mask (B,) of bools selects bags: a Jagged,
    with their weights. Gradients of values and weights go through all of these.

    Raises:
        InputError: kinds, ranks, dtypes or numbers that do not go together.
    """

    __slots__ = ("values", "offsets", "weights")

    values: Tensor
    offsets: Tensor
    weights: Tensor | None

    def __init__(
        self,
        values: object,
        offsets: object = None,
        *,
        lengths: object = None,
        weights: object = None,
    ) -> None:
        if (offsets is None) == (lengths is None):
            raise InputError("Jagged takes offsets=(B + 1,) or lengths=(B,): exactly one of them.")
        if not isinstance(values, Tensor):
            values = id_tensor("Jagged", values)
        if not is_dense(values) or values.dim() < 1:
            raise InputError(f"Jagged: values must be a dense tensor (N,), got {describe(values)}.")
        name, boundary = ("offsets", offsets) if lengths is None else ("lengths", lengths)
        if not isinstance(boundary, Tensor):
            boundary = id_tensor("Jagged", boundary, name)
        if not is_dense(boundary) or boundary.dim() != 1 or boundary.dtype not in ID_DTYPES:
            raise InputError(
                f"Jagged: {name} must be a 1-D int64 tensor (dense), got {describe(boundary)}."
            )
        if lengths is not None:
            counts = boundary
            boundary = counts.new_zeros(len(counts) + 1, dtype=torch.int64)
            torch.cumsum(counts, 0, out=boundary[1:])
        elif len(boundary) == 0:
            raise InputError("Jagged: offsets must have one entry more than there are bags, got 0.")
        weighed = weights if isinstance(weights, Tensor) else None
        if weights is not None and weighed is None:
            weighed = real_tensor("Jagged", "weights", weights)
        if weighed is not None and not (is_dense(weighed) and weighed.shape == values.shape[:1]):
            raise InputError(
                f"Jagged: one weight an id is needed, a dense tensor of shape ({len(values)},); got "
                f"{describe(weighed)}."
            )
        self.values = values
        self.offsets = boundary.to(torch.int64)
        self.weights = weighed

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
        """Join the bags of all parts, one part after the other; what a DataLoader collates with."""
        joined = list(iterated(parts) or ())
        if not joined or not all(isinstance(part, Jagged) for part in joined):
            raise InputError(
                f"Jagged.concatenate takes a list of one Jagged or more, got {describe(parts)}."
            )
        weights = [part.weights for part in joined if part.weights is not None]
        if weights and len(weights) != len(joined):
            raise InputError("Jagged.concatenate: some parts have weights and some have none.")
        return cls(
            torch.cat([part.values for part in joined]),
            lengths=torch.cat([part.lengths for part in joined]),
            weights=torch.cat(weights) if weights else None,
        )

    @property
    def lengths(self) -> Tensor:
        """(B,) values in each bag."""
        return self.offsets[1:] - self.offsets[:-1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, bags: int) -> Tensor: ...
    @overload
    def __getitem__(self, bags: slice | Sequence[int] | Tensor) -> Jagged: ...
    def __getitem__(self, bags: object) -> Tensor | Jagged:
        """The values of one bag, for an int: (n,), or (n, dim) of vectors. Or a Jagged of the bags that a
        slice, positions (negative ones count from the end) or a mask of bools select, in that order.

        Raises:
            IndexError: a position outside [-B, B).
            InputError: no such index, or offsets that do not fit the values.
        """
        if isinstance(bags, slice):
            return self._slice(bags)
        if _is_position(bags):
            bag, count = int(bags), len(self)
            if not -count <= bag < count:
                raise IndexError(f"Jagged: bag {bag} of {count}")
            begin, end = self._edges(bag % count, bag % count + 1)
            return self.values[begin:end]
        return self._select(self._positions(bags))

    def __iter__(self) -> Iterator[Tensor]:
        edges = self._edges(0, len(self))
        return (self.values[begin:end] for begin, end in zip(edges[:-1], edges[1:], strict=True))

    def to_lists(self) -> list[list[float]]:
        """Return the values of each bag; ``Jagged(j.weights, j.offsets).to_lists()`` has the weights.

        Raises:
            InputError: values without data, or offsets that do not fit them.
        """
        if self.values.is_meta:
            raise InputError("Jagged.to_lists: its values are on meta and have no data.")
        return [bag.tolist() for bag in self]

    def to_padded(self, padding: float, length: int | None = None) -> Tensor:
        """Return the values as (B, length), with `padding` behind those of shorter bags.

        Vectors become (B, length, dim). ``Jagged(j.weights, j.offsets).to_padded(0.0)`` pads weights.

        Args:
            padding: such as the table's ``padding_idx``.
            length: longer bags lose what is behind; None: that of the longest bag.

        Raises:
            InputError: a `padding` that values of their dtype cannot be, a negative length.
        """
        values = self.values
        edges = torch.tensor(self._edges(0, len(self)), device="cpu")
        lengths = edges[1:] - edges[:-1]
        longest = int(lengths.max()) if len(lengths) else 0
        columns = longest if length is None else integer(length)
        if columns is None or columns < 0:
            raise InputError(
                f"Jagged.to_padded: length must be an int of at least 0, got {describe(length)}."
            )
        try:
            if not isinstance(padding, numbers.Integral) and not values.is_floating_point():
                raise TypeError
            filled = values.new_full((), padding)
        except (OverflowError, RuntimeError, TypeError):
            dtype = str(values.dtype).removeprefix("torch.")
            raise InputError(
                f"Jagged.to_padded: padding must be one {dtype} number, got {describe(padding)}."
            ) from None
        shape = len(self), columns, *values.shape[1:]
        try:
            padded = filled.expand(shape).clone()
        except (MemoryError, RuntimeError, TypeError):  # the latter of more than 64 bits
            size = math.prod(shape) * values.itemsize
            raise InputError(
                f"Jagged.to_padded: there is no memory for {shape}, {size:,} bytes. length= cuts longer bags."
            ) from None
        rows, places = torch.nonzero(
            torch.arange(min(columns, longest), device="cpu") < lengths[:, None], as_tuple=True
        )
        at = (edges[rows] + places).to(values.device)
        return padded.index_put((rows.to(values.device), places.to(values.device)), values[at])

    def _edges(self, first: int, last: int) -> list[int]:
        """Offsets of the bags from `first` up to `last`, and where that one begins.

        Raises:
            InputError: they fall, or do not go from 0 to the number of values.
        """
        if self.offsets.is_meta:
            raise InputError(
                "Jagged: its offsets are on meta and have no data, so no bag can be read."
            )
        edges: list[int] = self.offsets[first : last + 1].tolist()
        ends = (edges[0] if first == 0 else 0, edges[-1] if last == len(self) else len(self.values))
        inside = edges[0] >= 0 and edges[-1] <= len(self.values)
        if ends != (0, len(self.values)) or not inside or edges != sorted(edges):
            raise InputError(
                f"Jagged: offsets must rise from 0 to {len(self.values)}, the number of values; those of "
                f"the bags {first} to {last - 1} do not."
            )
        return edges

    def _slice(self, bags: slice) -> Jagged:
        try:
            first, last, step = bags.indices(len(self))
        except (TypeError, ValueError, RuntimeError):  # the latter of tensors without data
            raise InputError(
                f"Jagged: a slice must be of ints and take steps other than 0, got {bags!r}."
            ) from None
        if step != 1:
            return self._select(
                torch.tensor([*range(first, last, step)], dtype=torch.int64, device="cpu")
            )
        last = max(first, last)
        edges = self._edges(first, last)
        own = slice(edges[0], edges[-1])
        weights = None if self.weights is None else self.weights[own]
        return Jagged(self.values[own], self.offsets[first : last + 1] - edges[0], weights=weights)

    def _positions(self, given: object) -> Tensor:
        """(n,) int64 positions of bags, on the host, of positions or a mask."""
        count = len(self)
        several = isinstance(given, Tensor) or is_array(given)
        if not several or isinstance(given, (bool, bytes, str, tuple)):
            raise InputError(
                "Jagged: bags are selected by an int, a slice, a list or tensor of positions, or a mask "
                f"({count},) of bools; got {describe(given)}."
            )
        chosen = real_tensor("Jagged", "positions of bags", given).cpu()
        if chosen.dtype is torch.bool:
            if chosen.shape != (count,):
                raise InputError(
                    f"Jagged: a mask of {count} bags must have the shape ({count},), got "
                    f"{tuple(chosen.shape)}."
                )
            return chosen.nonzero().flatten()
        if not chosen.numel():
            chosen = chosen.long()  # NumPy takes an empty list for floats
        chosen = id_tensor("Jagged", chosen, "positions of bags").long()
        if chosen.dim() != 1:
            raise InputError(
                f"Jagged: positions of bags must be 1-D, got shape {tuple(chosen.shape)}."
            )
        wrong = (chosen < -count) | (chosen >= count)
        if bool(wrong.any()):
            raise IndexError(f"Jagged: bag {int(chosen[wrong][0])} of {count}")
        return torch.where(chosen < 0, chosen + count, chosen)

    def _select(self, bags: Tensor) -> Jagged:
        """Return the bags at (n,) positions, which lie on the host."""
        edges = torch.tensor(self._edges(0, len(self)), device="cpu")
        begins, lengths = edges[bags], edges[bags + 1] - edges[bags]
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        at = torch.arange(int(offsets[-1]), device="cpu") + (
            begins - offsets[:-1]
        ).repeat_interleave(lengths)
        return Jagged(
            self.values[at.to(self.values.device)],
            offsets.to(self.offsets.device),
            weights=None if self.weights is None else self.weights[at.to(self.weights.device)],
        )

    def to(self, *args: Any, **kwargs: Any) -> Jagged:
        """Return the same bags on another device, as ``Tensor.to``.

        Raises:
            InputError: a dtype; the values and offsets are what they are.
        """
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is not None:
            raise InputError(f"Jagged.to moves to a device; it cannot become {dtype}.")
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Jagged:
        """Return the same bags in page-locked memory."""
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


def _collate_jagged(batch: Sequence[Jagged], *, collate_fn_map: object = None) -> Jagged:
    return Jagged.concatenate(batch)


default_collate_fn_map[Jagged] = _collate_jagged


def _is_position(given: object) -> TypeGuard[SupportsInt]:
    """Return True for one integer: Python's, NumPy's, or a tensor of it."""
    if isinstance(given, Tensor):
        return given.dim() == 0 and given.dtype in ID_DTYPES and not given.is_meta
    return isinstance(given, numbers.Integral) and not isinstance(given, bool)


def _flattened(
    what: str, bags: Iterable[Iterable[float] | Tensor]
) -> tuple[list[float], list[int]]:
    """The elements of all bags, and how many each has."""
    try:
        lists = [bag.tolist() if hasattr(bag, "tolist") else list(bag) for bag in bags]
        return [element for bag in lists for element in bag], [len(bag) for bag in lists]
    except (TypeError, RuntimeError):  # the latter of tensors without data
        raise InputError(
            f"Jagged.from_lists takes a list of lists of {what}, got {describe(bags)}."
        ) from None
