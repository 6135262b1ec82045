"""`hotbed export`: of click logs and of files with a schema, and what it refuses."""

from __future__ import annotations

import gc
import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import hotbed as hb
from hotbed.cli.app import app
from hotbed.data import ColumnFiles, CriteoLog, write_criteo_tsv

READER = Path(__file__).resolve().parents[2] / "examples" / "serve" / "read_bundle.py"
Bundle = runpy.run_path(str(READER))["Bundle"]


def run(*command: object) -> Any:
    return CliRunner().invoke(app, [str(part) for part in command])


def answers(path: Path, batch: dict[str, Any]) -> Any:
    bundle = Bundle(path)
    asked = {}
    for each in bundle.about["inputs"]:
        leaf = batch[each["name"]]
        is_bags = isinstance(leaf, hb.Jagged)
        asked[each["name"]] = [bag.tolist() for bag in leaf] if is_bags else leaf.tolist()
    return bundle.predict(asked)["output"]


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_click_logs(tmp_path: Path) -> None:
    write_criteo_tsv(str(tmp_path / "log.tsv"), rows=600, seed=0)
    log, model, out = tmp_path / "log.tsv", tmp_path / "model", tmp_path / "bundle"
    size = ("--dim", 4, "--batch-size", 128)
    assert run("train", "--data", log, "--save", model, *size).exit_code == 0
    done = run("export", model, out, "--data", log)
    assert done.exit_code == 0 and "MB" in done.stdout, done.output
    about = json.loads((out / "bundle.json").read_text())
    assert int(about["model_version"].split("-")[0]) > 0
    batch = next(iter(CriteoLog([str(log)], 50)))  # of the samples that were trained on
    expected = hb.checkpoint.load_model(model)(batch).detach().numpy()
    np.testing.assert_allclose(answers(out, dict(batch)), expected, atol=1e-5)
    options = ("--rows", "int8", "--default", "mean", "--standalone")
    again = run("export", model, out, "--data", log, *options)
    assert again.exit_code == 0 and (out / "standalone.onnx").is_file()
    assert np.abs(answers(out, dict(batch)) - expected).max() < 0.1
    ssd = ("--host", "24MB", "--ssd", tmp_path / "rows")
    for _ in range(2):  # what the first has left may go
        gc.collect()  # of a model that was traced, which holds the folder until then
        done = run("export", model, tmp_path / "over", "--data", log, *ssd)
        assert done.exit_code == 0, done.output
    np.testing.assert_allclose(answers(tmp_path / "over", dict(batch)), expected, atol=1e-5)
    for words, told in (
        (("--rows", "int2"), "rows is 'int2'"),
        (("--default", "x"), "default is 'x'"),
    ):
        done = run("export", model, out, "--data", log, *words)
        assert done.exit_code == 2 and told in done.stderr
    done = run("export", tmp_path / "none", out, "--data", log)
    assert done.exit_code == 2 and "no complete checkpoint" in done.stderr
    done = run("export", model, model, "--data", log)
    assert done.exit_code == 2
    assert (out / "bundle.json").exists()
    done = run("export", model, tmp_path / "log.tsv", "--data", log)
    assert done.exit_code == 2 and log.read_bytes()


def test_first_values_of_rows_that_steps_have_moved(tmp_path: Path) -> None:
    write_criteo_tsv(str(tmp_path / "log.tsv"), rows=200, seed=0)
    batch = next(iter(CriteoLog([str(tmp_path / "log.tsv")], 100)))
    for untouched, status in (("exact", 2), ("lazy", 0)):
        model = hb.models.DeepFM([name for name in batch if name.startswith("C")], dim=4)
        options: dict[str, Any] = {"weight_decay": 0.1, "untouched": untouched}
        optimizer = hb.optim.SGD(model.parameters(), lr=0.01, **options)
        model(batch).sum().backward()
        optimizer.step()
        hb.save(tmp_path / untouched, model, optimizer, step=1)
        out, log = tmp_path / f"{untouched}-bundle", tmp_path / "log.tsv"
        done = run("export", tmp_path / untouched, out, "--data", log, "--default", "first")
        assert done.exit_code == status and ("moves all rows of table" in done.stderr) == (
            status > 0
        )


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_a_schema(tmp_path: Path) -> None:
    data, model, out = tmp_path / "visits.csv", tmp_path / "model", tmp_path / "bundle"
    lines = ["clicked,visitor,tags,minutes"]
    lines += [f"{n % 2},v{n % 7},a{n % 3}|b{n % 5},{n % 11}" for n in range(300)]
    data.write_text("\n".join(lines) + "\n")
    schema = {
        "clicked": hb.data.Label(),
        "visitor": hb.data.Id(),
        "tags": hb.data.Ids(separator="|"),
        "minutes": hb.data.Number(),
    }
    hb.data.Schema(schema).write(tmp_path / "schema.toml")
    trained = ("--schema", tmp_path / "schema.toml", "--model", "deepfm", "--dim", 4)
    done = run("train", "--data", data, "--save", model, "--batch-size", 32, *trained)
    assert done.exit_code == 0, done.output
    done = run("export", model, out, "--data", data)
    assert done.exit_code == 0, done.output
    loaded = hb.checkpoint.load_model(model)
    batch = next(iter(ColumnFiles([str(data)], loaded.schema, 40)))
    expected = loaded(batch).detach().numpy()
    np.testing.assert_allclose(answers(out, dict(batch)), expected, atol=1e-5)
    about = json.loads((out / "bundle.json").read_text())
    shapes = {each["name"]: each["shape"] for each in about["inputs"]}
    assert shapes == {"dense": [1], "visitor": [], "tags": [-1]}
    assert about["model"]["schema"]
