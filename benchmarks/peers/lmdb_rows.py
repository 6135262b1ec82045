"""LMDB: a memory-mapped B-tree. Nothing is synced for a batch, and read-ahead is off."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.peers.keys import keys_of, read_in_parts


class Lmdb:
    name = "lmdb"
    ages = 0.1

    def __init__(self, folder: Path, rows: int, record_bytes: int, memory: int) -> None:
        self.folder, self.record_bytes = folder, record_bytes
        self.map_bytes = 3 * rows * record_bytes + (1 << 28)
        self.threads = 1

    @staticmethod
    def lacks() -> str | None:
        if importlib.util.find_spec("lmdb") is None:
            return "lmdb is not installed (make peers)"
        return None

    def build(self) -> None:
        import lmdb

        self.environment = lmdb.open(
            str(self.folder),
            map_size=self.map_bytes,
            sync=False,
            metasync=False,
            writemap=True,
            map_async=True,
            readahead=False,
            meminit=False,
            max_readers=256,
        )
        self.pool = ThreadPoolExecutor(64)
        self.filling = True

    def read(self, ids: np.ndarray) -> np.ndarray:
        return read_in_parts(ids, self.record_bytes, self._read_part, self.threads, self.pool)

    def _read_part(self, keys: list[bytes]) -> list[bytes]:
        # A cursor's getmulti touches the pages without holding Python's lock.
        with self.environment.begin() as transaction, transaction.cursor() as cursor:
            return [b"".join(value for _, value in cursor.getmulti(keys))]

    def write(self, ids: np.ndarray, records: np.ndarray) -> None:
        order = np.argsort(ids)
        items = zip(
            keys_of(ids[order]), (record.tobytes() for record in records[order]), strict=True
        )
        with self.environment.begin(write=True) as transaction, transaction.cursor() as cursor:
            cursor.putmulti(list(items), append=self.filling)

    def allocate(self) -> None:
        self.filling = False
        self.environment.sync(True)

    def settings(self) -> str:
        return (
            f"{self.threads} reading threads (the best of those tried), sync=False, writemap, "
            "map_async, no read-ahead"
        )
