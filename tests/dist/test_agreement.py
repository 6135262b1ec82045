"""What one rank cannot do, none does."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from dist.test_sharded import batch_of, collection, loss_of, plan_of
from dist.worlds import run

import hotbed as hb
from hotbed.dist import PeerError, Plan, TableWise, exchange
from hotbed.dist.errors import PeerLost, is_gone
from hotbed.errors import NotFiniteError, OptimizerError


def values_of(model: hb.EmbeddingCollection) -> list[torch.Tensor]:
    users = torch.arange(-25, 95) * 2**33
    ids = {"item": torch.arange(61), "word": torch.arange(61), "user": users}
    return [model.lookup(name, some) for name, some in ids.items()]


def faults(rank: int, world: int) -> None:
    model = collection()
    hb.distribute(model, plan_of(model, "mixed", world))
    optimizer = hb.optim.Adam(model.parameters(), lr=0.1)
    batch = batch_of(rank, slice(0, 4))
    loss_of(model(batch), 1).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = values_of(model)

    # A wrong id.
    wrong = {**batch, "item": torch.full((4, 2), 61)} if rank == 0 else batch
    if rank == 0:
        with pytest.raises(hb.IdError, match="'item'.* 61 is outside"):
            model(wrong)
    else:
        with pytest.raises(PeerError, match="Rank 0 could not go on: IdError: .*61 is outside"):
            model(wrong)

    # A gradient that is not finite, of rows that another rank keeps.
    scale = float("nan") if rank == 0 else 1.0
    loss_of(model(batch), scale).backward()
    with pytest.raises((NotFiniteError, PeerError), match="gradient is NaN or infinite"):
        optimizer.step()
    optimizer.zero_grad()
    assert all(map(torch.equal, values_of(model), before))

    # Another mode.
    model.train(rank != 0)
    with pytest.raises(PeerError, match="in another mode than rank"):
        model(batch)
    model.train()

    # Another thing.
    with pytest.raises(PeerError, match="Rank . is at a (step|lookup)"):
        model(batch) if rank else optimizer.step()
    optimizer.zero_grad()
    assert all(map(torch.equal, values_of(model), before))

    # A rank without a loss takes the step of the others.
    vectors = model(batch)
    if rank:
        loss_of(vectors, 1).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not all(map(torch.equal, values_of(model), before))
    steps = [float(model.table(name).rule.steps) for name in model.tables]
    assert steps == [2.0, 2.0, 2.0]
    late = collection()
    kept = hb.optim.SGD(late.parameters(), lr=0.1)
    with pytest.raises(OptimizerError, match="Distribute the model first"):
        hb.distribute(late)
    assert kept is late.table("item").optimizer
    cut = collection()
    hb.distribute(cut, plan_of(cut, "column", world))
    with pytest.raises(OptimizerError, match="one state for a whole row"):
        hb.optim.RowwiseAdagrad(cut.parameters(), lr=0.1)
    with pytest.raises(OptimizerError, match="fused=True updates tables during backward"):
        hb.optim.SGD(cut.parameters(), lr=0.1, fused=True)
    with pytest.raises(hb.TableError, match="distributed already"):
        hb.distribute(model)


@pytest.mark.process
def test_faults_of_one_rank_are_told_on_all() -> None:
    run(2, faults)


@pytest.mark.parametrize(
    "text",
    [
        "Application timeout caused pair closure",
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1",
        "Read error [127.0.0.1]:1: Connection reset by peer",
        "Timed out waiting 30000ms for recv operation to complete",
        "writev [127.0.0.1]:1: Broken pipe",
    ],
)
def test_what_says_that_a_process_is_gone(text: str) -> None:
    assert is_gone(RuntimeError(text))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("The skip connection has 3 channels, and the size of tensor a (4) must match"),
        RuntimeError("my socket timed out"),
        hb.TableError("Connection closed"),
    ],
)
def test_what_says_something_else(error: Any) -> None:
    assert not is_gone(error)


def over_budget(rank: int, world: int, shared_memory: bool) -> None:
    """Rank 1 keeps the table, and has no room for all the ids that rank 0 asks for."""
    storage = hb.Storage(host="2MB" if rank else "64MB")
    own = hb.EmbeddingCollection([hb.Table("user", 64)], seed=1, storage=storage)
    plan = Plan([*own.tables.values()], world, {"user": TableWise(1)})
    hb.distribute(own, plan, shared_memory=shared_memory)
    optimizer = hb.optim.SGD(own.parameters(), lr=0.1)
    for _ in range(2):
        own({"user": torch.arange(50)})["user"].sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    rows, count = own.lookup("user", torch.arange(50)), own.count("user")
    many = torch.arange(20_000) if rank == 0 else torch.arange(50)
    error = (hb.StorageError, hb.OutOfMemory) if rank else PeerError
    with pytest.raises(error, match="Rank 1 could not go on" if rank == 0 else "Raise Storage"):
        own({"user": many})
    assert own.count("user") == count == 50
    assert torch.equal(own.lookup("user", torch.arange(50)), rows)
    own({"user": torch.arange(50)})["user"].sum().backward()
    optimizer.step()
    assert not torch.equal(own.lookup("user", torch.arange(50)), rows)


@pytest.mark.process
@pytest.mark.parametrize("shared_memory", [False, True])
def test_an_owner_over_its_budget(shared_memory: bool) -> None:
    run(2, over_budget, shared_memory)


def in_the_middle(rank: int, world: int, shared_memory: bool) -> None:
    """What goes wrong on rank 1 once all have agreed on a lookup."""

    def failing(*arguments: Any, **options: Any) -> Any:
        raise MemoryError("no memory")

    def made() -> tuple[hb.EmbeddingCollection, Any]:
        model = collection()
        hb.distribute(model, plan_of(model, "row", world), shared_memory=shared_memory)
        return model, hb.optim.SGD(model.parameters(), lr=0.1)

    def step(model: hb.EmbeddingCollection, optimizer: Any) -> None:
        loss_of(model(batch_of(rank, slice(0, 4))), 1).backward()
        optimizer.step()
        optimizer.zero_grad()

    # The others can be told still: nothing is lost.
    model, optimizer = made()
    step(model, optimizer)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(exchange, "looked_up", failing)
        with pytest.raises((MemoryError, PeerError), match="no memory"):
            step(model, optimizer)
    step(model, optimizer)
    assert bool(torch.isin(model.rows("user").ids, torch.arange(-25, 95) * 2**33).all())

    # They cannot: that is the end, on all, at once; also where an error that was told is being handled.
    with pytest.MonkeyPatch.context() as patch:
        begin = time.monotonic()
        try:
            with patch.context() as told:
                if rank == 1:
                    told.setattr(exchange, "looked_up", failing)
                step(model, optimizer)
        except (MemoryError, PeerError):
            if rank == 1:
                patch.setattr(exchange.Fetched, "copy_out", failing)
            with pytest.raises((MemoryError, PeerLost)):
                step(model, optimizer)
        for _ in range(3):
            with pytest.raises(PeerLost):
                step(model, optimizer)
            optimizer.zero_grad()
        assert time.monotonic() - begin < 20
    with pytest.raises(PeerLost, match="could not go on in the middle" if rank == 1 else "ended"):
        step(model, optimizer)

    # A name that one rank has wrong.
    model, optimizer = made()
    name = "itme" if rank == 1 else "item"
    for ask in (
        lambda: model.lookup(name, [1]),
        lambda: model.assign(name, [1], torch.zeros(1, 4)),
        lambda: model.rows(name),
        lambda: model.count(name),
        lambda: model.erase("user" if rank != 1 else "usre", [1]),
    ):
        with pytest.raises(hb.TableError if rank == 1 else PeerError, match="There is no table"):
            ask()
    step(model, optimizer)


@pytest.mark.process
@pytest.mark.parametrize("shared_memory", [True, False])
def test_what_goes_wrong_in_the_middle(shared_memory: bool) -> None:
    run(3, in_the_middle, shared_memory)
