"""Errors of one rank's loader in the middle of `hotbed.train.fit`: the others hear of them, and all go on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from dist.worlds import run

import hotbed as hb
from hotbed.dist import PeerError

BATCHES, FAILS = 5, 3
WRAPPED: dict[str, Callable[[Iterable[Any], Any], Iterable[Any]]] = {
    "plain": lambda loader, model: loader,
    "lookahead": lambda loader, model: hb.lookahead(loader, model, depth=1),
    "even": lambda loader, model: hb.dist.even(loader),
    "slices": lambda loader, model: hb.dist.slices(loader),
}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = hb.EmbeddingCollection([hb.Table("item", 4)], seed=0)
        self.top = torch.nn.Linear(4, 1)

    def forward(self, batch: dict[str, Any]) -> Any:
        return self.top(self.embeddings({"item": batch["item"]})["item"])[:, 0]


class Loader:
    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(1, BATCHES + 1):
            if self.fails and number == FAILS:
                raise ValueError("the third batch is damaged")
            ids = torch.arange(4) * number
            yield {"item": ids, "label": (ids % 2).float()}


def one_fails(rank: int, world: int, how: str, failing: list[int]) -> None:
    model = hb.distribute(Model(), timeout=20)
    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.1)
    loader = WRAPPED[how](Loader(rank in failing), model)
    error, text = (
        (ValueError, "the third") if rank in failing else (PeerError, "Rank 1 could not go on")
    )
    with pytest.raises(error, match=f"{text}.*batch is damaged"):
        hb.train.fit(model, loader, optimizer)
    again = hb.train.fit(model, WRAPPED[how](Loader(False), model), optimizer)
    assert again.steps == BATCHES


@pytest.mark.process
@pytest.mark.parametrize("failing", [[1], [0, 1]], ids=["one", "all"])
@pytest.mark.parametrize("how", WRAPPED)
def test_a_loader_fails(how: str, failing: list[int]) -> None:
    run(2, one_fails, how, failing)
