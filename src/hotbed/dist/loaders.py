"""Loaders whose ranks end together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, Literal, TypeVar

import torch
import torch.distributed as torch_dist

from hotbed.dist.wire import group_of
from hotbed.errors import InputError
from hotbed.jagged import Jagged

__all__ = ["Even", "Slice", "Slices", "even", "slices"]

T = TypeVar("T")

_SECONDS = 300.0
"""That a rank may keep the others waiting, as loaders of files open slowly."""


class Slice(dict[str, Any]):
    """This rank's part of a batch.

    Attributes:
        samples: of the whole batch.
    """

    def __init__(self, values: Mapping[str, Any], samples: int) -> None:
        super().__init__(values)
        self.samples = samples


class Slices:
    """What `slices` returns."""

    def __init__(self, loader: Iterable[Mapping[str, Any]], rank: int, size: int) -> None:
        self.loader, self._rank, self._size = loader, rank, size
        if hasattr(loader, "seek"):
            self.seek = loader.seek

    def __iter__(self) -> Iterator[Slice]:
        for batch in self.loader:
            counts = {len(value) for value in batch.values()}
            if len(counts) != 1:
                raise InputError(
                    f"slices: the values of a batch are of {sorted(counts)} samples; all must be of as many."
                )
            (count,) = counts
            begin, end = (count * r // self._size for r in (self._rank, self._rank + 1))
            yield Slice({name: _cut(v, begin, end) for name, v in batch.items()}, count)


def slices(loader: Iterable[Mapping[str, Any]]) -> Slices:
    """Wraps a loader of whole batches, the same on all ranks, of which each rank gets its samples: so any
    number of ranks trains on the same batches.

    Args:
        loader: of batches feature → tensor or `Jagged`, of as many samples each. A batch may have fewer
            samples than there are ranks; `hotbed.train.fit` weighs those of all alike.
    """
    return Slices(loader, torch_dist.get_rank(), torch_dist.get_world_size())


def _cut(value: Any, begin: int, end: int) -> Any:
    if not isinstance(value, Jagged):
        return value[begin:end]
    first, last = int(value.offsets[begin]), int(value.offsets[end])
    weights = None if value.weights is None else value.weights[first:last]
    offsets = value.offsets[begin : end + 1] - first
    return Jagged(value.values[first:last], offsets, weights=weights)


def even(loader: Iterable[T], *, end: Literal["drop", "pad"] = "drop") -> Even[T]:
    """Wraps a loader so that all ranks get as many batches: the simple way to end together.

    Args:
        loader: of this rank.
        end: what happens when the first rank has no batch any more. ``"drop"``: all end, and what the others
            have left is dropped. ``"pad"``: it gets its last batch again until all have ended, which then
            counts several times.

    Wrap a loader once, and iterate what comes of it in each epoch: it has a process group of its own.
    Called by all ranks, each with its loader; so is each iteration and each batch. With ``"pad"`` a rank
    that has no batch at all is an InputError on all.
    """
    if end not in ("drop", "pad"):
        raise InputError(f'even(end={end!r}): give "drop" or "pad".')
    return Even(loader, end)


class Even(Generic[T]):
    """What `even` returns."""

    def __init__(self, loader: Iterable[T], end: str) -> None:
        self.loader, self.end = loader, end
        self._group: Any = None
        if torch_dist.is_available() and torch_dist.is_initialized():
            self._group = group_of(self, "hotbed.dist.even", _SECONDS, backend="gloo")

    def __iter__(self) -> Iterator[T]:
        last, missing = None, True
        for batch in self.loader:
            everywhere, _ = self._asked(True)
            if not everywhere and self.end == "drop":
                return
            last, missing = batch, False
            yield batch
        while True:
            _, somewhere = self._asked(False, missing)
            if not somewhere or self.end == "drop":
                return
            assert last is not None
            yield last

    def _asked(self, own: bool, missing: bool = False) -> tuple[bool, bool]:
        """Whether all ranks have a batch, and whether one has."""
        if self._group is None:
            return own, own
        told = torch.tensor([int(own), int(not own), int(missing)])
        torch_dist.all_reduce(told, group=self._group)
        has, has_not, nothing = told.tolist()
        if self.end == "pad" and nothing and has:
            raise InputError(
                f"even(end='pad'): {nothing} of {has + has_not} ranks have no batch that could be repeated. "
                "Give each at least one, or drop."
            )
        return has_not == 0, has > 0
