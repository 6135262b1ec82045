"""What people do with DistributedDataParallel, done with a distributed model."""

from __future__ import annotations

import copy
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from dist.test_distribute import made
from dist.worlds import run
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import hotbed as hb
from hotbed.dist import PeerError
from hotbed.dist.distribute import needed_sharing


def without_tables(rank: int, world: int, folder: str) -> None:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    twin = DistributedDataParallel(copy.deepcopy(model))
    assert hb.distribute(model) is model
    batch = torch.full((2, 3), rank + 1.0)
    for each in (model, twin):
        optimizer = hb.optim.Adam(each.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            each(batch).sum().backward()
            optimizer.step()
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(own, other)
    # All save together, into one checkpoint, and load it.
    saved = hb.save(folder, model, optimizer, step=3)
    torch_dist.barrier()
    assert [path.name for path in Path(folder).iterdir() if path.is_dir()] == [
        Path(saved.path).name
    ]
    before = model[0].weight.clone()
    nn.init.zeros_(model[0].weight)
    hb.load(folder, model)
    assert torch.equal(model[0].weight, before)
    # Uneven ends.
    with Join(hb.dist.joinables(model)):
        for _ in range(1 + rank):
            model(batch).sum().backward()
    with pytest.raises(hb.TableError, match="deepcopy the model before hotbed.distribute"):
        copy.deepcopy(model)
    hb.distribute(nn.ReLU())


@pytest.mark.process
def test_a_model_without_tables(tmp_path: Path) -> None:
    run(2, without_tables, str(tmp_path))


def average_of_weights(rank: int, world: int, folder: str) -> None:
    model = made()
    average = copy.deepcopy(model)
    hb.distribute(model, "basic")
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(hb.TableError, match="deepcopy the model before hotbed.distribute"):
            copied(model)
    hb.distribute(average, "basic")
    model.tables.assign("item", torch.arange(61), torch.ones(61, 4))
    hb.save(folder, model, step=1)
    hb.load(folder, average)
    assert torch.equal(average.tables.rows("item").values, torch.ones(61, 4))


@pytest.mark.process
def test_the_remedy_of_a_copy_works(tmp_path: Path) -> None:
    run(2, average_of_weights, str(tmp_path))


def on_rank_0_alone(rank: int, world: int) -> None:
    model = hb.EmbeddingCollection([hb.Table("item", 4, 61)], seed=3)
    hb.distribute(model, "basic")
    optimizer = hb.optim.Adam(model.parameters(), lr=0.1)

    def step() -> None:
        model({"item": [[1], [2 + rank]]})["item"].sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()

    def evaluate() -> Any:
        with torch.no_grad():
            return model.eval()({"item": [[5]]})

    for order_by_owner, text in (
        (lambda: model.state_dict(), r"state_dict\(\) of a distributed model.*hotbed.save\("),
        (lambda: optimizer.state_dict(), r"and of its optimizer.*hotbed.save\("),
        (lambda: model.count("item"), r"count\(\) is called by all ranks"),
        (evaluate, r"in another mode than.*All evaluate together.*hotbed.dist.even\(loader\)"),
    ):
        with pytest.raises(PeerError, match=text):
            if rank == 0:
                order_by_owner()
            else:
                step()
        model.train()
        optimizer.zero_grad()
        step()


@pytest.mark.process
def test_what_rank_0_does_alone() -> None:
    run(2, on_rank_0_alone)


class Layered(nn.Module):
    """A dynamic table and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = hb.EmbeddingCollection([hb.Table("item", 4)], seed=3)
        self.layer = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(self.tables({"item": ids})["item"])
        return out


def own_gradients(rank: int, world: int) -> None:
    """What would step dense layers by gradients of one rank alone, after which they are apart for good."""
    model = hb.distribute(Layered())
    optimizer = hb.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.tensor([[1 + rank], [5]])

    def twice() -> None:
        loss = model(ids).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    def two_forwards() -> None:
        losses = [model(ids).sum(), model(ids + 1).sum()]
        for loss in losses:
            loss.backward()

    def without_averaging() -> None:
        with model.no_sync():
            model(ids).sum().backward()

    def a_part() -> None:
        model.layer(torch.full((1, 4), float(rank))).sum().backward()

    weight = model.layer.weight.detach().clone()
    for habit in (twice, two_forwards, without_averaging, a_part):
        habit()
        with pytest.raises(hb.OptimizerError, match="layer.weight': its gradient is that of this"):
            optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(model.layer.weight, weight)
    without_averaging()
    for _ in range(2):
        model(ids).sum().backward()  # averages what there is, too
    optimizer.step()
    every = [torch.empty_like(weight) for _ in range(world)]
    torch_dist.all_gather(every, model.layer.weight.detach())
    assert torch.equal(every[0], every[1]) and not torch.equal(every[0], weight)


class Slow:
    """A process group whose all-reduces take a while."""

    def __init__(self, group: Any) -> None:
        self._group, self._thread = group, ThreadPoolExecutor(1)
        self.future: Any = None

    def allreduce(self, *arguments: Any) -> Slow:
        future: Any = torch.futures.Future()

        def average() -> None:
            time.sleep(0.1)
            work = self._group.allreduce(*arguments)
            work.wait()
            future.set_result(work.get_future().value())

        self._thread.submit(average)
        made = Slow.__new__(Slow)
        made.future = future
        return made

    def get_future(self) -> Any:
        return self.future

    def broadcast(self, *arguments: Any) -> Any:
        return self._group.broadcast(*arguments)


def failed_backwards(rank: int, world: int, slow: bool) -> None:
    """After a backward that has failed the ranks go on as one process does."""
    models = [hb.distribute(Layered()), Layered()]
    if slow:
        averaging: Any = needed_sharing(models[0], "").dense.averaging
        averaging._group = Slow(averaging._group)
    optimizers = [hb.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for number in range(5):
        ids = torch.arange(4)[:, None] + number
        for model, optimizer, own in zip(models, optimizers, (ids[rank::2], ids), strict=True):
            loss = model(own).square().mean()
            if number in (0, 3):
                model.tables.erase("item", ids[:1].flatten())
                with pytest.raises(hb.TableError, match="between this forward and its backward"):
                    loss.backward()
                if model is models[0]:
                    with pytest.raises(hb.OptimizerError, match="of this rank alone"):
                        optimizer.step()
            else:
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(models[0].layer.weight, models[1].layer.weight)
    rows = [model.tables.rows("item").values for model in models]
    torch.testing.assert_close(*rows)


@pytest.mark.process
def test_gradients_of_one_rank_are_refused() -> None:
    run(2, own_gradients)


@pytest.mark.process
@pytest.mark.parametrize("slow", [False, True])
def test_a_backward_that_failed_is_followed_by_others(slow: bool) -> None:
    run(2, failed_backwards, slow)
