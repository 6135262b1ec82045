"""LMDB: a memory-mapped B-tree. Nothing is synced for a batch, and read-ahead is off."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.peers.rocksdb import _keys


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
        order = np.argsort(ids)
        keys = _keys(ids[order])
        step = -(-len(keys) // self.threads)
        parts = [keys[begin : begin + step] for begin in range(0, len(keys), step)]
        if self.threads == 1:
            values = self._read_part(parts[0])
        else:
            values = b"".join(self.pool.map(self._read_part, parts))
        records = np.empty((len(ids), self.record_bytes), np.uint8)
        records[order] = np.frombuffer(values, np.uint8).reshape(records.shape)
        return records

    def _read_part(self, keys: list[bytes]) -> bytes:
        # A cursor's getmulti touches the pages without holding Python's lock.
        with self.environment.begin() as transaction, transaction.cursor() as cursor:
            return b"".join(value for _, value in cursor.getmulti(keys))

    def write(self, ids: np.ndarray, records: np.ndarray) -> None:
        order = np.argsort(ids)
        items = zip(_keys(ids[order]), (record.tobytes() for record in records[order]), strict=True)
        with self.environment.begin(write=True) as transaction, transaction.cursor() as cursor:
            cursor.putmulti(list(items), append=self.filling)

    def settle(self) -> None:
        self.filling = False
        self.environment.sync(True)

    def settings(self) -> str:
        return (
            f"{self.threads} reading threads (the best of those tried), sync=False, writemap, "
            "map_async, no read-ahead"
        )
