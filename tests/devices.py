"""Where tests of GPU kernels run: on the CUDA device, or in Triton's interpreter without one."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

# A kernel computes values that it masks out later; numpy, which interprets it, warns of them.
_OF_THE_INTERPRETER = pytest.mark.filterwarnings(
    "ignore:(overflow|underflow|invalid value|divide by zero) encountered:RuntimeWarning"
)


def interpret_kernels() -> None:
    """Without a CUDA device; before any kernel's module is imported."""
    if DEVICE.type == "cuda" or not importlib.util.find_spec("triton"):
        return
    os.environ["TRITON_INTERPRET"] = "1"
    import quick_interpreter

    quick_interpreter.install()


def mark_interpreted(items: Iterable[pytest.Item], folder: Path) -> None:
    """Lets numpy's warnings pass in the tests of a folder."""
    for item in items:
        if folder in item.path.parents:
            item.add_marker(_OF_THE_INTERPRETER)


@contextlib.contextmanager
def only_listed() -> Iterator[None]:
    """Whatever is launched inside must be in the list of what is compiled and looked at."""
    from hotbed.ops.gpu.variants import all_variants, launched

    with launched() as keys:
        yield
    unlisted = keys - {variant.key for variant in all_variants()}
    assert not unlisted, f"launched but not listed by variants(): {sorted(unlisted)}"
