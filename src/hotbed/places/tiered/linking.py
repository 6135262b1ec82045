"""Tiers that share the files of their SSD with checkpoints."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from pathlib import Path

from hotbed import _core
from hotbed.places.core_backed import CoreLookups
from hotbed.table.lookups import PlaceInLog, StoredTable
from hotbed.table.place import MovedTable

__all__ = ["Linking"]


class Linking(CoreLookups):
    """The part of `hotbed.places.tiered.tiers.Tiers` for files that are hard-linked.

    Attributes:
        folder: of rows on disk; None: there is no SSD.
        core: the tiers.
    """

    folder: Path | None
    core: _core.Storage

    @property
    @abc.abstractmethod
    def tables(self) -> list[MovedTable]:
        """Tables whose rows lie here."""

    @abc.abstractmethod
    def allocate_all(self) -> bool:
        """See `hotbed.places.tiered.tiers.Tiers.allocate_all`."""

    def link(self, live: Sequence[StoredTable], folder: str) -> list[PlaceInLog] | None:
        self.allocate_all()
        if self.folder is None or not self.core.link(folder):
            return None
        return [PlaceInLog(*self.core.place_of(table.core)) for table in live]

    def adopt(
        self, live: Sequence[StoredTable], folder: str, places: Sequence[tuple[int, int]]
    ) -> list[int] | None:
        if self.folder is None or {*live} != {*self.tables}:
            return None
        if [self.core.place_of(table.core)[:2] for table in live] != [*places]:
            return None
        if not self.core.adopt(folder):
            return None
        return [PlaceInLog(*self.core.place_of(table.core)).rows for table in live]
