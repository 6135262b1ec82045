"""Live tables, as modules below them see them."""

from __future__ import annotations

from typing import Protocol

import torch

from hotbed import _core
from hotbed.tables import Table

__all__ = ["DescribedTable", "SteppedTable"]


class DescribedTable(Protocol):
    """A live table, by what it is."""

    @property
    def name(self) -> str: ...
    @property
    def spec(self) -> Table: ...
    @property
    def compute_dtype(self) -> torch.dtype: ...


class SteppedTable(DescribedTable, Protocol):
    """A live table, and how it is stepped."""

    @property
    def rule(self) -> _core.TableRule | None: ...
