"""The files of examples/serve: what runs without containers runs, and the others fit what is served."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

import hotbed as hb
from hotbed.cli.app import app

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "serve"
TRITON = EXAMPLES / "triton" / "clicks"
TYPES = {"TYPE_FP32": "float32", "TYPE_INT64": "int64"}


def environment() -> dict[str, str]:
    paths = os.pathsep.join(path for path in sys.path if path)
    return {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": paths, "COLUMNS": "200"}


@pytest.mark.process
def test_the_script_serves_what_a_second_epoch_learns(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", str(EXAMPLES / "serve.sh"), str(tmp_path / "work")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (json.loads(line) for line in re.findall(r"^\{.*\}$", done.stdout, re.M))
    assert first["predictions"] != second["predictions"]
    assert int(second["version"].split("-")[0]) > int(first["version"].split("-")[0])
    assert (tmp_path / "work" / "bundle" / "standalone.onnx").is_file()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Triton's, with the bundle of a model of click logs."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("triton") / "clicks"
    shutil.copytree(TRITON, folder)
    shutil.copy(EXAMPLES / "read_bundle.py", folder / "1")
    model = hb.models.DLRM(hb.data.CATEGORIES, dim=4)
    batch = next(iter(hb.data.synthetic_clicks(rows=64, batch_size=64)))
    model(batch)
    hb.export(model, folder / "bundle", sample=batch)
    return folder


def entries_of(config: str, block: str) -> dict[str, tuple[str, list[int]]]:
    """Types and dims of inputs or outputs in a config.pbtxt."""
    found = re.search(rf"^{block} \[(.*?)^\]", config, re.M | re.S)
    assert found is not None
    each = re.findall(r'name: "(\w+)" data_type: (\w+) dims: \[ ([\d, ]+) \]', found[1])
    return {name: (kind, [int(size) for size in dims.split(",")]) for name, kind, dims in each}


def test_the_configuration_of_triton_is_that_of_a_bundle(repository: Path) -> None:
    about = json.loads((repository / "bundle" / "bundle.json").read_text())
    config = (repository / "config.pbtxt").read_text()
    for block, entries in (("input", about["inputs"]), ("output", about["outputs"])):
        told = entries_of(config, block)
        assert {*told} == {each["name"] for each in entries}
        for each in entries:
            kind, dims = told[each["name"]]
            assert TYPES[kind] == each["dtype"]
            assert dims == (each["shape"] or [1])
    assert 'backend: "python"' in config and config.count("{") == config.count("}")


class Tensor:
    def __init__(self, name: str, values: Any) -> None:
        self.name, self.values = name, values

    def as_numpy(self) -> Any:
        return self.values


class Response:
    def __init__(self, outputs: Any = (), error: Any = None) -> None:
        self.outputs, self.error = outputs, error


def stand_in() -> ModuleType:
    """What the stub takes of Triton's module."""
    found = ModuleType("triton_python_backend_utils")
    module: Any = found
    module.Tensor, module.InferenceResponse, module.TritonError = Tensor, Response, str
    module.triton_string_to_numpy = lambda name: np.dtype(TYPES[name])
    module.get_input_tensor_by_name = lambda request, name: request[name]
    return found


def test_the_model_of_triton_answers(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stand_in())
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("triton_model", repository / "1" / "model.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = (repository / "config.pbtxt").read_text()
    model = module.TritonPythonModel()
    told = {
        "parameters": {"bundle": {"string_value": "bundle"}},
        "output": [
            {"name": name, "data_type": kind}
            for name, (kind, _) in entries_of(config, "output").items()
        ],
    }
    model.initialize({"model_config": json.dumps(told), "model_repository": str(repository)})
    sample = json.loads((repository / "bundle" / "sample.json").read_text())
    rows = sample["instances"]
    asked = {
        name: Tensor(
            name,
            np.array([row[name] for row in rows], TYPES[kind]).reshape(len(rows), *dims),
        )
        for name, (kind, dims) in entries_of(config, "input").items()
    }
    for response in model.execute([asked, asked]):
        (answer,) = response.outputs
        assert answer.values.shape == (len(rows), 1) and answer.values.dtype == np.float32
        expected = [row["output"] for row in sample["predictions"]]
        np.testing.assert_allclose(answer.values[:, 0], expected, atol=1e-5)
    monkeypatch.setattr(model.bundle, "predict", refuse)
    (refused,) = model.execute([asked])
    assert refused.error == "an id"


def refuse(asked: Any) -> Any:
    raise ValueError("an id")


def options_of(command: str) -> set[str]:
    """What a command of hotbed takes."""
    done = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    return {*re.findall(r"--[\w-]+", done.stdout)}


def test_containers_call_commands_that_there_are() -> None:
    compose = yaml.safe_load((EXAMPLES / "docker-compose.yml").read_text())
    services = compose["services"]
    assert [*services] == ["log", "train", "export", "serve", "ask"]
    for before, after in zip([*services], [*services][1:], strict=False):
        assert [*services[after]["depends_on"]] == [before]
    assert all(each["volumes"] == ["data:/data"] for each in services.values())
    manifest = yaml.safe_load((EXAMPLES / "kserve.yaml").read_text())
    assert manifest["apiVersion"] == "serving.kserve.io/v1beta1"
    assert manifest["kind"] == "InferenceService"
    predictor = manifest["spec"]["predictor"]
    (container,) = predictor["containers"]
    assert container["name"] == "kserve-container"
    (port,) = container["ports"]
    assert container["args"][container["args"].index("--bind") + 1].endswith(
        f":{port['containerPort']}"
    )
    mounts = [each["name"] for each in container["volumeMounts"]]
    assert mounts == [each["name"] for each in predictor["volumes"]]
    called = [services[name]["command"] for name in ("train", "export", "serve")]
    for command, *words in [*called, container["args"]]:
        assert {word for word in words if word.startswith("--")} <= options_of(command), command


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_images(name: str) -> None:
    lines = (EXAMPLES / name).read_text().replace("\\\n", "").splitlines()
    words = [line.split()[0] for line in lines if line and not line.startswith("#")]
    known = {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "EXPOSE", "ENTRYPOINT", "CMD"}
    assert {*words} <= known and words.count("FROM") == 2
    bases = {line.split()[1] for line in lines if line.startswith("FROM")}
    assert bases == {"python:3.11-slim"}
    assert [line for line in lines if line.startswith("USER")] == ["USER hotbed"]
    root = EXAMPLES.parents[1]
    for line in lines:
        if line.startswith("COPY") and "--from" not in line:
            assert all((root / each).exists() for each in line.split()[1:-1])
        if line.startswith(("CMD", "ENTRYPOINT")):
            assert all(isinstance(word, str) for word in json.loads(line.partition(" ")[2]))


def test_it_is_told_what_each_file_is_for() -> None:
    text = (EXAMPLES / "README.md").read_text()
    assert len(text.split()) <= 400
    for path in EXAMPLES.iterdir():
        name = f"{path.name}/" if path.is_dir() else path.name
        assert path.name.startswith(("README", "__")) or f"`{name}`" in text, name


def answers_of_the_demo(tmp_path: Path, **programs: str) -> subprocess.CompletedProcess[str]:
    """Run the end of `make demo` with programs of the demo's environment, as shell scripts."""
    for name, does in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    return subprocess.run(
        ["sh", "tools/demo_answers.sh", str(tmp_path), "run", "log", str(tmp_path / "bundle")],
        cwd=EXAMPLES.parents[1],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.process
def test_the_demo_ends_with_answers_where_it_can(tmp_path: Path) -> None:
    done = answers_of_the_demo(tmp_path, python="exit 1")
    assert done.returncode == 0 and "hotbed[export,serve]" in done.stdout
    done = answers_of_the_demo(
        tmp_path, python="exit 0", hotbed="test $1 = export || { echo 'No rows' >&2; exit 1; }"
    )
    assert done.returncode == 1 and done.stderr == "No rows\n"
    serves = (
        f'test $1 = export || {{ echo "b answers at http://x" >&2; echo $$ >{tmp_path}/pid; '
        "exec sleep 60; }"
    )
    done = answers_of_the_demo(
        tmp_path, python='test "$1" = -c || echo "$2 answered"', hotbed=serves
    )
    assert done.returncode == 0 and "http://x answered" in done.stdout
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
