"""A whole model on several ranks: tables, dense layers, one optimizer."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from dist.test_sharded import batch_of, plan_of
from dist.worlds import run, shared_files
from torch import nn

import hotbed as hb
from hotbed.dist import PeerError
from hotbed.dist.averaging import AveragingGroup
from hotbed.dist.ranks import Ranks


class Model(nn.Module):
    """Tables of several kinds in three modules, and dense layers with a buffer."""

    def __init__(self, seed: int | None = 3, **options: Any) -> None:
        super().__init__()
        tables = [
            hb.Table("item", 4, 61, "mean", padding_idx=60),
            hb.Table("user", 7, None, "sum"),
        ]
        self.tables = hb.EmbeddingCollection(
            tables, {"item": "item", "user": "user"}, seed=seed, **options
        )
        self.word = hb.Embedding(61, 5)
        self.bag = hb.EmbeddingBag(9, 3, mode="sum")
        self.other = hb.Embedding(61, 2)  # another table of the name that its layer gives it
        self.norm = nn.BatchNorm1d(21)
        self.dense = nn.Linear(21, 1)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        vectors = self.tables({name: batch[name] for name in ("item", "user")})
        joined = [*vectors.values(), self.word(batch["word"]), self.bag(batch["more"])]
        joined.append(self.other(batch["word"]))
        return self.dense(self.norm(torch.cat(joined, 1)))[:, 0]


def made(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    model = Model()
    model.norm.momentum = 0.5
    return model


def samples_of(rank: int, world: int) -> slice:
    return slice(12 * rank // world, 12 * (rank + 1) // world)


def loss_of(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    label = (batch["word"] % 2).float()
    return nn.functional.binary_cross_entropy_with_logits(model(batch), label)


def rows_of(model: Model) -> dict[str, torch.Tensor]:
    return {
        "item": model.tables.lookup("item", torch.arange(61)),
        "user": model.tables.lookup("user", torch.arange(-25, 95) * 2**33),
        "word": model.word._live.lookup(torch.arange(61)),
        "bag": model.bag._live.lookup(torch.arange(9)),
        "other": model.other._live.lookup(torch.arange(61)),
    }


def train(rank: int, world: int, strategy: str) -> None:
    whole, own = made(), made(seed=rank)  # rank 0 has the values of all
    whole.norm.eval()
    own.norm.eval()
    assert hb.distribute(own, strategy) is own
    names = [name for name, _ in whole.named_parameters()]
    assert [name for name, _ in own.named_parameters()] == names
    assert type(own) is Model
    optimizers = [hb.optim.Adam(m.parameters(), lr=0.05) for m in (whole, own)]
    samples = samples_of(rank, world)
    for number in range(6):
        batch = batch_of(number, slice(None))
        loss_of(whole, batch).backward()
        mine = {name: ids[samples] for name, ids in batch.items()}
        loss_of(own, mine).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = rows_of(whole)
    for name, rows in rows_of(own).items():
        torch.testing.assert_close(rows, expected[name], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(own.dense.weight, whole.dense.weight, rtol=1e-4, atol=1e-5)


@pytest.mark.process
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["auto", "basic"])
def test_a_model_trains_as_in_one_process(world: int, strategy: str) -> None:
    run(world, train, strategy)


def refused(rank: int, world: int) -> None:
    model = made()
    for plan in (None, {"item": "row"}):
        with pytest.raises(hb.PlanError, match="name of a strategy"):
            hb.distribute(model, plan)
    with pytest.raises((hb.PlanError, PeerError), match="no such table 'word.weight'"):
        tables = [table for table in made().tables.tables.values()]
        hb.distribute(model, hb.plan(tables, 3))
    with pytest.raises(hb.PlanError, match="different plans"):
        hb.distribute(model, hb.plan(model, world, strategy="basic" if rank else "memory_balanced"))
    tables = [hb.Table("a", 2, 9, sharding="table"), hb.Table("b", 2, 7, sharding="row")]
    alone = hb.EmbeddingCollection(tables)
    assert hb.distribute(alone) is alone
    with pytest.raises(hb.TableError, match="cannot be copied"):
        copy.deepcopy(alone)


@pytest.mark.process
def test_what_cannot_be_distributed() -> None:
    with pytest.raises(hb.TableError, match="needs a process group"):
        hb.distribute(made())
    run(2, refused)


def what_rank_0_has(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    model = Model(seed=None)
    users = torch.arange(4) * 2**33 + rank
    model.tables.assign("user", users, torch.full((4, 7), float(rank + 1)))
    nn.init.constant_(model.word.weight, float(rank + 5))
    hb.distribute(model)
    told = [torch.empty(61, 4) for _ in range(world)]
    torch.distributed.all_gather(told, model.tables.lookup("item", torch.arange(61)))
    assert torch.equal(told[0], told[-1]) and told[0].std() > 0
    ids, rows = model.tables.rows("user")
    assert ids.tolist() == [n * 2**33 for n in range(4)]
    assert torch.equal(rows, torch.ones(4, 7))
    assert torch.equal(model.word._live.lookup(torch.arange(61)), torch.full((61, 5), 5.0))


@pytest.mark.process
def test_all_begin_with_the_rows_of_rank_0() -> None:
    run(3, what_rank_0_has)


def on_meta(rank: int, world: int, folder: str) -> None:
    ssd = {"ssd": Path(folder), "host": "4MB"} if folder else {"host": "8MB"}
    tables = [hb.Table("item", 4, 61), hb.Table("user", 4)]
    own = hb.EmbeddingCollection(tables, seed=3, device="meta", storage=hb.Storage(**ssd))
    batch = {"item": torch.tensor([[1, 2]]), "user": torch.tensor([[5, 9]]) + rank}
    with pytest.raises(hb.TableError, match='made with device="meta"'):
        own(batch)
    hb.distribute(own, plan_of(own, "row", world))
    optimizer = hb.optim.Adagrad(own.parameters(), lr=0.5)
    whole = hb.EmbeddingCollection(tables, seed=3)
    other = hb.optim.Adagrad(whole.parameters(), lr=0.5)
    users = torch.cat([torch.tensor([[5, 9]]) + r for r in range(world)])
    both = {"item": batch["item"].repeat(world, 1), "user": users}
    for _ in range(3):
        sum(v.sum() for v in own(batch).values()).backward()
        (sum(v.sum() for v in whole(both).values()) / world).backward()
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
    assert torch.equal(own.rows("item")[1], whole.rows("item")[1])
    assert all(map(torch.equal, own.rows("user"), whole.rows("user")))
    assert own.count("user") == whole.count("user") == 2 + world
    if folder:
        own.flush()
        assert (Path(folder) / f"rank-{rank}").is_dir()
        assert own.stats()["rows_used"] > 0


@pytest.mark.process
@pytest.mark.parametrize("ssd", [False, True])
def test_tables_too_large_for_one_rank(ssd: bool, tmp_path: Path) -> None:
    run(2, on_meta, str(tmp_path) if ssd else "")


def from_outside(rank: int, world: int) -> None:
    model, whole = made(), made()
    hb.distribute(model, "basic")
    item = torch.arange(61)
    # Each rank assigns rows of its own; of an id that several give the last rank's stay.
    model.tables.assign("item", item[rank : rank + 3], torch.full((3, 4), float(rank)))
    for r in range(world):
        whole.tables.assign("item", item[r : r + 3], torch.full((3, 4), float(r)))
    users = torch.tensor([7, 2**40 + rank, 11])
    model.tables.assign("user", users, torch.full((3, 7), 2.0))
    assert model.tables.count("user") == 2 + world
    assert model.tables.count() == 61 + 2 + world
    assert model.tables.erase("user", torch.tensor([7, 2**40 + rank])) == 1 + world
    assert model.tables.rows("user").ids.tolist() == [11]
    assert torch.equal(model.tables.rows("item").values, whole.tables.rows("item").values)
    # What this rank keeps.
    told = [torch.tensor([model.tables.count("item", local=True)]) for _ in range(world)]
    torch.distributed.all_gather(told, told[rank].clone())
    assert sum(int(one) for one in told) == 61
    if whole_rows := model.tables.count("item", local=True):
        kept = model.tables.rows("item", local=True)
        assert len(kept.ids) == whole_rows
        assert torch.equal(kept.values, model.tables.lookup("item", kept.ids, local=True))
        model.tables.assign(
            "item", torch.arange(61), whole.tables.lookup("item", torch.arange(61)), local=True
        )
        assert torch.equal(kept.values, model.tables.lookup("item", kept.ids, local=True))
    else:
        with pytest.raises(hb.IdError, match="another rank keeps some of these 1 ids"):
            model.tables.lookup("item", [3], local=True)
    # A state_dict has the tables on rank 0, and is read on all.
    state = model.state_dict()
    assert ("tables.item" in state) == (rank == 0)
    told = [state]
    torch.distributed.broadcast_object_list(told)
    whole.load_state_dict(told[0])
    assert torch.equal(whole.tables.rows("item").values, model.tables.rows("item").values)
    nn.init.zeros_(whole.word.weight)
    model.load_state_dict(whole.state_dict())
    assert not bool(rows_of(model)["word"].any())
    assert torch.equal(rows_of(model)["item"], rows_of(whole)["item"])
    # A fault of one rank is told on all.
    with pytest.raises((hb.IdError, PeerError), match="id 61 is outside"):
        model.tables.lookup("item", [61 if rank == 1 else 3])
    with pytest.raises((hb.TableError, PeerError), match="need values of shape"):
        model.tables.assign("item", [3], torch.zeros(1, 4 + rank))
    with pytest.raises((hb.InputError, PeerError), match="Feature 'user' is missing"):
        model.eval().tables({"item": [[1]]} if rank == 1 else {"item": [[1]], "user": [[1]]})


@pytest.mark.process
@pytest.mark.parametrize("world", [2, 3])
def test_rows_from_outside(world: int) -> None:
    run(world, from_outside)


def beside_dense(rank: int, world: int) -> None:
    model = hb.distribute(made())
    batch = batch_of(rank, slice(0, 4))
    with pytest.raises(hb.TableError, match="part of a distributed model was called by itself"):
        model.word(batch["word"])
    with torch.no_grad():
        model.word(batch["word"])
    loss_of(model, batch).backward()
    expected = model.dense.weight.grad.clone()
    with model.no_sync():
        loss_of(model, batch).backward()
    own = model.dense.weight.grad - expected
    told = [torch.empty_like(own) for _ in range(world)]
    torch.distributed.all_gather(told, own)
    assert not torch.equal(told[0], told[1])
    alone = hb.distribute(hb.EmbeddingCollection([hb.Table("a", 3, 9)]))
    with alone.no_sync():
        alone({"a": torch.tensor([[rank]])})["a"].sum().backward()


@pytest.mark.process
def test_dense_layers_are_averaged_where_the_model_is_called() -> None:
    run(2, beside_dense)


class Beside(hb.EmbeddingBag):
    """A table and dense parameters of the model itself."""

    def __init__(self) -> None:
        super().__init__(9, 3, mode="sum")
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(*args, **kwargs) * self.scale


def goes(rank: int, world: int) -> None:
    def trained(model: nn.Module, given: Any) -> list[weakref.ref[Any]]:
        hb.distribute(model, "basic")
        optimizer = hb.optim.Adagrad(model.parameters(), lr=0.1)
        for _ in range(2):
            found = model(given)
            sum(
                v.sum() for v in (found.values() if isinstance(found, dict) else [found])
            ).backward()
            optimizer.step()
            optimizer.zero_grad()
        lives = [p.hotbed_table for p in model.parameters() if hasattr(p, "hotbed_table")]
        kept = [model, optimizer, *lives, *(live.place.ranks for live in lives)]
        return [weakref.ref(each) for each in kept]

    gc.collect()
    before = shared_files()
    gc.disable()
    try:
        for make, given in (
            (lambda: made().eval(), batch_of(0, samples_of(rank, world))),
            (lambda: hb.EmbeddingCollection([hb.Table("a", 4, 9)]), {"a": [[rank]]}),
            (Beside, torch.tensor([[rank, 1]])),
        ):
            gone = trained(make(), given)
            assert len(gone) > 3 and [each() for each in gone] == [None] * len(gone)
            assert shared_files() == before
        sockets = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            trained(Beside(), torch.tensor([[rank, 1]]))
        assert len(os.listdir("/proc/self/fd")) == sockets
        torch_dist.barrier()  # the group of all is still there
    finally:
        gc.enable()


@pytest.mark.process
@pytest.mark.parametrize("world", [1, 2])
def test_memory_goes_with_the_model(world: int) -> None:
    run(world, goes)


def options(rank: int, world: int) -> None:
    model = made()
    wrong: list[dict[str, Any]] = [
        *({"timeout": value} for value in (0, -1, float("nan"), float("inf"), 1e300, "30", True)),
        *({"shared_memory": value} for value in ("no", None, 1)),
        *({"ddp": value} for value in ({"bogus": 1}, {"device_ids": [0]}, [1])),
    ]
    for one in wrong:
        with pytest.raises(hb.TableError, match=next(iter(one))):
            hb.distribute(model, **one)
    assert hb.distribute(model, timeout=torch_dist.get_world_size() * 10) is model


@pytest.mark.process
def test_options_that_cannot_be_leave_the_model_as_it_was() -> None:
    run(2, options)


def let_go(rank: int, world: int) -> None:
    ranks = Ranks(timeout=20)
    group = torch_dist.new_group(backend="gloo")
    averaging = AveragingGroup.over(group, ranks)
    gone = weakref.ref(averaging)
    if rank:  # the other's sum is under way
        torch_dist.barrier()
    work = averaging.allreduce([torch.ones(4)], torch_dist.AllreduceOptions())
    del averaging
    assert gone() is None
    if not rank:
        torch_dist.barrier()
    work.wait()


@pytest.mark.process
def test_a_sum_under_way_keeps_no_group() -> None:
    """Its thread would be the last to let go of the group, and wait for itself: the process ended."""
    run(2, let_go)
