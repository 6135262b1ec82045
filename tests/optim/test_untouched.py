"""untouched="exact" where a table meets more than steps: evaluation, other optimizers, saved states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hotbed as hb

ROWS, DIM = 30, 3
TIERS = hb.Storage(device=200_000, host="16MB")
AHEAD = pytest.mark.parametrize("storage", [None, TIERS], ids=["in memory", "in tiers"])
KINDS = pytest.mark.parametrize("rows", [None, ROWS], ids=["dynamic", "static"])


def trained(
    storage: hb.Storage | None, rows: int | None, steps: int = 6, **options: Any
) -> tuple[hb.EmbeddingCollection, Any]:
    """A collection that has stepped; most of its rows are behind."""
    tables = [hb.Table("item", DIM, rows, init=hb.init.Normal(0.0, 1.0))]
    collection = hb.EmbeddingCollection(tables, seed=0, storage=storage)
    optimizer = hb.optim.AdamW(
        collection.parameters(), lr=0.1, weight_decay=0.1, untouched="exact", **options
    )
    generator = torch.Generator().manual_seed(3)
    for at in range(steps):
        picked = torch.randint(0, ROWS, (ROWS if at == 0 else 4,), generator=generator)
        step(collection, optimizer, picked)
    return collection, optimizer


def step(collection: hb.EmbeddingCollection, optimizer: Any, ids: Tensor) -> Tensor:
    vectors = collection({"item": ids})["item"]
    vectors.sin().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return vectors.detach()


@AHEAD
@KINDS
@pytest.mark.parametrize("fused", [False, True])
def test_tuning_in_eval_mode_trains_rows_that_are_behind(
    storage: hb.Storage | None, rows: int | None, fused: bool
) -> None:
    """As training mode does, but for new ids, which stay without a row."""
    (tuned, tuner), (plain, optimizer) = (
        trained(storage, rows, fused=fused),
        trained(storage, rows, fused=fused),
    )
    known = plain.rows("item").ids[:12]
    tuned.eval()
    for ids in (known, known[3:7], torch.cat([known[5:], known[:2]])):
        assert torch.equal(step(tuned, tuner, ids), step(plain, optimizer, ids))
    if rows is None:
        step(tuned, tuner, torch.tensor([10**6, 10**7]))
        step(plain, optimizer, known[:0])
    for name in ("ids", "values"):
        found, expected = (getattr(c.rows("item"), name) for c in (tuned, plain))
        assert torch.equal(found, expected)


@AHEAD
@KINDS
@pytest.mark.parametrize("untouched", ["lazy", "exact"])
def test_another_optimizer_takes_rows_over_where_they_are(
    storage: hb.Storage | None, rows: int | None, untouched: str
) -> None:
    collection, _ = trained(storage, rows)
    before = collection.rows("item")
    for make in (hb.optim.RowwiseAdagrad, hb.optim.AdamW, hb.optim.Adam):
        optimizer = make(collection.parameters(), lr=0.1, untouched=untouched, replace_state=True)
        now = collection.rows("item")
        assert torch.equal(now.ids, before.ids) and torch.equal(now.values, before.values)
    step(collection, optimizer, before.ids[:3])
    assert torch.equal(collection.rows("item").values[3:], before.values[3:])


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("to", [None, TIERS], ids=["to memory", "to tiers"])
@pytest.mark.parametrize("of", [None, TIERS], ids=["of memory", "of tiers"])
def test_rows_without_states_are_loaded_as_they_were(
    of: hb.Storage | None, to: hb.Storage | None, order: str
) -> None:
    """Tiers store the states of rows that were touched; the others have moved all the same."""
    tables = [hb.Table("item", DIM, ROWS, init=hb.init.Normal(0.0, 1.0))]

    def make(storage: hb.Storage | None) -> tuple[hb.EmbeddingCollection, Any]:
        collection = hb.EmbeddingCollection(tables, seed=0, storage=storage)
        return collection, hb.optim.AdamW(
            collection.parameters(), lr=0.1, weight_decay=0.1, untouched="exact"
        )

    saved = make(of)
    for ids in ([1, 2], [2, 3], [4]):
        step(*saved, torch.tensor(ids))
    loaded = make(to)
    states = [part.state_dict() for part in saved]
    pairs = list(zip(loaded, states, strict=True))
    for part, state in pairs if order == "model first" else pairs[::-1]:
        part.load_state_dict(state)
    assert torch.equal(loaded[0].rows("item").values, saved[0].rows("item").values)
    for pair in (saved, loaded):
        step(*pair, torch.tensor([7, 2]))
    torch.testing.assert_close(
        loaded[0].rows("item").values, saved[0].rows("item").values, rtol=1e-6, atol=1e-6
    )


@AHEAD
@KINDS
@pytest.mark.parametrize("of", ["itself", "earlier", "before any step"])
def test_loading_states_leaves_rows_that_are_behind_as_they_read(
    storage: hb.Storage | None, rows: int | None, of: str
) -> None:
    collection, optimizer = trained(storage, rows, 0 if of == "before any step" else 4)
    states = optimizer.state_dict()
    for ids in ([1, 2, 3], [7], [7]):
        step(collection, optimizer, torch.tensor(ids))
    if of == "itself":
        states = optimizer.state_dict()
    before = collection.rows("item")
    optimizer.load_state_dict(states)
    after = collection.rows("item")
    known = torch.isin(after.ids, before.ids)  # a dynamic table may get ids of the states
    assert torch.equal(after.ids[known], before.ids)
    assert torch.equal(after.values[known], before.values)
    steps = states["state"].get(0, {"step": 0})["step"]
    assert optimizer.state_dict()["state"][0]["step"] == steps
    step(collection, optimizer, torch.tensor([1, 9]))


@pytest.mark.parametrize("rule", hb.optim.RULES)
def test_a_state_dict_from_before_any_step_loads(rule: type[Any]) -> None:
    layer = hb.Embedding(ROWS, DIM)
    try:
        optimizer = rule(layer.parameters(), lr=0.1, untouched="exact")
    except hb.OptimizerError:
        pytest.skip("the rule cannot follow rows that no batch touches")
    optimizer.load_state_dict(optimizer.state_dict())
    layer(torch.tensor([1])).sum().backward()
    optimizer.step()
