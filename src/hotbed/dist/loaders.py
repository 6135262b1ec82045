"""Loaders whose ranks end together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, Literal, TypeVar

import torch
import torch.distributed as torch_dist

from hotbed.errors import InputError

__all__ = ["Even", "even"]

T = TypeVar("T")


def even(loader: Iterable[T], *, end: Literal["drop", "pad"] = "drop") -> Even[T]:
    """Wraps a loader so that all ranks get as many batches: the simple way to end together.

    Args:
        loader: of this rank.
        end: what happens when the first rank has no batch any more. ``"drop"``: all end, and what the others
            have left is dropped. ``"pad"``: it gets its last batch again until all have ended, which then
            counts several times.

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
            self._group = torch_dist.new_group(backend="gloo")

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
