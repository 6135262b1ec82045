"""`fused=True`: tables are updated during backward."""

from __future__ import annotations

import gc

import pytest
import torch
from optim.models import Model, batches, loss_of, tables_of, train

import hotbed as hb


def test_fused_updates_during_backward() -> None:
    one, two = Model(), Model()
    plain = hb.optim.Adagrad(one.parameters(), lr=0.1)
    fused = hb.optim.Adagrad(two.parameters(), lr=0.1, fused=True)
    data = list(batches(6))
    assert train(one, plain, data) == train(two, fused, data)
    for name, rows in tables_of(one).items():
        assert torch.equal(rows, tables_of(two)[name])
    before = tables_of(two)["item"]
    loss_of(two).backward()
    assert two.embeddings.parameter("item").grad is None
    assert not torch.equal(tables_of(two)["item"], before)
    batch, _ = next(batches(1))
    with torch.no_grad():
        two(batch)
    with pytest.raises(hb.OptimizerError, match="fused=True.*for each step"):
        two(batch)
    fused.step()
    losses = [two(batch).sum() for _ in range(2)]
    losses[0].backward()
    with pytest.raises(hb.OptimizerError, match="a second one came first"):
        losses[1].backward()


def scaled(model: Model, scaler: torch.amp.GradScaler) -> None:
    scaler.scale(loss_of(model)).backward()


@pytest.mark.parametrize("unscale", [False, True])
def test_a_grad_scaler_is_refused_before_it_did_harm(unscale: bool) -> None:
    model = Model(dtype=torch.float32)
    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.1, fused=True)
    before, top = tables_of(model), model.top.weight.clone()
    scaler = torch.amp.GradScaler("cpu")
    scaled(model, scaler)
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.raises(hb.OptimizerError, match="Adagrad.fused=True.*GradScaler.*fused=False"):
        scaler.step(optimizer)
    assert all(torch.equal(rows, before[name]) for name, rows in tables_of(model).items())
    assert torch.equal(model.top.weight, top)
    # The batch can be given up, and training goes on without a scaler.
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()
    plain = Model(dtype=torch.float32)
    optimizer = hb.optim.Adagrad(plain.parameters(), lr=0.1)
    loss_of(plain).backward()
    optimizer.step()
    assert all(torch.equal(r, tables_of(plain)[name]) for name, r in tables_of(model).items())


def test_a_grad_scaler_that_comes_later_is_refused_too() -> None:
    model = Model(dtype=torch.float32)
    optimizer = hb.optim.SGD(model.parameters(), lr=0.1, fused=True)
    train(model, optimizer, [(b, y.float()) for b, y in batches(2)])
    scaler = torch.amp.GradScaler("cpu")
    scaled(model, scaler)
    with pytest.raises(hb.OptimizerError, match="GradScaler"):
        scaler.step(optimizer)


def test_a_grad_scaler_that_is_off_is_none() -> None:
    model = Model(dtype=torch.float32)
    optimizer = hb.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    before = tables_of(model)["item"]
    for _ in range(2):
        scaled(model, scaler)
        scaler.step(optimizer)
        optimizer.zero_grad()
    assert not torch.equal(tables_of(model)["item"], before)


def test_the_first_step_is_all_or_nothing() -> None:
    model = Model()
    optimizer = hb.optim.SGD(model.parameters(), lr=0.1, fused=True)
    before = tables_of(model)
    loss_of(model).backward()
    model.top.bias.grad[0] = float("nan")
    with pytest.raises(hb.NotFiniteError, match="top.bias"):
        optimizer.step()
    assert all(torch.equal(rows, before[name]) for name, rows in tables_of(model).items())


def test_a_batch_without_a_step_can_be_given_up() -> None:
    model = Model()
    optimizer = hb.optim.SGD(model.parameters(), lr=0.1, fused=True)
    for _ in range(2):  # the first gradients wait, later ones are applied at once
        loss_of(model).backward()
        with pytest.raises(hb.OptimizerError, match="for each step"):
            model(next(batches(1))[0])
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    with pytest.raises(hb.OptimizerError, match="for each step"):
        loss_of(model).backward()
        loss_of(model)


def test_an_optimizer_that_is_gone_updates_nothing() -> None:
    model = Model()
    optimizer = hb.optim.SGD(model.parameters(), lr=0.1, fused=True)
    loss_of(model).backward()
    optimizer.step()
    loss_of(model).backward()
    rows = tables_of(model)["item"]
    del optimizer
    gc.collect()
    loss_of(model).backward()
    assert model.embeddings.parameter("item").grad is not None
    assert torch.equal(tables_of(model)["item"], rows)


@pytest.mark.parametrize("tables", [1, 3])
def test_fused_refuses_a_gradient_that_is_not_finite(tables: int) -> None:
    names = [f"t{t}" for t in range(tables)]
    embeddings = hb.EmbeddingCollection([hb.Table(n, dim=4, rows=9) for n in names], seed=0)
    optimizer = hb.optim.SGD(embeddings.parameters(), lr=0.1, fused=True)
    batch = {name: torch.tensor([3, 7, 3]) for name in names}
    sum(v.sum() for v in embeddings(batch).values()).backward()
    optimizer.step()
    before = {name: embeddings.rows(name).values.clone() for name in names}
    vectors = embeddings(batch)
    weights = {name: torch.ones(3, 4) for name in names}
    weights["t0"][1, 2] = float("nan")
    with pytest.raises(hb.NotFiniteError, match="'t0', id 7, column 2.*the table was not changed"):
        sum((vectors[n] * weights[n]).sum() for n in names).backward()
    assert torch.equal(embeddings.rows("t0").values, before["t0"])
    sum(v.sum() for v in embeddings(batch).values()).backward()
    optimizer.step()
    moved = embeddings.rows("t0").values - before["t0"]
    assert torch.allclose(moved[[3, 7]], torch.tensor([[-0.2], [-0.1]]).expand(2, 4))
    assert not moved[[0, 1, 2, 4, 5, 6, 8]].any()


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "RowwiseAdagrad", "Adam", "FTRL"])
@pytest.mark.parametrize("tables", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_fused_gives_the_same_bits(name: str, tables: int, dtype: torch.dtype) -> None:
    """Enough ids that both ways of summing run in parallel; weighted bags, and rows left alone."""
    generator = torch.Generator().manual_seed(0)
    names = [f"t{t}" for t in range(tables)]
    results = []
    ids = {n: torch.randint(0, 3000, (4, 900, 3), generator=generator) for n in names}
    scale = torch.randn(900, 16, generator=generator).to(
        torch.float64 if dtype == torch.float64 else torch.float32
    )
    for fused in (False, True):
        embeddings = hb.EmbeddingCollection(
            [hb.Table(n, dim=16, rows=None, combiner="mean", dtype=dtype) for n in names], seed=0
        )
        optimizer = getattr(hb.optim, name)(embeddings.parameters(), lr=0.1, fused=fused)
        for step in range(4):
            vectors = embeddings({n: ids[n][step] for n in names})
            sum((v * scale).sum() for v in vectors.values()).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([embeddings.rows(n) for n in names])
    for plain, at_once in zip(*results, strict=True):
        assert torch.equal(plain.ids, at_once.ids)
        assert torch.equal(plain.values, at_once.values)


@pytest.mark.parametrize("storage", [None, hb.Storage(device="100KB", host="1MB")])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_gradients_of_weights_are_those_of_the_rows_that_were_pooled(
    combiner: str, storage: hb.Storage | None
) -> None:
    """Not of the rows that the update leaves."""
    found = []
    for fused in (False, True):
        model = hb.EmbeddingCollection([hb.Table("a", 4, 30, combiner)], seed=1, storage=storage)
        optimizer = hb.optim.SGD(model.parameters(), lr=0.5, fused=fused)
        grads = []
        for step in range(3):
            ids = torch.arange(9) * (step + 1) % 7
            weights = (torch.arange(9.0) + 1).requires_grad_()
            vectors = model({"a": hb.Jagged(ids, lengths=[4, 0, 5], weights=weights)})["a"]
            (vectors * torch.arange(12.0).view(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert weights.grad is not None
            grads.append(weights.grad)
        found.append(grads)
    for plain, fused_grad in zip(*found, strict=True):
        assert torch.equal(plain, fused_grad)
