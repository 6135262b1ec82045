"""What goes wrong on one rank ends in the right result, or in an error on every rank that runs, in time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from dist.test_distribute import Model, loss_of, made
from dist.test_sharded import batch_of
from dist.worlds import STARTS
from effort import examples

import hotbed as hb
from hotbed.dist import PeerError

PATIENCE = 120
"""Seconds until a test gives up on ranks of which nothing is heard."""

STEPS = 6
AT = 3
"""The step in which it goes wrong, on rank 1."""


class Broken(Exception):
    """The user's own."""


def batches(rank: int, fault: str) -> Iterator[dict[str, Any]]:
    for number in range(STEPS):
        if number == AT and rank == 1:
            match fault:
                case "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stopped" | "stopped for long":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "loader":
                    raise Broken
        yield batch_of(number, slice(4 * rank, 4 * rank + 4))


TRAINERS = 3


def train(
    rank: int, world: int, store: str, fault: str, timeout: float, told: Any, ssd: str | None
) -> None:
    """Ranks beyond `TRAINERS` are memory hosts. `ssd`: with look-ahead over tiers there, rows that travel
    ahead and as bfloat16, gradients as int8."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch_dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    model = made().eval()
    travel: dict[str, Any] = {}
    if ssd is not None:
        model = Model(storage=hb.Storage(host="32MB", ssd=ssd)).train()  # else nothing looks ahead
        travel = {"rows": "bfloat16", "gradients": "int8", "prefetch": 1}
    is_host = rank >= TRAINERS
    hb.distribute(model, "basic", timeout=timeout, memory_host=is_host, **travel)
    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.1)
    done = 0
    try:
        if is_host:
            hb.dist.serve_rows(model, optimizer)
            told.put((rank, "done", 0.0))
            return
        loop = batches(rank, fault)
        for number, batch in enumerate(loop if ssd is None else hb.lookahead(loop, model)):
            here = number == AT and rank == 1
            if here and fault == "wrong id":
                batch["word"][0] = 61
            if here and fault == "forward":
                raise Broken
            loss_of(model, batch).backward()
            if here and fault == "step":
                raise Broken
            if here and fault == "nan":
                model.dense.weight.grad[0, 0] = float("nan")
            if here and fault == "killed in the vote":
                die_in_the_vote(model.tables.table("item").place.ranks)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
        ranks: Any = model.tables.table("item").place.ranks
        assert ssd is None or ranks.sent["ids ahead"] > 0
        rows = model.tables.lookup("item", torch.arange(61))
        hb.dist.release_hosts(model)
        told.put((rank, "done", rows.sum().item()))
    except Exception as error:
        told.put((rank, type(error).__name__, f"{done}: {error}"))
        if not isinstance(error, (PeerError, hb.HotbedError)):
            told.close()
            told.join_thread()
            os._exit(1)  # as a script that raises ends, without a word to the others


def die_in_the_vote(ranks: Any) -> None:
    """Kill this process in the next step, between its two votes."""
    handshake = ranks.handshake

    def die(kind: str, *arguments: Any, **more: Any) -> Any:
        if kind == "a step" and not arguments:
            os.kill(os.getpid(), signal.SIGKILL)
        return handshake(kind, *arguments, **more)

    ranks.handshake = die


def outcome(
    folder: Path,
    fault: str,
    timeout: float,
    stop: float = 0.0,
    *,
    ahead: bool = False,
    hosts: int = 0,
) -> dict[int, Any]:
    """By rank what was raised or "done", and what it says."""
    world = TRAINERS + hosts
    others = {*range(world)} - {1}
    ssd = str(folder / "rows") if ahead else None
    told: Any = STARTS.Queue()
    found: dict[int, Any] = {}

    def listen(ranks: set[int]) -> None:
        while not ranks <= found.keys():
            rank, *rest = told.get(timeout=PATIENCE)
            found[rank] = rest

    arguments = (world, f"file://{folder}/store", fault, timeout, told, ssd)
    started = [STARTS.Process(target=train, args=(rank, *arguments)) for rank in range(world)]
    for process in started:
        process.start()
    try:
        if fault == "stopped":
            stat = Path(f"/proc/{started[1].pid}/stat")
            ends = time.monotonic() + PATIENCE
            while stat.read_text().rsplit(")", 1)[1].split()[0] != "T":
                assert time.monotonic() < ends, "it does not stop"
                time.sleep(0.05)
            time.sleep(stop)
        else:
            listen(others)  # also where rank 1 is stopped, and has not gone on
        if fault.startswith("stopped"):
            os.kill(started[1].pid or 0, signal.SIGCONT)
        listen(others if fault.startswith("killed") else {*range(world)})
        for process in started:
            process.join(60)
            assert process.exitcode is not None, "it does not end"
    finally:
        for process in started:
            process.kill()
    return found


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> float:
    found = outcome(tmp_path_factory.mktemp("world"), "none", 30)
    assert {rank: kind for rank, (kind, *_) in found.items()} == dict.fromkeys(range(3), "done")
    total: float = found[0][1]
    return total


SOAK = examples(1, 20)


@pytest.mark.process
@pytest.mark.parametrize("again", range(SOAK))
@pytest.mark.parametrize(
    ("fault", "raised", "says"),
    [
        ("killed", "PeerLost", "as 3 steps have left them"),
        ("killed in the vote", "PeerLost", "as 3 steps have left them"),
        ("loader", "PeerLost", "as 3 steps have left them"),
        ("forward", "PeerLost", "as 3 steps have left them"),
        ("step", "PeerLost", "as 3 steps have left them"),
        ("wrong id", "PeerError", "Rank 1 could not go on: IdError"),
        ("nan", "PeerError", "Rank 1 could not go on: NotFiniteError"),
    ],
)
def test_every_rank_that_runs_is_told(
    fault: str, raised: str, says: str, again: int, tmp_path: Path
) -> None:
    found = outcome(tmp_path, fault, 10 * PATIENCE)  # which nobody waits for
    for rank in (0, 2):
        kind, text = found[rank]
        assert kind == raised and says in text and text.startswith("3: "), (rank, text)
    own = {"wrong id": "IdError", "nan": "NotFiniteError"}
    if 1 in found:
        assert found[1][0] == own.get(fault, "Broken")


@pytest.mark.process
@pytest.mark.parametrize("again", range(SOAK))
@pytest.mark.parametrize("hosts", [0, 1])
@pytest.mark.parametrize(
    "fault", ["killed", "killed in the vote", "loader", "forward", "step", "wrong id", "nan"]
)
def test_every_rank_is_told_that_looks_ahead(
    fault: str, hosts: int, again: int, tmp_path: Path
) -> None:
    found = outcome(tmp_path, fault, 10 * PATIENCE, ahead=True, hosts=hosts)
    for rank in range(TRAINERS, TRAINERS + hosts):
        kind, text = found[rank]
        assert kind == "PeerLost" and "Another rank ended" in text, (kind, text)
    own = {"wrong id": "IdError", "nan": "NotFiniteError"}
    for rank in (0, 2):
        kind, text = found[rank]
        if fault in own:
            assert kind == "PeerError" and f"Rank 1 could not go on: {own[fault]}" in text, text
        elif kind == "RuntimeError":  # torch's, in a backward, which cuts the text short
            assert "PeerLost: Another rank ended" in text, text
        else:
            assert kind == "PeerLost" and "steps have left them" in text, (kind, text)
    if 1 in found:
        assert found[1][0] == own.get(fault, "Broken")


@pytest.mark.process
@pytest.mark.parametrize("hosts", [0, 1])
def test_ranks_that_look_ahead_end_alike(hosts: int, tmp_path: Path) -> None:
    found = outcome(tmp_path, "none", 30, ahead=True, hosts=hosts)
    assert {kind for kind, *_ in found.values()} == {"done"}
    assert len({found[rank][1] for rank in range(TRAINERS)}) == 1


@pytest.mark.process
@pytest.mark.parametrize("again", range(SOAK))
def test_a_rank_that_is_stopped_for_a_while(again: int, right: float, tmp_path: Path) -> None:
    found = outcome(tmp_path, "stopped", 30, stop=10 if SOAK > 1 else 2)
    assert [found[rank] for rank in range(3)] == [["done", right]] * 3


@pytest.mark.process
@pytest.mark.parametrize("again", range(SOAK))
def test_a_rank_that_is_stopped_for_too_long(again: int, tmp_path: Path) -> None:
    timeout = 30.0 if SOAK > 1 else 3.0
    found = outcome(tmp_path, "stopped for long", timeout)
    for rank in (0, 2):
        kind, text = found[rank]
        assert kind == "PeerLost" and f"waiting for more than {timeout:g} s" in text
    assert found[1][0] == "PeerLost"
