"""Memory hosts of models with several optimizers: checkpoints load, whichever of them a host is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dist.worlds import run

import hotbed as hb
from hotbed.dist import PeerError

GIVEN = {
    "table": lambda optimizers: optimizers[0:1],
    "one": lambda optimizers: optimizers[0],
    "all": lambda optimizers: optimizers,
    "none": lambda optimizers: None,
}
"""What a host gives serve_rows."""


def made(**options: Any) -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    model: Any = hb.models.DLRM(["user", "item"])
    if options:
        model = hb.distribute(model, "basic", **options)
    model.train()
    tables, dense = hb.split_parameters(model)
    names = {id(table): name for name, table in model.named_parameters()}
    users = [one for one in tables if "user" in names[id(one)]]
    items = [one for one in tables if "user" not in names[id(one)]]
    return model, [
        hb.optim.FTRL(items, lr=0.1),
        torch.optim.AdamW(dense, lr=1e-3),
        hb.optim.Adagrad(users, lr=0.1),
    ]


def step(model: Any, optimizers: list[Any], number: int) -> None:
    users, items = torch.tensor([1, 2 + number]), torch.tensor([3, 4 + number])
    model({"user": users, "item": items, "dense": torch.zeros(2, 13)}).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def resumed(rank: int, world: int, given: str, path: str) -> None:
    model, optimizers = made(memory_host=rank == 1)
    if rank:
        hb.dist.serve_rows(model, GIVEN[given](optimizers))
        return
    for number in range(4):
        if number == 2:
            hb.save(path, model, optimizers, step=2)
        step(model, optimizers, number)
    expected = {name: model.embeddings.lookup(name, range(8)) for name in model.embeddings.tables}
    assert hb.load(path, model, optimizers).step == 2
    for number in range(2, 4):
        step(model, optimizers, number)
    for name, rows in expected.items():
        assert torch.equal(model.embeddings.lookup(name, range(8)), rows), name
    hb.load(path, model)  # rows alone
    hb.dist.release_hosts(model)


@pytest.mark.process
@pytest.mark.parametrize("given", GIVEN)
def test_a_checkpoint_of_several_optimizers_loads(given: str, tmp_path: Any) -> None:
    run(2, resumed, given, str(tmp_path))


def without(rank: int, world: int, path: str) -> None:
    model, optimizers = made(memory_host=rank == 1)
    if rank:
        del optimizers
        hb.dist.serve_rows(model)
        return
    hb.save(path, model, optimizers, step=0)
    with pytest.raises(
        PeerError, match="Rank 1, a memory host, has other optimizers of the tables"
    ):
        hb.load(path, model, optimizers)
    hb.load(path, model)
    hb.dist.release_hosts(model)


@pytest.mark.process
def test_a_host_without_optimizer_refuses_to_load_states(tmp_path: Any) -> None:
    run(2, without, str(tmp_path))
