"""`device=` of tables: what it may name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hotbed as hb

TABLES = [hb.Table("item", 16, 10)]
MADE: dict[str, Callable[[Any], nn.Module]] = {
    "Embedding": lambda device: hb.Embedding(10, 4, device=device),
    "EmbeddingBag": lambda device: hb.EmbeddingBag(10, 4, device=device),
    "EmbeddingCollection": lambda device: hb.EmbeddingCollection(TABLES, device=device),
    "DLRM": lambda device: hb.models.DLRM(TABLES, dim=16, device=device),
    "WideDeep": lambda device: hb.models.WideDeep(TABLES, device=device),
}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize(
    ("device", "says"),
    [
        (
            "cuda:99",
            r"device='cuda:99' is not there: torch\.cuda\.device_count\(\) is \d+ \(.*CUDA",
        ),
        (torch.device("cuda", 99), "device='cuda:99' is not there"),
        ("cudda", "device='cudda' names no device; give"),
        (3.5, "device=3.5 names no device"),
        ("mps", "device='mps' cannot be honoured"),
    ],
)
def test_a_device_that_is_not_there_is_refused(made: str, device: Any, says: str) -> None:
    with pytest.raises(hb.TableError, match=says):
        MADE[made](device)


@pytest.mark.parametrize("made", MADE)
def test_the_cpu_may_be_named(made: str) -> None:
    for device in (None, "cpu", torch.device("cpu")):
        assert all(p.device.type == "cpu" for p in MADE[made](device).parameters())
