"""What the GPU benchmark checks before it trains tables on a device."""

from __future__ import annotations

import pytest
from devices import DEVICE

from benchmarks import gpu_models


def test_tables_are_checked_against_the_core():
    found = gpu_models.check(DEVICE.type, True)
    assert len(found) == 2 and all(error <= gpu_models.LIMIT for error in found.values())


def test_a_difference_is_told(monkeypatch):
    monkeypatch.setattr(gpu_models, "LIMIT", -1.0)
    with pytest.raises(AssertionError, match="rows are off by"):
        gpu_models.check(DEVICE.type, True)
