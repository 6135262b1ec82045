"""Base of the settings of models: numbers that fix their shape, kept in checkpoints."""

from __future__ import annotations

import dataclasses

__all__ = ["LinearSettings", "ModelSettings"]


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """Settings that all models have. A model adds its own in a subclass; lists become tuples."""

    dim: int = 16
    """Width of the tables."""
    num_dense: int = 13
    """Columns of ``batch["dense"]``."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):
                object.__setattr__(self, field.name, tuple(value))


@dataclasses.dataclass(frozen=True)
class LinearSettings(ModelSettings):
    """Settings of models with a linear part, in which ids have weights of their own."""

    one_row: bool = dataclasses.field(default=False, kw_only=True)
    """True if an id's weight lies in the row of its vector, as its last column (`hotbed.init.Columns`): one
    lookup an id, and one row with its states. False: in a table of its own, ``C1.wide`` beside ``C1``."""
