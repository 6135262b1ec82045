"""Every order in which people write forward, backward, step and zero_grad gives rows back."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from resolve.tiered_models import Model, adagrad, assert_same_rows, batches, pinned, storage

import hotbed as hb

SIZE = 100
STEPS = 30


def in_order(
    order: str, model: Model, optimizer: torch.optim.Optimizer, batch: dict[str, Any]
) -> float:
    """One step; the letters are forward, backward, step, zero_grad of the optimizer and of the model,
    capital ones with set_to_none=False."""
    loss = None
    for call in order:
        if call == "f":
            loss = model(batch)
        elif call == "b":
            loss.backward()
        elif call == "s":
            optimizer.step()
        elif call in "zZ":
            optimizer.zero_grad(set_to_none=call == "z")
        elif call in "mM":
            model.zero_grad(set_to_none=call == "m")
    return float(loss.detach())


ORDERS = ["fbsz", "fzbs", "zfbs", "fbsm", "fmbs", "mfbs"]
ORDERS += ["fbsZ", "fZbs", "Zfbs", "fbsM", "fMbs", "Mfbs"]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_rows_are_given_back(order: str, ahead: bool) -> None:
    data = batches(STEPS, size=SIZE)
    models = [Model(), Model(storage(66_000 if ahead else 44_000))]
    optimizers = [adagrad(model) for model in models]
    most = 0
    expected = [in_order(order, models[0], optimizers[0], batch) for batch in data]
    loader = hb.lookahead(data, models[1], depth=1) if ahead else data
    for batch, loss in zip(loader, expected, strict=True):
        assert in_order(order, models[1], optimizers[1], batch) == loss
        most = max(most, pinned(models[1]))
    # That of the step, that of the step before, and that which look-ahead has brought up.
    assert most <= (3 if ahead else 2) * 2 * SIZE
    optimizers[1].zero_grad()
    assert_same_rows(models[1], models[0])
    assert pinned(models[1]) == 0


RUNS = {
    "two batches a step": ["fzb", "fbs"],
    "batches whose loss or step nobody wants": ["f", "fzb", "fzbs"],
}


@pytest.mark.parametrize("run", RUNS)
def test_rows_are_given_back_where_calls_are_left_out(run: str) -> None:
    models = [Model(), Model(storage(66_000))]
    optimizers = [adagrad(model) for model in models]
    for batch, order in zip(batches(STEPS, size=SIZE), itertools.cycle(RUNS[run])):
        losses = [in_order(order, m, o, batch) for m, o in zip(models, optimizers, strict=True)]
        assert losses[0] == losses[1]
        assert pinned(models[1]) <= 3 * 2 * SIZE
    assert_same_rows(models[1], models[0])
