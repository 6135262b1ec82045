"""The options that optimizers are called with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hotbed.errors import OptimizerError

__all__ = ["arguments", "refuse_strangers"]

# Options of other optimizers, by names that a user may try on any.
_STRANGERS = {
    "l1": "L1 regularisation is a part of hotbed.optim.FTRL only. Elsewhere add a penalty on the "
    "looked-up vectors to the loss, such as l1 * vectors.abs().sum()",
    "l2": "it is called weight_decay here, and FTRL alone has l2",
}


def arguments(local: dict[str, Any]) -> dict[str, Any]:
    """What an ``__init__(self, params, ...)`` was called with besides params; `local` is its locals()."""
    return {k: v for k, v in local.items() if k not in ("self", "params", "__class__")}


def refuse_strangers(kind: type, options: Iterable[str]) -> None:
    """Raises where one of `options`, which optimizer `kind` has not, belongs to another."""
    for name in options:
        if name in _STRANGERS:
            raise OptimizerError(f"{kind.__name__} has no option {name}: {_STRANGERS[name]}.")
