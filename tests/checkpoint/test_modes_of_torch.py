"""Modes of torch in which a checkpoint is saved or loaded concern other tensors than its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from checkpoint.small_models import made, train

import hotbed as hb
from hotbed.checkpoint.inspect import differences, verified


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("place", ["memory", "ssd"])
@pytest.mark.parametrize(
    "mode",
    [lambda: torch.device("meta"), default_dtype, torch.no_grad, torch.inference_mode],
    ids=["default device", "default dtype", "no_grad", "inference_mode"],
)
def test_training_goes_on_with_the_same_bits(
    tmp_path: Path, place: str, mode: Callable[[], AbstractContextManager[object]]
) -> None:
    model, optimizer = made(place, tmp_path / "a", "Adam")
    train(model, optimizer, range(3))
    with mode():
        hb.save(tmp_path / "run", model, optimizer, step=3)
    losses = train(model, optimizer, range(3, 6))
    other, its_optimizer = made(place, tmp_path / "b", "Adam")
    with mode():
        hb.load(tmp_path / "run", other, its_optimizer)
        assert not any(fault for _, _, fault in verified(str(tmp_path / "run")))
        assert not any(found.changed for found in differences(*[str(tmp_path / "run")] * 2))
        assert hb.checkpoint.contains(tmp_path / "run", "embeddings.user", [-5]).tolist() == [False]
    assert train(other, its_optimizer, range(3, 6)) == losses
