"""Converted models, and layers that were taken over, on ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conversion.plain_models import batch_of, click_ids, made, train
from dist.worlds import run
from torch import nn

import hotbed as hb


def nothing(x: torch.Tensor) -> dict[str, object]:
    return {}


def trained(rank: int, world: int, fused: bool) -> None:
    plain, model = made(), made()
    train(plain, torch.optim.Adam(plain.parameters(), lr=0.01), range(6))
    hb.convert(model, min_rows=100, inputs=click_ids if fused else nothing)
    hb.distribute(model)
    optimizer = hb.optim.Adam(model.parameters(), lr=0.01, untouched="exact")
    own = slice(16 * rank, 16 * rank + 16)
    for number in range(6):
        x, y = batch_of(number)
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(model(x[own]), y[own]).backward()
        optimizer.step()
    for path in ("embs.C0", "bag"):
        layer, expected = model.get_submodule(path), plain.get_submodule(path).weight
        assert layer.weight.shape == expected.shape and layer.weight.requires_grad
        with torch.no_grad():
            torch.testing.assert_close(layer.weight[:50], expected[:50], rtol=0, atol=5e-6)
        with pytest.raises(hb.TableError, match="no gradient can go through its whole weight"):
            layer.weight.sum()
    with pytest.raises(hb.TableError, match="'embs.C0': ranks share its table"):
        hb.unconvert(model)


@pytest.mark.process
@pytest.mark.parametrize("fused", [False, True])
def test_a_converted_model_on_ranks(fused: bool) -> None:
    run(2, trained, fused)


def taken_over(rank: int, world: int) -> None:
    torch.manual_seed(0)
    layer = nn.Embedding(20, 4)
    collection = hb.EmbeddingCollection.from_layers([layer])
    hb.distribute(nn.ModuleList([collection]))
    assert torch.equal(collection.lookup("0", torch.arange(20)), layer.weight)


@pytest.mark.process
def test_weights_of_layers_survive_distribution() -> None:
    run(2, taken_over)
