"""Look-ahead of memory hosts: rows are brought up before they are asked for; results are those without."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from dist.test_lookahead_on_ranks import IDLE, Batch, Model, batch_of, sent_of, step
from dist.worlds import run
from torch.distributed.algorithms.join import Join

import hotbed as hb
from hotbed.dist import ColumnWise, PeerError, Plan, RowWise, Sharding
from hotbed.dist.rounds import RoundSession

pytestmark = pytest.mark.process

STEPS, SAMPLES = 12, 24
WORLDS = [(1, 1), (2, 1), (1, 2), (2, 2)]
"""Ranks that train, and memory hosts."""
BUDGETS = {1: "700KB", 2: "600KB"}
"""Of a host among so many, with room for a quarter of its rows, about."""


def distributed(
    rank: int, world: int, trainers: int, folder: str | None, name: str, **options: Any
) -> Model:
    """All rows lie on hosts, and those of the table "word" on ranks that train, too; unless these keep
    `nothing`."""
    nothing = options.pop("nothing", False)
    budget = options.pop("budget", BUDGETS[world - trainers] if rank >= trainers else "4MB")
    storage = None if folder is None else hb.Storage(host=budget, ssd=f"{folder}/{name}")
    model = Model(storage)
    hosts = tuple(range(trainers, world))
    kinds: dict[str, Sharding] = {
        "item": RowWise(owners=hosts),
        "tag": RowWise(owners=hosts),
        "word": ColumnWise(hosts if nothing else (*hosts, 0)),
    }
    plan = Plan([*model.embeddings.tables.values()], world, kinds)
    hb.distribute(model, plan, memory_host=rank >= trainers, **options)
    return model


def batches_of(rank: int, count: int = STEPS) -> list[Batch]:
    return [batch_of(rank, number, SAMPLES) for number in range(count)]


class Case:
    """A model that is trained without look-ahead, and one with it, on one rank."""

    def __init__(self, rank: int, world: int, trainers: int, folder: str | None) -> None:
        self.rank, self.world, self.trainers, self.folder = rank, world, trainers, folder
        self.is_host = rank >= trainers

    def model(self, name: str, **options: Any) -> tuple[Model, torch.optim.Optimizer]:
        made = distributed(self.rank, self.world, self.trainers, self.folder, name, **options)
        return made, hb.optim.Adagrad(made.parameters(), lr=0.05)

    def serve(self, name: str, **options: Any) -> Any:
        """On a host: answer, and return the counters of its tiers."""
        model, optimizer = self.model(name, **options)
        hb.dist.serve_rows(model, optimizer)
        prefetcher: Any = model.embeddings.prefetcher
        return [
            {
                **tiers.stats([]),
                "slots": sum(tiers.core.capacities()),
                "rows": sum(map(len, tiers.tables)),
            }
            for tiers in prefetcher.tiers
        ]


def rows_of(model: Model) -> list[torch.Tensor]:
    """All rows and dense weights; called by all ranks that train."""
    tables = [model.embeddings.rows(table) for table in model.embeddings.tables]
    return [t for rows in tables for t in rows] + [p.detach() for p in model.top.parameters()]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# -- the same bits -----------------------------------------------------------------------------------


def same_bits(rank: int, world: int, trainers: int, folder: str, options: dict[str, Any]) -> None:
    case = Case(rank, world, trainers, folder)
    if case.is_host:
        case.serve("without", **options)
        for stats in case.serve("with", **options):
            assert stats["batches_unprepared"] < stats["batches"] / 3
            assert stats["slots"] < 0.3 * stats["rows"] and stats["rows_from_ssd"] > 0
        return
    found, before = [], 0
    for name in ("without", "with"):
        model, optimizer = case.model(name, **options)
        loader: Any = batches_of(rank)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "The budget holds")  # on a busy machine
            if name == "with":
                loader = hb.lookahead(loader, model, 2, horizon=4)
            losses = [step(model, optimizer, batch) for _ in range(2) for batch in loader]
        sent = sent_of(model)
        if name == "with":
            assert sent["ids ahead"] > 0
            assert sent.get("ids", 0) <= before / 3
        before = sent.get("ids", 0)
        found.append((losses, rows_of(model)))
        hb.dist.release_hosts(model)
    assert found[0][0] == found[1][0]
    assert_equal(found[1][1], found[0][1])


@pytest.mark.parametrize(("trainers", "hosts"), WORLDS)
def test_results_are_those_without_look_ahead(trainers: int, hosts: int, tmp_path: Path) -> None:
    run(trainers + hosts, same_bits, trainers, str(tmp_path), {}, seconds=40)


def test_results_are_those_without_look_ahead_on_two_machines(tmp_path: Path) -> None:
    run(4, same_bits, 3, str(tmp_path), {"local_world_size": 2, "budget": "1MB"}, seconds=40)


# -- loops that differ, and what else is done beside ---------------------------------------------------


class TwoCollections(torch.nn.Module):
    """The second is looked up first."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        x, y = hb.Table("x", 16, 6000, "sum"), hb.Table("y", 16, 6000, "sum")
        one, two = (hb.Storage(host="1MB", ssd=f"{folder}/{name}") for name in "xy")
        self.first = hb.EmbeddingCollection([x], {"item": "x"}, seed=1, storage=one)
        self.other = hb.EmbeddingCollection([y], {"word": "y"}, seed=2, storage=two)

    def forward(self, batch: Batch) -> torch.Tensor:
        words = self.other({"word": batch["word"]})["word"]
        return (self.first({"item": batch["item"]})["item"] + words).sum(1)


def two_collections(rank: int, world: int, folder: str) -> None:
    found = []
    for name in ("without", "with"):
        model = TwoCollections(f"{folder}/{name}")
        hb.distribute(model, memory_host=rank == 1)
        optimizer = hb.optim.Adagrad(model.parameters(), lr=0.05)
        if rank == 1:
            hb.dist.serve_rows(model, optimizer)
            prefetcher: Any = model.first.prefetcher
            if name == "with":
                stats = [tiers.stats([])["batches_unprepared"] for tiers in prefetcher.tiers]
                assert sum(stats) < STEPS, stats
            continue
        loader: Any = batches_of(rank)
        losses = []
        for number, batch in enumerate(hb.lookahead(loader, model, 2) if found else loader):
            if number == 3:
                continue  # nobody looks it up
            loss = model(batch).square().sum()
            if number == 5:
                loss = model.first({"item": batch["item"]})["item"].square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        tables = [model.first.rows("x"), model.other.rows("y")]
        found.append((losses, [t for rows in tables for t in rows]))
        hb.dist.release_hosts(model)
    if rank == 0:
        assert found[0][0] == found[1][0]
        assert_equal(found[1][1], found[0][1])


def test_two_collections_in_another_order(tmp_path: Path) -> None:
    run(2, two_collections, str(tmp_path), seconds=40)


def different_loops(rank: int, world: int, trainers: int, folder: str) -> None:
    """Epochs that are left early, windows that close on one rank, evaluation, batches that nobody looks up or
    that are not those of the loader, a save, hosts that serve twice, and ranks that end in other steps."""
    case = Case(rank, world, trainers, folder)
    found = []
    for name in ("without", "with"):
        model, optimizer = case.model(name, budget="1MB")
        if case.is_host:
            for _ in range(2):
                hb.dist.serve_rows(model, optimizer)
            on_host: Any = model.embeddings.prefetcher
            assert len(on_host._pending.batches) < 6  # those that were passed over are gone
            continue
        losses = []
        batches = batches_of(rank)
        loader: Any = hb.lookahead(batches, model, 1 + rank) if found else batches
        for epoch in range(4):
            for number, batch in enumerate(loader):
                if (epoch, number) == (1, 4):
                    break
                if number == 2:
                    continue
                losses.append(step(model, optimizer, batches[7] if number == 5 else batch))
                if number == 6 and found and rank == epoch % trainers:
                    prefetcher: Any = model.embeddings.prefetcher
                    for tiers in prefetcher.tiers:
                        tiers.close_window()
                if number == 8:
                    model.eval()
                    with torch.no_grad():
                        losses.append(float(model(batches[0]).sum()))
                    model.train()
            if epoch == 2:
                hb.save(f"{folder}/saved-{name}", model, optimizer, step=1)
                hb.dist.release_hosts(model)
        with Join(hb.dist.joinables(model)):
            few = batches[: 5 + 2 * rank]
            for batch in hb.lookahead(few, model) if found else few:
                step(model, optimizer, batch)
        found.append((losses, rows_of(model)))
        hb.dist.release_hosts(model)
    if not case.is_host:
        assert found[0][0] == found[1][0]
        assert_equal(found[1][1], found[0][1])


@pytest.mark.parametrize(("trainers", "hosts"), [(2, 1), (1, 2), (2, 2)])
def test_loops_may_differ(trainers: int, hosts: int, tmp_path: Path) -> None:
    run(trainers + hosts, different_loops, trainers, str(tmp_path), seconds=60)


def never_looked_up(rank: int, world: int, trainers: int, folder: str) -> None:
    """A loop that trains on other ids than it has read, and passes over the rest."""
    model = distributed(rank, world, trainers, folder, "rows", budget="4MB")
    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.05)
    if rank >= trainers:
        most, prefetcher = [0], cast(Any, model.embeddings.prefetcher)
        drop, announced = prefetcher._drop, list[int]()

        def counting(told: Any) -> None:
            drop(told)
            pending = prefetcher._pending.batches
            most.append(len(pending))
            announced.extend(batch.ids for batch in pending.values() if batch.owned)

        prefetcher._drop = counting
        hb.dist.serve_rows(model, optimizer)
        assert 0 < max(most) < 8
        assert announced and min(announced) > 0
        assert prefetcher._host_window.closed
        return
    other = batch_of(rank, 99, SAMPLES)
    for number, batch in enumerate(hb.lookahead(batches_of(rank, 40), model, 2, horizon=4)):
        if number < 20:
            step(model, optimizer, other)
        elif number > 37:
            step(model, optimizer, batch)
    hb.dist.release_hosts(model)


@pytest.mark.parametrize(("trainers", "hosts"), [(1, 1), (2, 1)])
def test_hosts_let_go_of_batches_that_nobody_looks_up(
    trainers: int, hosts: int, tmp_path: Path
) -> None:
    run(trainers + hosts, never_looked_up, trainers, str(tmp_path), seconds=40)


def one_looks_ahead(rank: int, world: int, folder: str) -> None:
    case = Case(rank, world, 2, folder)
    found = []
    for name in ("without", "with"):
        model, optimizer = case.model(name)
        if case.is_host:
            hb.dist.serve_rows(model, optimizer)
            continue
        loader: Any = batches_of(rank)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for batch in hb.lookahead(loader, model) if found and rank == 0 else loader:
                step(model, optimizer, batch)
        idle = sum(IDLE in str(one.message) for one in caught)
        assert idle == int(bool(found) and rank == 0)
        found.append(rows_of(model))
        hb.dist.release_hosts(model)
    if not case.is_host:
        assert_equal(*found)


def test_one_rank_alone_looks_ahead_at_nothing_and_hangs_nobody(tmp_path: Path) -> None:
    run(3, one_looks_ahead, str(tmp_path), seconds=40)


# -- errors --------------------------------------------------------------------------------------------


def wrong_batch(rank: int, world: int, folder: str) -> None:
    case = Case(rank, world, 2, folder)
    found = []
    for name in ("without", "with"):
        model, optimizer = case.model(name)
        if case.is_host:
            hb.dist.serve_rows(model, optimizer)
            continue
        batches: Any = batches_of(rank)
        if rank == 1:
            batches[3] = {**batches[3], "item": batches[3]["item"] + 10**6}
        for number, batch in enumerate(hb.lookahead(batches, model) if found else batches):
            if number != 3:
                step(model, optimizer, batch)
                continue
            with pytest.raises(hb.IdError if rank == 1 else PeerError, match="item"):
                step(model, optimizer, batch)
        found.append(rows_of(model))
        hb.dist.release_hosts(model)
    if not case.is_host:
        assert_equal(*found)


def test_a_wrong_batch_on_one_rank_is_an_error_in_its_turn(tmp_path: Path) -> None:
    run(3, wrong_batch, str(tmp_path), seconds=40)


def no_room(rank: int, world: int, folder: str) -> None:
    """A host whose budget holds no batch tells the others, which can go on with smaller ones."""
    model = distributed(rank, world, 1, folder, "rows", budget="600KB" if rank else "4MB")
    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.05)
    if rank:
        hb.dist.serve_rows(model, optimizer)
        return
    small, large = (
        [batch_of(rank, n, 4) for n in range(6)],
        [batch_of(rank, n, 300) for n in range(4)],
    )
    for batch in hb.lookahead(small, model):
        step(model, optimizer, batch)
    with pytest.raises(PeerError, match=r"Rank 1 could not go on.*budget"):
        for batch in hb.lookahead(large, model):
            step(model, optimizer, batch)
    for batch in hb.lookahead(small, model):
        step(model, optimizer, batch)
    hb.dist.release_hosts(model)


def test_a_host_without_room_is_told_to_the_others(tmp_path: Path) -> None:
    run(2, no_room, str(tmp_path), seconds=40)


def closing_windows(rank: int, world: int, folder: str) -> None:
    """A host takes back again and again what it has announced, as where a batch has no room beside it."""
    case = Case(rank, world, 1, folder)
    found = []
    for name in ("without", "with"):
        model, optimizer = case.model(name)
        if case.is_host:
            closed = close_often(model.embeddings.prefetcher)
            hb.dist.serve_rows(model, optimizer)
            assert closed.count(True) > 5
            continue
        loader: Any = batches_of(rank)
        for batch in hb.lookahead(loader, model, 4) if found else loader:
            step(model, optimizer, batch)
        found.append(rows_of(model))
        hb.dist.release_hosts(model)
    if not case.is_host:
        assert_equal(*found)


def close_often(prefetcher: Any) -> list[bool]:
    """Close windows of a host behind every other lookup or step. Return whether there was any, of each."""
    go_on, closed = prefetcher.go_on, list[bool]()

    def closing() -> None:
        closed.extend(tiers.close_window() for tiers in prefetcher.tiers[: len(closed) % 2])
        closed.append(False)
        go_on()

    prefetcher.go_on = closing
    return closed


def test_a_host_takes_back_what_it_has_announced(tmp_path: Path) -> None:
    run(2, closing_windows, str(tmp_path), seconds=40)


def killed(rank: int, world: int, who: int, where: str, folder: str) -> None:
    model = distributed(rank, world, 2, folder, "rows", timeout=10)
    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.05)
    if rank == who:
        prefetcher: Any = model.embeddings.prefetcher
        die_in_a_call(prefetcher.rounds if where == "rounds" else model.embeddings.ranks, 12)
    try:
        if rank == 2:
            hb.dist.serve_rows(model, optimizer)
        else:
            for batch in hb.lookahead(batches_of(rank, 40), model, 2, horizon=3):
                step(model, optimizer, batch)
    except BaseException as error:
        Path(folder, f"error-{rank}").write_text(f"{type(error).__name__} {error}")
    os._exit(1)  # as a script that raises ends


def die_in_a_call(messenger: Any, number: int) -> None:
    """Kill this process when it next sends a message for the last of so many times."""
    send, left = messenger.send, [number]

    def die(*given: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return send(*given)

    messenger.send = die


@pytest.mark.parametrize("where", ["rounds", "lookups"])
@pytest.mark.parametrize("who", [1, 2])
def test_a_rank_that_is_killed_ends_the_others(who: int, where: str, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match=f"rank {who} is gone"):
        run(3, killed, who, where, str(tmp_path), seconds=40)
    assert time.monotonic() - began < 40
    told = {path.name: path.read_text() for path in tmp_path.glob("error-*")}
    assert told.keys() == {"error-0", "error-1", "error-2"} - {f"error-{who}"}
    for text in told.values():
        assert "Another rank ended" in text and "steps have left them" in text


class _Gone:
    """A batch whose ids a peer does not take any more, and the rounds in which they travel."""

    digest = depth = 0
    loop: object = None
    left = False

    def travel(self, rounds: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    def leave(self) -> None:
        self.left = True


def test_a_peer_that_goes_in_a_round_is_an_error_of_training_alone() -> None:
    gone: Any = _Gone()
    assert not RoundSession(gone, gone)._travel(gone)
    assert gone.left


def fails_in_a_round(rank: int, world: int, folder: str) -> None:
    """A host that cannot take ids of later batches looks nothing up ahead; the others go on without."""
    model = distributed(rank, world, 1, folder, "rows", timeout=10)
    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.05)
    if rank == 1:
        prefetcher: Any = model.embeddings.prefetcher
        describe = prefetcher.rounds.describe

        def failing(digest: int, own: Any = ()) -> Any:
            raise MemoryError(f"{len(describe(digest, own))}")

        prefetcher.rounds.describe = failing
        hb.dist.serve_rows(model, optimizer)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = [step(model, optimizer, batch) for batch in hb.lookahead(batches_of(0), model)]
    assert len(losses) == STEPS
    hb.dist.release_hosts(model)


def test_a_host_that_fails_in_a_round(tmp_path: Path) -> None:
    run(2, fails_in_a_round, str(tmp_path), seconds=40)
