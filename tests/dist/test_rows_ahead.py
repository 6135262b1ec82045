"""Rows of the next batch that travel while one is trained on: results are those without."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dist.test_lookahead_on_ranks import (
    DIM,
    ROWS,
    SHARDINGS,
    STEPS,
    Batch,
    Model,
    assert_equal,
    batch_of,
    distributed,
    sent_of,
    step,
)
from dist.worlds import run

import hotbed as hb
from hotbed.dist import GridWise, Plan, RowWise
from hotbed.dist.rows_ahead import SentInParts

pytestmark = pytest.mark.process

RULES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adagrad": lambda parameters: hb.optim.Adagrad(parameters, lr=0.05),
    "momentum": lambda parameters: hb.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "lazy": lambda parameters: hb.optim.Adam(parameters, lr=0.05),
    "exact": lambda parameters: hb.optim.Adam(parameters, lr=0.05, untouched="exact"),
}


def batches_of(rank: int) -> list[Batch]:
    """Which share about half of their ids with the one before."""
    found = [batch_of(rank, number) for number in range(STEPS)]
    for before, after in zip(found, found[1:], strict=False):
        after["item"][::2] = before["item"][::2]
        after["word"][::3] = before["word"][::3]
    return found


def both(
    rank: int,
    world: int,
    folder: str | None,
    shard: str,
    rule: str,
    between: Callable[[Model, Any, int], None] | None = None,
    **options: Any,
) -> tuple[Model, Model]:
    """Train a model without rows ahead and one with them, alike to the bit. `between`: does the step of a
    batch, whose backward is done."""
    models, losses = [], []
    for prefetch in (0, 1):
        model = distributed(world, shard, folder, f"{prefetch}", prefetch=prefetch, **options)
        optimizer = RULES[rule](model.parameters())
        found = []
        for number, batch in enumerate(hb.lookahead(batches_of(rank), model)):
            wait_for_next(model.embeddings, number)
            if between is None:
                found.append(step(model, optimizer, batch))
                continue
            loss = torch.nn.functional.mse_loss(model(batch), batch["label"])
            loss.backward()
            between(model, optimizer, number)
            found.append(float(loss.detach()))
        models.append(model)
        losses.append(found)
    assert losses[0] == losses[1]
    assert_equal(*models)
    return models[0], models[1]


def wait_for_next(tables: hb.EmbeddingCollection, number: int, steps: int = STEPS) -> None:
    """Wait until the ids of the next batch have travelled, for a while, as they may not."""
    prefetcher: Any = tables.prefetcher
    began = time.monotonic()
    while prefetcher is not None and time.monotonic() - began < 5:
        if prefetcher.rounds.count >= min(number + 3, steps + 1):
            return
        time.sleep(1e-3)


def same_bits(
    rank: int, world: int, folder: str | None, shard: str, rule: str, **options: Any
) -> None:
    without, model = both(rank, world, folder, shard, rule, **options)
    before, sent = sent_of(without), sent_of(model)
    assert "rows ahead" not in before
    counted: list[Any] = [one.embeddings.ranks for one in (without, model)]
    assert counted[0].served == counted[1].served
    if rule == "exact":  # rows of which no batch asks change, too
        assert sent["rows ahead"] == 0
        assert sent.get("rows", 0) == before.get("rows", 0)
    elif before["rows"]:
        assert sent["rows ahead"] > (0.2 if folder is None else 0.05) * before["rows"]
        few = 64 * world  # what ends pieces of messages
        assert sent["rows"] + sent["rows ahead"] <= before["rows"] + few * STEPS


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shard", SHARDINGS)
def test_results_are_those_without(shard: str, rule: str) -> None:
    run(2, same_bits, None, shard, rule)


def grids(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHARDINGS, "grid", lambda world: GridWise(((0, 3), (2, 1))))
        same_bits(rank, world, None, "grid", "adagrad")


def test_results_are_those_without_in_grids() -> None:
    run(4, grids)


@pytest.mark.parametrize("rule", ["adagrad", "exact"])
@pytest.mark.parametrize("world", [2, 3])
def test_results_are_those_without_over_tiers(world: int, rule: str, tmp_path: Path) -> None:
    run(world, same_bits, str(tmp_path), "row", rule)


def taken(model: Model, optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


def assigned(model: Model, optimizer: Any, number: int) -> None:
    taken(model, optimizer)
    ids = torch.arange(0, ROWS, 3)
    model.embeddings.assign("item", ids, torch.full((len(ids), DIM), float(number)))


def assigned_by_one(model: Model, optimizer: Any, number: int) -> None:
    taken(model, optimizer)
    ranks: Any = model.embeddings.ranks
    if ranks.rank == number % 2:
        ids = torch.arange(0, ROWS, 3)
        rows = torch.full((len(ids), DIM), float(number))
        model.embeddings.assign("item", ids, rows, local=True)


def erased(model: Model, optimizer: Any, number: int) -> None:
    taken(model, optimizer)
    model.embeddings.erase("tag", torch.arange(0, ROWS, 2) * 2**20 + 1)


def loaded(model: Model, optimizer: Any, number: int) -> None:
    taken(model, optimizer)
    if number % 3 == 2:
        kept = [model.state_dict()]
        torch.distributed.broadcast_object_list(kept)
        for name in ("item", "word"):
            kept[0][f"embeddings.{name}"] *= 0.5
        model.load_state_dict(kept[0])


def another_batch(model: Model, optimizer: Any, number: int) -> None:
    """One that nobody has announced, before the step and behind it."""
    ranks: Any = model.embeddings.ranks
    for at in range(2):
        torch.nn.functional.mse_loss(
            model(other := batch_of(ranks.rank, 500 + 2 * number + at)), other["label"]
        ).backward()
        taken(model, optimizer)


def evaluated(model: Model, optimizer: Any, number: int) -> None:
    taken(model, optimizer)
    ranks: Any = model.embeddings.ranks
    model.eval()
    with torch.no_grad():
        model(batch_of(ranks.rank, 500 + number))
    model.train()


def accumulated(model: Model, optimizer: Any, number: int) -> None:
    if number % 3 == 2:
        taken(model, optimizer)


def clipped(model: Model, optimizer: Any, number: int) -> None:
    hb.nn.clip_grad_norm_(model.parameters(), 0.01)
    taken(model, optimizer)


def clipped_later(model: Model, optimizer: Any, number: int) -> None:
    """A gradient that clipping has brought to the owners waits there for the step after the next batch."""
    hb.nn.clip_grad_norm_(model.parameters(), 0.01)
    if number % 2:
        taken(model, optimizer)


def frozen_at_times(model: Model, optimizer: Any, number: int) -> None:
    taken(model, optimizer)
    dict(model.named_parameters())["embeddings.item"].requires_grad_(number % 4 < 2)


def not_stepped(model: Model, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    if number % 2:
        for parameter in model.parameters():
            parameter.grad = None


def by_another_rule(model: Any, optimizer: Any, number: int) -> None:
    """An optimizer that moves rows of which no batch asks is made between a forward and its step."""
    if number == 3:
        exact = {"untouched": "exact", "replace_state": True}
        model.newer = hb.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.5, **exact)
    taken(model, getattr(model, "newer", optimizer))


def by_another_rule_once(model: Any, optimizer: Any, number: int) -> None:
    """The same, and it is gone before the next forward."""
    if number == 3:
        exact = {"untouched": "exact", "replace_state": True}
        taken(model, hb.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.5, **exact))
        model.newer = hb.optim.Adagrad(model.parameters(), lr=0.05, replace_state=True)
    else:
        taken(model, getattr(model, "newer", optimizer))


BETWEEN = [
    *(assigned, assigned_by_one, erased, loaded, another_batch, evaluated, accumulated),
    *(clipped, clipped_later, frozen_at_times, not_stepped, by_another_rule, by_another_rule_once),
]


def goes_between(rank: int, world: int, between: Callable[[Model, Any, int], None]) -> None:
    _, model = both(rank, world, None, "row", "adagrad", between)
    assert sent_of(model)["rows ahead"] > 0


@pytest.mark.parametrize("between", BETWEEN)
def test_whatever_comes_between_two_batches(between: Callable[[Model, Any, int], None]) -> None:
    run(2, goes_between, between)


def encoded(rank: int, world: int, rows: str, shared_memory: bool) -> None:
    _, model = both(
        rank,
        world,
        None,
        "row",
        "adagrad",
        rows=rows,
        gradients="int8",
        shared_memory=shared_memory,
    )
    assert sent_of(model)["rows ahead"] > 0


@pytest.mark.parametrize("shared_memory", [False, True])
@pytest.mark.parametrize("rows", ["bfloat16", "int8"])
def test_codecs(rows: str, shared_memory: bool) -> None:
    run(2, encoded, rows, shared_memory)


class Breaking(hb.dist.ByRow):
    """Rows as they are; raises in a method, where one is named, once."""

    broken = ""

    def _try(self, method: str) -> None:
        if self.broken == method:
            self.broken = ""
            raise ValueError(f"cannot {method}")

    def row_bytes(self, width: int, dtype: torch.dtype) -> int:
        return width * dtype.itemsize

    def encode_rows(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        self._try("encode_rows")
        out.copy_(rows.contiguous().view(torch.uint8))

    def decode_rows(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        self._try("decode_rows")
        out.copy_(encoded.contiguous().view(out.dtype))


def breaks(rank: int, world: int, method: str, **options: Any) -> None:
    """Of rows ahead that cannot be sent, nobody hears; of those that cannot be read, all do in the lookup."""
    codec = Breaking()
    hb.dist.CODECS["mine"] = codec
    seen = []

    def then_broken(call: Any) -> Any:
        def broken(self: Any, *arguments: Any) -> Any:
            if rank == 1 and (method == "encode_rows" or self._coming is not None):
                codec.broken = method if not seen else ""
                seen.append(1)
            return call(self, *arguments)

        return broken

    models, losses = [], []
    for prefetch in (0, 1):
        options.update(prefetch=prefetch, rows="mine")
        model = distributed(world, "row", None, "", **options)
        optimizer = RULES["adagrad"](model.parameters())
        found = []
        with pytest.MonkeyPatch.context() as patch:
            name = "begin" if method == "encode_rows" else "fetch"
            patch.setattr(SentInParts, name, then_broken(getattr(SentInParts, name)))
            for number, batch in enumerate(hb.lookahead(batches_of(rank), model)):
                wait_for_next(model.embeddings, number)
                if method == "decode_rows" and number == 1:
                    if prefetch:
                        error = ValueError if rank == 1 else hb.dist.PeerError
                        with pytest.raises(error, match="cannot decode_rows"):
                            model(batch)
                    else:
                        model(batch)
                    continue
                found.append(step(model, optimizer, batch))
        assert sent_of(model).get("rows ahead", 0) > 0 or not prefetch
        models.append(model)
        losses.append(found)
    assert losses[0] == losses[1] and (seen or rank != 1)
    assert_equal(*models)


@pytest.mark.parametrize("method", ["encode_rows", "decode_rows"])
def test_a_codec_that_breaks(method: str) -> None:
    run(2, breaks, method)


def trains_in(rank: int, world: int, host: int, folder: Path, prefetch: int) -> bool:
    storage = hb.Storage(host=host, ssd=folder)
    model = hb.EmbeddingCollection([hb.Table("item", 16, 2000)], seed=1, storage=storage)
    plan = Plan(model.tables.values(), world, {"item": RowWise()})
    hb.distribute(model, plan, prefetch=prefetch)
    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.1)
    chance = torch.Generator().manual_seed(rank)
    batches = [{"item": torch.randperm(2000, generator=chance)[:600]} for _ in range(8)]
    try:
        for number, batch in enumerate(hb.lookahead(batches, model, depth=1)):
            wait_for_next(model, number, len(batches))
            model(batch)["item"].square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except (hb.StorageError, hb.dist.PeerError):
        return False
    return True


def small_budget(rank: int, world: int, folder: str) -> None:
    """The least budget that trains is as small with rows ahead: these hold no rows of the batch before. Just
    below it some runs train, and others do not, as look-ahead has more or less under way."""
    warnings.simplefilter("ignore")  # look-ahead tells that it shortens itself
    model = hb.EmbeddingCollection([hb.Table("item", 1, 1)])
    hb.distribute(model, "basic")
    ranks: Any = model.ranks
    least: dict[int, int] = {}
    for host in range(390_000, 470_000, _STEP_OF_BUDGETS):
        for prefetch in {0, 1} - least.keys():
            for number in range(3):
                own_folder = Path(folder) / f"{host}-{prefetch}-{number}"
                own = trains_in(rank, world, host, own_folder, prefetch)
                if all(ranks.values_of_all("a distribution", own)):
                    least[prefetch] = host
                    break
        if len(least) == 2:
            break
    assert abs(least[0] - least[1]) <= _STEP_OF_BUDGETS, least


_STEP_OF_BUDGETS = 8_000


def test_a_small_budget_is_enough(tmp_path: Path) -> None:
    run(2, small_budget, str(tmp_path))


def forgotten(rank: int, world: int) -> None:
    """Rows that are erased while they are on their way are first values in the next lookup."""
    ids = torch.arange(100) * 2**20
    losses = []
    for prefetch in (0, 1):
        model = hb.EmbeddingCollection([hb.Table("item", 8)], seed=1)
        plan = Plan(model.tables.values(), world, {"item": RowWise()})
        hb.distribute(model, plan, prefetch=prefetch)
        optimizer = hb.optim.SGD(model.parameters(), lr=0.5)
        batches = [{"item": ids[at % 2 * 50 :][:60, None]} for at in range(8)]
        found = []
        for number, batch in enumerate(hb.lookahead(batches, model)):
            wait_for_next(model, number, len(batches))
            loss = (model(batch)["item"] - 1).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % 3 == 2:
                model.erase("item", ids)
            found.append(float(loss.detach()))
        losses.append(found)
        ranks: Any = model.ranks
        assert not prefetch or ranks.sent["rows ahead"] > 0
    assert losses[0] == losses[1]


def test_rows_that_are_forgotten_on_their_way() -> None:
    run(2, forgotten)
