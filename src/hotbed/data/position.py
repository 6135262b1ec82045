"""Where in its data a training stands."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, TypedDict, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

__all__ = [
    "Position",
    "RandomStates",
    "generators_of",
    "seek",
    "start_workers",
    "wrapped_by",
]


class RandomStates(TypedDict, total=False):
    """States of random generators: Python's, NumPy's, torch's on its devices, and those of a loader."""

    python: tuple[object, ...]
    numpy: dict[str, object] | tuple[str, np.ndarray, int, int, float]
    torch: Tensor
    cuda: list[Tensor]
    generators: list[Tensor]


@dataclasses.dataclass(slots=True)
class Position:
    """Position of a training in its data.

    `hotbed.train.fit` begins there and keeps it up to date; ``hotbed.save(loader=position)`` saves it.
    """

    epoch: int = 1
    """Number of the epoch that is under way, or comes next, from 1."""
    batch: int = 0
    """Batches of that epoch that are done."""
    steps: int = 0
    """Steps taken, over all epochs."""
    rows: int = 0
    """Samples trained on, over all epochs."""
    random: RandomStates | None = dataclasses.field(default=None, compare=False, repr=False)
    """States of random generators as the epoch began, from which a ``DataLoader`` draws its order; between
    two epochs, as the next one will begin."""
    loaded: bool = dataclasses.field(default=False, compare=False, repr=False)
    """True if it was loaded, and `fit` has not begun there yet."""

    def state_dict(self) -> dict[str, object]:
        """Return what `hotbed.save` stores."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "loaded"]
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Take over what `state_dict` returned."""
        for name in self.state_dict():
            setattr(self, name, state[name])
        self.loaded = True


class Seekable(Protocol):
    """A loader or data set that passes over batches itself."""

    def seek(self, epoch: int, batches: int, /) -> object: ...


def _seeks(loader: object) -> TypeGuard[Seekable]:
    return hasattr(loader, "seek")


def wrapped_by(loader: object) -> list[object]:
    """Return the loader, the one that it wraps as its ``loader``, the one that this wraps, and so on."""
    found: list[object] = []
    while loader is not None and not any(loader is one for one in found):
        found.append(loader)
        loader = getattr(loader, "loader", None)
    return found


def generators_of(loader: object) -> list[torch.Generator]:
    """The random generators of its own that a ``DataLoader`` has, also one inside of others."""
    found: list[torch.Generator] = []
    for owner in wrapped_by(loader):
        for path in ("generator", "sampler.generator", "batch_sampler.sampler.generator"):
            one: Any = owner
            for name in path.split("."):
                one = getattr(one, name, None)
            if hasattr(one, "get_state") and not any(one is other for other in found):
                found.append(one)
    return found


def start_workers(loader: object) -> None:
    """Begin an iteration of each ``DataLoader`` whose workers outlast it, and that has none yet: it draws
    their seeds, which later epochs do not."""
    for one in wrapped_by(loader):
        if isinstance(one, DataLoader) and one.num_workers and one.persistent_workers:
            if getattr(one, "_iterator", None) is None:
                iter(one)


def seek(loader: object, epoch: int, batches: int) -> int:
    """Has the next iteration of a loader be that of `epoch` (from 1), but for its first `batches`.

    A loader with a method ``seek(epoch, batches)`` passes over them itself. Of another, the first that it
    wraps with such a method is told the epoch, or the data set of a ``DataLoader``.

    Returns:
        How many batches whoever iterates it has to pass over.
    """
    if _seeks(loader):
        loader.seek(epoch, batches)
        return 0
    for one in wrapped_by(loader):
        known = one if _seeks(one) else getattr(one, "dataset", None)
        if _seeks(known):
            known.seek(epoch, 0)
            break
    return batches
