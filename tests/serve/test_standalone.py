"""One ONNX model with the tables inside answers as the bundle that it lies in."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from effort import examples
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hotbed as hb
from hotbed.serve import ExportError
from hotbed.serve.bundles.versions import versions_of
from hotbed.serve.http.model import ServedModel
from hotbed.serve.http.settings import ServeSettings

READER = Path(__file__).resolve().parents[2] / "examples" / "serve" / "read_bundle.py"
Bundle = runpy.run_path(str(READER))["Bundle"]
B = 6
LARGEST = 2**63 - 1
IDS = [0, 1, 2, 3, 5, 8, 13, 2**40, LARGEST, -1, -(2**63)]


class Towers(nn.Module):
    """Answers with the vectors, and with what a dense layer makes of them."""

    def __init__(self, tables: list[hb.Table]) -> None:
        super().__init__()
        self.vectors = hb.EmbeddingCollection(tables, seed=1)
        self.top = nn.LazyLinear(2)

    def forward(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        found = self.vectors({name: batch[name] for name in self.vectors.features})
        flat = [each.flatten(1).float() for each in found.values()]
        return {"score": self.top(torch.cat([*flat, batch["x"]], 1)), "flat": torch.cat(flat, 1)}


def asked_of(bundle: Path, sample: dict[str, Any]) -> dict[str, Any]:
    """What the bundle answers."""
    asked = {
        name: [bag.tolist() for bag in leaf] if isinstance(leaf, hb.Jagged) else leaf.tolist()
        for name, leaf in sample.items()
    }
    found: dict[str, Any] = Bundle(bundle).predict(asked)
    return found


def asked_alone(path: Path, sample: dict[str, Any]) -> dict[str, Any]:
    """What the one model answers."""
    fed = {}
    for name, leaf in sample.items():
        if isinstance(leaf, hb.Jagged):
            fed[f"{name}.lengths"] = leaf.offsets.diff().numpy()
            leaf = leaf.values
        fed[name] = leaf.numpy()
    session = onnxruntime.InferenceSession(str(path))
    names = [each.name for each in session.get_outputs()]
    fed = {each.name: fed[each.name] for each in session.get_inputs()}
    return dict(zip(names, session.run(names, fed), strict=True))


def check_alike(bundle: Path, sample: dict[str, Any], exact: bool = False) -> None:
    expected = asked_of(bundle, sample)
    for name, answer in asked_alone(bundle / "standalone.onnx", sample).items():
        if exact and name == "flat":
            np.testing.assert_array_equal(answer, expected[name])
        np.testing.assert_allclose(answer, expected[name], atol=1e-5, rtol=1e-5)


TABLES = st.builds(
    lambda dim, count, combiner, dtype, padding: {
        "dim": dim,
        "rows": count,
        "combiner": combiner,
        "dtype": dtype,
        "padding_idx": 0 if padding is not None and count else padding,
    },
    st.integers(1, 9),
    st.sampled_from([None, None, 1, 20]),
    st.sampled_from(["sum", "mean", "sqrtn", "max", None]),
    st.sampled_from([torch.float32, torch.float16]),
    st.sampled_from([None, None, 0, -1, 3]),
)


def ids_of(data: st.DataObject, table: dict[str, Any], *shape: int) -> Tensor:
    """Ids that the table takes, those without a row, too."""
    known = range(table["rows"]) if table["rows"] else IDS
    some = [*known] if table["padding_idx"] is None else [*known, table["padding_idx"]]
    size = int(np.prod(shape, dtype=int))
    drawn = data.draw(st.lists(st.sampled_from(some), min_size=size, max_size=size))
    return torch.tensor(drawn, dtype=torch.int64).reshape(shape)


def leaf_of(data: st.DataObject, table: dict[str, Any], form: str, count: int) -> Any:
    match form:
        case "one":
            return ids_of(data, table, count)
        case "many":
            size = data.draw(st.integers(1, 4)) if table["combiner"] else 3
            return ids_of(data, table, count, size)
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    return hb.Jagged(ids_of(data, table, sum(lengths)), lengths=lengths)


@settings(max_examples=examples(6), phases=[Phase.generate])
@given(
    st.lists(TABLES, min_size=3, max_size=6),
    st.sampled_from(["float32", "float32", "float16", "int8", "int4"]),
    st.sampled_from(["zeros", "mean"]),
    st.data(),
)
def test_all_kinds_of_tables(
    tmp_path_factory: pytest.TempPathFactory,
    given: list[dict[str, Any]],
    rows: str,
    default: str,
    data: st.DataObject,
) -> None:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("bundle")
    names = [f"t/{n}" for n in range(len(given))]
    tables = dict(zip(names, given, strict=True))
    model = Towers([hb.Table(name, **about) for name, about in tables.items()])
    forms = {
        name: data.draw(
            st.sampled_from(["one", "many", "any"] if about["combiner"] else ["one", "many"])
        )
        for name, about in tables.items()
    }

    def batch(count: int) -> dict[str, Any]:
        leaves = {name: leaf_of(data, tables[name], forms[name], count) for name in names}
        return {"x": torch.rand(count, 2), **leaves}

    sample = batch(B)
    model(sample)
    for name, about in tables.items():
        if about["rows"] is None:
            met = data.draw(st.lists(st.sampled_from(IDS), unique=True))
            model.vectors.assign(name, met, torch.randn(len(met), about["dim"]))
    path = hb.export(
        model, folder / "out", sample=sample, rows=rows, default=default, standalone=True
    )
    onnx.checker.check_model(str(path / "standalone.onnx"), full_check=True)
    exact = all(forms[name] != "many" for name in names)  # ReduceSum adds in its own order
    for count in (B, 1, 3):
        check_alike(path, batch(count), exact)
    shutil.rmtree(folder)


def test_ids_with_and_without_a_row(tmp_path: Path) -> None:
    model = Towers([hb.Table("a", 4)])
    model.vectors.assign("a", [3, 5, LARGEST], torch.tensor([[1.0] * 4, [3.0] * 4, [8.0] * 4]))
    sample = {"a": torch.tensor([3, 5]), "x": torch.rand(2, 2)}
    model(sample)
    asked = torch.tensor([3, 4, 5, LARGEST, LARGEST - 1, -(2**63)])
    batch = {"a": asked, "x": torch.rand(6, 2)}
    for chosen, wanted in (
        (None, [1, 0, 3, 8, 0, 0]),
        ([5, 9], [0, 0, 3, 0, 0, 0]),
        ([], [0, 0, 0, 0, 0, 0]),
    ):
        tables = None if chosen is None else {"vectors.a": chosen}
        path = hb.export(model, tmp_path / "b", sample=sample, tables=tables, standalone=True)
        found = asked_alone(path / "standalone.onnx", batch)["flat"]
        assert found[:, 0].tolist() == wanted
        check_alike(path, batch)


def test_every_row_is_found(tmp_path: Path) -> None:
    """By the search, whose steps depend on how many there are."""
    counts = [1, 2, 3, 4, 7, 8, 9, 1000]
    names = [f"t{count}" for count in counts]
    model = Towers([hb.Table(name, 1) for name in names])
    asked = torch.arange(-9, 3002)
    batch = {name: asked for name in names} | {"x": torch.rand(len(asked), 2)}
    sample = {name: each[:2] for name, each in batch.items()}
    model(sample)
    chosen = {}
    for name, count in zip(names, counts, strict=True):
        known = torch.arange(count) * 3 - 7
        model.vectors.assign(name, known, torch.arange(count).float()[:, None] + 1)
        chosen[f"vectors.{name}"] = known
    path = hb.export(model, tmp_path / "b", sample=sample, tables=chosen, standalone=True)
    found = asked_alone(path / "standalone.onnx", batch)["flat"]
    for column, count in enumerate(counts):
        place = {3 * row - 7: row + 1 for row in range(count)}
        assert found[:, column].tolist() == [place.get(id_, 0) for id_ in asked.tolist()]


def test_an_id_outside_of_a_static_table_is_refused(tmp_path: Path) -> None:
    model = Towers([hb.Table("a", 4, 9)])
    sample = {"a": torch.arange(B), "x": torch.rand(B, 2)}
    model(sample)
    path = hb.export(model, tmp_path / "b", sample=sample, standalone=True)
    for id_ in (9, -1, -9, LARGEST):
        asked = {"a": torch.full((B,), id_), "x": torch.rand(B, 2)}
        with pytest.raises(Exception, match="out of data bounds"):
            asked_alone(path / "standalone.onnx", asked)


def test_lengths_that_do_not_add_up_are_refused(tmp_path: Path) -> None:
    model = Towers([hb.Table("a", 4, 9, combiner="mean")])
    bags = hb.Jagged(torch.arange(4), lengths=[1, 3])
    sample = {"a": bags, "x": torch.rand(2, 2)}
    model(sample)
    path = hb.export(model, tmp_path / "b", sample=sample, standalone=True)
    session = onnxruntime.InferenceSession(str(path / "standalone.onnx"))
    fed = {"a": np.arange(4), "x": np.zeros((2, 2), np.float32)}
    for lengths in ([1, 2], [3, 3]):
        with pytest.raises(Exception, match="ScatterElements"):
            session.run(None, {**fed, "a.lengths": np.array(lengths)})
    assert len(session.run(["score"], {**fed, "a.lengths": np.array([0, 4])})[0]) == 2


def test_models_with_histories(tmp_path: Path) -> None:
    """Narrow ids, which the dense part takes, too, and a table with two features."""
    item = hb.Table("item", 16, combiner=None, padding_idx=-1)
    model = hb.models.DIN([item, "u"], features={"item": "item", "history": "item", "u": "u"})
    sample = {
        "u": torch.arange(B),
        "item": torch.arange(B),
        "history": torch.randint(0, 9, (B, 3)) - 1,
    }
    sample = {name: each.int() for name, each in sample.items()}
    model(sample)
    path = hb.export(model, tmp_path / "b", sample=sample, standalone=True)
    check_alike(path, sample)
    constants = onnx.load(path / "standalone.onnx").graph.initializer
    assert [each.name for each in constants if each.name.endswith(".rows.npy")] == [
        "hotbed/tables/0.rows.npy",
        "hotbed/tables/1.rows.npy",
    ]


class Named(nn.Module):
    """Its answers, layers and features have the names that were asked for."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.linear = hb.EmbeddingCollection([hb.Table(name, 4, 9) for name in names], seed=0)

    def forward(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        found = self.linear({name: batch[name] for name in self.linear.features})
        return {f"hotbed/{name}": each * 2 for name, each in found.items()}


def test_names_may_be_those_of_nodes(tmp_path: Path) -> None:
    names = ["linear", "mul", "mul_1", "hotbed/dense/mul"]
    model = Named(names)
    sample = {name: torch.arange(B) for name in names}
    model(sample)
    check_alike(hb.export(model, tmp_path / "b", sample=sample, standalone=True), sample)


@pytest.mark.parametrize(
    ("features", "answer", "told"),
    [
        (["a", "a.lengths"], "score", "'a' is asked for with 'a.lengths'"),
        (["a"], "a", "'a' is asked with and answered"),
        (["a"], "a.lengths", "'a.lengths' is asked with and answered"),
    ],
)
def test_names_that_clash(features: list[str], answer: str, told: str, tmp_path: Path) -> None:
    class Clashing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vectors = hb.EmbeddingCollection([hb.Table(name, 4, 9) for name in features])

        def forward(self, batch: dict[str, Any]) -> dict[str, Tensor]:
            return {answer: sum(self.vectors({n: batch[n] for n in features}).values()) * 2}

    sample: dict[str, Any] = {name: torch.arange(B) for name in features}
    sample["a"] = hb.Jagged(torch.arange(B), lengths=[1] * B)
    model = Clashing()
    with pytest.raises(ExportError, match=told):
        hb.export(model, tmp_path / "b", sample=sample, standalone=True)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("rows", ["float32", "int8"])
def test_tables_beyond_what_protobuf_takes_lie_beside_it(
    rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotbed.serve.exporting.standalone.INSIDE", 10_000)
    tables = [hb.Table("s", 8, 2000), hb.Table("d", 8), hb.Table("none", 8)]
    model = Towers(tables)
    sample = {"s": torch.arange(B), "d": torch.arange(B) * 7, "none": torch.arange(B)}
    sample["x"] = torch.rand(B, 2)
    model(sample)
    none: dict[str, object] = {"vectors.none": []}
    path = hb.export(model, tmp_path / "b", sample=sample, rows=rows, tables=none, standalone=True)
    assert (path / "standalone.onnx").stat().st_size < 60_000
    check_alike(path, sample)


def test_the_bundle_lists_it_and_is_served(tmp_path: Path) -> None:
    model = Towers([hb.Table("a", 4)])
    sample = {"a": torch.arange(B), "x": torch.rand(B, 2)}
    model(sample)
    path = hb.export(model, tmp_path / "b", sample=sample, standalone=True, step=7)
    about = json.loads((path / "bundle.json").read_text())
    assert "standalone.onnx" in [each["name"] for each in about["files"]]
    metadata = onnxruntime.InferenceSession(str(path / "standalone.onnx")).get_modelmeta()
    assert metadata.custom_metadata_map == {"model_version": about["model_version"]}
    ServedModel(ServeSettings(bundle=str(path), name="b"), versions_of(path)[-1])
    shutil.copy(path / "standalone.onnx", tmp_path / "alone.onnx")
    expected = asked_of(path, sample)
    shutil.rmtree(path)
    for name, answer in asked_alone(tmp_path / "alone.onnx", sample).items():
        np.testing.assert_allclose(answer, expected[name], atol=1e-5)
    hb.export(model, path, sample=sample)
    assert not (path / "standalone.onnx").exists()


class Judging(nn.Module):
    """Answers with what numbers can be made into."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = hb.EmbeddingCollection([hb.Table("id", 3)], seed=1)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        found = self.vectors(batch)["id"]
        return {"bool": found > 0, "whole": (99 * found).to(torch.uint8), "half": found.half()}


def test_answers_of_all_types(tmp_path: Path) -> None:
    model, sample = Judging(), {"id": torch.arange(B)}
    model.vectors.assign("id", sample["id"], torch.rand(B, 3))
    check_alike(hb.export(model, tmp_path / "b", sample=sample, standalone=True), sample)


def test_answers_that_differ_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Towers([hb.Table("a", 4)])
    sample = {"a": torch.arange(B), "x": torch.rand(B, 2)}
    model(sample)
    monkeypatch.setattr("hotbed.serve.exporting.standalone.TOLERANCE", -1.0)
    with pytest.raises(ExportError, match="otherwise than the bundle"):
        hb.export(model, tmp_path / "b", sample=sample, standalone=True)
    assert [*tmp_path.iterdir()] == []
