"""Every place that rows can lie in, for tests of what must not depend on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hotbed as hb

PLACES = ("memory", "budget", "host", "ssd", "three")
"""`host`: a device over the host's memory, the CPU standing in; `three`: with an SSD below."""

AROUND = 160_000
"""Bytes for the rows that compute: a few hundred."""
ABOVE_SSD = 450_000
"""Bytes of a host above an SSD, whose buffers take nearly all of it."""

TIGHT = 190_000
"""With which some thirty rows of 3,600 bytes compute."""


def storage_of(place: str, folder: Path) -> hb.Storage | None:
    match place:
        case "memory":
            return None
        case "budget":
            return hb.Storage(host="64MB")
        case "host":
            return hb.Storage(device=AROUND, host="64MB")
        case "ssd":
            return hb.Storage(host=ABOVE_SSD + AROUND, ssd=folder / "rows")
        case "tight":
            return hb.Storage(host=ABOVE_SSD + TIGHT, ssd=folder / "rows")
        case "three":
            return hb.Storage(device=AROUND, host=ABOVE_SSD, ssd=folder / "rows")
    raise ValueError(place)


def collection(place: str, folder: Path, *tables: hb.Table, **options: Any) -> Any:
    return hb.EmbeddingCollection(
        list(tables), seed=0, storage=storage_of(place, folder), **options
    )


def step(model: Any, optimizer: Any, batch: dict[str, torch.Tensor]) -> None:
    """One whose gradients are the vectors' sines, so that rows go different ways."""
    sum(v.sin().sum() for v in model(batch).values()).backward()
    optimizer.step()
    optimizer.zero_grad()


Make = Callable[..., Any]
