"""Fixtures of all tests: the real data, torch's thread count, hypothesis profiles."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

# Read by OpenMP when torch is loaded, here and in child processes. Its threads else spin while they wait,
# and the workers of pytest-xdist share the processors.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from effort import SOAK, examples
from hypothesis import HealthCheck, settings

# Timing of an example depends on the machine's load, so neither deadlines nor slow-data checks.
settings.register_profile(
    "hotbed",
    max_examples=examples(50),
    deadline=None,
    derandomize=not SOAK,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("hotbed")

# Kernels are interpreted where torch sees no CUDA device. Triton reads it when it is imported, which other
# libraries may do before a test.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

MANY = 100
"""Tests, among which one surely makes an optimizer."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Spare the garbage collector all modules, which it else looks through whenever a test calls it."""
    if len(session.items) > MANY:
        importlib.import_module("torch._dynamo")  # as the first optimizer of a process does
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else bindings report, at the end of the process, that functions of modules leak


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data: `$HOTBED_SHARED/data`, else `../shared/data` beside the checkout."""
    root = os.environ.get("HOTBED_SHARED")
    shared = Path(root) if root else Path(__file__).resolve().parents[2] / "shared"
    return real_data(shared / "data")


def real_data(path: Path) -> Path:
    """The path, if it is there. A test without real data is skipped, but fails where HOTBED_SHARED
    promises them."""
    if not path.exists():
        missing = f"no real data: {path} is not there"
        if os.environ.get("HOTBED_SHARED"):
            pytest.fail(f"{missing}; HOTBED_SHARED is to name the folder that holds data/criteo")
        pytest.skip(f"{missing}; set HOTBED_SHARED to the folder that holds data/criteo")
    return path


@pytest.fixture(scope="session")
def criteo_log(shared_data: Path) -> Path:
    """137,139 raw rows of the Criteo log, in time order."""
    return real_data(shared_data / "criteo" / "train.tsv.gz")


@pytest.fixture(scope="session")
def criteo_full_ids(shared_data: Path) -> Path:
    """20,000 rows of the same log as integer ids in the full data set's id space."""
    return real_data(shared_data / "criteo_full_ids" / "rows.csv.gz")


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """`set_threads(n)` sets torch's (and so Hotbed's) thread count until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def pretend_memory() -> Iterator[Callable[[int], None]]:
    """`pretend_memory(bytes)`: what the machine can give, until the test ends."""
    from hotbed import _core

    yield _core.pretend_memory
    _core.pretend_memory(0)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """torch's default generator starts every test from the same state."""
    torch.manual_seed(0)
