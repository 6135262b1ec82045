"""The folder in which OneFlow's OneEmbedding keeps rows: an append-only table for each rank, and snapshots.

::

    R-N/                       of rank R of N
        KEY_SIZE VALUE_SIZE    bytes of an id and of a row, as text
        PHYSICAL_BLOCK_SIZE NUM_LOGICAL_BLOCKS_PER_CHUNK
        keys/key-C             the ids of chunk C, one for each place of a row
        values/value-C         its rows: blocks of whole rows, with a gap behind them
        snapshots/NAME/LIST    the files index-C of the snapshot, in each of which stand the places
                               (uint64) of the rows that it has

A row is float32: the vector, then optimizer states; nothing in the folder says where those begin.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

import numpy as np
import torch

from hotbed.formats.tables import (
    Chunks,
    FileTable,
    FormatError,
    Found,
    Hints,
    distinct,
    plain,
    slices,
)

__all__ = ["OneEmbedding"]

_RANK = re.compile(r"([0-9]+)-([0-9]+)")
_INDEX = re.compile(r"index-([0-9]{12})")
_MOST = 1 << 40
"""Most bytes, or blocks in a chunk."""
_IDS: dict[int, np.dtype] = {4: np.dtype("<i4"), 8: np.dtype("<i8")}


class OneEmbedding:
    hints: tuple[str, ...] = ("dim", "snapshot")
    endings: tuple[str, ...] = ()

    def is_in(self, folder: str) -> bool:
        ranks = [name for name in os.listdir(folder) if _RANK.fullmatch(name)]
        return any(os.path.isfile(os.path.join(folder, r, "VALUE_SIZE")) for r in ["", *ranks])

    def read(self, path: str, hints: Hints) -> Found:
        parts = [_Part.of(folder) for folder in _ranks(path)]
        widths = {part.row_bytes // 4 for part in parts}
        if len(widths) > 1 or any(part.row_bytes % 4 for part in parts):
            raise FormatError(f"{path} has rows of several sizes, or of no float32.")
        (width,) = widths
        if hints.dim is None or not 0 < hints.dim <= width:
            raise FormatError(
                f"{path} has rows of {width} numbers, the vector first, then states of an optimizer; "
                "say how long the vector is with --dim."
            )
        dim, snapshot = hints.dim, _snapshot(path, parts, hints.snapshot)
        places = [(part, chunk, file) for part in parts for chunk, file in part.places(snapshot)]
        count = sum(os.path.getsize(file) // 8 for _, _, file in places)
        name = os.path.basename(os.path.realpath(path))

        def chunks() -> Chunks:
            for part, chunk, file in places:
                yield from part.rows(chunk, file, dim)
            if not count:
                yield torch.empty(0, dtype=torch.int64), torch.empty(0, dim)

        def all_chunks() -> Chunks:
            return distinct(path, name, chunks())

        return Found([FileTable(name, None, count, dim, torch.float32, all_chunks)], {})


def _ranks(path: str) -> list[str]:
    """The folders of all ranks."""
    own = _RANK.fullmatch(os.path.basename(os.path.realpath(path)))
    if os.path.isfile(os.path.join(path, "VALUE_SIZE")):
        if own and int(own[2]) > 1:
            raise FormatError(
                f"{path} has the rows of one rank of {own[2]}. Name the folder above it."
            )
        return [path]
    found = sorted(
        (int(m[2]), int(m[1]), name) for name in os.listdir(path) if (m := _RANK.fullmatch(name))
    )
    whole = range(found[0][0] if found else 0)
    if not found or [(ranks, rank) for ranks, rank, _ in found] != [(len(whole), r) for r in whole]:
        there = ", ".join(name for *_, name in found) or "none"
        raise FormatError(
            f"{path} needs the folders of all ranks of one run, 0-N to (N-1)-N; it has {there}."
        )
    return [os.path.join(path, name) for *_, name in found]


def _snapshot(path: str, parts: list[_Part], asked: str | None) -> str:
    names = [set(os.listdir(os.path.join(part.folder, "snapshots"))) for part in parts]
    common = sorted(set.intersection(*names))
    if asked in common or (asked is None and len(common) == 1):
        return asked or common[0]
    wrong = "say which snapshot, with --snapshot" if asked is None else f"no snapshot {asked!r}"
    raise FormatError(f"{path}: {wrong}; there are {', '.join(common) or 'none'}.")


class _Part(NamedTuple):
    """The persistent table of a rank."""

    folder: str
    id_bytes: int
    row_bytes: int
    block_bytes: int
    blocks: int
    """In a chunk."""

    @classmethod
    def of(cls, folder: str) -> _Part:
        def size(name: str) -> int:
            with open(plain(os.path.join(folder, name), folder), "rb") as file:
                text = file.read(32).strip()
            if not text.isdigit() or not 0 < int(text) <= _MOST:
                raise FormatError(f"{file.name} has no size in it.")
            return int(text)

        ids, row, block = size("KEY_SIZE"), size("VALUE_SIZE"), size("PHYSICAL_BLOCK_SIZE")
        if ids not in _IDS:
            raise FormatError(f"{folder} has ids of {ids} bytes, which are no integers.")
        whole = block if block >= row else -(-row // block) * block
        return cls(folder, ids, row, whole, size("NUM_LOGICAL_BLOCKS_PER_CHUNK"))

    def places(self, snapshot: str) -> list[tuple[int, str]]:
        """(chunk, file of places) of a snapshot."""
        folder = os.path.join(self.folder, "snapshots", snapshot)
        there = [name for name in os.listdir(folder) if name != "LIST"]
        with open(plain(os.path.join(folder, "LIST"), self.folder), "rb") as file:
            most = sum(len(os.fsencode(name)) + 2 for name in there)  # with what ends its line
            listed = [os.fsdecode(name) for name in file.read(most + 1).split()]
        if sorted(there) != sorted(listed) or not all(map(_INDEX.fullmatch, listed)):
            raise FormatError(f"{folder} is no snapshot that was finished.")
        found = [(int(name[-12:]), plain(os.path.join(folder, name), folder)) for name in listed]
        return sorted(found)

    def rows(self, chunk: int, places: str, dim: int) -> Chunks:
        keys = plain(os.path.join(self.folder, "keys", f"key-{chunk:012d}"), self.folder)
        values = plain(os.path.join(self.folder, "values", f"value-{chunk:012d}"), self.folder)
        in_block = self.block_bytes // self.row_bytes
        blocks = os.path.getsize(values) // self.block_bytes
        room = min(os.path.getsize(keys) // self.id_bytes, blocks * in_block)
        first, size = chunk * self.blocks * in_block, os.path.getsize(places)
        fits = size % 8 == 0 and size // 8 <= room and first + room <= 1 << 64
        at = np.sort(np.fromfile(places, "<u8")) - np.uint64(first) if fits else np.empty(0)
        if not fits or (len(at) and int(at.max()) >= room):
            raise FormatError(f"{places} names rows that {values} or {keys} have not.")
        if not len(at):
            return
        ids = np.memmap(keys, _IDS[self.id_bytes], "r", shape=(room,))
        raw = np.memmap(values, np.uint8, "r")
        strides = (self.block_bytes, self.row_bytes, 4)
        rows = np.ndarray((blocks, in_block, self.row_bytes // 4), "<f4", raw, 0, strides)
        for some in slices(len(at), 4 * dim):
            here = at[some].astype(np.int64)
            vectors = rows[here // in_block, here % in_block, :dim]
            yield torch.from_numpy(ids[here].astype(np.int64)), torch.from_numpy(vectors)


FORMAT = OneEmbedding()
