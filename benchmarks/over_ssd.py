"""Tables of which a part of the rows lies on an SSD."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import hotbed as hb

IN_MEMORY = 0.75
"""Share of the rows for which there is room in memory."""
BESIDE = 400_000_000
"""Bytes that are taken beside rows: what finds those on the SSD, buffers, batches that are known ahead."""
SLOT = 60
"""Bytes that a row in memory takes beside its own."""


def add_options(parser: argparse.ArgumentParser, over_ssd: str) -> None:
    """Add ``--folder`` and ``--over-ssd``, of which `over_ssd` says what it does."""
    parser.add_argument(
        "--folder", type=Path, help="of the disk to use (%(default)s: a temporary one)"
    )
    parser.add_argument("--over-ssd", action="store_true", help=over_ssd)


def storage_for(rows: int, record_bytes: int, folder: Path) -> hb.Storage:
    """Return one with room in memory for three quarters of so many rows."""
    return hb.Storage(
        host=int(rows * IN_MEMORY * (record_bytes + SLOT)) + BESIDE, ssd=folder / "rows"
    )


def fill(tables: hb.EmbeddingCollection) -> None:
    """Store all rows of static tables."""
    for name, table in tables.tables.items():
        assert table.rows is not None
        for ids in torch.arange(table.rows).split(50_000):
            tables.assign(name, ids, torch.randn(len(ids), table.dim))
