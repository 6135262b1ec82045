"""Models that read rows in few bits answer as their bundles do."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient
from torch import Tensor, nn

import hotbed as hb
from hotbed.serve.bundles.defaults import DEFAULTS
from hotbed.serve.bundles.row_formats import ROW_FORMATS
from hotbed.serve.http.app import app_of
from hotbed.serve.http.settings import ServeSettings

B = 6
FORMS = [*ROW_FORMATS]


def rounded(rows: Tensor, how: str) -> Tensor:
    form = ROW_FORMATS[how]
    return form.decoded(form.encoded(rows), rows.shape[1])


def served_answers(bundle: Path, asked: dict[str, Tensor]) -> list[object]:
    values = [leaf.tolist() for leaf in asked.values()]
    samples = [dict(zip(asked, row, strict=True)) for row in zip(*values, strict=True)]
    with TestClient(app_of(ServeSettings(bundle=str(bundle), name="bundle"))) as client:
        answer = client.post("/v1/models/bundle:predict", json={"instances": samples})
        assert answer.status_code == 200, answer.json()
        return list(answer.json()["predictions"])


@pytest.mark.parametrize("how", FORMS)
@pytest.mark.parametrize("default", DEFAULTS)
def test_answers_are_those_of_the_bundle(how: str, default: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = hb.models.DLRM(["user", "item"])
    sample = {
        "dense": torch.rand(B, 13),
        "user": torch.randint(0, 50, (B,)),
        "item": torch.randint(0, 50, (B,)),
    }
    model(sample)
    few = hb.serve.quantized(model, how, default=default)
    bundle = hb.export(model, tmp_path / "bundle", sample=sample, rows=how, default=default)
    asked = {**sample, "user": torch.tensor([10**9, *sample["user"][1:].tolist()])}
    with torch.no_grad():
        told = served_answers(bundle, asked)
        found = few(asked)
        np.testing.assert_allclose(found.numpy(), told, atol=1e-5, rtol=1e-5)
        whole = model.eval()(asked)
    exact = how == "float32"
    assert torch.equal(found[:1], whole[:1]) == (exact and default == "first")
    assert torch.equal(found[1:], whole[1:]) == exact


@pytest.mark.parametrize("how", FORMS)
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", "max", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_vectors_of_every_input(how: str, combiner: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    table = hb.Table("t", 5, rows=9, combiner=combiner, padding_idx=3, dtype=dtype)
    model = hb.EmbeddingCollection([table], seed=1)
    few = hb.serve.quantized(model, how)
    twin = hb.EmbeddingCollection([table], seed=1)
    kept = torch.arange(9)[torch.arange(9) != 3]
    twin.assign("t", kept, rounded(model.lookup("t", kept).float(), how).to(dtype))
    jagged = hb.Jagged(torch.tensor([1, 3, 8, 8, 0]), lengths=torch.tensor([2, 0, 3]))
    for ids in (torch.tensor([1, 3, 8]), torch.randint(0, 9, (4, 3)), jagged):
        found, wanted = few({"t": ids})["t"], twin.eval()({"t": ids})["t"]
        assert type(found) is type(wanted)
        if isinstance(wanted, hb.Jagged):
            assert torch.equal(found.offsets, wanted.offsets)
            found, wanted = found.values, wanted.values
        assert found.dtype == wanted.dtype and not found.requires_grad
        # In bfloat16 rows of few bits are no numbers of the twin's.
        exact = dtype != torch.bfloat16 or how in ("float32", "float16")
        close = {"atol": 1e-6, "rtol": 1e-6} if exact else {"atol": 0.05, "rtol": 0.05}
        torch.testing.assert_close(found, wanted.detach(), **close)


class Layers(nn.Module):
    """Layers of one table each, one of them twice, and a dense part that has a state."""

    def __init__(self) -> None:
        super().__init__()
        self.one = hb.Embedding(20, 4)
        self.bag = hb.EmbeddingBag(20, 4, mode="mean")
        self.both = nn.ModuleList([self.one])
        self.norm = nn.BatchNorm1d(12)

    def forward(self, ids: Tensor) -> Tensor:
        bags = self.bag(ids.flatten(), torch.arange(0, ids.numel(), ids.shape[1]))
        return self.norm(torch.cat([self.one(ids[:, 0]), self.both[0](ids[:, 1]), bags], 1))


def test_the_model_stays_as_it_is_and_later_steps_do_not_count() -> None:
    torch.manual_seed(2)
    model = Layers()
    optimizer = hb.optim.Adam(model.parameters(), lr=0.1)
    ids = torch.randint(0, 20, (B, 2))
    model(ids).sum().backward()
    optimizer.step()
    few = hb.serve.quantized(model, "int8")
    assert model.training and not few.training and not few.one.training
    before = few(ids)
    assert few.both[0] is few.one and few.norm.weight is model.norm.weight
    with torch.no_grad():
        difference = float((before - model.eval()(ids)).abs().max())
    assert 0 < difference < 0.1
    model.train()(ids).square().sum().backward()
    for _ in range(3):
        optimizer.step()
    assert torch.equal(few.one(ids[:, 0]), rounded_once(few, ids[:, 0]))
    with pytest.raises(hb.TableError, match="for evaluation"):
        few.train()(ids)
    assert model.training


def rounded_once(few: nn.Module, ids: Tensor) -> Tensor:
    """Rows are the same, however often they are read."""
    found: Tensor = few.both[0](ids)
    return found


def test_copies() -> None:
    model = hb.EmbeddingCollection([hb.Table("a", 3), hb.Table("b", 3, 9)], seed=1)
    few, asked = hb.serve.quantized(model, "int8"), {"a": torch.arange(9), "b": torch.arange(9)}
    other = copy.deepcopy(few)
    for name, vectors in other(asked).items():
        assert torch.equal(vectors, few(asked)[name])
    other.train()
    with pytest.raises(hb.TableError, match="evaluation"):
        other(asked)
    few(asked)
    with pytest.raises(TypeError, match="Pickle the model that they are of"):
        pickle.dumps(few)


def test_layers_of_a_converted_model() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.EmbeddingBag(30, 4, mode="sum"), nn.Linear(4, 1))
    rows = model[0].weight.detach().clone()
    hb.convert(model, min_rows=1)
    ids = torch.randint(0, 30, (B, 3))
    found = hb.serve.quantized(model, "int4")[0](ids)
    torch.testing.assert_close(found, rounded(rows, "int4")[ids].sum(1))


def test_what_is_refused() -> None:
    model = hb.EmbeddingCollection([hb.Table("t", 4, rows=5)])
    with pytest.raises(hb.serve.ExportError, match="rows is 'int3'. Pass one of float32"):
        hb.serve.quantized(model, "int3")
    with pytest.raises(hb.serve.ExportError, match="default is 'ones'"):
        hb.serve.quantized(model, default="ones")
    few = hb.serve.quantized(model)
    with pytest.raises(hb.IdError, match=r"Table 't': id 5 is outside \[0, 5\)"):
        few({"t": torch.tensor([1, 5])})
    weighted = hb.Jagged(torch.tensor([1]), lengths=torch.tensor([1]), weights=torch.ones(1))
    with pytest.raises(hb.InputError, match="'t' has weights"):
        few({"t": weighted})


def test_evaluation_of_it() -> None:
    torch.manual_seed(4)
    model = hb.models.DLRM(["user", "item"])
    batches = [
        {
            "dense": torch.rand(64, 13),
            "user": torch.randint(0, 50, (64,)),
            "item": torch.randint(0, 50, (64,)),
            "label": torch.randint(0, 2, (64,)).float(),
        }
        for _ in range(3)
    ]
    for batch in batches:
        model(batch)
    whole = hb.train.evaluate(model, batches)
    same = hb.train.evaluate(hb.serve.quantized(model, "float32"), batches)
    few = hb.train.evaluate(hb.serve.quantized(model, "int8"), batches)
    assert same.auc == whole.auc and same.logloss == whole.logloss
    assert abs(few.auc - whole.auc) < 0.02 and few.logloss != whole.logloss
