"""Errors of another rank, and of ranks that differ."""

from __future__ import annotations

import re

from hotbed.errors import HotbedError

__all__ = [
    "NO_COPY",
    "Gone",
    "LocalFault",
    "PeerError",
    "PeerLost",
    "is_gone",
    "is_known_to_all",
    "mark_known_to_all",
]

NO_COPY = (
    "it cannot be copied or pickled: deepcopy the model before hotbed.distribute, and distribute the copy, "
    "too (an average of weights, say). hotbed.save() and hotbed.load() bring rows from one to the other."
)

_GONE = re.compile(
    r"gloo|nccl|pair closure|connection (closed|reset|refused)|timed out waiting|broken pipe|socket closed"
    r"|error when running the callback: PeerLost",
    re.IGNORECASE,
)
"""What torch says where a process cannot be reached any more."""

_KNOWN_TO_ALL = "known_to_all_ranks"


class PeerError(HotbedError, RuntimeError):
    """Another rank could not go on, so this one did not either; the message says which and why."""


class LocalFault(PeerError):
    """Another rank of this machine could not go on. Other machines have not heard of it yet: it tells them
    in the next exchange among all."""


class Gone(RuntimeError):
    """A process cannot be reached any more."""


class PeerLost(PeerError):
    """A peer exited or timed out."""


def is_gone(error: RuntimeError) -> bool:
    """Whether it says that a process cannot be reached any more."""
    if isinstance(error, HotbedError):
        return False
    return isinstance(error, Gone) or _GONE.search(str(error)) is not None


def mark_known_to_all(error: BaseException) -> None:
    """Notes that all ranks know of this error."""
    setattr(error, _KNOWN_TO_ALL, True)


def is_known_to_all(error: BaseException) -> bool:
    """Return True if all ranks know of this error, or of one that it was raised from."""
    cause: BaseException | None = error
    while cause is not None and not hasattr(cause, _KNOWN_TO_ALL):
        cause = cause.__cause__
    return cause is not None
