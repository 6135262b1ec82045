"""Look-ahead on ranks where their loops differ: results are those without, and no rank waits for nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from dist.test_lookahead_on_ranks import (
    Batch,
    Model,
    assert_equal,
    batch_of,
    distributed,
    sent_of,
    step,
    train,
)
from dist.worlds import run
from torch.distributed.algorithms.join import Join

import hotbed as hb
from hotbed.dist import PeerError, Plan, RowWise
from hotbed.dist.wire import group_of

pytestmark = pytest.mark.process


def unweighted(batch: Batch) -> Batch:
    tags = hb.Jagged(batch["tag"].values, lengths=batch["tag"].lengths)
    return {"item": batch["item"], "tag": tags, "word": batch["word"]}


def with_other_weights(batch: Batch) -> Batch:
    tags = batch["tag"]
    ones = torch.ones(len(tags.values))
    return {**unweighted(batch), "tag": hb.Jagged(tags.values, lengths=tags.lengths, weights=ones)}


def weights_unknown(rank: int, world: int, folder: str, inputs: Any) -> None:
    """Look-ahead is told of ids without the weights that the forward has, or with others."""

    def weighted(batch: Batch, number: int) -> Batch:
        tags, chance = batch["tag"], torch.Generator().manual_seed(number)
        weights = torch.rand(len(tags.values), generator=chance)
        return {**batch, "tag": hb.Jagged(tags.values, lengths=tags.lengths, weights=weights)}

    batches = [weighted(batch_of(rank, number), number) for number in range(8)]
    without, model = (distributed(world, "table", folder, name) for name in ("without", "with"))
    expected = train(without, batches)
    assert train(model, hb.lookahead(batches, model, inputs=inputs)) == expected
    assert_equal(model, without)


@pytest.mark.parametrize("inputs", [unweighted, with_other_weights])
def test_weights_that_look_ahead_was_not_told_of(inputs: Any, tmp_path: Path) -> None:
    run(2, weights_unknown, str(tmp_path), inputs)


def no_room(rank: int, world: int, folder: str) -> None:
    """The budget of one rank is too small for its tables: the others hear of it at once."""
    host = "100KB" if rank == 1 else "1500KB"
    model = Model(hb.Storage(host=host, ssd=f"{folder}/rows"))
    specs = model.embeddings.tables
    hb.distribute(model, Plan([*specs.values()], world, {name: RowWise() for name in specs}))
    began = time.monotonic()
    with pytest.raises(hb.StorageError if rank == 1 else PeerError, match="budget"):
        train(model, hb.lookahead([batch_of(rank, number) for number in range(4)], model))
    assert time.monotonic() - began < 10


def test_a_budget_without_room_on_one_rank_is_told_to_all(tmp_path: Path) -> None:
    run(2, no_room, str(tmp_path))


def uneven_epochs(rank: int, world: int, folder: str) -> None:
    """Ranks that have had more batches in one epoch look ahead together in the next."""
    epochs = 3
    batches = [batch_of(rank, number) for number in range(6 + rank)]
    models = [distributed(world, "row", folder, name) for name in ("without", "with")]
    for at, model in enumerate(models):
        optimizer = hb.optim.Adagrad(model.parameters(), lr=0.05)
        loader: Any = hb.lookahead(batches, model) if at else batches
        began = time.monotonic()
        for _ in range(epochs):
            with Join(hb.dist.joinables(model)):
                for batch in loader:
                    step(model, optimizer, batch)
        assert time.monotonic() - began < 12
    assert_equal(*models)
    assert sent_of(models[1])["ids ahead"] > 0


def test_epochs_of_other_lengths(tmp_path: Path) -> None:
    run(2, uneven_epochs, str(tmp_path))


def closed_near_the_end(rank: int, world: int, folder: str) -> None:
    """A window closes when all ranks have read their last batches: none waits for more of this loop."""
    batches = [batch_of(rank, number) for number in range(8)]
    models = [distributed(world, "row", folder, name) for name in ("without", "with")]
    losses: list[list[float]] = [[], []]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for at, model in enumerate(models):
            optimizer = hb.optim.Adagrad(model.parameters(), lr=0.05)
            prefetcher: Any = model.embeddings.prefetcher
            loader: Any = hb.lookahead(batches, model) if at else batches
            for _ in range(2):
                for number, batch in enumerate(loader):
                    if number == 5 and at:
                        time.sleep(0.3)  # all are read
                        for tiers in prefetcher.tiers if rank == 1 else []:
                            tiers.close_window()
                    losses[at].append(step(model, optimizer, batch))
    assert losses[0] == losses[1]
    assert_equal(*models)


def test_a_window_that_closes_near_the_end(tmp_path: Path) -> None:
    run(2, closed_near_the_end, str(tmp_path))


def closed_in_the_middle(rank: int, world: int, folder: str) -> None:
    """A window closes while the other ranks know enough batches: all look ahead again a batch later."""
    batches = [batch_of(rank, number) for number in range(30)]
    without, model = (distributed(world, "row", folder, name) for name in ("without", "with"))
    expected = train(without, batches)
    prefetcher: Any = model.embeddings.prefetcher
    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.05)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, batch in enumerate(hb.lookahead(batches, model, 2, horizon=4)):
            time.sleep(0.02)
            if number in (9, 19) and rank == 1:
                for tiers in prefetcher.tiers:
                    tiers.close_window()
            losses.append(step(model, optimizer, batch))
    assert losses == expected
    assert_equal(model, without)
    assert model.embeddings.stats()["batches_unprepared"] < 15


def test_a_window_that_closes_in_the_middle(tmp_path: Path) -> None:
    run(2, closed_in_the_middle, str(tmp_path))


_LEAVES = """
import contextlib, gc, sys
import torch, torch.distributed as dist
from dist.test_lookahead_on_ranks import batch_of, distributed, step
import hotbed as hb
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
model = distributed(2, "row", folder, f"rows-{rank}")
optimizer = hb.optim.Adagrad(model.parameters(), lr=0.05)
batches = [batch_of(rank, n) for n in range(30)]
given = hb.lookahead(batches, model, 2, 4) if rank == 0 or sys.argv[3] != "one" else batches
with contextlib.suppress(hb.dist.PeerError):  # of rank 0, where the other is gone
    for number, batch in enumerate(given):
        if number == 6 and sys.argv[3] != "model gone":
            break
        if number == 6 and rank == 1:
            del model, optimizer  # which threads of look-ahead have, until their round is over
            gc.collect()
            sys.exit()
        step(model, optimizer, batch)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("who", ["all", "one", "model gone"])
def test_processes_end_while_a_round_waits(who: str, tmp_path: Path) -> None:
    """A thread inside of torch would abort them."""
    paths = os.pathsep.join(path for path in sys.path if path)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _LEAVES, str(rank), str(tmp_path), who],
            env={**os.environ, "PYTHONPATH": paths},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in started:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said


class Owner:
    pass


def dropped(rank: int, world: int) -> None:
    """The last reference goes on a thread of look-ahead, which the interpreter does not wait for."""
    owner = [Owner()]
    ended = weakref.ref(group_of(owner[0], "a test", 10.0, backend="gloo"))
    torch.distributed.barrier()  # the others have it, too
    thread = threading.Thread(target=owner.clear, daemon=True)
    thread.start()
    thread.join()
    assert ended() is not None
    group_of(Owner(), "a test", 10.0, backend="gloo")
    assert ended() is None


def test_daemon_threads_end_no_group() -> None:
    run(2, dropped)
