"""Gradients whose slots are no ids say so where somebody asks for ids."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dist.worlds import run

import hotbed as hb


def refuses(layer: hb.Embedding) -> None:
    layer(torch.tensor([1, 4, 1])).sum().backward()
    grad = layer.weight.grad
    for ask in (
        lambda: grad.to_dense(),
        lambda: grad[1],
        lambda: torch.index_select(grad, 0, torch.tensor([1])),
    ):
        with pytest.raises(
            hb.TableError, match=r"slots, which are no ids.*grad.coalesce\(\).values"
        ):
            ask()
    assert grad.coalesce().values().tolist() == [[2.0] * 3, [1.0] * 3]


def test_rows_that_come_and_go() -> None:
    refuses(hb.Embedding(None, 3))


def test_rows_in_tiers(tmp_path: Path) -> None:
    storage = hb.Storage(host="4MB", ssd=tmp_path)
    model = hb.EmbeddingCollection([hb.Table("item", 3, 50, "none")], storage=storage)
    model({"item": torch.tensor([1, 4, 1])})["item"].sum().backward()
    with pytest.raises(hb.TableError, match="to_dense of the gradient.*slots, which are no ids"):
        model.parameter("item").grad.to_dense()


def test_rows_whose_slots_are_ids() -> None:
    layer = hb.Embedding(50, 3)
    layer(torch.tensor([1, 4, 1])).sum().backward()
    dense = layer.weight.grad.to_dense()
    assert dense.shape == (50, 3)
    assert dense[:, 0].nonzero().flatten().tolist() == [1, 4]
    assert layer.weight.grad.coalesce()[4].tolist() == [1.0] * 3


def shared(rank: int, world: int) -> None:
    layer = hb.Embedding(50, 3)
    hb.distribute(layer)
    refuses(layer)


@pytest.mark.process
def test_rows_that_ranks_share() -> None:
    run(2, shared)
