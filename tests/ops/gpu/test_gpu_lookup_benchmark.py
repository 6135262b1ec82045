"""The scenario `lookup` of the GPU benchmark, as far as it goes without a device."""

import pytest
import torch
from devices import DEVICE

from benchmarks import gpu_lookup
from benchmarks.gpu_roof import Roof
from benchmarks.gpu_scenarios import Run
from benchmarks.report import Report


def test_kernels_are_checked_before_they_are_timed(monkeypatch):
    found = gpu_lookup.check(DEVICE.type, True)
    assert set(found) == {"lookup forward", "lookup step, sgd", "lookup step, adam"}
    assert max(found.values()) <= gpu_lookup.LIMIT
    monkeypatch.setattr(gpu_lookup, "LIMIT", -1.0)
    with pytest.raises(AssertionError, match="lookup forward is off by"):
        gpu_lookup.check(DEVICE.type, True)


def test_contenders_do_the_same_step():
    """Hotbed's way and torch's end at the same weights."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(20, gpu_lookup.DIM, generator=generator).to(DEVICE) for _ in range(2)]
    slots = [
        [torch.randint(0, 20, (9,), generator=generator).to(DEVICE) for _ in weights]
        for _ in range(2)
    ]
    gradient = torch.randn(9, 2 * gpu_lookup.DIM, generator=generator).to(DEVICE)
    for optimizer in gpu_lookup.OPTIMIZERS:
        hotbed = gpu_lookup._Hotbed(weights, slots, gradient, optimizer)
        rival = gpu_lookup._Torch(weights, slots, gradient, optimizer)
        for way in (None, hotbed.indices):
            hotbed.step(way)
            rival.step()
        for table, bag in zip(hotbed.lookup.tables, rival.bags, strict=True):
            torch.testing.assert_close(table.weights, bag.weight.detach(), rtol=0, atol=1e-5)
        for mine, theirs in zip(hotbed.forward().outputs, rival.forward(), strict=True):  # type: ignore[attr-defined]
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="measures a CUDA device")
def test_rows_of_the_report(monkeypatch):
    monkeypatch.setattr(gpu_lookup, "QUICK_ROWS", 500)
    monkeypatch.setattr(gpu_lookup, "QUICK_BATCH", 64)
    run = Run(Report("gpu", True), DEVICE, roof=Roof(1e12))
    gpu_lookup.measure(run)
    assert {row["name"] for row in run.report.rows} == {
        "hotbed", "hotbed, index before", "hotbed, not fused", "torch",
    }  # fmt: skip
    assert all(row["floor_ms"] > 0 for row in run.report.rows)
