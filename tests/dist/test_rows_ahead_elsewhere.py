"""Rows of the next batch that travel by way of machines, or from memory hosts, while one is trained on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dist import test_hosts_ahead as hosts
from dist.test_lookahead_on_ranks import Model, sent_of
from dist.test_rows_ahead import (
    BETWEEN,
    RULES,
    accumulated,
    another_batch,
    assigned,
    batches_of,
    both,
    breaks,
    clipped,
    clipped_later,
    erased,
    evaluated,
    frozen_at_times,
    not_stepped,
    same_bits,
    taken,
    wait_for_next,
)
from dist.worlds import run

import hotbed as hb
from hotbed.dist import Plan, Replicated, RowWise
from hotbed.dist.handshake import Handshake
from hotbed.dist.rows_ahead import SentInParts
from hotbed.dist.ways import RowsTold

pytestmark = pytest.mark.process

# -- what ranks agree on -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "holds_back", "agreed"),
    [
        ([[7, 1, 8], [7, 1, 8], [0, 0, 0]], False, (True, 8)),
        ([[7, 1, 8], [7, 1, 8], [0, 0, 0]], True, (False, 0)),
        ([[7, 1, 8], [7, 0, 8], [0, 0, 0]], False, (False, 8)),
        ([[7, 1, 8], [7, 1, 9], [0, 0, 0]], False, (True, 0)),
        ([[7, 1, 8], [7, 1, 0], [0, 0, 0]], False, (True, 0)),
    ],
)
def test_rows_go_ahead_where_all_with_batches_say_so(
    told: list[list[int]], holds_back: bool, agreed: tuple[bool, int]
) -> None:
    """The last rank is a memory host."""
    values, ended = torch.tensor(told), [False, False, True]
    opened = Handshake("a lookup", (0,), values, ended, [], 0, {}, holds_back)
    assert RowsTold.of(opened, [2]) == agreed


# -- by way of machines ------------------------------------------------------------------------------


def on_machines(rank: int, world: int, folder: str | None, shard: str, rule: str) -> None:
    same_bits(rank, world, folder, shard, rule, local_world_size=2)


@pytest.mark.parametrize("rule", ["adagrad", "exact"])
@pytest.mark.parametrize("shard", ["table", "row", "falling", "column"])
def test_results_are_those_without_on_two_machines(shard: str, rule: str) -> None:
    run(4, on_machines, None, shard, rule)


def test_results_are_those_without_over_tiers_on_two_machines(tmp_path: Path) -> None:
    run(4, on_machines, str(tmp_path), "row", "adagrad")


def machines_between(rank: int, world: int, between: Callable[[Model, Any, int], None]) -> None:
    options: dict[str, Any] = {"local_world_size": 2, "rows": "int8", "gradients": "int8"}
    _, model = both(rank, world, None, "row", "adagrad", between, **options)
    assert sent_of(model)["rows ahead"] > 0


@pytest.mark.parametrize("between", BETWEEN)
def test_whatever_comes_between_two_batches_on_two_machines(
    between: Callable[[Model, Any, int], None],
) -> None:
    run(4, machines_between, between)


class LastTable(torch.nn.Module):
    """A table that is cut by row, behind others that nobody looks up."""

    def __init__(self, world: int, prefetch: int) -> None:
        super().__init__()
        others, last = [hb.Table(name, 8, 40) for name in "abc"], hb.Table("last", 8, 400)
        self.others = hb.EmbeddingCollection(others, seed=1)
        self.embeddings = hb.EmbeddingCollection([last], seed=2)
        kinds = {**dict.fromkeys("abc", Replicated()), "last": RowWise()}
        plan = Plan([*others, last], world, kinds)
        hb.distribute(self, plan, prefetch=prefetch, local_world_size=2)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.embeddings(batch)["last"].square().sum()


def another_batch_between(rank: int, world: int) -> None:
    """It changes all rows while some are on their way. By machine, tables have numbers of another kind."""
    losses = []
    for prefetch in (0, 1):
        model = LastTable(world, prefetch)
        optimizer = hb.optim.SGD(model.embeddings.parameters(), lr=0.1)
        batches = [{"last": torch.arange(200) + at % 2 * 200} for at in range(8)]
        found = []
        for number, batch in enumerate(hb.lookahead(batches, model.embeddings)):
            wait_for_next(model.embeddings, number, len(batches))
            for one in (batch, {"last": torch.arange(400)}):
                loss = model(one)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(float(loss.detach()))
        losses.append(found)
        ranks: Any = model.embeddings.ranks
        assert not prefetch or ranks.sent["rows ahead"] > 0
    assert losses[0] == losses[1]


def test_another_batch_of_a_later_table_on_two_machines() -> None:
    run(4, another_batch_between)


def breaks_on_machines(rank: int, world: int, method: str) -> None:
    breaks(rank, world, method, local_world_size=2)


@pytest.mark.parametrize("method", ["encode_rows", "decode_rows"])
def test_a_codec_that_breaks_on_two_machines(method: str) -> None:
    run(4, breaks_on_machines, method)


# -- from memory hosts -------------------------------------------------------------------------------


def stepped(model: Model, optimizer: Any, number: int) -> None:
    taken(model, optimizer)


def all_frozen_for_long(model: Model, optimizer: Any, number: int) -> None:
    """No table is to get gradients for some batches, some of which are announced so."""
    taken(model, optimizer)
    for parameter in model.embeddings.parameters():
        parameter.requires_grad_(not 1 <= number < 9)


def loaded(model: Model, optimizer: Any, number: int) -> None:
    """Rows of a few steps ago, which hosts read, too."""
    taken(model, optimizer)
    if number == 2:
        hb.save("saved", model, optimizer, step=number)
    elif number % 3 == 2:
        hb.load("saved", model, optimizer)


class Counted:
    """How often rows were sent ahead, and how often they came with the lookup after all."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.begun = self.dropped = 0
        begin, drop = SentInParts.begin, SentInParts.drop

        def begins(of: SentInParts, *given: Any) -> None:
            self.begun += 1
            begin(of, *given)

        def drops(of: SentInParts) -> None:
            self.dropped += of._coming is not None
            drop(of)

        patch.setattr(SentInParts, "begin", begins)
        patch.setattr(SentInParts, "drop", drops)


def from_hosts(
    rank: int,
    world: int,
    trainers: int,
    folder: str,
    rule: str,
    between: Callable[[Model, Any, int], None],
    options: dict[str, Any],
) -> None:
    """Train without rows ahead and with them, alike to the bit."""
    os.chdir(folder)
    in_tiers = options.pop("in_tiers", False)
    found, sent = [], {}
    for prefetch in (0, 1):
        model = hosts.distributed(
            rank,
            world,
            trainers,
            folder if in_tiers else None,
            f"{prefetch}",
            budget="1MB",
            prefetch=prefetch,
            **options,
        )
        optimizer = RULES[rule](model.parameters())
        with pytest.MonkeyPatch.context() as patch:
            counted = Counted(patch)
            if rank >= trainers:
                hb.dist.serve_rows(model, optimizer)
            else:
                losses = []
                for number, batch in enumerate(hb.lookahead(batches_of(rank), model)):
                    wait_for_next(model.embeddings, number)
                    loss = torch.nn.functional.mse_loss(model(batch), batch["label"])
                    loss.backward()
                    between(model, optimizer, number)
                    losses.append(float(loss.detach()))
                found.append((losses, hosts.rows_of(model)))
                hb.dist.release_hosts(model)
        sent = sent_of(model)
    if rule == "exact":  # rows of which no batch asks change, too
        assert not counted.begun and not sent["rows ahead"]
    else:
        assert counted.begun > (0 if between in (frozen_at_times, all_frozen_for_long) else 5)
        assert counted.dropped < counted.begun / 2 or between in (assigned, erased, another_batch)
    if rank < trainers:
        assert found[0][0] == found[1][0]
        hosts.assert_equal(found[1][1], found[0][1])
    elif rule != "exact":
        assert sent["rows ahead"] > 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("trainers", "count"), hosts.WORLDS)
def test_results_are_those_without_on_memory_hosts(
    trainers: int, count: int, rule: str, tmp_path: Path
) -> None:
    world = trainers + count
    run(world, from_hosts, trainers, str(tmp_path), rule, stepped, {}, seconds=40)


@pytest.mark.parametrize("rule", ["adagrad", "exact"])
def test_where_ranks_that_train_keep_nothing(rule: str, tmp_path: Path) -> None:
    options = {"nothing": True}
    run(3, from_hosts, 2, str(tmp_path), rule, stepped, options, seconds=40)


@pytest.mark.parametrize("options", [{"in_tiers": True}, {"rows": "int8", "gradients": "int8"}])
def test_in_tiers_of_memory_hosts_and_encoded(options: dict[str, Any], tmp_path: Path) -> None:
    run(3, from_hosts, 2, str(tmp_path), "adagrad", stepped, options, seconds=40)


def test_memory_hosts_on_two_machines(tmp_path: Path) -> None:
    options = {"local_world_size": 2}
    run(4, from_hosts, 3, str(tmp_path), "adagrad", stepped, options, seconds=40)


BESIDE_HOSTS = [
    *(assigned, erased, loaded, another_batch, evaluated, accumulated),
    *(clipped, clipped_later, frozen_at_times, not_stepped, all_frozen_for_long),
]


@pytest.mark.parametrize("between", BESIDE_HOSTS)
def test_whatever_comes_between_two_batches_beside_hosts(
    between: Callable[[Model, Any, int], None], tmp_path: Path
) -> None:
    run(3, from_hosts, 2, str(tmp_path), "adagrad", between, {}, seconds=40)
