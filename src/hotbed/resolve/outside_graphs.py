"""Keeping resolve out of compiled graphs without importing the compiler.

``torch.compiler.disable`` would do, but decorating with it imports torch._dynamo, which takes longer
than all of Hotbed. The wrapper here calls for it only once something else has imported it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["outside_graphs"]

F = TypeVar("F", bound=Callable[..., Any])


def outside_graphs(function: F) -> F:
    """`function`, run eagerly with all it calls, at the price of one graph break."""
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def eager(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    eager._torchdynamo_disable = True  # type: ignore[attr-defined]
    return eager  # type: ignore[return-value]
