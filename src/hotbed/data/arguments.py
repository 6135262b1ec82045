"""Numbers that readers and generators are given, checked before anything is read or made."""

from __future__ import annotations

import math
from typing import SupportsFloat, SupportsIndex

from hotbed.arrays import integer
from hotbed.errors import InputError
from hotbed.text import brief

__all__ = ["real", "seed_of", "whole"]

_MOST = 2**63 - 1


def whole(name: str, value: object, least: int = 0) -> int:
    """The value of that name as an int of at least `least`; raises InputError where it is none."""
    given = integer(value)
    if given is None or not least <= given <= _MOST:
        raise InputError(
            f"{name} is {brief(value)}; it must be an integer, at least {least} and below 2**63."
        )
    return given


def real(name: str, value: object) -> float:
    """The value of that name as a float; raises InputError where it is no real number."""
    try:
        if isinstance(value, (SupportsFloat, SupportsIndex)) and not isinstance(value, bool):
            given = float(value)
            if not math.isnan(given):
                return given
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    raise InputError(f"{name} is {brief(value)}; it must be a number.")


def seed_of(value: object) -> int:
    """The value of a seed; raises InputError where it is no integer of 64 bits."""
    given = integer(value)
    if given is None or not 0 <= given < 2**64:
        raise InputError(f"seed must be an integer in [0, 2**64), got {brief(value)}.")
    return given
