"""Picks the parts of a batch that go into modules which look ahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from hotbed.ahead.source import find_features
from hotbed.modules.owner import TableOwner

__all__ = ["Inputs", "InputsOfModules"]

Inputs = Callable[[Any], Any]


class InputsOfModules:
    """Finds what goes into each module, by its name in the model.

    Attributes:
        message: what it is about, and what to tell the user, where something is not found; else None.
    """

    def __init__(
        self, model: nn.Module, modules: Mapping[str, TableOwner], given: Inputs | None
    ) -> None:
        """`given`: the user's function of a batch, as of `hotbed.lookahead`."""
        self._modules, self._given = modules, given
        self._given_by: dict[str, Inputs] = {}
        self.message: tuple[str, str] | None = None
        for name, module in modules.items():
            holder = model.get_submodule(name.rpartition(".")[0])
            for one in (holder, module):
                if callable(found := getattr(one, "embedding_inputs", None)):
                    self._given_by[name] = found

    def of(self, batch: object, name: str) -> object:
        """Return what goes into a module; None where that is not known."""
        module = self._modules[name]
        if self._given is not None:
            given = self._given(batch)
            return given[name] if len(self._modules) > 1 else given
        if name in self._given_by:
            given = self._given_by[name](batch)
            return module.inputs_from(given, name) if isinstance(given, Mapping) else given
        features = list(module.features_of(name))
        found = find_features(batch, features, 3)
        if found is not None:
            return module.inputs_from(found, name)
        self.message = (
            f"inputs of {name}",
            f"Look-ahead finds no mapping with all features of {type(module).__name__} {name!r} "
            f"({', '.join(map(repr, features))}) in a batch, and does nothing for it. Tell it where they "
            "are: lookahead(..., inputs=lambda batch: ...).",
        )
        return None
