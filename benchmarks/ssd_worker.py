"""One contender of the scenario `ssd`, in a process of its own: a command a line, an answer a line.

Every record that is read is checked: its first 16 bytes are the row's id and version.
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

CONTENDERS = {
    "hotbed": ("row_log", "RowLog"),
    "rocksdb": ("rocksdb", "RocksDb"),
    "lmdb": ("lmdb_rows", "Lmdb"),
}
FILL = 20_000
DEPTHS = (64, 128)


def contender_class(name: str) -> Any:
    module, kind = CONTENDERS[name]
    return getattr(importlib.import_module(f"benchmarks.peers.{module}"), kind)


class Worker:
    def __init__(
        self, name: str, folder: str, rows: int, record_bytes: int, batch: int, memory: int
    ) -> None:
        self.store = contender_class(name)(Path(folder), rows, record_bytes, memory)
        self.rows, self.record_bytes, self.batch = rows, record_bytes, batch
        self.versions = np.zeros(rows, np.int32)
        self.versions.fill(0)
        # Floats of trained rows do not compress either.
        self.noise = np.random.default_rng(0).integers(0, 256, (FILL, record_bytes), dtype=np.uint8)
        self.files: Callable[[], list[str]] | None = getattr(self.store, "files", None)

    def ids(self, seed: int) -> np.ndarray:
        """int64 (batch,): distinct rows in no order, the same for all contenders."""
        random = np.random.default_rng((7, seed))
        return random.permutation(np.unique(random.integers(0, self.rows, 2 * self.batch)))[
            : self.batch
        ]

    def records(self, ids: np.ndarray) -> np.ndarray:
        records = self.noise[: len(ids)].copy()
        stamp = records[:, :16].view(np.int64)
        stamp[:, 0], stamp[:, 1] = ids, self.versions[ids]
        return records

    def fill(self) -> dict[str, Any]:
        start = time.perf_counter()
        self.store.build()
        for begin in range(0, self.rows, FILL):
            ids = np.arange(begin, min(begin + FILL, self.rows))
            self.store.write(ids, self.records(ids))
        self.store.allocate()
        return {"seconds": time.perf_counter() - start}

    def age(self, seed: int, batches: int) -> dict[str, Any]:
        """Overwrites rows, so that what is measured is not a fresh file."""
        for i in range(batches):
            ids = self.ids(seed + i)
            self.versions[ids] += 1
            self.store.write(ids, self.records(ids))
        self.store.allocate()
        return {}

    def run(self, seed: int) -> dict[str, Any]:
        """One batch: the disk's own reads (for a contender that has files), read, write back."""
        ids = self.ids(seed)
        answer: dict[str, Any] = {}
        if self.files is not None:
            answer |= self._disk(seed)
        before, start = _cpu(), time.perf_counter()
        records = self.store.read(ids)
        answer["read_ms"] = (time.perf_counter() - start) * 1e3
        answer["read_cpu_us"] = (_cpu() - before) / len(ids) * 1e6
        stamp = records[:, :16].view(np.int64)
        if not (stamp[:, 0] == ids).all() or not (stamp[:, 1] == self.versions[ids]).all():
            raise AssertionError(f"{self.store.name} read other rows than were written")
        self.versions[ids] += 1
        stamp[:, 1] += 1
        start = time.perf_counter()
        self.store.write(ids, records)
        answer["write_ms"] = (time.perf_counter() - start) * 1e3
        return answer

    def _disk(self, seed: int) -> dict[str, Any]:
        from hotbed import _core

        assert self.files is not None
        while True:
            try:
                before, files = _cpu(), self.files()
                seconds = _core.random_reads(
                    files, 4096, self.batch, DEPTHS[seed % len(DEPTHS)], seed=seed
                )
                cpu = (_cpu() - before) / self.batch * 1e6
                return {"disk_ms": seconds * 1e3, "disk_cpu_us": cpu}
            except OSError:
                continue  # compaction removed a segment between listing and opening

    def tune(self, seed: int) -> dict[str, Any]:
        """Takes the number of reading threads that reads fastest."""
        if not hasattr(self.store, "threads"):
            return {}
        taken = {}
        for threads in (1, 8, 32, 64):
            self.store.threads = threads
            times = []
            for i in range(3):
                ids = self.ids(seed + i)
                start = time.perf_counter()
                self.store.read(ids)
                times.append(time.perf_counter() - start)
            taken[threads] = float(np.median(times))
        self.store.threads = min(taken, key=taken.__getitem__)
        return {"threads": {str(k): v for k, v in taken.items()}}

    def allocate(self) -> dict[str, Any]:
        self.store.allocate()
        return {}

    def settings(self) -> dict[str, Any]:
        return {"settings": self.store.settings()}


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    importlib.import_module("hotbed._core")  # before the limit on memory holds
    worker = Worker(**json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        print(json.dumps(getattr(worker, command)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
