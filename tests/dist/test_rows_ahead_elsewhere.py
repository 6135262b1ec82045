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
from hotbed.dist.rows_ahead import SentInParts

pytestmark = pytest.mark.process

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


def breaks_on_machines(rank: int, world: int, method: str) -> None:
    breaks(rank, world, method, local_world_size=2)


@pytest.mark.parametrize("method", ["encode_rows", "decode_rows"])
def test_a_codec_that_breaks_on_two_machines(method: str) -> None:
    run(4, breaks_on_machines, method)


# -- from memory hosts -------------------------------------------------------------------------------


def stepped(model: Model, optimizer: Any, number: int) -> None:
    taken(model, optimizer)


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
        assert counted.begun > (0 if between is frozen_at_times else 5)
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
    *(clipped, clipped_later, frozen_at_times, not_stepped),
]


@pytest.mark.parametrize("between", BESIDE_HOSTS)
def test_whatever_comes_between_two_batches_beside_hosts(
    between: Callable[[Model, Any, int], None], tmp_path: Path
) -> None:
    run(3, from_hosts, 2, str(tmp_path), "adagrad", between, {}, seconds=40)
