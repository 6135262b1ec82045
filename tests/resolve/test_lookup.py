"""The lookup path where modules do not show it: complaints and fused updates of optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hotbed as hb
from hotbed.group.pool import pool


def test_a_complaint_is_raised_once_at_the_next_training_forward() -> None:
    layer = hb.Embedding(4, 2)
    layer._live.complaint = hb.OptimizerError("left behind")
    with torch.no_grad():
        layer(torch.tensor([1]))
    layer.eval()(torch.tensor([1]))
    layer.train()
    with pytest.raises(hb.OptimizerError, match="left behind"):
        layer(torch.tensor([1]))
    layer(torch.tensor([1]))


def test_a_fused_update_takes_the_gradient() -> None:
    layer = hb.Embedding(None, 2)
    optimizer = hb.optim.SGD(layer.parameters(), lr=1.0, fused=True)
    with torch.no_grad():
        before = layer(torch.tensor([7, 9, 8]))
    layer(torch.tensor([7, 9, 7])).sum().backward()
    assert layer.weight.grad is None
    optimizer.step()
    with torch.no_grad():
        moved = layer(torch.tensor([7, 9, 8])) - before
    assert torch.allclose(moved, torch.tensor([[-2.0, -2.0], [-1.0, -1.0], [0.0, 0.0]]))


@pytest.mark.parametrize("storage", [None, hb.Storage(device="1MB", host="1MB")])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_backward_is_prepared_for_only_where_one_may_come(
    frozen: bool, storage: hb.Storage | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = [hb.Table("a", 2, 4), hb.Table("b", 2, 4)]
    layer = hb.EmbeddingCollection(tables, storage=storage)
    layer.parameter("a").requires_grad_(False)
    layer.parameter("b").requires_grad_(not frozen)
    wanted = []

    def pooled(resolved: Any, handles: Any) -> Any:
        wanted.append(resolved.wants_gradient)
        return pool(resolved, handles)

    monkeypatch.setattr("hotbed.group.lookup.pool", pooled)
    batch = {name: torch.tensor([1]) for name in "ab"}
    layer(batch)
    with torch.no_grad():
        layer(batch)
    assert wanted == [not frozen, False]


def test_gradient_rows_of_a_backward_are_known_to_be_distinct_and_finite() -> None:
    layer = hb.Embedding(4, 2)
    (layer(torch.tensor([1, 3, 1])) * torch.tensor([2.0, 1.0])).sum().backward()
    (rows,) = layer.weight.waiting.shares
    assert rows.slots.tolist() == [1, 3] and rows.rows.tolist() == [[4.0, 2.0], [2.0, 1.0]]
    assert (rows.distinct, rows.finite) == (True, True)
    grad = layer.weight.grad
    assert grad is not None and grad._values().data_ptr() == rows.rows.data_ptr()  # not copied
    layer.zero_grad()
    (layer(torch.tensor([1])) * float("inf")).sum().backward()
    assert not layer.weight.waiting.shares[0].finite
