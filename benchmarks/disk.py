"""What a disk does with a file, beside which checkpoints are measured."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path

BLOCK = 32 << 20


def write(path: Path, size: int) -> None:
    """Write a file of so many bytes, and to the disk. (The first call makes what is written.)"""
    block = _block()
    with open(path, "wb", buffering=0) as file:
        for begin in range(0, size, BLOCK):
            file.write(block[: size - begin])
        os.fsync(file.fileno())


@functools.cache
def _block() -> bytes:
    return os.urandom(BLOCK)


def read(path: Path) -> None:
    """Read a file."""
    into = bytearray(BLOCK)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(into):
            pass


def forget(folder: Path) -> None:
    """Have the system keep none of the files in memory."""
    os.sync()
    for file in folder.rglob("*"):
        if file.is_file():
            with open(file, "rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def took_ms(work: Callable[[], object]) -> float:
    """Return the milliseconds that something takes."""
    begin = time.perf_counter()
    work()
    return (time.perf_counter() - begin) * 1e3
