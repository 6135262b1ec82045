"""What ranks can agree to do together, and what each is told when they do."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["ENDED", "KINDS", "SERVED", "Opened", "as_text", "opened_by", "text_in"]

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

_TEXT = 2000
"""Bytes of a fault's text."""


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


def opened_by(kind: int, sequence: int, count: int) -> str:
    """What an opening message is for, in words."""
    return f"{KINDS[kind]} ({count} numbers, exchange {sequence})"


def as_text(error: BaseException | None) -> Tensor:
    """(n,) uint8 of what an error says, and of None; as long for all."""
    raw = b"" if error is None else f"{type(error).__name__}: {error}".encode()[:_TEXT]
    return torch.tensor(list(raw.ljust(_TEXT, b"\0")), dtype=torch.uint8)


def text_in(raw: Tensor) -> str:
    """What it says."""
    return bytes(raw.tolist()).rstrip(b"\0").decode(errors="replace")
