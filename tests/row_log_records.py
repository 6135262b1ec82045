"""Records that tell which row and version they are, and a log with arrays in place of buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch  # noqa: F401  (its libgomp must be loaded before the core's)

from hotbed import _core

WORDS = 9
RECORD_BYTES = 8 * WORDS
SEGMENT_BYTES = 64 * 4096
"""The smallest: many segments come and go."""


def records(tables: np.ndarray, ids: np.ndarray, versions: np.ndarray | int) -> np.ndarray:
    """uint8 (keys, RECORD_BYTES): version, then words that depend on table, id and version."""
    words = np.empty((len(ids), WORDS), np.uint64)
    words[:] = np.asarray(versions, np.uint64).reshape(-1, 1) if np.ndim(versions) else versions
    mixed = words[:, 1:] * np.uint64(0x9E3779B97F4A7C15) + ids.astype(np.uint64)[:, None]
    mixed ^= mixed >> np.uint64(29)
    mixed += tables.astype(np.uint64)[:, None] + np.arange(WORDS - 1, dtype=np.uint64)
    words[:, 1:] = mixed * np.uint64(0xBF58476D1CE4E5B9)
    return words.view(np.uint8).reshape(len(ids), RECORD_BYTES)


class Log:
    """One store of a `_core.RowLog`."""

    def __init__(self, core: Any, store: int = 0) -> None:
        self.core, self.store = core, store

    @classmethod
    def create(cls, path: Any, tables: list[tuple[int, str, int | None]], **options: Any) -> Log:
        options = {"segment_bytes": SEGMENT_BYTES, "append_bytes": 2 * SEGMENT_BYTES, **options}
        return cls(_core.RowLog.create(str(path), [(RECORD_BYTES, tables)], **options))

    def write(self, tables: np.ndarray, ids: np.ndarray, version: int) -> None:
        self.core.write(self.store, tables, ids, records(tables, ids, version))

    def erase(self, tables: np.ndarray, ids: np.ndarray) -> None:
        self.core.erase(self.store, tables, ids)

    def versions(self, tables: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """int64 (keys,): the version of each row, 0 where there is none. Checks every byte."""
        read = np.full((len(ids), RECORD_BYTES), 0xCC, np.uint8)
        found = np.zeros(len(ids), bool)
        self.core.read(self.store, tables, ids, read, found)
        versions = read.view(np.uint64)[:, 0].copy()
        expected = records(tables, ids, versions)
        expected[~found] = 0xCC
        np.testing.assert_array_equal(read, expected)
        return np.where(found, versions, 0).astype(np.int64)

    def ids(self, table: int) -> list[int]:
        out = np.empty(self.core.rows(self.store, table), np.int64)
        self.core.ids(self.store, table, out)
        return out.tolist()

    def statistics(self) -> dict[str, Any]:
        return self.core.statistics()["stores"][self.store]
