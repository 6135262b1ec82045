"""What requests ask, and are told that cannot be answered: of TensorFlow Serving, and of the Open Inference
Protocol."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import json
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient
from torch import Tensor, nn

import hotbed as hb
from hotbed.errors import InputError
from hotbed.serve.http.app import app_of
from hotbed.serve.http.limits import Limits
from hotbed.serve.http.settings import ServeSettings

LIMITS = Limits(body=4000, samples=50, ids=20, seconds=5)
PREDICT, INFER = "/v1/models/clicks:predict", "/v2/models/clicks/infer"


class Clicks(nn.Module):
    """Inputs of all kinds, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            hb.Table("user", 3),
            hb.Table("city", 2, rows=10, padding_idx=0, combiner="mean"),
            hb.Table("seen", 4, combiner=None, padding_idx=-1),
        ]
        self.vectors = hb.EmbeddingCollection(tables, seed=1)
        self.top = nn.Linear(3 + 2 + 12 + 2, 2)

    def forward(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        found = self.vectors({name: batch[name] for name in ("user", "city", "seen")})
        flat = [each.flatten(1) for each in found.values()]
        scores = self.top(torch.cat([*flat, batch["x"]], 1))
        return {"click": scores[:, 0].sigmoid(), "both": scores}


def sample_of(count: int) -> dict[str, Any]:
    """Ids of which the tables of a trained model have all: others read first values there, and zeros here."""
    return {
        "x": torch.rand(count, 2),
        "user": torch.arange(count) % 9,
        "city": hb.Jagged(torch.arange(count) % 10, lengths=torch.ones(count, dtype=torch.long)),
        "seen": (torch.arange(3 * count) % 10 - 1).reshape(count, 3),
    }


@pytest.fixture(scope="module")
def model() -> Clicks:
    torch.manual_seed(0)
    model = Clicks()
    model(sample_of(30))
    return model.eval()


@pytest.fixture(scope="module")
def bundle(model: Clicks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "clicks"
    return hb.export(model, path, sample=sample_of(6), step=7)


@pytest.fixture(scope="module")
def client(bundle: Path) -> Iterator[TestClient]:
    app = app_of(ServeSettings(bundle=str(bundle), name="clicks", limits=LIMITS))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


def row(**changes: Any) -> dict[str, Any]:
    return {"x": [0.5, 1], "user": 3, "city": [1, 2], "seen": [4, -1, 5], **changes}


def asked_of(model: Clicks, rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Return what the model answers itself."""
    bags = [torch.tensor(each["city"], dtype=torch.long) for each in rows]
    batch = {
        "x": torch.tensor([each["x"] for each in rows], dtype=torch.float32),
        "user": torch.tensor([each["user"] for each in rows]),
        "city": hb.Jagged(torch.cat(bags), lengths=torch.tensor([len(bag) for bag in bags])),
        "seen": torch.tensor([each["seen"] for each in rows]),
    }
    with torch.no_grad():
        return {name: each.numpy() for name, each in model(batch).items()}


ROWS = st.lists(
    st.builds(
        row,
        x=st.lists(st.floats(-3, 3, width=32), min_size=2, max_size=2),
        user=st.integers(0, 8),
        city=st.lists(st.integers(0, 9), max_size=5),
        seen=st.lists(st.integers(-1, 8), min_size=3, max_size=3),
    ),
    min_size=1,
    max_size=8,
)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(ROWS)
def test_all_forms_answer_as_the_model(
    client: TestClient, model: Clicks, rows: list[dict[str, Any]]
) -> None:
    expected = asked_of(model, rows)
    by_rows = client.post(PREDICT, json={"instances": rows}).json()["predictions"]
    columns = {name: [each[name] for each in rows] for name in rows[0]}
    by_columns = client.post(PREDICT, json={"inputs": columns}).json()["outputs"]
    tensors = client.post(INFER, json={"id": "a", "inputs": tensors_of(columns)}).json()
    assert tensors["id"] == "a" and tensors["model_version"].startswith("7-")
    outputs = {each["name"]: each for each in tensors["outputs"]}
    for name, values in expected.items():
        one = [each[name] for each in by_rows]
        np.testing.assert_allclose(one, values, atol=1e-5, rtol=1e-5)
        assert by_columns[name] == one
        flat = np.reshape(outputs[name]["data"], outputs[name]["shape"])
        np.testing.assert_array_equal(flat, np.array(one))


def tensors_of(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    count = len(columns["user"])
    flat = [id for bag in columns["city"] for id in bag]
    lengths = [len(bag) for bag in columns["city"]]
    return [
        {"name": "x", "shape": [count, 2], "datatype": "FP32", "data": columns["x"]},
        {"name": "user", "shape": [count, 1], "datatype": "INT64", "data": columns["user"]},
        {"name": "city", "shape": [len(flat)], "datatype": "INT64", "data": flat},
        {"name": "city.lengths", "shape": [count], "datatype": "INT32", "data": lengths},
        {
            "name": "seen",
            "shape": [count, 3],
            "datatype": "INT32",
            "data": [id for ids in columns["seen"] for id in ids],
        },
    ]


WRONG_ROWS = {
    "a string for an id": (row(user="3"), "user: ids are integers, not '3'"),
    "a bool for an id": (row(user=True), "user: ids are integers, not True"),
    "a fraction for an id": (row(city=[1.5]), "city: ids are integers, not 1.5"),
    "an id beyond 64 bits": (row(user=1 << 63), "user: an id is no 64-bit integer"),
    "an id beyond a table": (row(city=[10]), "city: id 10 is out of range: there are 10 rows"),
    "a negative id": (row(city=[-1]), "city: id -1 is out of range"),
    "no list": (row(city="1"), "city: takes lists of ids, not '1'"),
    "a list of lists": (row(city=[[1]]), "city: ids are integers, not [1]"),
    "too many numbers": (row(x=[1, 2, 3]), "x: takes lists of 2 values"),
    "no numbers": (row(x=None), "x: takes lists of 2 values, not None"),
    "a string for a number": (row(x=[1, "2"]), "x: takes numbers, not '2'"),
    "a bool for a number": (row(x=[1, False]), "x: takes numbers, not False"),
    "a number beyond float32": (row(x=[1, 1e300]), "x: a number is out of the range of float32"),
    "too few ids": (row(seen=[1, 2]), "seen: takes lists of 3 values"),
    "an unknown name": (row(age=3), "age: is not known, in instances[1]"),
    "no sample": (3, "instances[1]: is an object"),
}


@pytest.mark.parametrize("wrong", WRONG_ROWS)
def test_wrong_rows_are_told_by_their_names(client: TestClient, wrong: str) -> None:
    value, told = WRONG_ROWS[wrong]
    response = client.post(PREDICT, json={"instances": [row(), value]})
    assert response.status_code == 400
    assert response.json()["error"].startswith(told), response.json()
    assert client.post(PREDICT, json={"instances": [row()]}).status_code == 200


def test_a_missing_name_is_told(client: TestClient) -> None:
    short = {name: value for name, value in row().items() if name != "user"}
    response = client.post(PREDICT, json={"instances": [row(), short]})
    assert response.status_code == 400
    assert response.json()["error"].startswith("user: is missing in instances[1]")


def test_the_page_tells_which_ids_there_are(client: TestClient) -> None:
    page = client.get("/openapi.json").text
    city = json.loads("{" + page[page.index('"city":') :].partition(',"seen"')[0] + "}")["city"]
    assert city["items"] == {"type": "integer", "minimum": 0, "maximum": 9}
    assert city["maxItems"] == LIMITS.ids


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (b"", 400, "The body is no JSON"),
        (b"{", 400, "The body is no JSON"),
        (b'{"instances": [NaN]}', 400, "The body is no JSON"),
        (b"[" * 3000, 400, "The body is no JSON"),
        (b"[]", 400, "The body is an object"),
        (b"{}", 400, "The body has one of"),
        (b'{"instances": [], "inputs": {}}', 400, "The body has one of"),
        (b'{"instances": []}', 400, "There are no samples"),
        (b'{"instances": {}}', 400, "instances: is a list"),
        (b'{"inputs": []}', 400, "inputs: is an object"),
        (b'{"inputs": {"x": 1, "user": 1, "city": 1, "seen": 1}}', 400, "x: is a list"),
        (b'{"inputs": {"x": [], "user": [1], "city": [], "seen": []}}', 400, "user: has 1 samples"),
        (b'{"instances": [1], "extra": 1}', 400, "The body has 'extra'"),
        (b'{"instances": [1], "signature_name": "x"}', 400, "signature_name: there is"),
        (b" " * 4000, 400, "The body is no JSON"),
        (b" " * 4001, 413, "The body is larger than 4,000 bytes"),
    ],
)
def test_wrong_bodies(client: TestClient, body: bytes, status: int, told: str) -> None:
    response = client.post(PREDICT, content=body)
    assert response.status_code == status
    assert response.json()["error"].startswith(told), response.json()


@pytest.mark.parametrize("name", ["x", "user", "city", "seen"])
def test_deep_values_are_told(client: TestClient, name: str) -> None:
    for depth in (900, 1000):
        body = json.dumps({"instances": [row(**{name: "deep"})]})
        deep = body.replace('"deep"', "[" * depth + "]" * depth)
        response = client.post(PREDICT, content=deep)
        assert response.status_code == 400 and len(response.text) < 200


def test_long_names_are_told_shortly(client: TestClient) -> None:
    long = "k" * 3000
    for path, body in (
        (PREDICT, {long: 1}),
        (PREDICT, {"instances": [row(**{long: 1})]}),
        (INFER, {"inputs": [{"name": long}]}),
        ("/v2/repository/models/clicks/load", {"parameters": {"version": long}}),
    ):
        response = client.post(path, json=body)
        assert response.status_code == 400 and len(response.text) < 300


def test_bodies_that_are_read_at_a_time(bundle: Path) -> None:
    limits = dataclasses.replace(LIMITS, body=2000, bodies=1)
    app = app_of(ServeSettings(bundle=str(bundle), name="clicks", limits=limits))
    body = json.dumps({"instances": [row()]}).encode()

    async def run() -> list[tuple[int, dict[str, str]]]:
        transport = httpx2.ASGITransport(app)
        came = asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield b" " * 1800
            await came.wait()
            yield body

        async with httpx2.AsyncClient(transport=transport, base_url="http://h") as client:
            first = asyncio.create_task(client.post(PREDICT, content=slow()))
            await asyncio.sleep(0.1)
            second = await client.post(PREDICT, content=body + b" " * 400)
            came.set()
            answers = [await first, second, await client.post(PREDICT, content=body)]
        return [(each.status_code, dict(each.headers)) for each in answers]

    found = asyncio.run(run())
    assert [status for status, _ in found] == [200, 503, 200]
    assert found[1][1]["retry-after"] == "1"


def test_a_sample_may_have_more_ids_than_a_request(model: Clicks, tmp_path: Path) -> None:
    bags = hb.Jagged(torch.arange(12) % 10, lengths=torch.full((6,), 2))
    path = hb.export(model, tmp_path / "clicks", sample={**sample_of(6), "city": bags})
    limits = dataclasses.replace(LIMITS, ids=1)
    with TestClient(
        app_of(ServeSettings(bundle=str(path), name="clicks", limits=limits))
    ) as client:
        assert client.post(PREDICT, json={"instances": [row()]}).status_code == 413
        assert client.post(PREDICT, json={"instances": [row(city=[1])]}).status_code == 200


@pytest.mark.parametrize("name", ["", "..", "a/b", "a:b", "a\nb", "\udcff"])
def test_names_that_are_no_part_of_a_path(bundle: Path, name: str) -> None:
    with pytest.raises(InputError, match="Pass one by --name"):
        ServeSettings(bundle=str(bundle), name=name)


def test_limits_of_samples_and_bags(client: TestClient) -> None:
    columns = {"x": [[0, 0]] * 51, "user": [1] * 51, "city": [[]] * 51, "seen": [[1, 2, 3]] * 51}
    assert client.post(PREDICT, json={"inputs": columns}).status_code == 413
    response = client.post(PREDICT, json={"instances": [row(city=[1] * 21)]})
    assert response.status_code == 413
    assert response.json()["error"].startswith("city: a sample has 21 ids")
    assert client.post(PREDICT, json={"instances": [row(city=[1] * 20)]}).status_code == 200


def test_gzip(client: TestClient) -> None:
    body = json.dumps({"instances": [row()]}).encode()
    as_gzip = {"content-encoding": "gzip"}
    plain = client.post(PREDICT, content=body).json()
    assert client.post(PREDICT, content=gzip.compress(body), headers=as_gzip).json() == plain
    bomb = gzip.compress(b" " * 50_000_000)
    for bad, status in ((bomb, 413), (body, 400), (gzip.compress(body)[:-9], 400)):
        assert client.post(PREDICT, content=bad, headers=as_gzip).status_code == status
    other = client.post(PREDICT, content=body, headers={"content-encoding": "br"})
    assert other.status_code == 415


def changed(n: int, **changes: Any) -> list[dict[str, Any]]:
    tensors = tensors_of({name: [value] for name, value in row().items()})
    tensors[n] |= changes
    return tensors


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        (changed(0, shape=[1, 3]), "x: has data whose lists are not all of 3 values"),
        (changed(0, shape=[1, 3], data=[1, 2, 3]), "x: takes the shape [samples, 2]"),
        (changed(0, datatype="INT64"), "x: takes the datatype FP16 or FP32 or FP64"),
        (changed(1, datatype="FP32"), "user: takes the datatype INT16 or"),
        (changed(1, datatype="BYTES", data=["a"]), "user: takes the datatype"),
        (changed(1, shape=[2]), "user: has 1 values, and a shape of 2"),
        (changed(1, shape=[]), "user: has a shape"),
        (changed(1, shape=[1 << 62, 1 << 62]), "user: has a shape with a size that is none"),
        (changed(1, shape=[(1 << 31) - 1] * 99), "user: has a shape of 99 sizes, and may have"),
        (changed(1, shape=[-1, -1]), "user: has a shape with a size that is none"),
        (changed(1, data=None, parameters={"binary_data_size": 8}), "user: data binary data"),
        (changed(1, name="nobody"), "nobody: is not known"),
        (changed(1, name="x"), "x: is there twice"),
        (changed(3, data=[3]), "city: has 2 ids, and lengths of 3"),
        (changed(3, data=[-1]), "city: lengths are counts of ids"),
        (changed(3, data=[1 << 70]), "city: lengths are counts of ids"),
        (changed(3, name="seen.lengths"), "seen: takes no lengths"),
        (changed(2)[:2], "city: is missing"),
        ([3], "inputs[0]: is an object"),
    ],
)
def test_wrong_tensors(client: TestClient, inputs: list[Any], told: str) -> None:
    response = client.post(INFER, json={"inputs": inputs})
    assert response.status_code == 400, response.json()
    assert response.json()["error"].startswith(told), response.json()


def test_chosen_outputs(client: TestClient) -> None:
    body = {"inputs": changed(0), "outputs": [{"name": "click"}]}
    (only,) = client.post(INFER, json=body).json()["outputs"]
    assert only["name"] == "click" and only["datatype"] == "FP32" and only["shape"] == [1]
    for names in (["clack"], ["click", "click"]):
        body["outputs"] = [{"name": name} for name in names]
        assert client.post(INFER, json=body).status_code == 400


def test_what_the_server_tells_of_itself(client: TestClient, bundle: Path) -> None:
    version = json.loads((bundle / "bundle.json").read_text())["model_version"]
    status = client.get("/v1/models/clicks").json()["model_version_status"]
    assert [(each["version"], each["state"]) for each in status] == [(version, "AVAILABLE")]
    assert client.get(f"/v1/models/clicks/versions/{version}").status_code == 200
    assert client.get("/v1/models/clicks/versions/1").status_code == 404
    assert client.get("/v1/models/other").status_code == 404
    about = client.get("/v2/models/clicks").json()
    assert about["versions"] == [version]
    assert {each["name"]: each["shape"] for each in about["inputs"]} == {
        "x": [-1, 2],
        "user": [-1],
        "city": [-1, -1],
        "seen": [-1, 3],
    }
    for path in ("/v2", "/v2/health/live", "/v2/health/ready", "/healthz", "/readyz"):
        assert client.get(path).status_code == 200
    assert client.get("/v2/models/clicks/ready").json()["ready"] is True
    shown = client.get("/sample").json()
    again = client.post(PREDICT, json={"instances": shown["instances"]}).json()["predictions"]
    for one, other in zip(again, shown["predictions"], strict=True):
        np.testing.assert_allclose(one["both"], other["both"], atol=1e-5)
    assert client.post(PREDICT, json={"instances": [row()]}).headers["x-model-version"] == version
    assert "What is asked with" in client.get("/").text
    assert client.get(INFER).status_code == 405
    assert client.get("/nothing").status_code == 404


def test_figures(client: TestClient) -> None:
    def figure(name: str) -> float:
        lines = client.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    before = figure("hotbed_samples_total"), figure('hotbed_requests_total{endpoint="predict"')
    client.post(PREDICT, json={"instances": [row(), row()]})
    client.post(PREDICT, json={})
    after = figure("hotbed_samples_total"), figure('hotbed_requests_total{endpoint="predict"')
    assert (after[0] - before[0], after[1] - before[1]) == (2, 2)
    assert figure("hotbed_waiting_samples") == 0


def test_tokens(bundle: Path) -> None:
    app = app_of(ServeSettings(bundle=str(bundle), name="clicks", tokens=("one", "two")))
    with TestClient(app) as client:
        for header in (None, "one", "Bearer three", "Bearer ", "Basic one", "Bearer on\xe9"):
            headers = {} if header is None else {"authorization": header.encode("latin-1")}
            assert client.get("/v1/models/clicks", headers=headers).status_code == 401
            assert client.get("/metrics", headers=headers).status_code == 401
        for token in ("one", "two"):
            headers = {"authorization": f"Bearer {token}"}
            assert client.get("/v1/models/clicks", headers=headers).status_code == 200
        assert client.get("/readyz").status_code == 200


def test_a_bundle_that_answers_otherwise_is_refused(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    rows = np.load(copy / "tables" / "0.rows.npy", mmap_mode="r+")
    rows += 1
    del rows
    with pytest.raises(hb.serve.BundleError, match="otherwise than sample.json says"):
        app_of(ServeSettings(bundle=str(copy), name="clicks"))
    for name in ("dense.onnx", "sample.json"):
        with open(copy / name, "r+b") as file:
            file.seek(-30, os.SEEK_END)
            last = file.read()
            file.seek(-30, os.SEEK_END)
            file.write(last[::-1])
        with pytest.raises(hb.serve.BundleError, match=f"{name} is damaged: its CRC32C"):
            app_of(ServeSettings(bundle=str(copy), name="clicks"))
        shutil.copy(bundle / name, copy / name)
        rows = np.load(copy / "tables" / "0.rows.npy", mmap_mode="r+")
        rows[:] = np.load(bundle / "tables" / "0.rows.npy")
        del rows
    app = app_of(ServeSettings(bundle=str(copy), name="clicks"))
    with TestClient(app, raise_server_exceptions=False) as client:
        (copy / "bundle.json").rename(copy / "away")
        assert client.post("/v2/repository/index").status_code == 503
        assert client.post("/v2/repository/models/clicks/load").status_code == 400
        assert client.post(PREDICT, json={"instances": [row()]}).status_code == 200
        (copy / "away").rename(copy / "bundle.json")
        assert client.post("/v2/repository/index").status_code == 200
    (copy / "dense.onnx").unlink()
    with pytest.raises(hb.serve.BundleError, match=r"cannot be read: .*dense\.onnx"):
        app_of(ServeSettings(bundle=str(copy), name="clicks"))
    with pytest.raises(hb.serve.BundleError, match="is no bundle"):
        app_of(ServeSettings(bundle=str(tmp_path), name="clicks"))


class Pair(nn.Module):
    """Answers with the rows of two static tables, of which a sample has an id each."""

    def __init__(self) -> None:
        super().__init__()
        tables = [hb.Table("a", 2, rows=5), hb.Table("b", 2, rows=9)]
        self.vectors = hb.EmbeddingCollection(tables, seed=1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.cat([*self.vectors(batch).values()], 1)


def test_ids_that_are_read_together(tmp_path: Path) -> None:
    """Each is checked by its own table, and told by its name."""
    model, sample = Pair(), {"a": torch.arange(5), "b": torch.arange(5)}
    bundle = hb.export(model, tmp_path / "pair", sample=sample)
    path = "/v1/models/pair:predict"
    refused: dict[str, list[list[Any]]] = {
        "a": [[5], [-1], [2**63], [True], [1.0], ["1"], [None], [[1]]],
        "b": [[9], [-(2**63) - 1], [{}]],
    }
    with TestClient(app_of(ServeSettings(bundle=str(bundle), name="pair"))) as client:
        for name, wrong in refused.items():
            for ids in wrong:
                answer = client.post(path, json={"inputs": {"a": [4], "b": [4], name: ids}})
                assert answer.status_code == 400 and answer.json()["error"].startswith(f"{name}: ")
        answer = client.post(path, json={"inputs": {"b": [8, 0], "a": [4, 2]}})
        expected = model.eval()({"a": torch.tensor([4, 2]), "b": torch.tensor([8, 0])})
        np.testing.assert_array_equal(np.float32(answer.json()["outputs"]), expected.detach())
