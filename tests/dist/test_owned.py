"""Model-parallel input: each rank reads the ids of the tables that it keeps, for the samples of all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dist.test_bags_at_owners import FEATURES, KINDS, ROWS, SAMPLES, bags_of, gradients, inputs
from dist.worlds import run
from torch import Tensor, nn

import hotbed as hb
from hotbed.dist import PeerError, Plan, RowWise, Sharding, TableWise

pytestmark = pytest.mark.process

COMBINERS = ("sum", "mean", "sqrtn", "max")
MIXED: dict[str, Sharding] = {"a": TableWise(0), "b": KINDS["column"], "c": KINDS["replicated"]}


def tables(combiner: str, **options: Any) -> list[hb.Table]:
    return [
        hb.Table("a", 8, ROWS, combiner, **options),
        hb.Table("b", 8, ROWS, combiner, padding_idx=3),
        hb.Table("c", 4, None, combiner),
    ]


def models(
    combiner: str, kinds: dict[str, Sharding], world: int, storage: Any = None, **options: Any
) -> list[hb.EmbeddingCollection]:
    """One for one process, and the same for ranks."""
    alone, shared = (
        hb.EmbeddingCollection(tables(combiner, **options), FEATURES, seed=3, storage=where)
        for where in (None, storage)
    )
    hb.distribute(shared, Plan([*shared.tables.values()], world, kinds))
    return [alone, shared]


def whole_batch(number: int, samples: int, weighted: bool) -> dict[str, Any]:
    batch = inputs(bags_of(number, range(samples), 1 + samples // SAMPLES))
    if weighted:
        bag = batch["again"]
        draw = torch.Generator().manual_seed(number)
        weights = torch.randint(1, 5, (len(bag.values),), generator=draw) / 4
        batch["again"] = hb.Jagged(bag.values, lengths=bag.lengths, weights=weights)
    return {**batch, "label": torch.arange(samples)}


def trained(
    rank: int, world: int, combiner: str, deal: str, storage: Any, options: dict[str, Any]
) -> None:
    kinds = MIXED if deal == "mixed" else dict.fromkeys("abc", KINDS[deal])
    alone, shared = models(combiner, kinds, world, storage, **options)
    rule = hb.optim.SGD if deal == "column" else hb.optim.Adagrad
    rules = [rule(m.parameters(), lr=0.5) for m in (alone, shared)]
    sizes = [SAMPLES * world, SAMPLES * world + 1, world - 1, SAMPLES * world]  # a rank without any
    weighted = combiner in ("sum", "mean")
    wholes = [whole_batch(number, size, weighted) for number, size in enumerate(sizes)]
    ids_sent = 0
    for number, (whole, batch) in enumerate(
        zip(wholes, hb.dist.owned(wholes, shared), strict=True)
    ):
        size = sizes[number]
        mine = range(size * rank // world, size * (rank + 1) // world)
        assert batch["label"].tolist() == [*mine] and batch.samples == size
        together = alone({name: whole[name] for name in FEATURES})
        own = shared({name: batch[name] for name in FEATURES})
        for name, vectors in own.items():
            expected = together[name][mine.start : mine.stop]
            if number == 0:
                assert torch.equal(vectors, expected), (name, combiner, deal)
            torch.testing.assert_close(vectors, expected, rtol=1e-5, atol=1e-6)
        grads = [g[:size] / world for g in gradients(number, together, range(size))]
        torch.autograd.backward([*together.values()], grads)
        torch.autograd.backward([*own.values()], gradients(number, own, mine))
        for one in rules:
            one.step()
            one.zero_grad()
        ranks: Any = shared.ranks
        assert ranks.sent.get("ids", 0) == ids_sent == 0
    for name in "abc":
        own_rows, expected_rows = shared.rows(name), alone.rows(name)
        assert torch.equal(own_rows.ids, expected_rows.ids)
        torch.testing.assert_close(own_rows.values, expected_rows.values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("deal", ["table", "column", "replicated", "mixed"])
def test_vectors_and_rows_are_those_of_one_process(world: int, deal: str) -> None:
    if (deal, world) in (("column", 3), ("mixed", 3)):
        pytest.skip("these columns are cut for two ranks")
    for combiner in COMBINERS:
        run(world, trained, combiner, deal, None, {})


def test_other_tables(tmp_path: Path) -> None:
    run(2, trained, "mean", "table", None, {"dtype": torch.float64})
    run(2, trained, "sum", "mixed", None, {"dtype": torch.bfloat16})
    run(2, trained, "mean", "table", hb.Storage(host="4MB", ssd=tmp_path / "rows"), {})


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = hb.EmbeddingCollection(tables("mean"), FEATURES, seed=3)
        torch.manual_seed(0)
        self.top = nn.Linear(36, 1)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        found = self.embeddings({name: batch[name] for name in FEATURES})
        return self.top(torch.cat([*found.values()], 1))[:, 0]


def with_dense_layers(rank: int, world: int) -> None:
    """A model with dense layers, clipping, accumulation and evaluation: as with slices."""
    wholes = [whole_batch(number, SAMPLES * world, False) for number in range(6)]
    found = []
    for wrap in (hb.dist.slices, None):
        model = Clicks()
        kinds = dict.fromkeys("abc", TableWise(1))
        hb.distribute(model, Plan([*model.embeddings.tables.values()], world, kinds))
        optimizer = hb.optim.Adam(model.parameters(), lr=0.01)
        loader: Any = wrap(wholes) if wrap else hb.dist.owned(wholes, model)
        losses = []
        for number, batch in enumerate(loader):
            model.train(number != 3)
            with torch.set_grad_enabled(number != 3):
                loss = (model(batch) - batch["label"].float()).square().mean()
            losses.append(float(loss.detach()))
            if number == 3:
                continue
            loss.backward()
            hb.nn.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found.append((losses, [model.embeddings.rows(name).values for name in "abc"]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-6)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_model_trains_as_with_slices() -> None:
    run(2, with_dense_layers)


class TwoCollections(nn.Module):
    """Both read the feature "item", each with a table that another rank keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = hb.EmbeddingCollection([hb.Table("x", 4, 20)], {"item": "x"}, seed=1)
        self.other = hb.EmbeddingCollection([hb.Table("y", 4, 20)], {"item": "y"}, seed=2)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        item = {"item": batch["item"]}
        return self.first(item)["item"] + 2 * self.other(item)["item"]


def one_feature_of_two_tables(rank: int, world: int) -> None:
    alone, shared = TwoCollections(), TwoCollections()
    specs = [*shared.first.tables.values(), *shared.other.tables.values()]
    hb.distribute(shared, Plan(specs, world, {"x": TableWise(0), "y": TableWise(1)}))
    whole = {"item": torch.tensor([[1, 2], [3, 3], [0, 19], [7, 1]])}
    rules = [
        hb.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.1, untouched="exact")
        for m in (alone, shared)
    ]
    for _ in range(3):  # rows that are behind catch up in lookups
        (batch,) = hb.dist.owned([whole], shared)
        own, expected = shared(batch), alone(whole)
        torch.testing.assert_close(own, expected[2 * rank : 2 * rank + 2])
        own.square().mean().backward()
        expected.square().mean().backward()
        for rule in rules:
            rule.step()
            rule.zero_grad()
        whole["item"] = (whole["item"] + 1) % 20


def test_a_feature_may_be_read_by_tables_of_several_ranks() -> None:
    run(2, one_feature_of_two_tables)


def refused(rank: int, world: int) -> None:
    _, shared = models("sum", dict.fromkeys("abc", TableWise(0)), world)
    whole = whole_batch(0, 8, False)
    (batch,) = hb.dist.owned([whole], shared)
    features = {name: batch[name] for name in FEATURES}
    shared(features)

    def fails(kind: Any, match: str, given: dict[str, Any]) -> None:
        with pytest.raises((kind, PeerError), match=match):
            shared(given)
        shared(features)  # all goes on

    slices = {name: whole[name][4 * rank : 4 * rank + 4] for name in FEATURES}
    fails(hb.InputError, "Some features of this batch", {**features, "a": slices["a"]})
    fails(PeerError, "Wrap the loaders of all ranks alike", slices if rank else features)
    (longer,) = hb.dist.owned([whole_batch(1, 8 + 2 * rank, False)], shared)
    fails(PeerError, "batches of other sizes", {name: longer[name] for name in FEATURES})
    wrong = {**whole, "a": whole["a"] + ROWS}
    (wrong_batch,) = hb.dist.owned([wrong], shared)
    fails(hb.IdError, "feature 'a'|Table 'a'", {name: wrong_batch[name] for name in FEATURES})
    vectors = shared(features)["a"]
    vectors.sum().backward()
    grad = shared.parameter("a").grad
    assert grad is not None and grad.shape == shared.parameter("a").shape
    for look in (lambda: grad * 2, lambda: grad._values(), lambda: grad.to_dense(), grad.coalesce):
        with pytest.raises(hb.TableError, match="batches are of hotbed.dist.owned"):
            look()
    shared.zero_grad(set_to_none=False)
    shared.zero_grad()
    assert shared.parameter("a").grad is None
    loss = shared(features)["a"].sum()
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer = hb.optim.SGD(shared.parameters(), lr=0.1)
    with pytest.raises((hb.TableError, PeerError), match="takes one backward"):
        optimizer.step()
    optimizer.zero_grad()
    shared(features)["a"].sum().backward()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    with pytest.raises((hb.TableError, PeerError), match="A GradScaler"):
        scaler.unscale_(optimizer)
    optimizer.zero_grad()
    alone = hb.EmbeddingCollection(tables("sum"), FEATURES, seed=3)
    with pytest.raises(hb.InputError, match=r"hotbed.dist.owned is for the model"):
        alone(features)
    if rank == 0:  # which keeps the table
        with pytest.raises(hb.InputError, match="lacks feature 'a'"):
            [*hb.dist.owned([{k: v for k, v in whole.items() if k != "a"}], shared)]
    else:
        (left_out,) = hb.dist.owned([{"label": whole["label"]}], shared)
        assert left_out["a"].given is None
    with pytest.raises(hb.InputError, match="same number of samples"):
        [*hb.dist.owned([{**whole, "label": torch.arange(3)}], shared)]
    for model in (alone, nn.Linear(2, 2)):
        with pytest.raises(
            hb.TableError, match=r"takes a model with tables that hotbed.distribute"
        ):
            hb.dist.owned([whole], model)
    by_row = hb.EmbeddingCollection([hb.Table("r", 4, 20)], seed=1)
    hb.distribute(by_row, Plan([*by_row.tables.values()], world, {"r": RowWise()}))
    with pytest.raises(hb.TableError, match="table 'r' of feature 'r' is cut by row"):
        hb.dist.owned([], by_row)
    unpooled = hb.EmbeddingCollection([hb.Table("u", 4, 20, None)], seed=1)
    hb.distribute(unpooled, Plan([*unpooled.tables.values()], world, {"u": TableWise(0)}))
    with pytest.raises(hb.TableError, match="combiner=None"):
        hb.dist.owned([], unpooled)


def test_what_cannot_be_is_refused() -> None:
    run(2, refused)
