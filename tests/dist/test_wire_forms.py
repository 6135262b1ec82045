"""Rows and gradients that travel in fewer bytes than they are stored: float16, bfloat16 and int8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dist.worlds import run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hotbed as hb
from hotbed import _core
from hotbed.dist import ColumnWise, Plan, Replicated, RowWise, Sharding, TableWise
from hotbed.tables import CORE_DTYPES

FORMS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "int8": None}


def through(
    rows: Tensor, form: str, at_random: bool = False, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Bytes, (n, row bytes) uint8, and the rows that they become."""
    kind = getattr(_core.WireForm, form)
    size = _core.wire_row_bytes(kind, rows.shape[1])
    raw, back = torch.empty(len(rows), size, dtype=torch.uint8), torch.empty_like(rows)
    for call, tensor in ((_core.encode_pieces, rows), (_core.decode_pieces, back)):
        call(
            [
                (
                    kind,
                    CORE_DTYPES[rows.dtype],
                    *rows.shape,
                    tensor.data_ptr(),
                    raw.data_ptr(),
                    at_random,
                    seed,
                )
            ]
        )
    return raw, back


def by_numpy(rows: Tensor) -> Tensor:
    """int8, to the nearest."""
    wide = rows.float().numpy()
    most = np.abs(wide).max(1, keepdims=True)
    scale = (most / np.float32(127)).astype(np.float32)
    whole = np.rint(wide / np.where(scale > 0, scale, np.float32(1)))
    return torch.from_numpy(whole.astype(np.float32) * scale).to(rows.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 70), st.integers(0, 2**32), st.floats(-20, 20))
def test_rows_are_those_of_an_oracle(
    form: str, dtype: torch.dtype, count: int, width: int, seed: int, power: float
) -> None:
    chance = torch.Generator().manual_seed(seed)
    scale = 1.0 if dtype == torch.float16 else 2.0**power
    rows = (torch.randn(count, width, generator=chance) * scale).to(dtype)
    rows[torch.rand(count, generator=chance) < 0.2] = 0
    _, found = through(rows, form)
    expected = by_numpy(rows) if form == "int8" else rows.float().to(FORMS[form]).to(dtype)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("at_random", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(bad: float, at_random: bool) -> None:
    rows = torch.ones(3, 5)
    rows[1, 2] = bad
    for form in FORMS:
        _, found = through(rows, form, at_random)
        assert torch.equal(found.isfinite().all(1), torch.tensor([True, False, True]))
    tiny = torch.tensor([[1e-36, -1e-40], [0.0, -0.0], [1e-30, 3e38]])
    _, found = through(tiny, "int8", at_random)
    assert torch.equal(found[:2], torch.zeros(2, 2)) and bool(found.isfinite().all())
    assert found[2, 1] == pytest.approx(3e38)


def test_rounding_at_random_is_right_in_the_mean_and_the_same_for_equal_rows() -> None:
    row = torch.linspace(-1, 1, 16)[None]
    every = torch.cat([through(row, "int8", True, seed)[1] for seed in range(4000)])
    step = 1 / 127
    assert bool(((every - row).abs() < step).all())
    assert bool(((every.mean(0) - row).abs() < 5 * 0.5 * step / 4000**0.5).all())
    # Neighbours in a row, and rows of neighbouring seeds, are rounded independently.
    ups = ((every - row) > 0).float()[:, 1:-1]
    together = torch.corrcoef(ups.T) - torch.eye(14)
    assert float(together.nan_to_num().abs().max()) < 0.1
    assert abs(float(torch.corrcoef(torch.stack([ups[1:, 4], ups[:-1, 4]]))[0, 1])) < 0.1
    raw, _ = through(row.repeat(3, 1), "int8", True, 7)
    assert torch.equal(raw[0], raw[1]) and torch.equal(raw[0], raw[2])
    assert not torch.equal(raw[0], through(row, "int8", True, 8)[0][0])


# -- on ranks ------------------------------------------------------------------------------------------

IDS = torch.tensor([[1, 7, 3, 3], [0, 19, 5, 7], [2, 2, 2, 11], [13, 17, 18, 1]])
KINDS: dict[str, Sharding] = {
    "row": RowWise(),
    "column": ColumnWise((0, 1)),
    "table": TableWise(1),
    "replicated": Replicated(),
}


def tables(combiner: str = "sum", **wire: Any) -> list[hb.Table]:
    return [hb.Table(name, 8, 20, combiner, **wire) for name in KINDS]


def distributed(world: int, specs: list[hb.Table], **wire: str) -> hb.EmbeddingCollection:
    model = hb.EmbeddingCollection(specs, seed=3)
    hb.distribute(model, Plan(specs, world, KINDS), **wire)
    return model


def slices_of(kind: str) -> list[slice]:
    """Columns that travel together."""
    return [slice(0, 4), slice(4, 8)] if kind == "column" else [slice(0, 8)]


def sent_through(rows: Tensor, kind: str, form: str) -> Tensor:
    return torch.cat([through(rows[:, c].contiguous(), form)[1] for c in slices_of(kind)], 1)


def rows_of_forwards(rank: int, world: int, form: str) -> None:
    """One id a bag: rows; four: vectors that the owners pool, of a table cut by row in parts."""
    whole = hb.EmbeddingCollection(tables(), seed=3)
    model = distributed(world, tables(), rows=form)
    mine = IDS[2 * rank : 2 * rank + 2]
    with torch.no_grad():
        for ids in (mine[:, :1], mine):
            found = model(dict.fromkeys(KINDS, ids))
            for kind in KINDS:
                rows = whole.lookup(kind, ids.flatten()).view(*ids.shape, 8)
                if ids.shape[1] == 1:
                    expected = sent_through(rows[:, 0], kind, form)
                elif kind == "row":
                    owner = ids % world
                    expected = sum(
                        through((rows * (owner == r)[..., None]).sum(1), form)[1]
                        for r in range(world)
                    )
                else:
                    expected = sent_through(rows.sum(1), kind, form)
                torch.testing.assert_close(found[kind], expected, rtol=0, atol=1e-7)
                assert torch.equal(model.lookup(kind, [3, 4]), whole.lookup(kind, [3, 4]))


def bytes_sent(rank: int, world: int) -> None:
    sent = {}
    for form in ("stored", *FORMS):
        specs = [hb.Table("row", 64, 4000)]
        model = hb.EmbeddingCollection(specs, seed=3)
        hb.distribute(model, Plan(specs, world, {"row": RowWise()}), rows=form, gradients=form)
        optimizer = hb.optim.SGD(model.parameters(), lr=0.5)
        for bag in (1, 8):  # rows, and vectors
            ids = torch.arange(80 * bag).view(80, bag) + 80 * bag * rank
            model({"row": ids})["row"].sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ranks: Any = model.ranks
        sent[form] = dict(ranks.sent)
    for what in ("rows", "vectors", "gradients"):
        assert sent["stored"][what] > 0
        for form in FORMS:
            share = 68 / 256 if form == "int8" else 0.5
            assert sent[form][what] == share * sent["stored"][what], (form, what)
    assert all(sent[form]["ids"] == sent["stored"]["ids"] for form in FORMS)


@pytest.mark.process
def test_bytes_are_those_of_the_form() -> None:
    run(2, bytes_sent)


@pytest.mark.process
@pytest.mark.parametrize("form", FORMS)
def test_forwards_see_what_has_travelled(form: str) -> None:
    run(2, rows_of_forwards, form)


def trained(rank: int, world: int, specs: list[hb.Table], steps: int, **wire: str) -> Any:
    model = distributed(world, specs, **wire)
    optimizer = hb.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        ids = (IDS[2 * rank : 2 * rank + 2] + step) % 20
        ids = ids if step % 2 else ids[:, :1]
        chance = torch.Generator().manual_seed(10 * step + rank)
        vectors = torch.cat([*model(dict.fromkeys(KINDS, ids)).values()], 1)
        (vectors * torch.randn(vectors.shape, generator=chance)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def gradients(rank: int, world: int, form: str) -> None:
    exact, _ = trained(rank, world, tables(), 6)
    model, _ = trained(rank, world, tables(), 6, gradients=form)
    again, _ = trained(rank, world, tables(), 6, gradients=form)
    # Gradients are some units large, of which 12 at most, 4 in a bag, come together in a row.
    bound = {"float16": 2.0**-9, "bfloat16": 2.0**-6, "int8": 4 / 127}[form]
    for name in KINDS:
        error = (model.rows(name).values - exact.rows(name).values).abs().max()
        assert 0 < float(error) < 12 * bound, name
        assert torch.equal(model.rows(name).values, again.rows(name).values)
    # The copies of a replicated table are alike.
    own = model.rows("replicated", local=True).values
    every = [torch.empty_like(own) for _ in range(world)]
    torch.distributed.all_gather(every, own)
    assert all(torch.equal(one, own) for one in every)


@pytest.mark.process
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("world", [2])
def test_gradients_are_summed_as_they_have_travelled(world: int, form: str) -> None:
    run(world, gradients, form)


def mean_of_gradients(rank: int, world: int) -> None:
    """Many steps with one gradient: its rounding cancels out."""
    specs = tables()
    model = distributed(world, specs, gradients="int8")
    before = {name: model.rows(name).values for name in KINDS}
    optimizer = hb.optim.SGD(model.parameters(), lr=1.0)
    grad = torch.linspace(0.1, 1, 8)
    for _ in range(300):
        vectors = torch.cat([*model(dict.fromkeys(KINDS, torch.tensor([[4]]))).values()], 1)
        (vectors * grad.repeat(len(KINDS))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name in KINDS:
        moved = (before[name] - model.rows(name).values)[4] / 300
        assert float((moved - grad).abs().max()) < 5 * 0.5 / 127 / 300**0.5, name


@pytest.mark.process
def test_rounding_of_gradients_cancels_out() -> None:
    run(2, mean_of_gradients)


def not_finite(rank: int, world: int, form: str) -> None:
    model = distributed(world, tables(), gradients=form)
    optimizer = hb.optim.SGD(model.parameters(), lr=0.5)
    before = {name: model.rows(name).values for name in KINDS}
    for ids in (torch.tensor([[rank]]), torch.tensor([[rank, 3, 3]])):
        vectors = torch.cat([*model(dict.fromkeys(KINDS, ids)).values()], 1)
        (vectors * (float("nan") if rank == 0 else 1.0)).sum().backward()
        with pytest.raises((hb.NotFiniteError, hb.dist.PeerError), match="infinite"):
            optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(model.rows(name).values, before[name]) for name in KINDS)


@pytest.mark.process
@pytest.mark.parametrize("form", FORMS)
def test_gradients_that_are_not_finite_are_refused(form: str) -> None:
    run(2, not_finite, form)


def each_its_own(rank: int, world: int) -> None:
    """Forms of one table, beside others that travel as they are stored, and in a form of the model."""
    forms: dict[str, Any] = {
        "row": "int8",
        "column": ("bfloat16", "stored"),
        "table": None,
        "replicated": ("stored", "float16"),
    }
    specs = [hb.Table(name, 8, 20, wire=wire) for name, wire in forms.items()]
    assert specs[0].wire == ("int8", "int8")
    for default in ({}, {"rows": "float16", "gradients": "int8"}):
        mixed, _ = trained(rank, world, specs, 5, **default)
        for name, wire in forms.items():
            names = default if wire is None else {"rows": "int8", "gradients": "int8"}
            if isinstance(wire, tuple):
                names = dict(zip(("rows", "gradients"), wire, strict=True))
            alone, _ = trained(rank, world, tables(), 5, **names)
            assert torch.equal(mixed.rows(name).values, alone.rows(name).values), name


@pytest.mark.process
def test_tables_may_travel_in_forms_of_their_own() -> None:
    run(2, each_its_own)


def resumed(rank: int, world: int, folder: str) -> None:
    """A run that is loaded goes on with the bits of one that has not ended."""
    wire = {"rows": "int8", "gradients": "int8"}

    def steps(model: Any, optimizer: Any, numbers: range) -> None:
        for step in numbers:
            ids = (IDS[2 * rank : 2 * rank + 2] + step) % 20
            loss = torch.cat([*model(dict.fromkeys(KINDS, ids)).values()], 1).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    models = [distributed(world, tables(), **wire) for _ in range(2)]
    optimizers = [hb.optim.Adam(model.parameters(), lr=0.1) for model in models]
    steps(models[0], optimizers[0], range(4))
    hb.save(folder, models[0], optimizers[0], step=4)
    steps(models[0], optimizers[0], range(4, 8))
    hb.load(folder, models[1], optimizers[1])
    steps(models[1], optimizers[1], range(4, 8))
    for name in KINDS:
        assert torch.equal(models[0].rows(name).values, models[1].rows(name).values), name


@pytest.mark.process
def test_a_resumed_run_rounds_alike(tmp_path: Path) -> None:
    run(2, resumed, str(tmp_path))


@pytest.mark.parametrize(
    "wire", [8, ("int8",), ("int8", "int8", "int8"), ["int8", "int8"], ("int8", None)]
)
def test_wire_of_a_table_is_a_name_or_two(wire: Any) -> None:
    with pytest.raises(hb.TableError, match="Table 'a': wire must be the name of a form"):
        hb.Table("a", 4, 10, wire=wire)


def unknown(rank: int, world: int) -> None:
    specs = [hb.Table(name, 8, 20, wire="int7") for name in KINDS]
    with pytest.raises(hb.TableError, match="Table 'row': wire of rows: expected one of stored"):
        distributed(world, specs)


@pytest.mark.process
def test_a_form_that_nobody_knows_is_refused_by_name() -> None:
    run(2, unknown)
