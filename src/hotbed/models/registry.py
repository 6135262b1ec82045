"""Models by name, so that checkpoints and the command line can make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from hotbed.errors import TableError

__all__ = ["MODELS", "register"]

MODELS: dict[str, type[nn.Module]] = {}
"""Registered models, by name: those of `hotbed.models`, and users' own."""

_M = TypeVar("_M", bound=type[nn.Module])


def register(name: str) -> Callable[[_M], _M]:
    """Decorate a model's class, so that `hotbed.checkpoint.load_model` and the command line know it by name.

    >>> @hb.models.register("mine")
    ... class Mine(hb.models.ClickModel): ...

    The class is called with ``tables``, the settings by name, and ``seed``, ``storage`` and ``device``. Its
    objects have ``embeddings``, a collection, and ``config``, the arguments that make one of the same shape:
    numbers, texts and lists of them, and under "tables" the list of `Table`s. A subclass of `ClickModel` has
    all of that.

    Raises:
        TableError: the name is that of another class, or no text; or it decorates what is no module's class.
    """
    if not isinstance(name, str) or not name:
        raise TableError(f"register: the name is {name!r}. Pass a text, as in @register('mine').")

    def registered(kind: _M) -> _M:
        if not isinstance(kind, type) or not issubclass(kind, nn.Module):
            raise TableError(f"register({name!r}): {kind!r} is no class of modules.")
        there = MODELS.get(name, kind)
        if (there.__module__, there.__qualname__) != (kind.__module__, kind.__qualname__):
            raise TableError(
                f"register({name!r}): the name is that of {there.__module__}.{there.__qualname__}. "
                "Choose another."
            )
        MODELS[name] = kind
        return kind

    return registered
