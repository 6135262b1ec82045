"""Keeping what has side effects out of compiled graphs without importing the compiler.

``torch.compiler.disable`` would do, but decorating with it imports torch._dynamo, which takes longer
than all of Hotbed. The method here is replaced by it once something else has imported the compiler.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["outside_graphs"]

P = ParamSpec("P")
R = TypeVar("R")


def outside_graphs(method: Callable[P, R]) -> Callable[P, R]:
    """A method or function, run eagerly with all it calls, at the price of one graph break."""

    disabled: Callable[P, R] | None = None

    @functools.wraps(method)
    def eager(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return method(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(method)  # type: ignore[no-untyped-call]
        for owner in type(args[0]).__mro__ if args else ():
            if vars(owner).get(method.__name__) is eager:
                setattr(owner, method.__name__, disabled)
        return disabled(*args, **kwargs)

    vars(eager)["_torchdynamo_disable"] = True
    return eager
