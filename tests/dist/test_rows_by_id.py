"""Looking for ids, and forgetting them, in tables that ranks share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dist.test_sharded import DEALS, assert_same_rows, batch_of, collection, loss_of, plan_of
from dist.worlds import run
from torch import Tensor, nn

import hotbed as hb
from hotbed.dist import PeerError


def step(model: Any, optimizer: Any, number: int, samples: slice, scale: float) -> None:
    loss_of(model(batch_of(number, samples)), scale).backward()
    optimizer.step()
    optimizer.zero_grad()


def asked_by(rank: int) -> dict[str, Tensor]:
    """Ids of each table, some of them twice, some without a row; each rank has others."""
    users = torch.arange(-25 + 7 * rank, 95 - rank) * 2**33
    items = torch.arange(-2, 63 - rank)
    return {"user": torch.cat([users, users[:5]]), "item": items, "word": items.flip(0)}


def as_one_process(rank: int, world: int, deal: str, untouched: str) -> None:
    whole, own = collection(), collection()
    hb.distribute(own, plan_of(own, deal, world))
    rule = {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.1, "untouched": untouched}
    optimizers = [hb.optim.SGD(model.parameters(), **rule) for model in (whole, own)]
    samples = slice(12 * rank // world, 12 * (rank + 1) // world)
    for number in range(6):
        step(whole, optimizers[0], number, slice(None), 1)
        step(own, optimizers[1], number, samples, world)
        for name, ids in asked_by(rank).items():
            assert torch.equal(own.contains(name, ids), whole.contains(name, ids)), name
        present = asked_by(rank)["user"][whole.contains("user", asked_by(rank)["user"])]
        found = own.lookup("user", present, missing="error")
        assert torch.equal(found, whole.lookup("user", present))
        if number % 2:
            continue
        # Each rank forgets some; one process forgets all of them.
        gone = {"user": torch.arange(-5, 9) * 2**33, "item": torch.arange(11), "word": [3, 7, 60]}
        for name, ids in gone.items():
            forgotten = own.erase(name, torch.as_tensor(ids)[rank::world])
            assert forgotten == whole.erase(name, ids), name
    assert_same_rows(own, whole)


def check_local(rank: int, world: int, deal: str) -> None:
    """Each row is one that some rank keeps, and contains() knows which."""
    own = collection()
    hb.distribute(own, plan_of(own, deal, world))
    own.assign("user", [5, 2**40, -9], torch.ones(3, 7))
    kept = own.count("user", local=True)
    assert f"'user': {kept} rows × 7 on this rank, kept by id" in repr(own.parameter("user"))
    for name, ids in {"user": [5, 2**40, -9, 6], "item": [-1, 0, 30, 61]}.items():
        here = own.contains(name, ids, local=True)
        together = [torch.empty_like(here) for _ in range(world)]
        torch.distributed.all_gather(together, here)
        everywhere = torch.stack(together).sum(0).tolist()
        absent = [at for at, times in enumerate(everywhere) if not times]
        assert absent == ([3] if name == "user" else [0, 3])
        if deal in ("row", "modulo", "last"):
            assert max(everywhere) == 1
            kept = torch.tensor(ids)[here]
            assert torch.equal(
                own.lookup(name, kept, missing="error", local=True), own.lookup(name, kept)
            )


def every_deal(rank: int, world: int) -> None:
    for deal in DEALS:
        try:
            as_one_process(rank, world, deal, "lazy")
            as_one_process(rank, world, deal, "exact")
            check_local(rank, world, deal)
        except BaseException as error:
            raise AssertionError(f"{deal} on rank {rank} of {world}") from error


@pytest.mark.process
@pytest.mark.parametrize("world", [1, 3])
def test_ids_are_found_and_forgotten_as_in_one_process(world: int) -> None:
    run(world, every_deal)


def absent_on_one_rank(rank: int, world: int) -> None:
    model = collection()
    hb.distribute(model, plan_of(model, "row", world))
    model.assign("user", [1, 2], torch.ones(2, 7))
    ids = [1, 2, 99] if rank == 1 else [1, 2]
    error = hb.IdError if rank == 1 else PeerError
    with pytest.raises(error, match="'user': 1 of 3 ids have no row, such as 99"):
        model.lookup("user", ids, missing="error")
    with pytest.raises(hb.InputError if rank else PeerError, match="ids must be int64"):
        model.contains("user", [0.5] if rank else [1])
    with pytest.raises(PeerError, match="is at a "):
        model.contains("user", [1]) if rank else model.lookup("user", [1])


@pytest.mark.process
def test_an_id_that_one_rank_misses_is_an_error_on_all() -> None:
    run(2, absent_on_one_rank)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = collection()


def in_all_tables(rank: int, world: int) -> None:
    model = Model()
    hb.distribute(model, plan_of(model.tables, "mixed", world))
    model.tables.assign("user", [1, 2, 3], torch.ones(3, 7))
    given: dict[str, Any] = {"user": [1] if rank else [], "item": [4, 5], "more": [5, 6 + rank]}
    assert hb.erase(model, given) == {
        "tables.user": 1,
        "tables.item": 3 + (world > 1),
        "tables.word": 0,
    }
    assert model.tables.rows("user").ids.tolist() == [2, 3]
    with pytest.raises(hb.InputError if rank else PeerError, match="no feature 'usre'"):
        hb.erase(model, {"usre" if rank else "user": [2]})
    here = model.tables.contains("user", [2, 3], local=True)
    assert hb.erase(model, {"user": [2, 3]}, local=True) == {"tables.user": int(here.sum())}


@pytest.mark.process
def test_all_tables_of_a_model_forget() -> None:
    run(2, in_all_tables)
