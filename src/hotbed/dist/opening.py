"""What ranks can agree to do together, and what each is told when they do."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["ENDED", "KINDS", "SERVED", "Opened"]

ENDED = "nothing any more"
SERVED = {
    ENDED: True,
    "the end": True,
    "a lookup": True,
    "a step": True,
    "a sum of gradients": True,
    "a norm of gradients": True,
    "a change of gradients": True,
    "a lookup of rows": True,
    "a look for infinities": True,
    "a distribution": False,
    "an assignment": False,
    "a deletion of rows": False,
    "a count of rows": False,
    "a copy of rows": False,
    "a checkpoint": False,
    "figures": False,
}
"""What ranks do together, and whether a rank takes part in it that has no batches any more."""
KINDS = tuple(SERVED)


class Opened(NamedTuple):
    """What all ranks agree to do."""

    kind: str
    tables: tuple[int, ...]
    """Numbers of the tables concerned."""
    numbers: Tensor
    """(ranks, n) int64: what each says beside it; of a rank that has ended, zeros."""
    ended: list[bool]
    """Which ranks have no batches any more."""
    waiting: list[Any]
    """Trips as they waited when it was opened, which `Ranks.waiting` may have let go since."""
