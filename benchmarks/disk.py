"""What the disk below a folder can do."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np

BLOCK = 4096
FILE_BYTES = 1 << 30
THREADS = 16
SECONDS = 2.0


def free_bytes(folder: Path) -> int:
    """Bytes that files in `folder` may still take."""
    return shutil.disk_usage(folder).free


def random_reads_per_second(folder: Path, file_bytes: int = FILE_BYTES) -> float:
    """Random aligned reads of 4 KiB a second, past the page cache, with 16 of them under way."""
    path = folder / f"hotbed-disk-{os.getpid()}"
    try:
        block = os.urandom(1 << 20)
        with open(path, "wb") as file:
            for _ in range(file_bytes >> 20):
                file.write(block)
            os.fsync(file.fileno())
        return _read(path, file_bytes)
    finally:
        path.unlink(missing_ok=True)


def _read(path: Path, file_bytes: int) -> float:
    counts = [0] * THREADS
    end = time.perf_counter() + SECONDS

    def work(thread: int) -> None:
        import mmap

        rng = np.random.default_rng(thread)
        offsets = rng.integers(0, file_bytes // BLOCK, 1 << 16) * BLOCK
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        page = mmap.mmap(-1, BLOCK)  # direct reads want an aligned buffer
        try:
            for offset in offsets.tolist():
                os.preadv(file, [page], offset)
                counts[thread] += 1
                if time.perf_counter() >= end:
                    return
        finally:
            os.close(file)

    began = time.perf_counter()
    threads = [threading.Thread(target=work, args=(t,)) for t in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - began)
