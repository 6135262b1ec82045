"""Requests with columns as they stand in the files are answered as those with the ids that training made."""

from __future__ import annotations

import builtins
import copy
import csv
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

import hotbed as hb
from hotbed.serve.bundles.manifests import read_bundle
from hotbed.serve.exporting.saved import export_saved
from hotbed.serve.http.app import app_of
from hotbed.serve.http.limits import Limits
from hotbed.serve.http.parts import inputs_of_bundle
from hotbed.serve.http.records import Records, Unencoded, records_of
from hotbed.serve.http.settings import ServeSettings

pytest.importorskip("pyarrow")

PREDICT = "/v1/models/clicks:predict"
LIMITS = Limits(body=100_000, samples=50, ids=20, seconds=20)
SCHEMA = hb.data.Schema(
    {
        "clicked": hb.data.Label(),
        "price": hb.data.Number(transform="log"),
        "user": hb.data.Id(),
        "item": hb.data.Id(rows=40),
        "city": hb.data.Id(values="int"),
        "tags": hb.data.Ids(),
        "both": hb.data.Pair(of=("user", "item")),
        "visit": hb.data.Key(),
    }
)


def rows_of(count: int) -> list[dict[str, Any]]:
    return [
        {
            "clicked": n % 2,
            "price": n / 7 if n % 5 else None,
            "user": f"user {n % 9}" if n % 4 else None,
            "item": n % 13,
            "city": n % 3 - 1,
            "tags": ["new", "red", None][: n % 4],
            "visit": f"v{n}",
        }
        for n in range(count)
    ]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        for row in rows:
            writer.writerow({**row, "tags": "|".join(each or "" for each in row["tags"])})
    return path


def serving(bundle: Path) -> TestClient:
    app = app_of(ServeSettings(bundle=str(bundle), name="clicks", limits=LIMITS))
    return TestClient(app, raise_server_exceptions=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    data = written(folder / "clicks.csv", rows_of(300))
    torch.manual_seed(0)
    model = hb.models.DeepFM.from_schema(SCHEMA, dim=4, hidden=[8])
    reader = hb.data.open(data, SCHEMA, batch_size=50)
    hb.train.fit(model, reader, hb.optim.Adam(model.parameters(), lr=0.05))
    hb.save(folder / "run", model, step=6)
    export_saved(str(folder / "run"), str(folder / "bundle"), [str(data)])
    return folder


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    with serving(folder / "bundle") as client:
        yield client


def asked(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("price", "user", "item", "city", "tags")}


def test_columns_are_answered_as_the_model_answers_files(
    client: TestClient, folder: Path, tmp_path: Path
) -> None:
    rows = rows_of(30)
    (batch,) = hb.data.open(written(tmp_path / "some.csv", rows), SCHEMA, batch_size=50)
    model = hb.checkpoint.load_model(folder / "run").eval()
    with torch.no_grad():
        expected = model(batch).numpy()
    assert len({*expected.tolist()}) > 20
    records = [asked(row) for row in rows]
    by_rows = client.post(PREDICT, json={"records": records}).json()["predictions"]
    np.testing.assert_allclose(by_rows, expected, atol=1e-5)
    columns = {name: [row[name] for row in records] for name in records[0]}
    assert client.post(PREDICT, json={"columns": columns}).json() == {"outputs": by_rows}
    instances = [
        {
            "dense": batch["dense"][n].tolist(),
            "tags": batch["tags"][n].tolist(),
            **{name: int(batch[name][n]) for name in ("user", "item", "city", "both")},
        }
        for n in range(len(rows))
    ]
    assert client.post(PREDICT, json={"instances": instances}).json()["predictions"] == by_rows
    assert client.post(PREDICT, json={"records": rows}).json()["predictions"] == by_rows  # labels
    texts = [{n: v if isinstance(v, list) else text(v) for n, v in row.items()} for row in records]
    assert client.post(PREDICT, json={"records": texts}).json()["predictions"] == by_rows
    cut = [{**row, "tags": "|".join(each or "" for each in row["tags"])} for row in records]
    packed = gzip.compress(json.dumps({"records": cut}).encode())
    headers = {"content-encoding": "gzip"}
    assert client.post(PREDICT, content=packed, headers=headers).json()["predictions"] == by_rows


def text(value: Any) -> str | None:
    return None if value is None else str(value)


def changed(**changes: Any) -> dict[str, Any]:
    return {**asked(rows_of(8)[7]), **changes}


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ({"records": [changed(), changed(user=1.5)]}, 400, "user: value 1, 1.5 stands among text"),
        ({"records": [changed(user=1.5)]}, 400, "user: has the type double"),
        ({"records": [changed(price="x")]}, 400, "price: 'x' is not a number"),
        ({"records": [changed(city="x")]}, 400, "city: 'x' is not an integer"),
        ({"records": [changed(tags=[{}])]}, 400, "tags: {} is neither"),
        ({"records": [changed(tags=["a"] * 21)]}, 413, "tags: a sample has 21 ids"),
        ({"records": [changed(tags="|" * 20)]}, 413, "tags: a sample has 21 ids"),
        ({"records": [changed(both=3)]}, 400, "both: is no column of the data, in records[0]"),
        ({"records": [changed(), changed(age=3)]}, 400, "age: is no column of the data, in reco"),
        ({"records": [changed(), {"user": "a"}]}, 400, "price: is missing in records[1]"),
        ({"records": [3]}, 400, "records[0]: is an object"),
        ({"records": {}}, 400, "records: is a list"),
        ({"records": []}, 400, "There are no samples"),
        ({"records": [changed()] * 51}, 413, "There are 51 samples"),
        ({"records": [changed()], "instances": []}, 400, "The body has one of records and columns"),
        ({"records": [changed()], "columns": {}}, 400, "The body has one of records and columns"),
        ({"columns": []}, 400, "columns: is an object"),
        ({"columns": {"user": ["a"]}}, 400, "price: is missing in columns"),
        ({"columns": changed()}, 400, "price: is a list with a value of each sample"),
        (
            {"columns": {**{name: [v] for name, v in changed().items()}, "city": [1, 2]}},
            400,
            "city: has 2 values, and price 1",
        ),
    ],
)
def test_wrong_columns_are_told_by_their_names(
    client: TestClient, body: dict[str, Any], status: int, told: str
) -> None:
    response = client.post(PREDICT, json=body)
    assert response.status_code == status, response.json()
    assert response.json()["error"].startswith(told), response.json()
    good = {"records": [changed()], "signature_name": "serving_default"}
    assert client.post(PREDICT, json=good).status_code == 200


def test_the_pages_tell_of_columns(client: TestClient) -> None:
    page = client.get("/openapi.json").json()
    body = page["paths"][PREDICT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    forms = {name: each for each in body["oneOf"] for name in each["required"]}
    assert {*forms} == {"instances", "inputs", "records", "columns"}
    record = forms["records"]["properties"]["records"]["items"]
    assert record["required"] == ["price", "user", "item", "city", "tags"]
    assert {*record["properties"]} == {*record["required"], "clicked", "visit"}
    check = pytest.importorskip("jsonschema").Draft202012Validator(body).is_valid
    records = [changed(), rows_of(1)[0], {name: None for name in record["required"]}]
    columns = {name: [each[name] for each in records] for name in record["required"]}
    for good in ({"records": records}, {"columns": columns}):
        assert check(good) and client.post(PREDICT, json=good).status_code == 200
    for bad in ({"records": [{"user": "a"}]}, {"records": [changed(user=1.5)]}, {"columns": {}}):
        assert not check(bad) and client.post(PREDICT, json=bad).status_code == 400
    about = client.get("/v1/models/clicks/metadata").json()["metadata"]
    assert about["columns"]["price"] == ["number", "string", "null"]


def test_a_click_log(tmp_path: Path) -> None:
    log = tmp_path / "log.tsv"
    hb.data.write_criteo_tsv(log, rows=200, seed=1)
    torch.manual_seed(0)
    model = hb.models.DLRM(["C1", "C7"], dim=4)
    reader = hb.data.CriteoLog(log, 50)
    hb.train.fit(model, reader, hb.optim.Adam(model.parameters(), lr=0.05))
    hb.save(tmp_path / "run", model, step=4)
    export_saved(str(tmp_path / "run"), str(tmp_path / "bundle"), [str(log)])
    (batch,) = hb.data.CriteoLog(log, 50, rows=(0, 50))
    with torch.no_grad():
        expected = model.eval()(batch).numpy()
    names = ["label", *hb.data.DENSE, *hb.data.CATEGORIES]
    lines = [line.split("\t") for line in log.read_text().splitlines()[:50]]
    whole = [dict(zip(names, line, strict=True)) for line in lines]
    needed = [*hb.data.DENSE, "C1", "C7"]
    typed = [
        {name: (int(row[name]) if name[0] == "I" else row[name]) if row[name] else None}
        for row in whole
        for name in needed
    ]
    records = [
        {name: value for cell in typed[at : at + 15] for name, value in cell.items()}
        for at in range(0, len(typed), 15)
    ]
    with serving(tmp_path / "bundle") as client:
        for rows in (whole, records):
            response = client.post(PREDICT, json={"records": rows})
            np.testing.assert_allclose(response.json()["predictions"], expected, atol=1e-5)
        wrong = client.post(PREDICT, json={"records": [{**records[0], "C7": "xyz"}]})
        assert wrong.status_code == 400
        assert wrong.json()["error"] == "C7: 'xyz' is not 8 hexadecimal digits."


def test_bundles_without_a_schema(tmp_path: Path) -> None:
    sample = {"dense": torch.rand(4, 1), "C1": torch.arange(4)}
    model = hb.models.DLRM(["C1"], dim=4, num_dense=1)
    model(sample)
    hb.export(model, tmp_path / "bundle", sample=sample)
    with serving(tmp_path / "bundle") as client:
        response = client.post(PREDICT, json={"records": [{"C1": "68fd1e64"}]})
        assert response.status_code == 400
        assert "its model has no schema" in response.json()["error"]
        assert client.get("/openapi.json").status_code == 200


def test_a_server_without_pyarrow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "pyarrow":
            raise ImportError(name)
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with serving(folder / "bundle") as client:
        response = client.post(PREDICT, json={"records": [changed()]})
        assert response.status_code == 501
        assert "pip install 'hotbed[arrow]'" in response.json()["error"]
        instances = client.get("/sample").json()["instances"]
        assert client.post(PREDICT, json={"instances": instances}).status_code == 200


def test_a_sample_that_the_schema_does_not_make(tmp_path: Path) -> None:
    """Such a bundle is served all the same."""
    schema = hb.data.Schema({"clicked": hb.data.Label(), "tags": hb.data.Ids(pooling="mean")})
    model = hb.models.DeepFM.from_schema(schema, dim=4, hidden=[4])
    sample = {"tags": torch.arange(6).reshape(3, 2)}
    model(sample)
    path = hb.export(model, tmp_path / "padded", sample=sample)
    with serving(path) as client:
        assert client.post(PREDICT, json={"records": [{"tags": "a|b"}]}).status_code == 200
    about = copy.deepcopy(read_bundle(str(path)))
    inputs = inputs_of_bundle(about, LIMITS)
    assert about["model"] is not None
    for columns, told in (
        ({"tags": {"kind": "id"}}, None),
        ({"tags": {"kind": "ids"}}, None),
        ({"tag": {"kind": "id"}}, "Columns do not make the input 'tags'"),
        ({"tags": {"kind": "vowel"}}, "kind is 'vowel'"),
    ):
        about["model"]["schema"] = {"columns": columns}
        found = records_of(about, inputs, LIMITS)
        assert isinstance(found, Records if told is None else Unencoded)
        assert told is None or (isinstance(found, Unencoded) and told in found.why)
    about["inputs"][0]["shape"] = [2]
    about["model"]["schema"] = {"columns": {"tags": {"kind": "id"}}}
    found = records_of(about, inputs_of_bundle(about, LIMITS), LIMITS)
    assert isinstance(found, Unencoded) and "Columns do not make these inputs" in found.why
