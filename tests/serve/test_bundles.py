"""Bundles answer as the models that they were made of, by NumPy and onnxruntime alone."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_in import storage_of
from torch import Tensor, nn

import hotbed as hb
from hotbed.serve import BundleError, ExportError

READER = Path(__file__).resolve().parents[2] / "examples" / "serve" / "read_bundle.py"
Bundle = runpy.run_path(str(READER))["Bundle"]
B = 6
CLICKS = ("DLRM", "DeepFM", "WideDeep", "DCN", "AutoInt", "PNN", "FinalMLP", "MMoE")


def ids(most: int, *shape: int) -> Tensor:
    return torch.randint(0, most, shape or (B,))


def jagged(most: int, count: int = B) -> hb.Jagged:
    lengths = torch.randint(0, 5, (count,))
    return hb.Jagged(ids(most, int(lengths.sum())), lengths=lengths)


def asked_with(sample: dict[str, Any]) -> dict[str, Any]:
    """As a request has it."""
    return {
        name: [bag.tolist() for bag in leaf] if isinstance(leaf, hb.Jagged) else leaf.tolist()
        for name, leaf in sample.items()
    }


def check_answers(path: Path, model: nn.Module, sample: dict[str, Any]) -> None:
    """The bundle answers as the model, with batches of any size, and as its own sample says."""
    bundle = Bundle(path)
    for count in (B, 1, 3):
        part = {name: leaf[:count] for name, leaf in sample.items()}
        with torch.no_grad():
            expected = model.eval()(part)
        (answer,) = bundle.predict(asked_with(part)).values()
        np.testing.assert_allclose(answer, expected.numpy(), atol=1e-5, rtol=1e-5)
    shown = json.loads((path / "sample.json").read_text())
    rows = shown["instances"]
    answers = bundle.predict({name: [row[name] for row in rows] for name in rows[0]})
    for name, answer in answers.items():
        told = [row[name] for row in shown["predictions"]]
        np.testing.assert_allclose(answer, told, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CLICKS)
def test_every_click_model(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = getattr(hb.models, name)(["user", "item"])
    sample = {"dense": torch.rand(B, 13), "user": ids(50), "item": ids(50), "label": torch.ones(B)}
    model(sample)
    path = hb.export(model, tmp_path / "bundle", sample=sample)
    check_answers(path, model, sample)
    about = json.loads((path / "bundle.json").read_text())
    assert [each["name"] for each in about["inputs"]] == ["dense", "user", "item"]
    assert about["model"]["name"] in hb.models.MODELS


def test_ids_are_not_asked_for_only_to_be_counted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    names = [f"C{n}" for n in range(26)]
    model = hb.models.DLRM(names, dim=4, num_dense=1)
    sample = {"dense": torch.rand(B, 1), **{name: ids(9, B, 2) for name in names}}
    model(sample)
    path = hb.export(model, tmp_path / "bundle", sample=sample)
    inputs = json.loads((path / "bundle.json").read_text())["inputs"]
    assert {each["name"] for each in inputs if each["dense"]} == {"dense"}
    assert all(each["shape"] == [-1] for each in inputs if each["kind"] == "ids")
    check_answers(path, model, sample)


def test_histories_and_towers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    item = hb.Table("item", 16, combiner=None, padding_idx=-1)
    features = {"item": "item", "history": "item", "user": "user"}
    model: nn.Module = hb.models.DIN([item, "user"], features=features)
    history = torch.where(torch.rand(B, 4) < 0.3, -1, ids(9, B, 4))
    sample = {"user": ids(9), "item": ids(9), "history": history}
    model(sample)
    path = hb.export(model, tmp_path / "din", sample=sample)
    check_answers(path, model, sample)
    inputs = {
        each["name"]: each for each in json.loads((path / "bundle.json").read_text())["inputs"]
    }
    assert inputs["history"]["shape"] == [4] and inputs["history"]["dense"]
    towers = hb.models.TwoTower(["user", "item"])
    pair = {"user": ids(9), "item": ids(9)}
    towers(pair)
    check_answers(hb.export(towers, tmp_path / "towers", sample=pair), towers, pair)


@pytest.mark.parametrize("bags", [False, True])
def test_one_tensor_for_two_features(bags: bool, tmp_path: Path) -> None:
    """A sample may give two features the same; requests do not."""
    torch.manual_seed(0)
    models = [hb.models.DLRM(["user", "item"], dim=4, num_dense=1)]
    models += [] if bags else [hb.models.TwoTower(["user", "item"])]
    for number, model in enumerate(models):
        both = jagged(9) if bags else ids(9)
        sample = {"dense": torch.rand(B, 1), "user": both, "item": both}
        other = {**sample, "item": jagged(9) if bags else ids(9)}
        for batch in (sample, other):
            model(batch)
        check_answers(hb.export(model, tmp_path / str(number), sample=sample), model, other)


class Uses(nn.Module):
    """Does with its vectors and its batch what `what` says."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.vectors = hb.EmbeddingCollection([hb.Table("a", 4), hb.Table("b", 4)], seed=1)
        self.unused = hb.Embedding(9, 2)
        self.top = nn.utils.parametrizations.weight_norm(nn.Linear(4, 2))
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, batch: dict[str, Any]) -> Any:
        found = self.vectors({name: batch[name] for name in "ab"})
        first = found["a"]
        match self.what:
            case "one of two":
                moved = batch["b"].to("cpu")
                assert isinstance(moved, hb.Jagged)
                return self.top(first)
            case "a shape":
                return self.top(first) * found["b"].shape[1]
            case "halves":
                return first.half() * 0.3
            case "nothing of a width":
                return {"score": self.top(first), "none": first[:, :0]}
            case "samples by samples":
                return first @ first.T
            case "samples last":
                return first.T
            case "a mean of samples":
                return first - first.mean()
            case "a running sum":
                return first.cumsum(0)
            case "the samples behind":
                return first.flip(0).cumsum(0).flip(0)
            case "another number of rows":
                return {"score": self.top(first), "bias": self.top.bias}
            case "numbers of no sample":
                return first * batch["w"].sum()
            case "longest bag":
                return first * batch["b"].lengths.max()
            case "not finite":
                return first / 0
            case "its forwards":
                self.seen += 1
                return first * self.seen
            case "its forwards, anew":
                self.seen = self.seen + 1
                return first * self.seen
            case _:
                return batch["x"] + 1


@pytest.mark.parametrize("what", ["one of two", "a shape", "halves", "nothing of a width"])
def test_what_is_not_used_is_not_asked_for(what: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Uses(what)
    sample = {"a": ids(9), "b": jagged(9)}
    model(sample)
    path = hb.export(model, tmp_path / "bundle", sample=sample)
    about = json.loads((path / "bundle.json").read_text())
    assert [each["name"] for each in about["inputs"]] == ["a"]
    assert [*about["tables"]] == ["vectors.a"] and len([*(path / "tables").iterdir()]) == 3
    answers = Bundle(path).predict(asked_with({"a": sample["a"]}))
    with torch.no_grad():
        wanted = model.eval()(sample)
    for name, each in (wanted if isinstance(wanted, dict) else {"output": wanted}).items():
        atol = 1e-3 if each.dtype is torch.half else 1e-5
        np.testing.assert_allclose(answers[name], each.numpy(), atol=atol)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("samples by samples", "'output' of a sample otherwise where there are others"),
        ("samples last", r"answers 'output', of shape \(4, 6\), and there are 6 samples"),
        ("a mean of samples", "'output' of a sample otherwise where there are others"),
        ("a running sum", "'output' of a sample otherwise where there are others"),
        ("the samples behind", "'output' of a sample otherwise where there are others"),
        ("another number of rows", r"answers 'bias', of shape \(2,\)"),
        ("numbers of no sample", r"is asked with 'w', of shape \(4,\)"),
        ("longest bag", "reads 'lengths' of the bags 'b'"),
        ("not finite", "'output' of the sample with numbers that are not finite"),
        ("its forwards", "otherwise than the model"),
        ("its forwards, anew", "otherwise|cannot be exported"),
        ("numbers alone", "nothing that depends on what it looks up"),
    ],
)
def test_answers_that_are_not_of_a_sample(what: str, told: str, tmp_path: Path) -> None:
    """A server answers several requests at once, and each has its own answers."""
    sample = {"a": ids(9), "b": jagged(9), "w": torch.rand(4), "x": torch.rand(B)}
    model = Uses(what)
    model(sample)
    seen = model.seen.clone()
    with pytest.raises(ExportError, match=told):
        hb.export(model, tmp_path / "b", sample=sample)
    assert [*tmp_path.iterdir()] == [] and torch.equal(model.seen, seen)


class Mixed(nn.Module):
    """Tables of all kinds, and a dense part that sees every vector."""

    def __init__(self, tables: list[hb.Table], storage: hb.Storage | None = None) -> None:
        super().__init__()
        self.vectors = hb.EmbeddingCollection(tables, seed=1, storage=storage)
        self.top = nn.LazyLinear(2)

    def forward(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        found = self.vectors({name: batch[name] for name in self.vectors.features})
        flat = [each.flatten(1).float() for each in found.values()]
        return {"score": self.top(torch.cat([*flat, batch["x"]], 1))}


TABLES = st.builds(
    lambda dim, static, combiner, dtype, padded: {
        "dim": dim,
        "rows": 20 if static else None,
        "combiner": combiner,
        "dtype": dtype,
        "padding_idx": 3 if padded else None,
    },
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from(["sum", "mean", "sqrtn", "max", None]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.booleans(),
)


@settings(max_examples=12, deadline=None)
@given(st.lists(TABLES, min_size=1, max_size=4), st.sampled_from(["memory", "ssd"]), st.data())
def test_vectors_have_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, given: list[dict[str, Any]], place: str, data: Any
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    folder = tmp_path_factory.mktemp("bundle")
    tables = [hb.Table(f"t/{n}", **about) for n, about in enumerate(given)]
    model = Mixed(tables, storage_of(place, folder))
    sample: dict[str, Any] = {"x": torch.rand(B, 2)}
    for table in tables:
        forms = [ids(20), ids(20, B, 3)]
        if table.combiner != "none":
            forms.append(jagged(20))
        sample[table.name] = forms[data.draw(st.integers(0, len(forms) - 1))]
    model(sample)
    for number, table in enumerate(tables):
        # Ids that training has not met: in a bundle they have the default.
        model.vectors.assign(table.name, range(20), torch.randn(20, given[number]["dim"]))
    path = hb.export(model, folder / "out", sample=sample)
    check_answers(path, Answer(model), sample)
    bundle, asked = Bundle(path), asked_with(sample)
    with torch.no_grad():
        vectors = model.eval().vectors({table.name: sample[table.name] for table in tables})
    for lookup in bundle.about["lookups"]:
        expected = vectors[lookup["input"]].float().numpy()
        found = bundle.vectors(lookup, asked[lookup["input"]])
        np.testing.assert_array_equal(found.reshape(expected.shape), expected)


class Answer(nn.Module):
    """The one output of a model that has names for them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, Any]) -> Tensor:
        (found,) = self.model(batch).values()
        return found


@pytest.mark.parametrize(
    ("rows", "step", "size"), [("float16", 2**-11, 32), ("int8", 1 / 255, 24), ("int4", 1 / 15, 12)]
)
def test_rows_in_few_bits(rows: str, step: float, size: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Mixed([hb.Table("a", 16, 200)])
    values = torch.randn(200, 16) * torch.logspace(-3, 3, 200)[:, None]
    values[5] = 0.25  # all equal
    values[6] = 0
    model.vectors.assign("a", range(200), values)
    sample = {"a": ids(200), "x": torch.rand(B, 2)}
    model(sample)
    path = hb.export(model, tmp_path / "b", sample=sample, rows=rows)
    found = torch.from_numpy(Bundle(path).tables["vectors.a"].rows(np.arange(200)))
    width = values.amax(1) - values.amin(1) if rows != "float16" else values.abs().amax(1)
    assert (
        (found - values).abs().amax(1) <= width * step * 0.55 + values.abs().amax(1) * 2**-11
    ).all()
    assert torch.equal(found[5:7], values[5:7])
    stored = [path / f"tables/0.{part}.npy" for part in ("rows", "scales")]
    bytes_of = [os.path.getsize(each) - 128 for each in stored if each.exists()]
    assert sum(bytes_of) == 200 * size


@pytest.mark.parametrize("rows", ["float32", "float16", "int8", "int4"])
def test_none_of_the_ids_has_a_row(rows: str, tmp_path: Path) -> None:
    model = Mixed([hb.Table("a", 5)])
    sample = {"a": ids(9), "x": torch.rand(B, 2)}
    model(sample)
    path = hb.export(model, tmp_path / "b", sample=sample, rows=rows)
    assert Bundle(path).tables["vectors.a"].rows(np.array([10, 11])).tolist() == [[0.0] * 5] * 2


def test_ids_without_a_row(tmp_path: Path) -> None:
    model = Mixed([hb.Table("a", 4)])
    model.vectors.assign("a", [3, 5], torch.tensor([[1.0] * 4, [3.0] * 4]))
    sample = {"a": torch.tensor([3, 5]), "x": torch.rand(2, 2)}
    model(sample)
    asked = np.array([3, 4, 5, -1])
    for default, at in (("zeros", 0.0), ("mean", 2.0)):
        path = hb.export(model, tmp_path / default, sample=sample, default=default)
        rows = Bundle(path).tables["vectors.a"].rows(asked)
        assert rows[:, 0].tolist() == [1.0, at, 3.0, at]
    only = hb.export(model, tmp_path / "only", sample=sample, tables={"vectors.a": [5, 9]})
    table = Bundle(only).tables["vectors.a"]
    assert table.ids.tolist() == [5] and table.rows(asked)[:, 0].tolist() == [0, 0, 3, 0]
    none = hb.export(model, tmp_path / "none", sample=sample, tables={"vectors.a": []})
    assert Bundle(none).tables["vectors.a"].rows(asked).tolist() == [[0.0] * 4] * 4


def test_the_reader_needs_neither_torch_nor_hotbed(tmp_path: Path) -> None:
    model = Mixed([hb.Table("a", 4, combiner="mean")])
    sample = {"a": jagged(9), "x": torch.rand(B, 2)}
    model(sample)
    path = hb.export(model, tmp_path / "b", sample=sample)
    program = (
        "import sys, runpy; sys.modules.update(torch=None, hotbed=None); "
        f"sys.argv = ['', {str(path)!r}]; runpy.run_path({str(READER)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads((path / "sample.json").read_text())["predictions"]
    answers = json.loads(done.stdout)["score"]
    np.testing.assert_allclose(answers, [row["score"] for row in told], atol=1e-5)
    assert len(READER.read_text().splitlines()) <= 100


def test_a_program_of_torch_export(tmp_path: Path) -> None:
    model = Mixed([hb.Table("a", 4)])
    sample = {"a": ids(9), "x": torch.rand(B, 2)}
    expected = model(sample)["score"]
    path = hb.export(model, tmp_path / "b", sample=sample, program=True)
    program = torch.export.load(str(path / "dense.pt2")).module()
    vectors = model.vectors({"a": sample["a"]})["a"]
    found = program([vectors], [sample["a"], sample["x"]])["score"]
    torch.testing.assert_close(found, expected)


class OneLayer(nn.Module):
    """Its table has the name of what it is asked with."""

    def __init__(self) -> None:
        super().__init__()
        self.user = hb.Embedding(20, 4)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.user(batch["user"])


def test_names_may_be_the_same(tmp_path: Path) -> None:
    model, sample = OneLayer(), {"user": ids(20)}
    check_answers(hb.export(model, tmp_path / "b", sample=sample), model, sample)
    alone = hb.EmbeddingCollection([hb.Table("user", 4, 20)], seed=0)
    with pytest.raises(ExportError, match="'user' is asked with and answered"):
        hb.export(alone, tmp_path / "c", sample=sample)


class Doubled(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.linear = hb.EmbeddingCollection([hb.Table(name, 4, 9) for name in names], seed=0)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        found = self.linear({name: batch[name] for name in self.linear.features})
        return sum(each * batch["add"] for each in found.values())


def test_names_may_be_those_of_operations(tmp_path: Path) -> None:
    names = ["mul", "mul_1", "linear", "view"]
    model = Doubled(names)
    sample = {name: ids(9) for name in names} | {"add": torch.rand(B, 1)}
    check_answers(hb.export(model, tmp_path / "b", sample=sample), model, sample)


def test_narrow_ids_that_the_dense_part_takes(tmp_path: Path) -> None:
    item = hb.Table("item", 16, combiner=None, padding_idx=-1)
    model = hb.models.DIN([item, "u"], features={"item": "item", "history": "item", "u": "u"})
    sample = {"u": ids(9), "item": ids(9), "history": ids(9, B, 3) - 1}
    sample = {name: each.int() for name, each in sample.items()}
    model(sample)
    check_answers(hb.export(model, tmp_path / "b", sample=sample), model, sample)


class Returning(nn.Module):
    """Returns what a function makes of the vectors."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.vectors = hb.EmbeddingCollection([hb.Table("user", 3)], seed=1)
        self.made = made

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return self.made(self.vectors({"user": batch["user"]})["user"])


def test_answers_of_all_types(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Returning(
        lambda found: {"bool": found > 0, "whole": (9 * found).long(), "half": found.half()}
    )
    sample = {"user": ids(9)}
    model(sample)
    answers = Bundle(hb.export(model, tmp_path / "b", sample=sample)).predict(asked_with(sample))
    for name, each in model(sample).items():
        expected = each.detach().numpy()
        assert answers[name].dtype == expected.dtype
        np.testing.assert_array_equal(answers[name], expected)


def test_names_of_answers(tmp_path: Path) -> None:
    for made, told in (
        (lambda found: {"": found}, "is empty"),
        (lambda found: {"a": {"b": found}, "a.b": 2 * found}, "'a.b' in two ways"),
    ):
        with pytest.raises(ExportError, match=told):
            hb.export(Returning(made), tmp_path / "b", sample={"user": ids(9)})


def test_threads(tmp_path: Path) -> None:
    model, sample = OneLayer(), {"user": ids(20)}
    places = ["same", "same", "other", "more"]
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda p: hb.export(model, tmp_path / p, sample=sample), places))
    for path in paths:
        check_answers(path, model, sample)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["more", "other", "same"]


class Layer(nn.Module):
    def forward(self, vector: Tensor) -> Tensor:
        return vector * 2 if float(vector.detach().sum()) > 0 else vector


class Odd(nn.Module):
    """What no bundle can do."""

    def __init__(self, what: str) -> None:
        super().__init__()
        table = hb.Table("a", 4, combiner=None if what == "unpooled bags" else "sum")
        self.vectors = hb.EmbeddingCollection([table], seed=0)
        self.what, self.layer = what, nn.Sequential(Layer())

    def forward(self, batch: dict[str, Any]) -> Tensor:
        given = batch["a"]
        if self.what == "computed ids":
            given = given % 5
        if self.what == "ids changed in place":
            given.remainder_(5)
        if self.what == "bags changed in place":
            given.offsets[1] = 2
        found = self.vectors({"a": given})["a"]
        if self.what == "twice":
            found = found + self.vectors({"a": given})["a"]
        if self.what == "unpooled bags":
            return found.values
        if self.what == "an answer's name":
            return found + batch["output"]
        if self.what == "a fixed number of ids":
            return found + given.offsets[-1]
        if self.what == "random":
            return found + torch.rand(found.shape)
        if self.what == "a fixed batch":
            return found + torch.ones(B, 1)
        return self.layer(found) if self.what == "control flow" else found


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("computed ids", "ids of 'vectors.a' are computed by the model"),
        ("twice", "'vectors.a' is looked up more than once"),
        ("unpooled bags", "as many vectors as ids"),
        ("weights", "with weights"),
        ("control flow", "Layer 'layer.0' cannot be exported"),
        ("random", "random, or"),
        ("a fixed batch", "cannot be exported|fixed to"),
        ("a fixed number of ids", "reads 'offsets' of the bags 'a'"),
        ("one sample", "at least two"),
        ("ids changed in place", "changes 'a' of its batch"),
        ("bags changed in place", "changes 'a' of its batch"),
        ("an answer's name", "'output' is asked with and answered"),
        ("an array", "are ndarray. Give the sample's as tensors"),
    ],
)
def test_what_cannot_be_exported(what: str, told: str, tmp_path: Path) -> None:
    bags = hb.Jagged([1, 2, 3, 4, 5, 6], lengths=[1] * B)
    if what == "weights":
        bags.weights = torch.ones(6)
    sample = (
        bags
        if what in ("unpooled bags", "weights", "a fixed number of ids", "bags changed in place")
        else ids(9, 1 if what == "one sample" else B)
    )
    batch = {"a": sample.numpy() if what == "an array" else sample}
    if what == "an answer's name":
        batch["output"] = torch.rand(B, 4)
    with pytest.raises(ExportError, match=told):
        hb.export(Odd(what), tmp_path / "b", sample=batch)
    assert [*tmp_path.iterdir()] == []


def no_room(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_wrong_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Mixed([hb.Table("a", 4), hb.Table("s", 4, 9)])
    sample = {"a": ids(9), "s": ids(9), "x": torch.rand(B, 2)}
    model(sample)
    for name, value in (("rows", "int3"), ("default", "ones")):
        with pytest.raises(ValueError, match=f"{name} is '{value}'"):
            hb.export(model, tmp_path / "b", sample=sample, **{name: value})
    for tables, told in (({"b": [1]}, "there are vectors.a"), ({"vectors.s": [1]}, "static")):
        with pytest.raises(hb.TableError, match=told):
            hb.export(model, tmp_path / "b", sample=sample, tables=tables)
    model.vectors.assign("a", [1], torch.full((1, 4), torch.inf))
    with pytest.raises(ExportError, match="not finite"):
        hb.export(model, tmp_path / "b", sample=sample)
    with pytest.raises(ExportError, match="looks up nothing"):
        hb.export(nn.Linear(2, 2), tmp_path / "b", sample=torch.rand(2, 2))
    with pytest.raises(ExportError, match="no folder of this machine"):
        hb.export(model, "s3://bucket/b", sample=sample)
    model.vectors.assign("a", [1], torch.ones(1, 4))
    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", no_room)
        with pytest.raises(OSError, match="No space left"):
            hb.export(model, tmp_path / "b", sample=sample)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    with pytest.raises(BundleError, match="no bundle"):
        hb.export(model, tmp_path / "mine", sample=sample)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["mine"]


def test_an_earlier_bundle_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: Any) -> None:
    model = Mixed([hb.Table("a", 4)])
    sample = {"a": ids(9), "x": torch.rand(B, 2)}
    model(sample)
    path = hb.export(model, tmp_path / "b", sample=sample, step=3)
    first = json.loads((path / "bundle.json").read_text())["model_version"]
    assert first.startswith("3-")

    def fail(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("hotbed.serve.exporting.export.write_table", fail)
        with pytest.raises(OSError, match="No space"):
            hb.export(model, path, sample=sample)
    assert json.loads((path / "bundle.json").read_text())["model_version"] == first
    hb.export(model, path, sample=sample)
    assert json.loads((path / "bundle.json").read_text())["model_version"] != first
    assert [each.name for each in tmp_path.iterdir()] == ["b"]
    check_answers(path, Answer(model), sample)


@pytest.mark.parametrize("link", ["to a bundle", "to nothing", "to a link", "of the parent"])
def test_a_symbolic_link_stays(tmp_path: Path, link: str) -> None:
    model = Mixed([hb.Table("a", 4)])
    sample = {"a": ids(9), "x": torch.rand(B, 2)}
    model(sample)
    folder, path = tmp_path / "kept" / "bundle", tmp_path / "link"
    folder.parent.mkdir()
    if link != "to nothing":
        hb.export(model, folder, sample=sample, step=1)
    if link == "of the parent":
        path.symlink_to("kept")
        path /= "bundle"
    elif link == "to a link":
        path.symlink_to("other")
        (tmp_path / "other").symlink_to("kept/bundle")
    else:
        path.symlink_to("kept/bundle")
    before = sorted(os.listdir(tmp_path))
    found = hb.export(model, path, sample=sample, step=2)
    assert found.samefile(folder)
    assert json.loads((folder / "bundle.json").read_text())["step"] == 2
    assert (tmp_path / "link").is_symlink() and path.samefile(folder)
    assert sorted(os.listdir(tmp_path)) == before and os.listdir(folder.parent) == ["bundle"]


def test_the_model_stays_as_it_is(tmp_path: Path) -> None:
    model = hb.models.DeepFM(["user"])
    sample = {"dense": torch.rand(B, 13), "user": ids(50)}
    model(sample)
    modules, forwards = [*model.modules()], [m.forward for m in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hb.export(model, tmp_path / "b", sample=sample)
    assert model.training and [*model.modules()] == modules
    assert [m.forward for m in model.modules()] == forwards
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(after[k], before[k]) for k in before)
    new = {**sample, "user": torch.tensor([10**9] * B)}
    hb.export(model, tmp_path / "new", sample=new)
    assert not model.embeddings.contains("user", [10**9]).any()  # a sample trains nothing


def test_files_of_others_in_a_bundle_are_not_removed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = hb.models.DLRM(["user"], dim=4, num_dense=1)
    sample = {"dense": torch.rand(B, 1), "user": ids(9)}
    model(sample)
    path = hb.export(model, tmp_path / "bundle", sample=sample)
    (path / "notes.txt").write_text("mine")
    with pytest.raises(BundleError, match=r"'notes\.txt' beside a bundle"):
        hb.export(model, path, sample=sample)
    check_answers(path, model, sample)
    (path / "notes.txt").unlink()
    hb.export(model, path, sample=sample)
