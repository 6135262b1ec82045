"""Tables trained on a device against the same ones trained by the core, before anything is timed."""

from __future__ import annotations

import torch
from torch import Tensor

import hotbed as hb

LIMIT = 1e-5
"""The largest difference, over the largest value, that is taken for rounding."""


def check(device: str) -> dict[str, float]:
    """Trains a small collection there and by the core: the largest difference over the largest value.

    Raises:
        AssertionError: it is more than LIMIT.
    """
    found = {}
    for name, storage in (
        ("whole tables on the device", None),
        ("tables in tiers on the device", hb.Storage(device=60_000, host="4MB")),
    ):
        here, there = (_trained_rows(where, storage) for where in (None, device))
        error = max(float((here[n] - there[n]).abs().max() / here[n].abs().max()) for n in here)
        if not error <= LIMIT:
            raise AssertionError(f"{name}: rows are off by {error:.2g} of the largest.")
        found[name] = error
    return found


def _trained_rows(device: str | None, storage: hb.Storage | None) -> dict[str, Tensor]:
    """The rows of two tables after four steps on a device, or by the core."""
    rows, dim, batch = 200, 8, 16
    tables = [hb.Table("a", dim, rows, "sum"), hb.Table("b", dim, rows, "mean")]
    module = hb.EmbeddingCollection(tables, seed=0, storage=storage)
    if device is not None:
        _place(module, device)
    optimizer = hb.optim.Adagrad(module.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        ids = {name: torch.randint(0, rows, (batch, 2), generator=generator) for name in "ab"}
        target = torch.randn(batch, dim, generator=generator)
        vectors = module(ids)
        target = target.to(vectors["a"].device)
        (vectors["a"] * target + vectors["b"] * target.flip(0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: module.rows(name).values.cpu() for name in "ab"}


def _place(module: hb.EmbeddingCollection, device: str) -> None:
    """Moves tables; the CPU stands in for a device where kernels are interpreted."""
    if device != "cpu":
        module.to(device)
        return
    from hotbed import devices
    from hotbed.places import moves

    before, devices.KINDS = devices.KINDS, ("cpu",)
    try:
        for name in module.tables:
            moves.move(module.table(name), torch.device("cpu"))
    finally:
        devices.KINDS = before
