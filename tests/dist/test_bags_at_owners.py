"""Bags that owners pool: vectors and rows are those of one process."""

from __future__ import annotations

import random
import weakref
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from dist.worlds import run
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import hotbed as hb
from hotbed.dist import ColumnWise, Plan, Replicated, RowWise, Sharding, TableWise
from hotbed.dist import bags as dist_bags
from hotbed.dist.ranks import Ranks
from hotbed.places.host.batch import FlatBags

ROWS, DIM, SAMPLES = 300, 8, 12
KINDS: dict[str, Sharding] = {
    "replicated": Replicated(),
    "table": TableWise(1),
    "column": ColumnWise((1, 0)),
    "row": RowWise(),
}


def tables(combiner: str, rows: int | None = ROWS, dtype: torch.dtype | None = None) -> Any:
    return [
        hb.Table("a", DIM, rows, combiner=combiner, dtype=dtype or torch.float32),
        hb.Table("b", DIM, rows, combiner=combiner, padding_idx=3),
        hb.Table("c", 4, rows, combiner=combiner),
    ]


FEATURES = {"a": "a", "b": "b", "again": "a", "c": "c", "b2": "b"}
LENGTHS = {"a": 6, "b": 7, "again": None, "c": 1, "b2": None}
"""Ids of a bag; None: 0 to 12. Those of "c" are no long bags: their rows come."""


def bags_of(number: int, samples: range, world: int = 1) -> dict[str, list[Tensor]]:
    """Some samples of a batch of all ranks."""
    draw = torch.Generator().manual_seed(number)
    found = {}
    for name, length in LENGTHS.items():
        every = [
            torch.randint(
                ROWS,
                (int(torch.randint(13, (), generator=draw)) if length is None else length,),
                generator=draw,
            )
            for _ in range(SAMPLES * world)
        ]
        found[name] = [every[i] for i in samples]
    return found


def inputs(bags: dict[str, list[Tensor]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, some in bags.items():
        if LENGTHS[name] is None or not some:
            found[name] = hb.Jagged(
                torch.cat([*some, torch.empty(0).long()]), lengths=[*map(len, some)]
            )
        else:
            found[name] = torch.stack(some)
    return found


def both(combiner: str, kind: Sharding, world: int, **options: Any) -> list[hb.EmbeddingCollection]:
    """One model for one process, and the same for ranks."""
    storage = options.pop("storage", None)
    alone, shared = (
        hb.EmbeddingCollection(tables(combiner, **options), FEATURES, seed=3, storage=where)
        for where in (None, storage)
    )
    plan = Plan([*shared.tables.values()], world, dict.fromkeys("abc", kind))
    hb.distribute(shared, plan)
    return [alone, shared]


def gradients(number: int, found: dict[str, Tensor], samples: range) -> list[Tensor]:
    """For those samples of a batch of all ranks; multiples of 2⁻¹⁰, so that sums are exact."""
    draw = torch.Generator().manual_seed(number)
    every = [
        torch.randint(-64, 64, (200, v.shape[1]), generator=draw) / 1024 for v in found.values()
    ]
    return [
        g[samples.start : samples.stop].to(v.dtype)
        for g, v in zip(every, found.values(), strict=True)
    ]


def assert_same_rows(shared: Any, alone: Any, exact: bool = True) -> None:
    ids = torch.arange(ROWS)
    for name in "abc":
        own, expected = shared.lookup(name, ids), alone.lookup(name, ids)
        torch.testing.assert_close(own, expected, **(EXACT if exact else TOLERANCE))


EXACT = {"rtol": 0.0, "atol": 0.0}
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def trained(rank: int, world: int, combiner: str, deal: str, options: dict[str, Any]) -> None:
    kind = KINDS[deal]
    alone, shared = both(combiner, kind, world, **options)
    rules = [hb.optim.SGD(m.parameters(), lr=0.5) for m in (alone, shared)]
    every, mine = range(SAMPLES * world), range(SAMPLES * rank, SAMPLES * (rank + 1))
    # Bags of rows that are split are summed in parts, and no third of a mean is exact.
    exact = deal != "row" and world != 3
    for number in range(5):
        together = alone(inputs(bags_of(number, every, world)))
        own = shared(inputs(bags_of(number, mine, world)))
        for name, vectors in own.items():
            expected = together[name][mine.start : mine.stop]
            same = exact or (number == 0 and deal != "row")
            torch.testing.assert_close(vectors, expected, **(EXACT if same else TOLERANCE))
        # Each rank's loss is a mean over its samples.
        grads = [g / world for g in gradients(number, together, every)]
        torch.autograd.backward([*together.values()], grads)
        torch.autograd.backward([*own.values()], gradients(number, own, mine))
        for rule in rules:
            rule.step()
            rule.zero_grad()
        assert_same_rows(shared, alone, exact)
    sent = cast(Ranks, shared.table("a").place.ranks).sent
    if rank == 1 and deal != "replicated" and (deal, world) != ("row", 4):  # where none are long
        assert sent["vectors"] > 0 and sent["rows"] > 0


@pytest.mark.process
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("deal", KINDS)
def test_vectors_and_rows(world: int, deal: str) -> None:
    for combiner in ("sum", "mean", "sqrtn"):
        run(world, trained, combiner, deal, {})


@pytest.mark.process
def test_other_tables(tmp_path: Path) -> None:
    run(2, trained, "mean", "row", {"rows": None})
    run(2, trained, "mean", "table", {"dtype": torch.float64})
    run(2, trained, "sum", "column", {"dtype": torch.bfloat16} | {"storage": None})
    storage = hb.Storage(host="4MB", ssd=tmp_path / "rows")
    run(2, trained, "mean", "table", {"storage": storage})


def random_habits(rank: int, world: int, seed: int) -> None:
    """Several backwards before a step, kept graphs, gradients that are looked at, clipped or dropped,
    tables that are frozen, ranks with short bags, batches that never see a backward."""
    chance = random.Random(seed)
    deal, combiner = chance.choice([*KINDS]), chance.choice(["sum", "mean", "sqrtn"])
    alone, shared = both(combiner, KINDS[deal], world)
    rule = chance.choice([hb.optim.SGD, hb.optim.Adagrad, hb.optim.Adam])
    rules = [rule(m.parameters(), lr=0.05) for m in (alone, shared)]
    every, mine = range(SAMPLES * world), range(SAMPLES * rank, SAMPLES * (rank + 1))
    number = 0
    for _ in range(4):
        frozen = chance.choice([None, None, "a", "c"])
        for model in (alone, shared):
            for name in "abc":
                model.parameter(name).requires_grad_(name != frozen)
        for _ in range(chance.choice([1, 1, 2, 3, 40])):
            number += 1
            short = chance.choice([None, None, 0])
            cut = slice(None, 1) if short is not None else slice(None)
            bags = {n: [b[cut] for b in some] for n, some in bags_of(number, every, world).items()}
            whole = alone(inputs(bags))
            # Where one rank alone has short bags, rows come to all.
            own = shared(inputs({n: some[mine.start : mine.stop] for n, some in bags.items()}))
            wanted = [n for n in own if FEATURES[n] != frozen]
            used = chance.sample(wanted, chance.randint(1, len(wanted)))
            if not chance.random() < 0.9:
                continue
            sums = [
                sum((m[n] * (i + 1)).sin().mean() for i, n in enumerate(used)) for m in (whole, own)
            ]
            again = chance.random() < 0.2
            for loss in sums:
                loss.backward(retain_graph=again)
                if again:
                    loss.backward()
        match chance.choice(["", "look", "clip", "drop"]):
            case "look":
                for model in (alone, shared):
                    if (grad := model.parameter("b").grad) is not None:
                        grad.mul_(0.5)
            case "clip":
                for model in (alone, shared):
                    hb.nn.clip_grad_norm_(model.parameters(), 0.1)
            case "drop":
                for model in (alone, shared):
                    model.parameter("a").grad = None
        for one in rules:
            one.step()
            one.zero_grad()
        assert_same_rows(shared, alone, exact=False)


@pytest.mark.process
@pytest.mark.parametrize("world", [2, 3])
def test_habits_of_training(world: int) -> None:
    for seed in range(12):
        run(world, random_habits, 100 * world + seed)


def other_lengths(rank: int, world: int) -> None:
    """Long bags on one rank, and short ones, or none, on the other."""
    alone, shared = both("sum", TableWise(0), world)
    rules = [hb.optim.SGD(m.parameters(), lr=0.5) for m in (alone, shared)]
    for number, empty in enumerate([False, True, False]):
        every = bags_of(number, range(SAMPLES * world), world)
        for name, some in every.items():
            for i in range(SAMPLES, SAMPLES * world):
                some[i] = some[i][: 0 if empty and LENGTHS[name] is None else 1]
        mine = slice(SAMPLES * rank, SAMPLES * (rank + 1))
        ragged = {
            name: hb.Jagged(torch.cat(some), lengths=[*map(len, some)])
            for name, some in every.items()
        }
        own_bags = {name: some[mine] for name, some in every.items()}
        own = shared(
            {n: hb.Jagged(torch.cat(b), lengths=[*map(len, b)]) for n, b in own_bags.items()}
        )
        together = alone(ragged)
        for name in own:
            tolerance = TOLERANCE if number else EXACT
            torch.testing.assert_close(own[name], together[name][mine], **tolerance)
        torch.autograd.backward(
            [*together.values()], [v.detach().round(decimals=2) for v in together.values()]
        )
        torch.autograd.backward(
            [*own.values()], [world * v.detach().round(decimals=2) for v in own.values()]
        )
        for rule in rules:
            rule.step()
            rule.zero_grad()
        assert_same_rows(shared, alone, exact=False)


@pytest.mark.process
def test_ranks_with_bags_of_other_lengths() -> None:
    run(2, other_lengths)


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = hb.EmbeddingCollection(tables("mean"), FEATURES, seed=3)
        torch.manual_seed(0)
        self.top = nn.Linear(4 * DIM + 4, 1)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        logits: Tensor = self.top(torch.cat([*self.embeddings(batch).values()], 1))
        return logits


def ended(rank: int, world: int, deal: str) -> None:
    model = Clicks()
    hb.distribute(
        model, Plan([*model.embeddings.tables.values()], world, dict.fromkeys("abc", KINDS[deal]))
    )
    optimizer = hb.optim.Adam(model.parameters(), lr=0.01)
    with Join(hb.dist.joinables(model)):
        for number in range(2 + 3 * rank):
            model(inputs(bags_of(number, range(SAMPLES)))).square().mean().backward()
            if number == 3:
                grad = model.embeddings.parameter("a").grad  # so that all are merged
                assert grad is not None and bool(grad._values().isfinite().all())
            optimizer.step()
            optimizer.zero_grad()
    rows = torch.stack([*model.embeddings.lookup("a", torch.arange(ROWS))])
    assert bool(rows.isfinite().all())
    assert model.embeddings.table("a").rule.steps == 2 + 3 * (world - 1)


@pytest.mark.process
@pytest.mark.parametrize("deal", ["table", "row"])
def test_a_rank_that_has_ended_answers(deal: str) -> None:
    run(2, ended, deal)


def ended_and_other_modes(rank: int, world: int) -> None:
    _, shared = both("mean", RowWise(), world)
    optimizer = hb.optim.SGD(shared.parameters(), lr=0.5)
    with Join(hb.dist.joinables(shared)):
        for number in range(4 if rank else 1):
            batch = inputs(bags_of(number, range(SAMPLES)))
            if number == 2:
                shared.train(rank == 1)
                with pytest.raises(hb.dist.PeerError, match="looks up in another mode"):
                    shared(batch)
                shared.train()
            sum(v.sum() for v in shared(batch).values()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert shared.table("a").rule.steps == 4


@pytest.mark.process
def test_a_rank_that_has_ended_hears_of_other_modes() -> None:
    run(3, ended_and_other_modes, seconds=20)


def gradient_of_one_rank(rank: int, world: int, looks: bool) -> None:
    """The other's rows have a gradient of zeros, also where gradients of bags are merged."""
    alone, shared = both("mean", TableWise(1), world)
    rules = [hb.optim.Adam(m.parameters(), lr=0.1) for m in (alone, shared)]
    mine = slice(SAMPLES * rank, SAMPLES * (rank + 1))
    for number in range(2):
        bags = bags_of(number, range(SAMPLES * world), world)
        together = alone(inputs(bags))["b"]
        own = shared(inputs({n: some[mine] for n, some in bags.items()}))["b"]
        grad = torch.ones_like(together)
        grad[SAMPLES:] *= 1 - number
        together.backward(grad / world)
        if number == 0 or rank == 0:
            own.backward(grad[mine])
        if looks and rank == 0:
            assert shared.parameter("b").grad is not None
        for rule in rules:
            rule.step()
            rule.zero_grad()
        assert_same_rows(shared, alone, exact=False)


@pytest.mark.process
@pytest.mark.parametrize("looks", [False, True])
def test_gradients_of_one_rank_alone(looks: bool) -> None:
    run(2, gradient_of_one_rank, looks)


def wrong_ids(rank: int, world: int) -> None:
    _, shared = both("sum", TableWise(1), world)
    batch = inputs(bags_of(0, range(SAMPLES)))
    if rank == 0:
        batch["a"][2, 1] = ROWS
    kind = hb.IdError if rank == 0 else hb.dist.PeerError
    with pytest.raises(kind, match=f"id {ROWS} is outside"):
        shared(batch)
    batch["a"] = batch["a"].clamp(max=ROWS - 1)
    assert bool(shared(batch)["a"].isfinite().all())


def changed_afterwards(rank: int, world: int) -> None:
    """Ids and gradients that somebody writes to before the step."""
    alone, shared = both("mean", RowWise(), world)
    rules = [hb.optim.SGD(m.parameters(), lr=0.5) for m in (alone, shared)]
    batch = inputs(bags_of(0, range(SAMPLES)))
    for model in (alone, shared):
        given = {n: v.clone() if isinstance(v, Tensor) else v for n, v in batch.items()}
        grads = [torch.ones(SAMPLES, 4 if n == "c" else DIM) for n in given]
        torch.autograd.backward([*model(given).values()], grads)
        for name in ("a", "b", "c"):
            given[name].fill_(5)
        for grad in grads:
            grad.zero_()
    for rule in rules:
        rule.step()
    assert_same_rows(shared, alone, exact=False)


@pytest.mark.process
def test_wrong_ids_and_refilled_tensors() -> None:
    run(2, wrong_ids)
    run(2, changed_afterwards)


def emptied(rank: int, world: int, length: int) -> None:
    """A step after zero_grad(set_to_none=False) counts, and moves no row, as in one process."""
    alone, shared = both("sum", TableWise(1), world)
    rules = [hb.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (alone, shared)]
    for number in range(3):
        ids = torch.randint(
            ROWS, (SAMPLES * world, length), generator=torch.Generator().manual_seed(number)
        )
        alone(dict.fromkeys(FEATURES, ids))["a"].sum().div(world).backward()
        mine = ids[SAMPLES * rank : SAMPLES * (rank + 1)]
        shared(dict.fromkeys(FEATURES, mine))["a"].sum().backward()
        if number == 1:
            for model in (alone, shared):
                model.zero_grad(set_to_none=False)
        for rule in rules:
            rule.step()
            rule.zero_grad()
        assert_same_rows(shared, alone)
        assert shared.table("a").rule.steps == alone.table("a").rule.steps == number + 1


@pytest.mark.process
@pytest.mark.parametrize("length", [1, 5])
def test_gradients_that_were_set_to_zero(length: int) -> None:
    run(2, emptied, length)


def ids_let_go(rank: int, world: int) -> None:
    """The ids of all ranks lie at an owner until they are pooled, and not until the gradients come."""
    alone, shared = both("sum", TableWise(0), world)
    rules = [hb.optim.SGD(m.parameters(), lr=0.5) for m in (alone, shared)]
    kept: list[weakref.ref[Tensor]] = []

    class Watched(FlatBags):
        def __init__(self, ids: Tensor, *rest: Any) -> None:
            super().__init__(ids, *rest)
            kept.append(weakref.ref(ids))

    with mock.patch.object(dist_bags, "FlatBags", Watched):
        own = shared(inputs(bags_of(0, range(SAMPLES * rank, SAMPLES * (rank + 1)), world)))
    assert kept and not any(ids() is not None for ids in kept)
    together = alone(inputs(bags_of(0, range(SAMPLES * world), world)))
    grads = gradients(0, together, range(SAMPLES * world))
    torch.autograd.backward([*together.values()], [g / world for g in grads])
    mine = gradients(0, own, range(SAMPLES * rank, SAMPLES * (rank + 1)))
    torch.autograd.backward([*own.values()], mine)
    for rule in rules:
        rule.step()
    assert_same_rows(shared, alone)


def test_owners_let_ids_go_that_they_have_pooled() -> None:
    run(2, ids_let_go)
