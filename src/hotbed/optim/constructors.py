"""Options that the constructors of all optimizers share, and take by name only."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypedDict, get_args, get_type_hints

from hotbed.optim.dense import DenseFactory

__all__ = ["Coupled", "Shared", "Stock", "arguments", "spell_out"]


class Shared(TypedDict, total=False):
    """Options of every optimizer; see `TableOptimizer`."""

    maximize: bool
    untouched: str
    dense: DenseFactory | None
    fused: bool
    replace_state: bool


class Coupled(Shared, total=False):
    """Options of those whose rule torch has, too."""

    decoupled_weight_decay: bool
    foreach: bool | None
    differentiable: bool


class Stock(Coupled, total=False):
    """Options of those whose class in torch is ``capturable``."""

    capturable: bool


_DEFAULTS: dict[str, str | bool | None] = {
    "maximize": False,
    "decoupled_weight_decay": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "untouched": "lazy",
    "dense": None,
    "fused": False,
    "replace_state": False,
}


def spell_out(init: Callable[..., None]) -> None:
    """Show in the signature of a constructor what ``**options: Unpack[Shared]`` stands for."""
    signature = inspect.signature(init)
    *own, last = signature.parameters.values()
    if last.kind is not last.VAR_KEYWORD or last.annotation in (last.empty, "Any"):
        return
    (kind,) = get_args(get_type_hints(init, include_extras=True)[last.name])
    for name, default in _DEFAULTS.items():
        if name in kind.__annotations__:
            shown = _annotation(kind, name)
            own.append(
                inspect.Parameter(name, last.KEYWORD_ONLY, default=default, annotation=shown)
            )
    init.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]


def _annotation(kind: type, name: str) -> str:
    text = kind.__annotations__[name]
    return str(getattr(text, "__forward_arg__", text))


def arguments(local: dict[str, Any]) -> dict[str, object]:
    """The arguments besides params that a constructor was called with, defaults included.

    Args:
        local: the ``locals()`` of an ``__init__(self, params, ..., **options: Unpack[...])``.

    Raises:
        TypeError: an option is unknown.
    """
    init = local["__class__"].__init__
    given = {k: v for k, v in local.items() if k not in ("self", "params", "__class__")}
    options = given.pop("options")
    shared = [name for name in inspect.signature(init).parameters if name in _DEFAULTS]
    for name in options:
        if name not in shared:
            raise TypeError(f"{init.__qualname__}() got an unexpected keyword argument {name!r}")
    return given | {name: options.get(name, _DEFAULTS[name]) for name in shared}
