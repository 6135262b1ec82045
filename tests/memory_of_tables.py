"""What tables take and what they say that they take, in a process of its own.

`python -m tests.memory_of_tables TABLES KIND FOLDER` prints a line of JSON for each stage.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import hotbed as hb

ROWS, DIM, BATCH = 230, 16, 10
BUDGET = 100_000_000


def resident() -> int:
    """Bytes of this process's memory that are its own."""
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("Anonymous:")))


def made(tables: int, kind: str, folder: str) -> hb.EmbeddingCollection:
    rows = ROWS if kind.startswith("static") else None
    tier = kind.split()[-1]
    storage = None
    if tier in ("host", "ssd"):
        storage = hb.Storage(host=BUDGET, ssd=folder if tier == "ssd" else None)
    return hb.EmbeddingCollection(
        [hb.Table(f"t{k}", DIM, rows) for k in range(tables)], storage=storage
    )


def train(embeddings: hb.EmbeddingCollection, optimizer: hb.optim.Adam) -> None:
    """On all rows, in batches so small that they do not show."""
    for ids in torch.arange(ROWS).split(BATCH):
        vectors = embeddings(dict.fromkeys(embeddings.features, ids))
        torch.stack([v.sum() for v in vectors.values()]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def stages(tables: int, kind: str, folder: str) -> Iterator[tuple[str, int, int]]:
    """(stage, bytes by which the process has grown, bytes that the collection counts)"""
    other = made(1, kind, folder + "/other")
    train(other, hb.optim.Adam(other.parameters()))
    del other
    before = resident()
    embeddings = made(tables, kind, folder + "/this")

    def now(stage: str) -> tuple[str, int, int]:
        counted = sum(table["total"] for table in embeddings.memory().values())
        return stage, resident() - before, counted

    yield now("made")
    optimizer = hb.optim.Adam(embeddings.parameters())
    yield now("with an optimizer")
    train(embeddings, optimizer)
    yield now("trained")
    if kind in ("dynamic", "dynamic host"):
        for name in embeddings.tables:
            embeddings.erase(name, torch.arange(ROWS // 2))
        yield now("half erased")
        for name in embeddings.tables:
            embeddings.table(name).forget_rows()
        yield now("forgotten")


def told_stages(tables: int, kind: str, folder: str) -> list[tuple[str, int, int]]:
    return list(stages(tables, kind, folder))


def around_large_batches() -> list[int]:
    """Return bytes of the process before a model is made, when it is trained, and when it is gone."""
    ids, found = torch.arange(ROWS).repeat(10), list[int]()
    for _ in range(2):  # what torch takes once is there the second time
        found = [resident()]
        embeddings = made(100, "static", "")
        vectors = embeddings(dict.fromkeys(embeddings.features, ids))
        torch.stack([v.sum() for v in vectors.values()]).sum().backward()
        del vectors
        found.append(resident())
        del embeddings
        found.append(resident())
    return found


if __name__ == "__main__":
    for stage, grown, counted in stages(int(sys.argv[1]), sys.argv[2], sys.argv[3]):
        print(json.dumps({"stage": stage, "grown": grown, "counted": counted}), flush=True)
