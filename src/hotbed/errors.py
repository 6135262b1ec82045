"""Errors that Hotbed raises. Every message names the table or feature, the offending value and the remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from hotbed import _core

__all__ = [
    "HotbedError",
    "InputError",
    "IdError",
    "TableError",
    "OptimizerError",
    "NotFiniteError",
    "OutOfMemory",
    "PlanError",
    "StorageError",
]


class HotbedError(Exception):
    """Base of every error that Hotbed raises on purpose."""


class InputError(HotbedError, ValueError):
    """A batch that cannot be looked up: wrong kind, shape, offsets or features."""


class IdError(InputError, IndexError):
    """An id outside the rows of a static table."""


class TableError(HotbedError, ValueError):
    """A table or module that is described or used in a way that cannot be honoured."""


class OptimizerError(HotbedError, RuntimeError, ValueError):
    """A table driven by the wrong optimizer, by none or by two; or an option that cannot be honoured."""


class NotFiniteError(HotbedError, ArithmeticError):
    """A gradient with a NaN or an infinity; nothing was written."""


class PlanRemedy(Protocol):
    """One change with which a plan is possible."""

    @property
    def said(self) -> str: ...
    @property
    def arguments(self) -> dict[str, object]: ...


class PlanError(HotbedError, ValueError):
    """An impossible plan: a shard that fits no rank, table or memory; a file without a plan.

    ``remedies`` are, where memory does not suffice, changes with which it would; see `hotbed.plan`.
    """

    remedies: Sequence[PlanRemedy] = ()


class OutOfMemory(HotbedError, MemoryError):
    """The planes of a table do not fit; nothing was changed.

    ``asked_bytes`` is what was needed on top of what is held, ``free_bytes`` what there was.
    """

    asked_bytes: int = 0
    free_bytes: int = 0


class StorageError(HotbedError, OSError):
    """A tier that cannot hold what it must, or cannot read or write; no row is lost.

    ``errno`` is the system's number, where it has refused something; ``needed`` the number of rows or bytes
    that would be needed, where one is; ``path`` the file or folder that it is about.
    """

    needed: int = 0
    path: str = ""
    needs: Sequence[tuple[int, int]] = ()
    """For a batch that did not fit: what each row space would need. The core sets it."""
    budget: str | None = None
    """Budget that is too small for any layout, "host" or "compute". The core sets it."""
    parts: Mapping[str, int] | None = None
    """Bytes that the budget would be spent on, by part. The core sets it."""


_core.register_out_of_memory(OutOfMemory)
_core.register_storage_error(StorageError)
