"""Ten minutes of training in three tiers: memory stays flat and the space on disk bounded. Only under
`make soak`; HOTBED_SOAK_SECONDS sets another length."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from effort import SOAK
from resolve.small_logs import small_logs
from torch import Tensor

import hotbed as hb

SECONDS = float(os.environ.get("HOTBED_SOAK_SECONDS", "600"))
WARM_UP = 0.2
"""Of the time: planes, buffers and indices reach their full size."""
REPORTS = 40
RSS_BOUND = 48 << 20
"""Bytes by which the resident memory may exceed what it was after warm-up."""
DIM = 32
ROWS = 400_000  # of the static table; of the dynamic one, ids in circulation
BATCH = 4096
RATIO = 1.3
SEGMENT = 4 << 20  # so that hundreds are emptied and removed
# A record is weights, Adagrad's sums and a header of 16 bytes; a block has one of 32.
ROWS_A_BLOCK = (4096 - 32) // (2 * 4 * DIM + 16)
# Beyond the ratio, of the one store there is: what compaction keeps in hand, and files.
SLACK = 6 * SEGMENT + (1 << 20)


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def on_disk(folder: Path) -> int:
    """Bytes of the log's files. One may go while they are counted."""
    total = 0
    for path in folder.rglob("*.rows"):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def batch(generator: torch.Generator, step: int) -> dict[str, Tensor]:
    """Popular ids and rare ones; which are popular changes slowly."""

    def ids() -> Tensor:
        drawn = (ROWS * torch.rand(BATCH, generator=generator) ** 3).long()
        return (drawn + 17 * step) % ROWS

    return {"item": ids(), "user": ids() * 1_000_003}


@pytest.mark.skipif(not SOAK, reason="takes ten minutes: runs under make soak (HOTBED_SOAK=1)")
def test_memory_stays_flat_and_space_bounded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = hb.Storage(device="24MB", host="64MB", ssd=tmp_path, space_ratio=RATIO)
    with small_logs(segment_bytes=SEGMENT):
        embeddings = hb.EmbeddingCollection(
            [hb.Table("item", DIM, ROWS), hb.Table("user", DIM)], seed=0, storage=storage
        )
    optimizer = hb.optim.Adagrad(embeddings.parameters(), lr=0.05)
    everything = torch.arange(ROWS)
    for ids in everything.split(50_000):
        values = torch.zeros(len(ids), DIM)
        embeddings.assign("item", ids, values)
        embeddings.assign("user", ids * 1_000_003, values)
    assert embeddings.count() == 2 * ROWS
    live = -(-2 * ROWS // ROWS_A_BLOCK) * 4096

    began = time.monotonic()
    flat_from, next_report = began + WARM_UP * SECONDS, began
    base = most = fullest = 0
    generator = torch.Generator().manual_seed(0)

    def data():
        step = 0
        while time.monotonic() < began + SECONDS:
            yield batch(generator, step)
            step += 1

    for step, inputs in enumerate(hb.lookahead(data(), embeddings)):
        vectors = embeddings(inputs)
        loss = sum((v - 1).square().sum() for v in vectors.values())
        assert isinstance(loss, Tensor) and bool(torch.isfinite(loss))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        now = time.monotonic()
        if step % 16 and now < next_report:
            continue
        rss, disk = resident(), on_disk(tmp_path)
        fullest = max(fullest, disk)
        if now >= flat_from:
            base = base or rss
            most = max(most, rss)
        if now >= next_report:
            next_report += SECONDS / REPORTS
            counted = embeddings.stats()
            with capsys.disabled():
                print(
                    f"\n{now - began:5.0f} s, {step:,} steps: loss {loss.item():,.0f}, "
                    f"{rss / 1e6:.0f} MB resident, {disk / 1e6:.0f} MB on disk "
                    f"({disk / live:.2f} x), {counted['hit_rate']:.0%} hits",
                    end="",
                    flush=True,
                )
        assert disk <= RATIO * live + SLACK
        assert embeddings.count() == 2 * ROWS
    with capsys.disabled():
        print(
            f"\nmost resident {most / 1e6:.0f} MB against {base / 1e6:.0f} MB after warm-up; "
            f"most on disk {fullest / 1e6:.0f} MB for {live / 1e6:.0f} MB of live rows"
        )
    assert embeddings.stats()["rows_written_back"] > 5 * ROWS or SECONDS < 300
    assert most <= base + RSS_BOUND
