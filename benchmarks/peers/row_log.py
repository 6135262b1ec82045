"""Hotbed's row log, by the core: what its SSD tier is made of."""

from __future__ import annotations

from pathlib import Path

import numpy as np


class RowLog:
    name = "hotbed"
    ages = 1.0

    def __init__(self, folder: Path, rows: int, record_bytes: int, memory: int) -> None:
        self.folder, self.rows, self.record_bytes = folder, rows, record_bytes

    @staticmethod
    def lacks() -> str | None:
        return None

    def build(self) -> None:
        from hotbed import _core

        stores = [(self.record_bytes, [(0, "item", self.rows)])]
        self.log = _core.RowLog.create(str(self.folder), stores, reset=True)
        self.tables = np.zeros(self.rows, np.int32)

    def read(self, ids: np.ndarray) -> np.ndarray:
        records = np.empty((len(ids), self.record_bytes), np.uint8)
        found = np.empty(len(ids), bool)
        self.log.read(0, self.tables[: len(ids)], ids, records, found)
        if not found.all():
            raise AssertionError("the row log lost rows")
        return records

    def write(self, ids: np.ndarray, records: np.ndarray) -> None:
        self.log.write(0, self.tables[: len(ids)], ids, records)

    def allocate(self) -> None:
        self.log.flush()

    def files(self) -> list[str]:
        """The segments of this moment: what the disk's own rate is measured on."""
        return [str(path) for path in self.folder.glob("*.rows")]

    def settings(self) -> str:
        now = self.log.statistics()
        store = now["stores"][0]
        return (
            f"defaults: {now['backend']}, depth 128, "
            f"{'direct' if now['direct'] else 'buffered'} files, "
            f"{now['memory_bytes'] / 1e6:.0f} MB of memory, space {store['bytes'] / 1e9:.2f} GB "
            f"({store['bytes'] / store['live_bytes']:.2f} x live blocks), "
            f"{store['rows_moved'] / max(1, store['rows_written']):.2f} rows moved for each written"
        )
