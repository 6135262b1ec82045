"""Where in its data a training stands."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["Position", "generators_of", "seek", "wrapped_by"]


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
    random: Any = dataclasses.field(default=None, compare=False, repr=False)
    """States of random generators as the epoch began, from which a ``DataLoader`` draws its order; between
    two epochs, as the next one will begin."""
    loaded: bool = dataclasses.field(default=False, compare=False, repr=False)
    """True if it was loaded, and `fit` has not begun there yet."""

    def state_dict(self) -> dict[str, Any]:
        """Return what `hotbed.save` stores."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "loaded"]
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        for name in self.state_dict():
            setattr(self, name, state[name])
        self.loaded = True


def wrapped_by(loader: Any) -> list[Any]:
    """Return the loader, the one that it wraps as its ``loader``, the one that this wraps, and so on."""
    found: list[Any] = []
    while loader is not None and not any(loader is one for one in found):
        found.append(loader)
        loader = getattr(loader, "loader", None)
    return found


def generators_of(loader: Any) -> list[Any]:
    """The random generators of its own that a ``DataLoader`` has, also one inside of others."""
    found: list[Any] = []
    for owner in wrapped_by(loader):
        for path in ("generator", "sampler.generator", "batch_sampler.sampler.generator"):
            one = owner
            for name in path.split("."):
                one = getattr(one, name, None)
            if hasattr(one, "get_state") and not any(one is other for other in found):
                found.append(one)
    return found


def seek(loader: Any, epoch: int, batches: int) -> int:
    """Has the next iteration of a loader be that of `epoch` (from 1), but for its first `batches`.

    A loader with a method ``seek(epoch, batches)`` passes over them itself. Of another, the first that it
    wraps with such a method is told the epoch, or the data set of a ``DataLoader``.

    Returns:
        How many batches whoever iterates it has to pass over.
    """
    if hasattr(loader, "seek"):
        loader.seek(epoch, batches)
        return 0
    for one in wrapped_by(loader):
        known = one if hasattr(one, "seek") else getattr(one, "dataset", None)
        if known is not None and hasattr(known, "seek"):
            known.seek(epoch, 0)
            break
    return batches
