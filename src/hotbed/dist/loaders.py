"""Loaders whose ranks end together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, Literal, TypeVar

import torch
import torch.distributed as torch_dist

from hotbed.arrays import is_one_of
from hotbed.dist.errors import PeerError, is_gone
from hotbed.dist.handshake import raise_fault
from hotbed.dist.roles import place_among_trainers, ranks_with_batches, refuse_memory_host
from hotbed.dist.wire import Gloo, group_of
from hotbed.errors import InputError

__all__ = ["Even", "Slice", "Slices", "even", "samples_in", "slices"]

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
    """Loader of this rank's slices of batches."""

    def __init__(self, loader: Iterable[Mapping[str, Any]]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Slice]:
        rank, size = 0, 1
        if _in_a_group():
            refuse_memory_host("hotbed.dist.slices")
            rank, size = place_among_trainers()
        for batch in self.loader:
            count = samples_in(batch, "slices")
            begin, end = (count * r // size for r in (rank, rank + 1))
            yield Slice({name: v[begin:end] for name, v in batch.items()}, count)


def samples_in(batch: Mapping[str, Any], called: str) -> int:
    """Return how many samples a batch has. `called`: by the user, for errors.

    Raises:
        InputError: the batch is no dict; a value has no samples, or they have different numbers of them.
    """
    if not isinstance(batch, Mapping):
        raise InputError(
            f"{called}: expected batches that are dicts of inputs by name, got {type(batch).__name__}."
        )
    counts = set()
    for name, value in batch.items():
        try:
            counts.add(len(value))
        except TypeError:  # of a tensor without dimensions, too
            raise InputError(
                f"{called}: {name!r} of a batch is a single value, and must have one for each sample."
            ) from None
    if len(counts) != 1:
        raise InputError(
            f"{called}: all values of a batch must have the same number of samples; got "
            f"{' and '.join(map(str, sorted(counts))) or 'no values'}."
        )
    (count,) = counts
    return count


def slices(loader: Iterable[Mapping[str, Any]]) -> Slices:
    """Wrap a loader of whole batches, the same on all ranks, of which each rank gets its samples.

    So any number of ranks trains on the same batches. Without a process group there is one rank; memory hosts
    (see `hotbed.distribute`) get none.

    Args:
        loader: of batches feature → tensor or `Jagged`, of as many samples each. A batch may have fewer
            samples than there are ranks; `hotbed.train.fit` weighs those of all alike.
    """
    return Slices(loader)


def _in_a_group() -> bool:
    return torch_dist.is_available() and torch_dist.is_initialized()


def even(loader: Iterable[T], *, end: Literal["drop", "pad"] = "drop") -> Even[T]:
    """Wrap a loader so that all ranks get as many batches: the simple way to end together.

    Args:
        loader: of this rank.
        end: what happens when the first rank has no batch any more. ``"drop"``: all end, and what the others
            have left is dropped. ``"pad"``: it gets its last batch again until all have ended, which then
            counts several times.

    Wrap a loader once, and iterate what comes of it in each epoch: it has a process group of its own.
    Called by all ranks that have batches, each with its loader, after `hotbed.distribute` where others are
    memory hosts; so is each iteration and each batch. With ``"pad"`` a rank
    that has no batch at all is an InputError on all. What a loader raises its rank raises, and the others a
    `PeerError`, as they do where a rank is gone.
    """
    return Even(loader, end)


class Even(Generic[T]):
    """Loader that gives all ranks as many batches."""

    def __init__(self, loader: Iterable[T], end: str) -> None:
        self.loader, self.end = loader, end
        self._group: torch_dist.ProcessGroup | None = None
        if _in_a_group():
            refuse_memory_host("hotbed.dist.even")
            self._group = group_of(
                self, "hotbed.dist.even", _SECONDS, ranks_with_batches(), backend="gloo"
            )
        self._refuse_other_end()

    def _refuse_other_end(self) -> None:
        """Raise InputError where `end` is none, or another one on another rank, which hears of it."""
        fault = None
        if not is_one_of(self.end, ("drop", "pad")):
            fault = InputError(f'even(end={self.end!r}): give "drop" or "pad".')
        if self._group is not None:
            pad, drop, _ = self._gathered(self.end == "pad", fault=fault)
            if pad and drop:
                raise InputError(
                    f'even(): end="pad" on {pad} ranks and "drop" on {drop}. Give all the same.'
                )
        elif fault is not None:
            raise fault

    def __iter__(self) -> Iterator[T]:
        last, missing = None, True
        for batch in self._batches():
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

    def _batches(self) -> Iterator[T]:
        """Yield the loader's batches. The other ranks hear of an error in it."""
        with self.telling_errors():
            yield from self.loader

    @contextlib.contextmanager
    def telling_errors(self) -> Iterator[None]:
        """Report errors raised inside, in work between two batches, to the other ranks, which ask for their
        next batch here."""
        try:
            yield
        except PeerError:
            raise
        except Exception as error:
            if self._group is not None:
                with contextlib.suppress(PeerError):  # nobody is there to hear it
                    self._gathered(False, fault=error)
            raise

    def _asked(self, own: bool, missing: bool = False) -> tuple[bool, bool]:
        """Whether all ranks have a batch, and whether one has."""
        if self._group is None:
            return own, own
        has, has_not, nothing = self._gathered(own, missing)
        if self.end == "pad" and nothing and has:
            raise InputError(
                f"even(end='pad'): {nothing} of {has + has_not} ranks have no batch that could be repeated. "
                "Give each at least one, or drop."
            )
        return has_not == 0, has > 0

    def _gathered(
        self, own: bool, missing: bool = False, fault: Exception | None = None
    ) -> list[int]:
        """How many ranks have a batch, have none, and have had none."""
        assert self._group is not None
        wire = Gloo(self._group, torch_dist.get_rank(self._group))
        try:
            reported = wire.gather(
                torch.tensor([own, not own, missing, fault is not None], device="cpu").long()
            )
            if bool(reported[:, 3].any()):
                raise_fault(reported[:, 3].tolist(), fault, wire.gather, len(reported))
        except RuntimeError as error:
            if not is_gone(error):
                raise
            raise PeerError(
                "hotbed.dist.even: another rank ended, or kept this one waiting for more than "
                f"{_SECONDS:g} s. ({' '.join(str(error).split())[:300]})"
            ) from None
        return reported[:, :3].sum(0).tolist()
