"""Base of the settings of models: numbers that fix their shape, kept in checkpoints."""

from __future__ import annotations

import dataclasses

__all__ = ["ModelSettings"]


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
