"""Rows of stores whose keys are 8 bytes and whose values are whole records."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from concurrent.futures import Executor

import numpy as np


def keys_of(ids: np.ndarray) -> list[bytes]:
    """Big-endian, so that keys lie in the order of ids."""
    packed = ids.astype(">i8").tobytes()
    return [packed[i : i + 8] for i in range(0, len(packed), 8)]


def read_in_parts(
    ids: np.ndarray,
    record_bytes: int,
    get: Callable[[list[bytes]], Iterable[bytes]],
    threads: int,
    pool: Executor,
) -> np.ndarray:
    """uint8 (n, record_bytes): keys sorted, as multi-get wants them, and in as many parts as threads.

    `get`: the values of some keys in their order, in pieces of any size.
    """
    order = np.argsort(ids)
    keys = keys_of(ids[order])
    step = -(-len(keys) // threads)
    parts = [keys[begin : begin + step] for begin in range(0, len(keys), step)]
    pieces = get(parts[0]) if threads == 1 else itertools.chain(*pool.map(get, parts))
    records = np.empty((len(ids), record_bytes), np.uint8)
    records[order] = np.frombuffer(b"".join(pieces), np.uint8).reshape(records.shape)
    return records
