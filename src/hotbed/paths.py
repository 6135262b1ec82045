"""Paths that a user gives."""

from __future__ import annotations

import os

from hotbed.errors import InputError
from hotbed.text import brief

__all__ = ["path_text"]


def path_text(given: object, name: str = "path") -> str:
    """Return the path in the argument of that name as text.

    Raises:
        InputError: it is no path.
    """
    try:
        return os.fsdecode(given)  # type: ignore[arg-type]
    except TypeError:
        raise InputError(f"{name} is {brief(given)}; give text or a pathlib.Path.") from None
