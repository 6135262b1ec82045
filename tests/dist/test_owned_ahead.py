"""Look-ahead for model-parallel input: owners bring rows up in time, and results are those without."""

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
from hotbed.dist import ColumnWise, PeerError, Plan, Replicated, Sharding, TableWise

pytestmark = pytest.mark.process

ROWS, DIM, STEPS, SAMPLES = 1500, 64, 12, 16
FEATURES = {"item": "item", "again": "item", "tag": "tag", "word": "word"}
IDLE = "Look-ahead waits for another rank"

Batch = dict[str, Any]

DEALS: dict[str, Callable[[int], dict[str, Sharding]]] = {
    "table": lambda world: {
        "item": TableWise(0),
        "tag": TableWise(1),
        "word": TableWise(world - 1),
    },
    "one rank": lambda world: dict.fromkeys(("item", "tag", "word"), TableWise(1)),
    "column": lambda world: dict.fromkeys(("item", "tag", "word"), ColumnWise(tuple(range(world)))),
    "replicated": lambda world: {
        "item": Replicated(),
        "tag": TableWise(0),
        "word": ColumnWise(tuple(reversed(range(world)))),
    },
}
BUDGETS = {"table": "600KB", "one rank": "1MB", "column": "800KB", "replicated": "1MB"}
"""In which a quarter of the rows of a rank have room, about."""
CASES = [
    (2, "table", "adagrad"),
    (3, "table", "exact"),
    (2, "one rank", "exact"),
    (3, "one rank", "adagrad"),
    (2, "column", "adagrad"),
    (3, "column", "exact"),
    (2, "replicated", "exact"),
    (3, "replicated", "adagrad"),
]
RULES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adagrad": lambda parameters: hb.optim.Adagrad(parameters, lr=0.05),
    "exact": lambda parameters: hb.optim.Adam(parameters, lr=0.05, untouched="exact"),
}


def batch_of(number: int, samples: int) -> Batch:
    """Samples of all ranks: one id, long bags, bags with weights, and bags whose largest values are taken."""
    chance = torch.Generator().manual_seed(number)
    lengths = torch.randint(0, 6, (samples,), generator=chance)
    count = int(lengths.sum())
    ids = torch.randint(0, ROWS, (2, count), generator=chance)
    weights = torch.rand(count, generator=chance)
    return {
        "item": torch.randint(0, ROWS, (samples,), generator=chance),
        "again": hb.Jagged(ids[0], lengths=lengths, weights=weights),
        "tag": hb.Jagged(ids[1] * 2**20 + 1, lengths=lengths),
        "word": torch.randint(0, ROWS, (samples, 2), generator=chance),
        "label": torch.rand(samples, generator=chance),
    }


class Model(torch.nn.Module):
    def __init__(self, storage: hb.Storage | None) -> None:
        super().__init__()
        tables = [
            hb.Table("item", DIM, ROWS, "sum"),
            hb.Table("tag", DIM, None, "mean"),
            hb.Table("word", DIM, ROWS, "max"),
        ]
        self.embeddings = hb.EmbeddingCollection(tables, FEATURES, seed=1, storage=storage)
        torch.manual_seed(0)
        self.top = torch.nn.Linear(DIM, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        found = self.embeddings({name: batch[name] for name in FEATURES})
        return self.top(sum(found.values()))[:, 0]


def distributed(
    world: int, deal: str, folder: str | None, name: str, timeout: float = 30, **options: Any
) -> Model:
    storage = None
    if folder is not None:
        storage = hb.Storage(host=BUDGETS[deal], ssd=f"{folder}/{name}")
    model = Model(storage)
    plan = Plan([*model.embeddings.tables.values()], world, DEALS[deal](world))
    hb.distribute(model, plan, timeout=timeout, **options)
    return model


def wholes(world: int, count: int = STEPS) -> list[Batch]:
    """The last of which have other numbers of samples, and one has fewer than there are ranks."""
    sizes = [SAMPLES * world] * count
    sizes[-3:] = [SAMPLES * world + 1, world - 1, SAMPLES]
    return [batch_of(number, samples) for number, samples in enumerate(sizes)]


def step(model: Model, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    loss = torch.nn.functional.mse_loss(model(batch), batch["label"], reduction="sum")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def train(model: Model, batches: Any, rule: str = "adagrad", epochs: int = 1) -> list[float]:
    optimizer = RULES[rule](model.parameters())
    return [step(model, optimizer, batch) for _ in range(epochs) for batch in batches]


def assert_equal(model: Model, other: Model) -> None:
    for table in model.embeddings.tables:
        own, expected = (m.embeddings.rows(table) for m in (model, other))
        assert torch.equal(own.ids, expected.ids), table
        assert torch.equal(own.values, expected.values), table
    for one, two in zip(model.top.parameters(), other.top.parameters(), strict=True):
        assert torch.equal(one, two)


def tiers_of(model: Model) -> list[Any]:
    prefetcher: Any = model.embeddings.prefetcher
    return list(prefetcher.tiers)


def same_bits(
    rank: int, world: int, folder: str, deal: str, rule: str, options: dict[str, Any]
) -> None:
    batches = wholes(world)
    in_memory = distributed(world, deal, None, "memory", **options)
    expected = train(in_memory, hb.dist.owned(batches, in_memory), rule, 2)
    without = distributed(world, deal, folder, "without", **options)
    assert train(without, hb.dist.owned(batches, without), rule, 2) == expected
    model = distributed(world, deal, folder, "with", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Now and then on a busy machine, where batches hold rows for longer: fewer are looked up ahead.
        warnings.filterwarnings("ignore", "The budget holds 1 batches")
        ahead = hb.lookahead(hb.dist.owned(batches, model), model, 2, horizon=4)
        assert train(model, ahead, rule, 2) == expected
    ranks: Any = model.embeddings.ranks
    assert ranks.sent.get("ids", 0) == ranks.sent["ids ahead"] == 0
    for tiers in tiers_of(model):
        slots, rows = sum(tiers.core.capacities()), sum(map(len, tiers.tables))
        stats = tiers.stats([])
        assert slots < (0.6 if deal == "replicated" else 0.4) * rows
        assert stats["batches_unprepared"] < 8 and stats["rows_from_ssd"] > 0  # of 24
    assert_equal(model, without)
    assert_equal(model, in_memory)


@pytest.mark.parametrize(("world", "deal", "rule"), CASES)
def test_results_are_those_without_look_ahead(
    world: int, deal: str, rule: str, tmp_path: Path
) -> None:
    run(world, same_bits, str(tmp_path), deal, rule, {})


def test_rows_ahead_are_not_for_vectors(tmp_path: Path) -> None:
    run(2, same_bits, str(tmp_path), "one rank", "adagrad", {"prefetch": 1})


# -- ranks that do different things --------------------------------------------------------------------


def both(rank: int, world: int, folder: str) -> tuple[list[Batch], Model, list[float], Model]:
    """Batches, a model trained on them without look-ahead, its losses, and a new model."""
    batches = wholes(world)
    without = distributed(world, "table", folder, "without")
    expected = train(without, hb.dist.owned(batches, without))
    return batches, without, expected, distributed(world, "table", folder, "with", timeout=10)


def one_looks_ahead(rank: int, world: int, folder: str) -> None:
    batches, without, expected, model = both(rank, world, folder)
    loader: Any = hb.dist.owned(batches, model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert train(model, hb.lookahead(loader, model) if rank == 0 else loader) == expected
    assert_equal(model, without)
    assert sum(IDLE in str(one.message) for one in caught) == int(rank == 0)


def test_one_rank_alone_looks_ahead_at_nothing_and_hangs_nobody(tmp_path: Path) -> None:
    run(2, one_looks_ahead, str(tmp_path), seconds=60)


def windows_that_close(rank: int, world: int, folder: str) -> None:
    """A window closes on one rank alone, again and again; ranks look ahead less far than others."""
    batches, without, expected, model = both(rank, world, folder)

    def closing(ahead: Iterator[Batch]) -> Iterator[Batch]:
        for number, batch in enumerate(ahead):
            if number % world == rank and number > 1:
                for tiers in tiers_of(model):
                    tiers.close_window()
            yield batch

    ahead = hb.lookahead(hb.dist.owned(batches, model), model, 1 + rank, horizon=2 + 3 * rank)
    assert train(model, closing(iter(ahead))) == expected
    assert_equal(model, without)


def test_a_window_that_closes_on_one_rank_opens_anew_on_all(tmp_path: Path) -> None:
    run(3, windows_that_close, str(tmp_path))


def several_loops(rank: int, world: int, folder: str) -> None:
    """Epochs of which one is left early, and one has a frozen table, with evaluations, skipped batches, and
    batches that look-ahead does not know."""
    batches = wholes(world, 6)
    models = [distributed(world, "table", folder, name) for name in ("without", "with")]
    losses: list[list[float]] = [[], []]
    for at, model in enumerate(models):
        optimizer = hb.optim.Adagrad(model.parameters(), lr=0.05)
        loader: Any = hb.dist.owned(batches, model)
        (other,) = hb.dist.owned([batch_of(99, 2 * SAMPLES)], model)
        for epoch in range(3):
            model.embeddings.parameter("word").requires_grad_(epoch < 2)
            for number, batch in enumerate(hb.lookahead(loader, model) if at else loader):
                if epoch == 1 and number == 3:
                    break
                if number == 1:
                    continue
                losses[at].append(step(model, optimizer, other if number == 2 else batch))
                if number == 4:
                    model.eval()
                    with torch.no_grad():
                        losses[at].append(float(model(batch).sum()))
                    model.train()
        slices: Any = hb.dist.slices(batches[:4])
        losses[at] += [step(model, optimizer, batch) for batch in slices]
    assert losses[0] == losses[1]
    assert_equal(*models)


def test_loops_may_be_left_and_begun_again(tmp_path: Path) -> None:
    run(2, several_loops, str(tmp_path))


def uneven(rank: int, world: int, folder: str) -> None:
    """Ranks with other numbers of batches train on those that all have, and then there is an error."""
    batches = wholes(world)
    without = distributed(world, "table", folder, "without")
    train(without, hb.dist.owned(batches[:5], without))
    model = distributed(world, "table", folder, "with", timeout=3)
    own = batches[:5] if rank == 0 else batches
    with pytest.raises(PeerError, match="no(ne| batches) any more"):
        with Join(hb.dist.joinables(model)):
            train(model, hb.lookahead(hb.dist.owned(own, model), model))
    for table in model.embeddings.tables:
        found, expected = (m.embeddings.rows(table, local=True) for m in (model, without))
        assert torch.equal(found.ids, expected.ids) and torch.equal(found.values, expected.values)


def test_uneven_ends(tmp_path: Path) -> None:
    run(2, uneven, str(tmp_path), seconds=60)


# -- errors --------------------------------------------------------------------------------------------


def wrong_batch(rank: int, world: int, folder: str) -> None:
    """An error of a batch on the rank that has its ids is told to all in its turn, and training goes on."""
    batches = wholes(world, 8)
    wrong = {**batches[3], "item": batches[3]["item"] + ROWS}
    given = [*batches[:3], wrong, *batches[4:]]
    models = [distributed(world, "table", folder, name) for name in ("without", "with")]
    for at, model in enumerate(models):
        optimizer = hb.optim.Adagrad(model.parameters(), lr=0.05)
        loader: Any = hb.dist.owned(given, model)
        for number, batch in enumerate(hb.lookahead(loader, model) if at else loader):
            if number != 3:
                step(model, optimizer, batch)
                continue
            with pytest.raises(hb.IdError if rank == 0 else PeerError, match="item"):
                step(model, optimizer, batch)
    assert_equal(*models)
    for tiers in tiers_of(models[1]):
        assert tiers.stats([])["batches_unprepared"] < 4


def test_a_wrong_batch_is_an_error_in_its_turn(tmp_path: Path) -> None:
    run(2, wrong_batch, str(tmp_path))


def another_mode(rank: int, world: int, folder: str) -> None:
    """One rank gives slices, or batches of other sizes: an error on all, in which nobody waits for long."""
    batches = wholes(world)
    models = [distributed(world, "table", folder, name, timeout=10) for name in ("one", "other")]
    loader: Any = (hb.dist.slices if rank else lambda b: hb.dist.owned(b, models[0]))(batches)
    with pytest.raises(PeerError, match="Wrap the loaders of all ranks alike"):
        train(models[0], hb.lookahead(loader, models[0]))
    other = [*batches[:2], batch_of(2, SAMPLES + 2 * rank), *batches[3:]]
    losses = []
    with pytest.raises(PeerError, match="batches of other sizes"):
        optimizer = hb.optim.Adagrad(models[1].parameters(), lr=0.05)
        for batch in hb.lookahead(hb.dist.owned(other, models[1]), models[1]):
            losses.append(step(models[1], optimizer, batch))
    assert len(losses) == 2


def test_loaders_of_other_kinds_are_told_to_all(tmp_path: Path) -> None:
    run(2, another_mode, str(tmp_path), seconds=60)


def refilled(rank: int, world: int, folder: str) -> None:
    model = distributed(world, "table", folder, "with", timeout=3)
    batches = wholes(world, 6)
    name = ("item", "tag")[rank]  # of which this rank has the ids
    kept: Any = {n: v.clone() if n == "item" else v for n, v in batches[0].items()}

    def filling() -> Iterator[Batch]:
        for batch in batches[:3]:
            kept["item"].copy_(batch["item"])
            tag = hb.Jagged(batch["tag"].values, lengths=batch["tag"].lengths)
            yield {**batch, "item": kept["item"], "tag": tag}
            tag.values.zero_()

    began = time.monotonic()
    with pytest.raises((hb.InputError, PeerError), match=f"feature '{name}'|Another rank|waiting"):
        train(model, hb.lookahead(hb.dist.owned(filling(), model), model))
    assert time.monotonic() - began < 20


def test_a_loader_that_fills_its_tensors_again_is_refused(tmp_path: Path) -> None:
    run(2, refilled, str(tmp_path), seconds=60)


def failing_loader(rank: int, world: int, folder: str) -> None:
    """A loader that fails on one rank: its error there, and a PeerError on the others."""
    model = distributed(world, "table", folder, "with", timeout=3)

    def failing() -> Iterator[Batch]:
        yield from wholes(world)[:3]
        if rank == 1:
            raise OSError("no such file")
        yield from wholes(world)[3:]

    with pytest.raises(OSError if rank == 1 else PeerError, match="no such file|kept this one"):
        train(model, hb.lookahead(hb.dist.owned(failing(), model), model))


def test_a_loader_that_fails_on_one_rank(tmp_path: Path) -> None:
    run(2, failing_loader, str(tmp_path), seconds=60)


def no_room(rank: int, world: int, folder: str) -> None:
    """The budget of one rank holds no batch: the others are told at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BUDGETS, "table", "400KB" if rank == 1 else "600KB")
        model = distributed(world, "table", folder, "with")
    batches = [batch_of(number, 120) for number in range(4)]
    began = time.monotonic()
    with pytest.raises(hb.StorageError if rank == 1 else PeerError, match="budget"):
        train(model, hb.lookahead(hb.dist.owned(batches, model), model))
    assert time.monotonic() - began < 10


def test_a_budget_without_room_on_one_rank_is_told_to_all(tmp_path: Path) -> None:
    run(2, no_room, str(tmp_path), seconds=60)
