"""How much one request may ask for."""

from __future__ import annotations

import dataclasses

from hotbed.errors import InputError

__all__ = ["Limits", "check_count"]


def check_count(name: str, value: int) -> None:
    """Raise InputError unless it is 1 or more."""
    if value < 1:
        raise InputError(f"{name} is {value}. Pass 1 or more.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much one request may ask for, and how long it may take."""

    body: int = 16 << 20
    """Bytes, of what is compressed when it is not."""
    bodies: int = 1 << 30
    """Bytes of all bodies that a worker reads at a time; beyond, requests are told to come again."""
    samples: int = 8192
    ids: int = 10_000
    """In one bag."""
    k: int = 1000
    """Items that top-k answers of a sample."""
    items: int = 200_000
    """Items that top-k answers of all samples of a request."""
    seconds: float = 10.0
    """To send headers, to send a body, and to be answered in."""
    waiting: float = 0.25
    """Seconds of work before a new request, beyond which it is told to come again (503)."""
    connections: int = 4096
    """Open at a time, of a worker; more are told to come again."""
    batch: int = 1024
    """Samples of different requests that are answered at once."""

    def __post_init__(self) -> None:
        for name in ("body", "bodies", "samples", "ids", "k", "items", "connections", "batch"):
            check_count(name, getattr(self, name))
        for name in ("seconds", "waiting"):
            if not 0 < getattr(self, name) < 86_400:
                raise InputError(f"{name} is {getattr(self, name)}. Pass seconds, up to a day.")
