"""Where GPU kernels are tested: on a CUDA device, or in Triton's interpreter without one.

TRITON_INTERPRET counts when a kernel's module is imported, so it is set before any test is.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from devices import DEVICE

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("triton"):
        import quick_interpreter

        quick_interpreter.install()


collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]


# A kernel computes values that it masks out later; numpy, which interprets it, warns of them.
_OF_THE_INTERPRETER = pytest.mark.filterwarnings(
    "ignore:(overflow|underflow|invalid value|divide by zero) encountered:RuntimeWarning"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(_OF_THE_INTERPRETER)


@pytest.fixture
def device() -> torch.device:
    """Where the kernels under test run."""
    return DEVICE


@pytest.fixture(autouse=True)
def only_listed_variants() -> Iterator[None]:
    """Whatever a test launches must be in the list of what is compiled and looked at."""
    from hotbed.ops.gpu.variants import all_variants, launched

    with launched() as keys:
        yield
    unlisted = keys - {variant.key for variant in all_variants()}
    assert not unlisted, f"launched but not listed by variants(): {sorted(unlisted)}"


@pytest.fixture
def kernels_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets modules choose kernels for CPU tensors too, where there is no CUDA device."""
    from hotbed.ops.gpu import variants

    if DEVICE.type == "cpu":
        monkeypatch.setattr(variants, "DEVICES", ("cpu",))
