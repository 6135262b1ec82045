"""Where GPU kernels are tested: on a CUDA device, or in Triton's interpreter without one.

TRITON_INTERPRET counts when a kernel's module is imported, so it is set before any test is.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from devices import DEVICE, interpret_kernels, mark_interpreted, only_listed

interpret_kernels()

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_interpreted(items, Path(__file__).parent)


@pytest.fixture
def device() -> torch.device:
    """Where the kernels under test run."""
    return DEVICE


@pytest.fixture(autouse=True)
def only_listed_variants() -> Iterator[None]:
    """Whatever a test launches must be in the list of what is compiled and looked at."""
    with only_listed():
        yield


@pytest.fixture
def kernels_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets modules choose kernels for CPU tensors too, where there is no CUDA device."""
    from hotbed import devices

    if DEVICE.type == "cpu":
        monkeypatch.setattr(devices, "KINDS", ("cpu",))
