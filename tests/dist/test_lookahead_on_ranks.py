"""Look-ahead on ranks: ids travel before their forward, and the results are those without."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dist.worlds import run
from torch.distributed.algorithms.join import Join

import hotbed as hb
from hotbed.dist import ColumnWise, PeerError, Plan, RowWise, Sharding, TableWise

pytestmark = pytest.mark.process

ROWS, DIM, STEPS, SAMPLES = 6000, 16, 14, 64
IDLE = "Look-ahead waits for another rank"

Batch = dict[str, Any]

SHARDINGS: dict[str, Callable[[int], Sharding]] = {
    "table": lambda world: TableWise(world - 1),
    "row": lambda world: RowWise(),
    "modulo": lambda world: RowWise("modulo"),
    "falling": lambda world: RowWise(owners=tuple(reversed(range(world)))),
    "column": lambda world: ColumnWise(tuple(range(world))),
}


def tables() -> list[hb.Table]:
    return [
        hb.Table("item", DIM, ROWS),
        hb.Table("tag", DIM, None, "mean"),
        hb.Table("word", DIM, ROWS, "none"),
    ]


def batch_of(rank: int, number: int, samples: int = SAMPLES) -> Batch:
    """One id, long bags that owners pool, and vectors of each id."""
    chance = torch.Generator().manual_seed(1000 * rank + number)
    tags = torch.randint(0, ROWS, (samples, 5), generator=chance)
    lengths = torch.randint(3, 6, (samples,), generator=chance)
    flat = torch.cat([row[:n] for row, n in zip(tags, lengths.tolist(), strict=True)])
    return {
        "item": torch.randint(0, ROWS, (samples,), generator=chance),
        "tag": hb.Jagged(flat * 2**20 + 1, lengths=lengths),
        "word": torch.randint(0, ROWS, (samples, 2), generator=chance),
        "label": torch.rand(samples, generator=chance),
    }


class Model(torch.nn.Module):
    def __init__(self, storage: hb.Storage | None) -> None:
        super().__init__()
        self.embeddings = hb.EmbeddingCollection(tables(), seed=1, storage=storage)
        torch.manual_seed(0)
        self.top = torch.nn.Linear(DIM, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        found = self.embeddings({name: batch[name] for name in ("item", "tag", "word")})
        words = found["word"]
        pooled = words.values if isinstance(words, hb.Jagged) else words
        return self.top(found["item"] + found["tag"] + pooled.view(-1, 2, DIM).sum(1))[:, 0]


def distributed(
    world: int, shard: str, folder: str | None, name: str, timeout: float = 30, **options: Any
) -> Model:
    storage = None
    if folder is not None:
        storage = hb.Storage(host="1500KB", ssd=f"{folder}/{name}")
    model = Model(storage)
    specs = model.embeddings.tables
    kinds = {table: SHARDINGS[shard](world) for table in specs}
    hb.distribute(model, Plan([*specs.values()], world, kinds), timeout=timeout, **options)
    return model


def step(model: Model, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    loss = torch.nn.functional.mse_loss(model(batch), batch["label"])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def train(model: Model, batches: Iterator[Batch] | Any) -> list[float]:
    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.05)
    return [step(model, optimizer, batch) for batch in batches]


def assert_equal(model: Model, other: Model) -> None:
    for table in model.embeddings.tables:
        own, expected = (m.embeddings.rows(table) for m in (model, other))
        assert torch.equal(own.ids, expected.ids), table
        assert torch.equal(own.values, expected.values), table
    for one, two in zip(model.top.parameters(), other.top.parameters(), strict=True):
        assert torch.equal(one, two)


def sent_of(model: Model) -> dict[str, int]:
    ranks: Any = model.embeddings.ranks
    return dict(ranks.sent)


# -- the same bits -----------------------------------------------------------------------------------


def same_bits(
    rank: int, world: int, folder: str, shard: str, local_size: int | None = None
) -> None:
    options = {"local_world_size": local_size}
    batches = [batch_of(rank, number) for number in range(STEPS)]
    in_memory = distributed(world, shard, None, "memory", **options)
    expected = train(in_memory, hb.lookahead(batches, in_memory))  # which has nothing to do there
    without = distributed(world, shard, folder, "without", **options)
    assert train(without, batches) == expected
    model = distributed(world, shard, folder, "with", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Now and then on a busy machine, where batches hold rows for longer: fewer are looked up ahead.
        warnings.filterwarnings("ignore", "The budget holds 1 batches")
        assert train(model, hb.lookahead(batches, model, depth=2)) == expected
    sent, before = sent_of(model), sent_of(without)
    assert before["ids ahead"] == 0 and "ids ahead" not in sent_of(in_memory)
    if before["ids"]:  # a rank that owns all rows sends itself nothing
        assert sent["ids ahead"] > 0
        assert (
            sent.get("ids", 0) <= before["ids"] * 2 / STEPS
        )  # forwards of the first batches alone
    assert_equal(model, without)
    assert_equal(model, in_memory)
    stats = model.embeddings.stats()
    if stats.get("batches"):
        assert stats["batches_unprepared"] <= 3


@pytest.mark.parametrize("shard", SHARDINGS)
@pytest.mark.parametrize("world", [2, 3])
def test_results_are_those_without_look_ahead(world: int, shard: str, tmp_path: Path) -> None:
    run(world, same_bits, str(tmp_path), shard)


def test_results_are_those_without_look_ahead_on_two_machines(tmp_path: Path) -> None:
    run(4, same_bits, str(tmp_path), "row", 2)


# -- ranks that do different things --------------------------------------------------------------------


def one_looks_ahead(rank: int, world: int, folder: str) -> None:
    batches = [batch_of(rank, number) for number in range(STEPS)]
    without = distributed(world, "row", folder, "without")
    expected = train(without, batches)
    model = distributed(world, "row", folder, "with")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        began = time.monotonic()
        assert train(model, hb.lookahead(batches, model) if rank == 0 else batches) == expected
        assert time.monotonic() - began < 20
    assert_equal(model, without)
    texts = [one for one in caught if IDLE in str(one.message)]
    assert len(texts) == int(rank == 0)
    assert all(one.filename == __file__ for one in texts)


def test_one_rank_alone_looks_ahead_at_nothing_and_hangs_nobody(tmp_path: Path) -> None:
    run(2, one_looks_ahead, str(tmp_path))


def other_settings(rank: int, world: int, folder: str) -> None:
    batches = [batch_of(rank, number) for number in range(STEPS)]
    without = distributed(world, "row", folder, "without")
    expected = train(without, batches)
    model = distributed(world, "row", folder, "with")
    depth, horizon = [(1, 1), (4, 9), (2, None)][rank]
    assert train(model, hb.lookahead(batches, model, depth, horizon)) == expected
    assert_equal(model, without)


def test_depths_and_horizons_may_differ(tmp_path: Path) -> None:
    run(3, other_settings, str(tmp_path))


def slow_loader(batches: list[Batch], seconds: float) -> Iterator[Batch]:
    for batch in batches:
        time.sleep(seconds)
        yield batch


def slow_ranks(rank: int, world: int, folder: str) -> None:
    batches = [batch_of(rank, number) for number in range(STEPS)]
    without = distributed(world, "row", folder, "without")
    expected = train(without, batches)
    model = distributed(world, "row", folder, "with")
    seconds = 0.05 if rank == 1 else 0.0
    assert train(model, hb.lookahead(slow_loader(batches, seconds), model)) == expected
    assert_equal(model, without)
    # The first batch of one comes later than the other waits for: it joins in when it comes.
    late = distributed(world, "row", folder, "late")

    def first_late() -> Iterator[Batch]:
        if rank == 1:
            time.sleep(2.5)
        yield from batches

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert train(late, hb.lookahead(first_late(), late)) == expected
    assert sent_of(late)["ids ahead"] > 0
    assert_equal(late, without)


def test_slow_loaders_change_nothing(tmp_path: Path) -> None:
    run(2, slow_ranks, str(tmp_path))


def windows_that_close(rank: int, world: int, folder: str) -> None:
    """A window closes on one rank alone, again and again."""
    batches = [batch_of(rank, number) for number in range(STEPS)]
    without = distributed(world, "row", folder, "without")
    expected = train(without, batches)
    model = distributed(world, "row", folder, "with")
    prefetcher: Any = model.embeddings.prefetcher

    def closing(ahead: Iterator[Batch]) -> Iterator[Batch]:
        for number, batch in enumerate(ahead):
            if number % world == rank and number > 1:
                for tiers in prefetcher.tiers:
                    tiers.close_window()
            yield batch

    assert train(model, closing(iter(hb.lookahead(batches, model)))) == expected
    assert_equal(model, without)


def test_a_window_that_closes_on_one_rank_opens_anew_on_all(tmp_path: Path) -> None:
    run(3, windows_that_close, str(tmp_path))


def several_loops(rank: int, world: int, folder: str) -> None:
    """Epochs, one of which is left early by all, then by one; evaluation beside."""
    batches = [batch_of(rank, number) for number in range(6)]
    models = [distributed(world, "row", folder, name) for name in ("without", "with")]
    losses: list[list[float]] = [[], []]
    for at, model in enumerate(models):
        optimizer = hb.optim.Adagrad(model.parameters(), lr=0.05)
        ahead: Any = hb.lookahead(batches, model) if at else batches
        for epoch in range(4):
            for number, batch in enumerate(ahead):
                if epoch == 1 and number == 3:
                    break
                losses[at].append(step(model, optimizer, batch))
                if number == 2:
                    model.eval()
                    with torch.no_grad():
                        losses[at].append(float(model(batches[0]).sum()))
                    model.train()
            if epoch == 2 and at:
                for batch in hb.lookahead(batches, model) if rank == 0 else batches[:1]:
                    del batch
                    break
    assert losses[0] == losses[1]
    assert_equal(*models)


def test_loops_may_be_left_and_begun_again(tmp_path: Path) -> None:
    run(2, several_loops, str(tmp_path))


def uneven(rank: int, world: int, folder: str) -> None:
    batches = [batch_of(rank, number) for number in range(4 + 3 * rank)]
    models = [distributed(world, "row", folder, name) for name in ("without", "with")]
    for at, model in enumerate(models):
        optimizer = hb.optim.Adagrad(model.parameters(), lr=0.05)
        with Join(hb.dist.joinables(model)):
            for batch in hb.lookahead(batches, model) if at else batches:
                step(model, optimizer, batch)
    assert_equal(*models)
    evens = [distributed(world, "row", folder, name) for name in ("even without", "even")]
    losses = []
    for at, model in enumerate(evens):
        loader = hb.dist.even(batches)
        losses.append(train(model, hb.lookahead(loader, model) if at else loader))
    assert losses[0] == losses[1] and len(losses[0]) == 4
    assert_equal(*evens)


def test_uneven_ends(tmp_path: Path) -> None:
    run(3, uneven, str(tmp_path))


# -- errors --------------------------------------------------------------------------------------------


def wrong_batch(rank: int, world: int, folder: str) -> None:
    batches = [batch_of(rank, number) for number in range(8)]
    models = [distributed(world, "row", folder, name) for name in ("without", "with")]
    wrong = {**batches[3], "item": batches[3]["item"] + ROWS}
    given = [*batches[:3], wrong if rank == 1 else batches[3], *batches[4:]]
    for at, model in enumerate(models):
        optimizer = hb.optim.Adagrad(model.parameters(), lr=0.05)
        for number, batch in enumerate(hb.lookahead(given, model) if at else given):
            if number != 3:
                step(model, optimizer, batch)
                continue
            with pytest.raises(hb.IdError if rank == 1 else PeerError, match="item"):
                step(model, optimizer, batch)
    assert_equal(*models)


def test_a_wrong_batch_on_one_rank_is_an_error_in_its_turn(tmp_path: Path) -> None:
    run(2, wrong_batch, str(tmp_path))


def refilled(rank: int, world: int, folder: str) -> None:
    model = distributed(world, "row", folder, "with", timeout=3)
    batches = [batch_of(rank, number) for number in range(6)]
    kept = torch.empty_like(batches[0]["item"])

    def filling() -> Iterator[Batch]:
        for batch in batches:
            kept.copy_(batch["item"])
            yield {**batch, "item": kept if rank == 0 else batch["item"]}

    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.05)
    with pytest.raises((hb.InputError, PeerError)) as caught:
        for batch in hb.lookahead(filling(), model):
            step(model, optimizer, batch)
    if rank == 0:
        assert "A batch was changed after look-ahead had read it" in str(caught.value)


def test_a_loader_that_fills_its_tensors_again_is_refused(tmp_path: Path) -> None:
    run(2, refilled, str(tmp_path), seconds=100)
