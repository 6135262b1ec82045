"""The lookup path where modules do not show it: complaints and fused updates of optimizers."""

from __future__ import annotations

import pytest
import torch

import hotbed as hb


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
