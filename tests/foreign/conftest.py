"""Undoes what other libraries set for the whole process when they are imported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def anomalies_are_not_looked_for() -> Iterator[None]:
    """One of them has torch look for anomalies in each backward from then on."""
    yield
    torch.autograd.set_detect_anomaly(False)
