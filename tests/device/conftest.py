"""Tables on a device: a CUDA device, or the CPU in its place, with kernels interpreted."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from devices import DEVICE, interpret_kernels, mark_interpreted, only_listed

interpret_kernels()

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_interpreted(items, Path(__file__).parent)


@pytest.fixture(autouse=True)
def only_listed_variants() -> Iterator[None]:
    """Whatever a test launches must be in the list of what is compiled and looked at."""
    with only_listed():
        yield


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a CUDA device, the CPU is taken for one."""
    from hotbed import devices

    if DEVICE.type == "cpu":
        monkeypatch.setattr(devices, "KINDS", ("cpu",))
