"""Messages to a shard and its answers: ids of tables, and their rows."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["Wanted", "read_rows", "read_wanted", "rows_message", "wanted_message"]

_T = TypeVar("_T", bound=np.generic)


class Wanted(NamedTuple):
    """Rows that are asked for."""

    version: str
    """Of the bundle."""
    ids: dict[str, NDArray[np.int64]]
    """By table."""


def wanted_message(wanted: Wanted) -> bytes:
    """Return a request: a line of JSON with the version and the number of ids of each table, and the ids."""
    counts = {name: len(ids) for name, ids in wanted.ids.items()}
    head = json.dumps({"version": wanted.version, "counts": counts}).encode()
    return b"\n".join([head, b"".join(ids.astype("<i8").tobytes() for ids in wanted.ids.values())])


def read_wanted(message: bytes) -> Wanted:
    """Return what a request asks for.

    Raises:
        ValueError: it is none.
    """
    head, _, rest = message.partition(b"\n")
    match json.loads(head):
        case {"version": str(version), "counts": dict(counts)}:
            pass
        case _:
            raise ValueError("The request has no version and counts.")
    if not all(type(count) is int and count >= 0 for count in counts.values()):
        raise ValueError("Counts are numbers of ids.")
    if len(rest) != 8 * sum(counts.values()):
        raise ValueError(f"The request has {len(rest)} bytes of ids, of {sum(counts.values())}.")
    flat = np.frombuffer(rest, "<i8").astype(np.int64, copy=False)
    return Wanted(version, dict(zip(counts, _split(flat, [*counts.values()]), strict=True)))


def rows_message(rows: Sequence[NDArray[np.float32]]) -> bytes:
    """Return an answer: rows of each table, in the order in which it was asked."""
    return b"".join(each.astype("<f4", copy=False).tobytes() for each in rows)


def read_rows(
    message: bytes, wanted: Wanted, dims: Mapping[str, int]
) -> dict[str, NDArray[np.float32]]:
    """Return (n, dim) float32 rows by table.

    Raises:
        ValueError: there are not as many as were asked for.
    """
    flat = np.frombuffer(message, "<f4").astype(np.float32, copy=False)
    sizes = [len(ids) * dims[name] for name, ids in wanted.ids.items()]
    if len(flat) != sum(sizes):
        raise ValueError(f"The answer has {len(flat)} numbers, and {sum(sizes)} were asked for.")
    parts = zip(wanted.ids, _split(flat, sizes), strict=True)
    return {name: part.reshape(-1, dims[name]) for name, part in parts}


def _split(flat: NDArray[_T], sizes: Sequence[int]) -> list[NDArray[_T]]:
    ends = [*itertools.accumulate(sizes)]
    return [flat[end - size : end] for size, end in zip(sizes, ends, strict=True)]
