"""The weight of a converted layer, read as one matrix."""

from __future__ import annotations

import copy
import operator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conversion.plain_models import (
    DIM,
    ROWS,
    batch_of,
    click_ids,
    made,
    storage,
)
from torch import Tensor, nn

import hotbed as hb


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.item(ids), self.item.weight)


def test_gradients_go_through_the_weight_in_memory() -> None:
    plain, model = made(Tied), made(Tied)
    hb.convert(model, min_rows=100)
    losses = []
    for each, optimizer in (
        (plain, torch.optim.Adam(plain.parameters(), lr=0.01)),
        (model, hb.optim.Adam(model.parameters(), lr=0.01, untouched="exact")),
    ):
        losses.append([])
        for number in range(5):
            ids = batch_of(number)[0][:, 0].long()
            optimizer.zero_grad()
            loss = F.cross_entropy(each(ids), ids)
            loss.backward()
            optimizer.step()
            losses[-1].append(float(loss.detach()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_the_weight_in_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = made(), made()
    hb.convert(model, min_rows=100, storage=storage(tmp_path), inputs=click_ids)
    layer, weight = model.embs["C0"], plain.embs["C0"].weight
    optimizer = hb.optim.SGD(
        [{"params": [layer.weight], "lr": 0.5}, {"params": [model.bag.weight]}], lr=0.1
    )
    matrix = layer.weight
    assert isinstance(matrix, nn.Parameter) and matrix.shape == weight.shape and len(matrix) == ROWS
    assert matrix.requires_grad and matrix.device.type == "cpu" and "lie in tiers" in repr(matrix)
    with torch.no_grad():
        assert torch.equal(matrix[3], weight[3]) and torch.equal(
            matrix @ matrix[5], weight @ weight[5]
        )
        assert len(list(matrix)) == ROWS and torch.equal(next(iter(matrix)), weight[0])
        for write in (
            lambda: matrix.zero_(),
            lambda: nn.init.normal_(matrix),
            lambda: matrix.__setitem__(0, 1.0),
            lambda: matrix.data,
            lambda: matrix.copy_(weight),
            lambda: torch.add(weight, 1, out=matrix),
            lambda: operator.iadd(matrix, 1),
            lambda: operator.imul(matrix[0], 2),
            lambda: matrix[0].fill_(0),
            lambda: matrix.detach().zero_(),
            lambda: nn.init.constant_(matrix[1:], 1.0),
            lambda: matrix.t().mul_(2),
            lambda: matrix.view(-1)[:3].zero_(),
            lambda: matrix.unbind()[1].add_(1),
            lambda: matrix[3].numpy(),
        ):
            with pytest.raises(hb.TableError, match="'embs.C0': its rows lie in tiers"):
                write()
        monkeypatch.setattr("hotbed.table.matrix.MOST_BYTES", 100)
        with pytest.raises(hb.TableError, match="takes 64,000 bytes, more than 100"):
            matrix.sum()
        monkeypatch.undo()
        assert torch.equal(matrix[3].clone().zero_(), torch.zeros(DIM))
        assert torch.equal(copy.deepcopy(matrix), weight)
    layer.weight.requires_grad_(False)
    assert not model.embs["C0"].weight.requires_grad and not layer(torch.tensor([3])).requires_grad
    layer.weight.requires_grad = True
    seen: list[int] = []
    layer.weight.register_hook(lambda grad: seen.append(1))
    with pytest.raises(hb.TableError, match="no gradient can go through its whole weight.*skip="):
        F.linear(torch.ones(1, DIM), matrix)
    layer(torch.tensor([3])).sum().backward()
    assert matrix.grad is not None and seen == [1]
    optimizer.step()
    with torch.no_grad():
        assert torch.equal(layer.weight[3], weight[3] - 0.5)
        layer.weight = weight
        assert torch.equal(layer.weight[3], weight[3])
    with pytest.raises(hb.OptimizerError, match="is in a torch.optim.SGD"):
        torch.optim.SGD([layer.weight], lr=0.1).step()
