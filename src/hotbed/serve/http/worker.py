"""Processes that answer, once all that they need is there."""

from __future__ import annotations

import gc
from typing import TypeVar

__all__ = ["settled"]

_A = TypeVar("_A")


def settled(application: _A) -> _A:
    """Return an application, which is the last thing that is made in this process before requests come.

    A collection that looks at all that torch's modules have takes a tenth of a second, in which no request is
    answered: they are looked at no more.
    """
    gc.collect()
    gc.freeze()
    return application
