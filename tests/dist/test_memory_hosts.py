"""Ranks that keep rows and have no batches: the numbers are those of one process, and errors reach all."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from dist.test_distribute import loss_of as loss_of_model
from dist.test_distribute import made, rows_of
from dist.test_sharded import assert_same_rows, batch_of, collection, loss_of
from dist.worlds import run
from torch.distributed.algorithms.join import Join

import hotbed as hb
from hotbed.dist import PeerError
from hotbed.dist.distribute import sharing_of

USERS = torch.arange(-25, 95) * 2**33
WORLDS = [(1, 1), (2, 1), (1, 2), (2, 2)]
"""Ranks that train, and memory hosts."""


def begin(rank: int, trainers: int, plan: Any = "auto", **options: Any) -> hb.EmbeddingCollection:
    model = collection()
    hb.distribute(model, plan, memory_host=rank >= trainers, **options)
    return model


def samples_of(rank: int, trainers: int) -> slice:
    return slice(12 * rank // trainers, 12 * (rank + 1) // trainers)


def train(model: Any, optimizer: Any, numbers: range, rank: int, trainers: int) -> None:
    for number in numbers:
        loss_of(model(batch_of(number, samples_of(rank, trainers))), trainers).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] *= 0.5  # hosts are told


def trained(numbers: range, rule: str) -> hb.EmbeddingCollection:
    """In one process."""
    model = collection()
    train(model, getattr(hb.optim, rule)(model.parameters(), lr=0.1), numbers, 0, 1)
    return model


def as_one_process(rank: int, world: int, trainers: int, plan: str, rule: str) -> None:
    options = {"shared_memory": rule != "SGD"}
    chosen: Any = plan
    if plan == "by hand":
        kinds = {
            "item": hb.dist.ColumnWise((world - 1, 0)),
            "user": hb.dist.RowWise(owners=(world - 1, 0)),
            "word": "replicated",
        }
        chosen = hb.dist.Plan(collection().tables.values(), world, kinds)
    model = begin(rank, trainers, chosen, **options)
    optimizer = getattr(hb.optim, rule)(model.parameters(), lr=0.1)
    if rank >= trainers:
        hb.dist.serve_rows(model, optimizer)
        return
    train(model, optimizer, range(4), rank, trainers)
    whole = trained(range(4), rule)
    assert_same_rows(model, whole)
    for name in whole.tables:
        assert model.count(name) == whole.count(name)
    assert torch.equal(model.lookup("user", USERS), whole.lookup("user", USERS))
    assert torch.equal(model.contains("user", USERS), whole.contains("user", USERS))
    batch = batch_of(9, samples_of(rank, trainers))
    model.eval()
    whole.eval()
    for name, vectors in whole(batch).items():
        assert torch.equal(model(batch)[name], vectors)
    hb.dist.release_hosts(model)


@pytest.mark.process
@pytest.mark.parametrize("rule", ["SGD", "Adam"])
@pytest.mark.parametrize("plan", ["auto", "basic", "by hand"])
@pytest.mark.parametrize(("trainers", "hosts"), WORLDS)
def test_rows_are_those_of_one_process(trainers: int, hosts: int, plan: str, rule: str) -> None:
    run(trainers + hosts, as_one_process, trainers, plan, rule)


def by_id(rank: int, world: int, trainers: int) -> None:
    model = begin(rank, trainers)
    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.1)
    if rank >= trainers:
        hb.dist.serve_rows(model, optimizer)
        return
    train(model, optimizer, range(2), rank, trainers)
    whole = trained(range(2), "Adagrad")
    ids = torch.tensor([2**40, 2**41, 7 * 2**33]) + rank
    rows = torch.arange(21.0).view(3, 7) + rank
    model.assign("user", ids, rows)
    for other in range(trainers):
        whole.assign("user", ids - rank + other, rows - rank + other)
    assert_same_rows(model, whole, "assigned")
    assert model.erase("user", USERS[rank::trainers]) == whole.erase("user", USERS)
    assert_same_rows(model, whole, "erased")
    state, expected = model.state_dict(), whole.state_dict()
    if rank == 0:  # which has the tables
        for name, value in expected.items():
            assert not isinstance(value, torch.Tensor) or torch.equal(state[name], value), name
    with pytest.raises(PeerError, match="memory host, which takes no part in a load of rows"):
        model.load_state_dict(state)
    for _ in range(70):  # more than wait by themselves
        loss_of(model(batch_of(5, samples_of(rank, trainers))), trainers).backward()
        loss_of(whole(batch_of(5, slice(None))), 1).backward()
    norms = [hb.nn.clip_grad_norm_(one.parameters(), 3.0) for one in (model, whole)]
    torch.testing.assert_close(*norms)
    model.zero_grad()
    hb.dist.release_hosts(model)


@pytest.mark.process
@pytest.mark.parametrize(("trainers", "hosts"), WORLDS)
def test_all_that_is_asked_of_rows_by_id(trainers: int, hosts: int) -> None:
    run(trainers + hosts, by_id, trainers)


def copies(rank: int, world: int, folder: str) -> None:
    table = hb.Table("item", 4, 6000)
    model = hb.EmbeddingCollection([table], seed=1)
    plan = hb.dist.Plan([table], world, {"item": hb.dist.RowWise(owners=(1, 2))})
    hb.distribute(model, plan, memory_host=rank > 0)
    if rank:
        hb.dist.serve_rows(model)
        sent = sharing_of(model).ranks.sent["a copy of rows"]
        Path(folder, str(rank)).write_text(str(sent))
        return
    whole = hb.EmbeddingCollection([table], seed=1)
    model.assign("item", range(6000), whole.lookup("item", range(6000)) + 1)
    assert torch.equal(model.rows("item").values, whole.rows("item").values + 1)
    hb.dist.release_hosts(model)


@pytest.mark.process
def test_copies_of_all_rows_go_to_ranks_that_train(tmp_path: Path) -> None:
    run(3, copies, str(tmp_path))
    for rank in (1, 2):
        sent = int((tmp_path / str(rank)).read_text())
        assert 3000 * 24 <= sent <= 3000 * 33  # ids twice, and rows, and to nobody else


def save(rank: int, world: int, trainers: int, path: str) -> None:
    model = begin(rank, trainers)
    optimizer = hb.optim.Adam(model.parameters(), lr=0.1, untouched="exact")
    if rank >= trainers:
        hb.dist.serve_rows(model, optimizer)
        return
    if os.path.isdir(path):
        restored = hb.load(path, model, optimizer)
        train(model, optimizer, range(restored.step, 4), rank, trainers)
        assert_same_rows(model, adam(range(4)))
    else:
        train(model, optimizer, range(2), rank, trainers)
        saved = hb.save(path, model, optimizer, step=2)
        assert saved.rows == sum(model.count(name) for name in model.tables)
        with pytest.raises(hb.checkpoint.CheckpointError, match="step"):
            hb.save(path, model, optimizer, step=-1)
        with pytest.raises((hb.checkpoint.CheckpointError, PeerError)):
            hb.load(path + "nothing", model, optimizer)
        train(model, optimizer, range(2, 4), rank, trainers)
        assert_same_rows(model, adam(range(4)))
    hb.dist.release_hosts(model)


def adam(numbers: range) -> hb.EmbeddingCollection:
    model = collection()
    train(model, hb.optim.Adam(model.parameters(), lr=0.1, untouched="exact"), numbers, 0, 1)
    return model


@pytest.mark.process
@pytest.mark.parametrize(("trainers", "hosts"), WORLDS)
def test_hosts_save_and_load_with_the_others(trainers: int, hosts: int, tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    run(trainers + hosts, save, trainers, path)
    alone = collection()
    optimizer = hb.optim.Adam(alone.parameters(), lr=0.1, untouched="exact")
    hb.load(path, alone, optimizer)
    assert_same_rows(alone, adam(range(2)))
    for others in WORLDS:
        run(sum(others), save, others[0], path)


def whole_models(rank: int, world: int, trainers: int) -> None:
    model = made(seed=rank)
    model.norm.eval()
    loader = hb.dist.slices([batch_of(number, slice(None)) for number in range(3)])
    hb.distribute(model, memory_host=rank >= trainers)
    optimizer = hb.optim.Adam(model.parameters(), lr=0.05)
    if rank >= trainers:
        for call in (hb.dist.joinables, hb.dist.release_hosts):
            with pytest.raises(hb.TableError, match=r"this one is a memory host.*serve_rows"):
                call(model)
        for loop in (loader, hb.dist.slices([])):
            with pytest.raises(hb.TableError, match="this one is a memory host"):
                list(loop)
        with pytest.raises(hb.TableError, match="this one is a memory host"):
            hb.dist.even([])
        hb.dist.serve_rows(model, optimizer)
        return
    with pytest.raises(hb.TableError, match="this rank has batches"):
        hb.dist.serve_rows(model, optimizer)
    whole = made()
    whole.norm.eval()
    other = hb.optim.Adam(whole.parameters(), lr=0.05)
    for number, batch in enumerate(hb.dist.even(loader)):
        loss_of_model(model, batch).backward()
        loss_of_model(whole, batch_of(number, slice(None))).backward()
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
    expected = rows_of(whole)
    for name, rows in rows_of(model).items():
        torch.testing.assert_close(rows, expected[name], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.dense.weight, whole.dense.weight, rtol=1e-4, atol=1e-5)
    hb.dist.release_hosts(model)


@pytest.mark.process
@pytest.mark.parametrize(("trainers", "hosts"), WORLDS)
def test_a_model_with_dense_layers(trainers: int, hosts: int) -> None:
    run(trainers + hosts, whole_models, trainers)


def one_model_after_another(rank: int, world: int) -> None:
    """Groups of the ranks that train are made where earlier ones have ended, on one of them later."""
    kept = []
    for number in range(3):
        model = made(1)
        hb.distribute(model, memory_host=rank == 2, timeout=10)
        if rank == 2:
            hb.dist.serve_rows(model)
        else:
            even = hb.dist.even([1, 2])
            assert [*even] == [1, 2]
            if rank and not number:
                kept.append((model, even))
            del even
            hb.dist.release_hosts(model)
        del model
        gc.collect()


@pytest.mark.process
def test_models_come_and_go() -> None:
    run(3, one_model_after_another, seconds=40)


def uneven(rank: int, world: int, trainers: int, dense: bool) -> None:
    model: Any = made() if dense else collection()
    hb.distribute(model, memory_host=rank >= trainers)
    optimizer = hb.optim.SGD(model.parameters(), lr=0.05)
    if rank >= trainers:
        hb.dist.serve_rows(model, optimizer)
        return
    for _ in range(2):
        with Join(hb.dist.joinables(model)):
            for number in range(1 + 2 * rank):
                batch = batch_of(number, samples_of(rank, trainers))
                loss = loss_of_model(model, batch) if dense else loss_of(model(batch), 1)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    if dense:
        told = [torch.empty_like(model.dense.weight) for _ in range(trainers)]
        group = torch.distributed.new_group(range(trainers), use_local_synchronization=True)
        torch.distributed.all_gather(told, model.dense.weight.detach(), group)
        assert torch.equal(told[0], told[-1])
    else:
        assert model.table("item").rule.steps == 2 * (2 * trainers - 1)
    hb.dist.release_hosts(model)


@pytest.mark.process
@pytest.mark.parametrize("dense", [False, True])
def test_trainers_that_end_at_different_times(dense: bool) -> None:
    run(3, uneven, 2, dense)


def long_bags(rank: int, world: int, trainers: int, codecs: str) -> None:
    tables = [hb.Table("a", 8, 50), hb.Table("b", 8, None, "mean"), hb.Table("c", 8, 50, "sum")]
    model = hb.EmbeddingCollection(tables, seed=1)
    plan = hb.dist.Plan(
        tables,
        world,
        {
            "a": hb.dist.RowWise(owners=range(trainers, world)),
            "b": hb.dist.RowWise(owners=(0, world - 1)),
            "c": hb.dist.TableWise(world - 1),
        },
    )
    hb.distribute(model, plan, rows=codecs, gradients=codecs, memory_host=rank >= trainers)
    optimizer = hb.optim.SGD(model.parameters(), lr=1.0)
    if rank >= trainers:
        hb.dist.serve_rows(model, optimizer)
        return
    whole = hb.EmbeddingCollection(tables, seed=1)
    other = hb.optim.SGD(whole.parameters(), lr=1.0)
    for number in range(3):
        drawn = torch.Generator().manual_seed(number)
        bags = {t.name: torch.randint(0, 50, (4 * trainers, 16), generator=drawn) for t in tables}
        own = {name: ids[4 * rank : 4 * rank + 4] for name, ids in bags.items()}
        found, expected = model(own), whole(bags)
        for name, vectors in found.items():
            close = 1e-6 if codecs == "stored" else 0.05
            torch.testing.assert_close(
                vectors, expected[name][4 * rank : 4 * rank + 4], rtol=close, atol=close
            )
        (trainers * sum(v.sum() for v in found.values())).backward()
        sum(v.sum() for v in expected.values()).backward()
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
    sent = sharing_of(model).ranks.sent
    assert "rows" not in sent and sent["gradients"] > 0
    hb.dist.release_hosts(model)


@pytest.mark.process
@pytest.mark.parametrize("codecs", ["stored", "bfloat16"])
@pytest.mark.parametrize(("trainers", "hosts"), WORLDS)
def test_hosts_pool_long_bags(trainers: int, hosts: int, codecs: str) -> None:
    run(trainers + hosts, long_bags, trainers, codecs)


def in_tiers(rank: int, world: int, trainers: int, folder: str) -> None:
    table = hb.Table("item", 16, 9000)
    small = hb.Storage(host="500KB", ssd=folder)
    model = hb.EmbeddingCollection([table], seed=1, storage=small)
    hb.distribute(model, "basic", memory_host=rank >= trainers)
    optimizer = hb.optim.SGD(model.parameters(), lr=1.0)
    if rank >= trainers:
        hb.dist.serve_rows(model, optimizer)
        return
    whole = hb.EmbeddingCollection([table], seed=1)
    other = hb.optim.SGD(whole.parameters(), lr=1.0)
    for number, batch in enumerate(hb.lookahead(batches(rank, trainers), model)):
        loss = trainers * (model(batch)["item"] * 2).sum()
        loss.backward()
        (whole(torch_batch(number, trainers))["item"] * 2).sum().backward()
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
    assert sharing_of(model).ranks.sent["ids ahead"] > 0
    assert torch.equal(model.lookup("item", range(9000)), whole.lookup("item", range(9000)))
    hb.dist.release_hosts(model)


def torch_batch(number: int, trainers: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(number)
    return {"item": torch.randint(0, 9000, (100 * trainers, 1), generator=drawn)}


def batches(rank: int, trainers: int) -> list[dict[str, torch.Tensor]]:
    whole = [torch_batch(number, trainers)["item"] for number in range(8)]
    return [{"item": ids[100 * rank : 100 * rank + 100]} for ids in whole]


@pytest.mark.process
@pytest.mark.parametrize(("trainers", "hosts"), WORLDS)
def test_hosts_have_tiers(trainers: int, hosts: int, tmp_path: Path) -> None:
    run(trainers + hosts, in_tiers, trainers, str(tmp_path))
