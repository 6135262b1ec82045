"""Gradients of weights are of the rows that the forward has seen, or an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dist.worlds import run
from torch import Tensor

import hotbed as hb

IDS, OFFSETS = torch.tensor([1, 2, 2, 5]), torch.tensor([0, 2, 4])


def collection(
    rows: int | None, combiner: str, storage: hb.Storage | None = None
) -> hb.EmbeddingCollection:
    table = hb.Table("a", 4, rows, combiner=combiner)
    model = hb.EmbeddingCollection([table], seed=1, storage=storage)
    model.assign("a", torch.arange(8), torch.arange(32.0).view(8, 4) / 10)
    return model


def looked_up(model: hb.EmbeddingCollection) -> tuple[Tensor, Tensor]:
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    return weights, model({"a": hb.Jagged(IDS, OFFSETS, weights=weights)})["a"]


def step(model: hb.EmbeddingCollection) -> None:
    optimizer = hb.optim.SGD(model.parameters(), lr=1.0)
    model({"a": torch.tensor([1, 2, 5])})["a"].sum().backward()
    optimizer.step()


CHANGES: dict[str, Callable[[hb.EmbeddingCollection], object]] = {
    "step": step,
    "assign": lambda model: model.assign("a", torch.tensor([1]), torch.full((1, 4), 100.0)),
}


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *((kind, change) for kind in ("static", "dynamic", "tiers") for change in CHANGES),
        ("static", "parameter"),  # whose parameter has rows to write to
    ],
)
def test_rows_that_change_between_forward_and_backward(
    kind: str, change: str, combiner: str, tmp_path: Path
) -> None:
    storage = hb.Storage(host="16MB", ssd=str(tmp_path)) if kind == "tiers" else None
    model = collection(50 if kind == "static" else None, combiner, storage)
    weights, vectors = looked_up(model)
    if change == "parameter":
        with torch.no_grad():
            model.parameter("a").fill_(100.0)
    else:
        CHANGES[change](model)
    with pytest.raises(hb.TableError, match="'a': rows were changed between this forward and its"):
        vectors.sum().backward()
    weights, vectors = looked_up(model)
    model.eval()
    looked_up(model)  # reads, and changes nothing
    vectors.sum().backward()
    assert weights.grad is not None


def on_ranks(rank: int, world: int) -> None:
    """The rows of a forward lie beside its batch."""
    grads = []
    for changed in (False, True):
        model = hb.EmbeddingCollection([hb.Table("a", 4, 50)], seed=1)
        hb.distribute(model)
        weights, vectors = looked_up(model)
        if changed:
            model.assign("a", torch.arange(8), torch.full((8, 4), 100.0))
        vectors.sum().backward()
        assert weights.grad is not None
        grads.append(weights.grad)
    assert torch.equal(*grads)


@pytest.mark.process
def test_on_ranks_they_are_those_of_the_forward() -> None:
    run(2, on_ranks)


def test_an_optimizer_that_is_made_meanwhile_changes_no_row() -> None:
    model = collection(50, "sum")
    weights, vectors = looked_up(model)
    optimizer = hb.optim.Adam(model.parameters())
    optimizer.load_state_dict(optimizer.state_dict())
    vectors.sum().backward()
    expected = [float(row.sum()) for row in model.lookup("a", IDS)]
    assert weights.grad is not None and weights.grad.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("layer", ["collection", "bag"])
def test_rows_written_into_the_parameter_before_the_forward_are_those_of_it(layer: str) -> None:
    """As in torch, whose initializers and constraints write there."""
    bag = hb.EmbeddingBag(50, 4, mode="sum")
    model = collection(50, "sum") if layer == "collection" else None
    parameter = model.parameter("a") if model else bag.weight

    def pooled(weights: Tensor) -> Tensor:
        if model:
            return model({"a": hb.Jagged(IDS, OFFSETS, weights=weights)})["a"]
        return bag(IDS, OFFSETS, per_sample_weights=weights)

    optimizer = hb.optim.SGD((model or bag).parameters(), lr=0.1)
    torch.nn.init.normal_(parameter)
    for _ in range(3):
        weights = torch.ones(4, requires_grad=True)
        pooled(weights).sum().backward()
        assert weights.grad is not None
        torch.testing.assert_close(weights.grad, parameter.detach()[IDS].sum(1))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            parameter.clamp_(-0.5, 0.5)


def test_rows_put_in_place_of_others_before_a_backward_are_not_lost() -> None:
    model = collection(50, "sum")
    _, vectors = looked_up(model)
    model.parameter("a").data = torch.full((50, 4), 3.0)
    for _ in range(2):
        with pytest.raises(hb.TableError, match="'a': rows were changed between this forward"):
            vectors.sum().backward(retain_graph=True)
    assert torch.equal(model.rows("a").values, torch.full((50, 4), 3.0))


def test_rows_that_cannot_be_adopted_now_are_adopted_later() -> None:
    """While somebody reads in this thread, nothing may write."""
    model = collection(50, "sum")
    records = model.table("a").records()
    next(records)
    model.parameter("a").data = torch.full((50, 4), 3.0)
    with pytest.raises(RuntimeError, match="to be written by a thread that reads them"):
        model.lookup("a", [1])
    del records
    assert torch.equal(model.lookup("a", [1]), torch.full((1, 4), 3.0))


def test_tables_without_weights_may_change_and_nothing_is_no_change() -> None:
    model = hb.EmbeddingCollection([hb.Table("a", 4, 50), hb.Table("b", 4, 50)], seed=1)
    weights = torch.ones(4, requires_grad=True)
    batch = {"a": hb.Jagged(IDS, OFFSETS, weights=weights), "b": torch.tensor([1, 2])}
    vectors = model(batch)
    model.assign("b", [9], torch.ones(1, 4))
    model.assign("a", [], torch.ones(0, 4))
    (vectors["a"].sum() + vectors["b"].sum()).backward()
    assert weights.grad is not None
    vectors = model(batch)
    model.assign("a", [9], torch.ones(1, 4))
    vectors["b"].sum().backward()  # which asks for no gradient of weights
