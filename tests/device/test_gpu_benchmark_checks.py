"""What the GPU benchmark checks before it trains tables on a device."""

from __future__ import annotations

import pytest
from devices import DEVICE

from benchmarks import gpu_table_checks


def test_tables_are_checked_against_the_core():
    found = gpu_table_checks.check(DEVICE.type)
    assert len(found) == 2 and all(error <= gpu_table_checks.LIMIT for error in found.values())


def test_a_difference_is_told(monkeypatch):
    monkeypatch.setattr(gpu_table_checks, "LIMIT", -1.0)
    with pytest.raises(AssertionError, match="rows are off by"):
        gpu_table_checks.check(DEVICE.type)
