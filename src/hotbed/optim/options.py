"""The options that optimizers are called with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from hotbed import _core
from hotbed.errors import OptimizerError
from hotbed.handles import live_table

__all__ = ["arguments", "numbers_of", "refuse_strangers", "refuse_tables_twice"]

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


def refuse_tables_twice(group: dict[str, Any]) -> None:
    """Raises where a table is in `group` twice: torch only warns, and would step it twice."""
    given = group["params"]
    if not isinstance(given, (Tensor, set)):
        given = group["params"] = list(given)
    seen: set[Any] = set()
    for parameter in given if isinstance(given, list) else ():
        parameter = parameter[1] if isinstance(parameter, tuple) else parameter
        live = live_table(parameter)
        if live is not None and parameter in seen:
            raise OptimizerError(
                f"Table {live.name!r} is given to the optimizer twice, as by modules that share it. "
                "Pass each parameter once: model.parameters() of the module around them does."
            )
        seen.add(parameter)


_NUMBERS = [name for name in dir(_core.Hyperparameters) if not name.startswith("_")]


def numbers_of(hyper: Any) -> dict[str, float]:
    """The core's numbers of a step by name."""
    return {name: getattr(hyper, name) for name in _NUMBERS}
