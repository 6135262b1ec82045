"""untouched="lazy" Adam against torch.optim.SparseAdam, eps and all."""

from __future__ import annotations

import pytest
import torch

import hotbed as hb


@pytest.mark.parametrize("eps", [1e-8, 1e-3])
def test_lazy_adam_is_sparse_adam(eps: float) -> None:
    torch.manual_seed(0)
    theirs = torch.nn.EmbeddingBag(50, 6, mode="sum", sparse=True, dtype=torch.float64)
    ours = hb.EmbeddingBag.from_pretrained(theirs.weight.detach(), freeze=False, mode="sum")
    optimizers = (
        torch.optim.SparseAdam(theirs.parameters(), lr=0.05, eps=eps),
        hb.optim.Adam(ours.parameters(), lr=0.05, eps=eps),
    )
    for _ in range(30):
        ids = torch.randint(0, 50, (7, 3))
        for layer, optimizer in zip((theirs, ours), optimizers, strict=True):
            optimizer.zero_grad()
            (layer(ids) ** 2).sum().backward()
            optimizer.step()
    torch.testing.assert_close(ours.weight.detach(), theirs.weight.detach(), rtol=0, atol=1e-12)
