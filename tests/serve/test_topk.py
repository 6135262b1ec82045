"""Top-k of bundles: all items are compared, and answered as the model scores them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serve.servers import served
from starlette.testclient import TestClient
from torch import Tensor

import hotbed as hb
from hotbed.serve.bundles import item_search
from hotbed.serve.bundles.item_search import ItemVectors
from hotbed.serve.http.app import app_of
from hotbed.serve.http.limits import Limits
from hotbed.serve.http.settings import ServeSettings

TOPK, PREDICT = "/v1/models/pairs:topk", "/v1/models/pairs:predict"
LIMITS = Limits(samples=50, k=40, items=400)
ITEMS = torch.cat([torch.arange(30), torch.tensor([-(2**63), -7, 2**53 + 1, 2**63 - 1])])
"""As hashes are: of both signs, and beyond what floats hold."""


def serving(bundle: Path) -> TestClient:
    app = app_of(ServeSettings(bundle=str(bundle), name="pairs", limits=LIMITS))
    return TestClient(app, raise_server_exceptions=False)


def trained(model: hb.models.TwoTower, batch: dict[str, Any], optimizer: Any | None = None) -> None:
    """Train, so that weights and rows are none that layers begin with."""
    optimizer = optimizer or hb.optim.Adam(model.parameters(), lr=0.05)
    model.train()
    for _ in range(5):
        model.loss(model(batch), torch.ones(len(batch["item"]))).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def batch_of(count: int = 34) -> dict[str, Any]:
    return {
        "dense": torch.rand(count, 2),
        "user": torch.arange(count) % 9,
        "item": ITEMS[torch.arange(count) % len(ITEMS)],
    }


@pytest.fixture(scope="module")
def model() -> hb.models.TwoTower:
    torch.manual_seed(0)
    model = hb.models.TwoTower(["user", "item"], dim=4, num_dense=2, hidden=(8,), out=6, seed=1)
    trained(model, batch_of())
    return model


@pytest.fixture(scope="module")
def bundle(model: hb.models.TwoTower, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hb.export(model, tmp_path_factory.mktemp("topk") / "bundle", sample=batch_of(), step=3)


@pytest.fixture(scope="module")
def client(bundle: Path) -> Iterator[TestClient]:
    with serving(bundle) as client:
        yield client


def users() -> list[dict[str, Any]]:
    return [{"user": n, "dense": [n / 9, 0.5]} for n in range(9)]


def check_best(answer: dict[str, Any], scores: Tensor, ids: Tensor, k: int) -> None:
    """Whether an answer is that of (Q, N) scores of (N,) items."""
    assert answer.keys() == {"items", "scores"} and len(answer["items"]) == len(scores)
    at = {id: n for n, id in enumerate(ids.tolist())}
    for row, items, told in zip(scores, answer["items"], answer["scores"], strict=True):
        own = torch.tensor([row[at[id]] for id in items])
        best = row.sort(descending=True).values[:k]
        assert len({*items}) == len(items) == min(k, len(ids))
        for found in (own, best):
            torch.testing.assert_close(torch.tensor(told), found, atol=1e-5, rtol=1e-6)
        assert told == sorted(told, reverse=True)


def scores_of(model: hb.models.TwoTower, rows: list[dict[str, Any]]) -> Tensor:
    """Return the (Q, N) scores that the model has of all ITEMS, one by one."""
    with torch.no_grad():
        return torch.stack(
            [
                model(
                    {
                        "user": torch.tensor([row["user"]] * len(ITEMS)),
                        "dense": torch.tensor([row["dense"]] * len(ITEMS)),
                        "item": ITEMS,
                    }
                )
                for row in rows
            ]
        )


@pytest.mark.parametrize("k", [1, 7, 33, 40])
def test_the_items_of_highest_score(client: TestClient, model: hb.models.TwoTower, k: int) -> None:
    rows = users()
    answer = client.post(TOPK, json={"instances": rows, "k": k})
    assert answer.status_code == 200 and answer.headers["x-model-version"].startswith("3-")
    check_best(answer.json(), scores_of(model, rows), ITEMS, k)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    assert client.post(TOPK, json={"inputs": columns, "k": k}).json() == answer.json()


def test_scores_are_those_of_predict(client: TestClient) -> None:
    (items,) = client.post(TOPK, json={"instances": users()[:1]}).json()["items"]
    assert len(items) == 10
    rows = [{**users()[0], "item": id} for id in items]
    predicted = client.post(PREDICT, json={"instances": rows}).json()["predictions"]
    answer = client.post(TOPK, json={"instances": users()[:1]}).json()
    np.testing.assert_allclose(answer["scores"][0], predicted, atol=1e-5)


def test_rows_in_few_bits_and_chosen_ones(model: hb.models.TwoTower, tmp_path: Path) -> None:
    some = ITEMS[::3].sort().values
    tables = {"embeddings.item": some}
    path = hb.export(model, tmp_path / "b", sample=batch_of(), rows="int8", tables=tables)
    with serving(path) as client:
        answer = client.post(TOPK, json={"instances": users()[:1], "k": 40}).json()
        (items,) = answer["items"]
        assert sorted(items) == some.tolist()
        rows = [{**users()[0], "item": id} for id in items]
        predicted = client.post(PREDICT, json={"instances": rows}).json()["predictions"]
        np.testing.assert_allclose(answer["scores"][0], predicted, atol=1e-5)


SMALL = st.integers(-2, 2)


@settings(deadline=None)
@given(st.data(), st.integers(0, 60), st.integers(1, 5), st.integers(1, 70))
def test_exactly_and_ties_by_the_lower_id(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, count: int, queries: int, k: int
) -> None:
    def drawn(rows: int) -> np.ndarray:
        numbers = data.draw(st.lists(SMALL, min_size=3 * rows, max_size=3 * rows))
        return np.array(numbers, np.float32).reshape(rows, 3)

    folder = tmp_path_factory.mktemp("items")
    (folder / "topk").mkdir()
    ids = np.sort(np.random.default_rng(count).choice(10**6, count, replace=False)) - 500_000
    vectors, asked = drawn(count), drawn(queries)
    np.save(folder / "topk" / "ids.npy", ids)
    np.save(folder / "topk" / "vectors.npy", vectors)
    items = ItemVectors(str(folder), {"inputs": [], "items": count, "width": 3})
    scores = asked.astype(np.float64) @ vectors.T
    order = np.lexsort((np.broadcast_to(ids, scores.shape), -scores), axis=1)[:, :k]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(item_search, "_LEAST", 1)
        patch.setattr(item_search, "_MOST", data.draw(st.integers(1, 70)))
        patch.setattr(item_search, "_QUERIES", data.draw(st.integers(1, 5)))
        patch.setattr(item_search, "_SPARE", data.draw(st.integers(0, 2)))
        found = items.search(asked, k)
    np.testing.assert_array_equal(found.ids, ids[order])
    np.testing.assert_array_equal(found.scores, np.take_along_axis(scores, order, 1))
    assert found.ids.dtype == np.int64 and found.scores.dtype == np.float32


def test_an_answer_does_not_depend_on_who_else_asks(tmp_path: Path) -> None:
    (tmp_path / "topk").mkdir()
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((5000, 24)).astype(np.float32)
    vectors[3000:] = vectors[1000:3000]  # the same items again
    np.save(tmp_path / "topk" / "ids.npy", np.arange(5000))
    np.save(tmp_path / "topk" / "vectors.npy", vectors)
    items = ItemVectors(str(tmp_path), {"inputs": [], "items": 5000, "width": 24})
    asked = rng.standard_normal((300, 24)).astype(np.float32)
    together = items.search(asked, 20)
    for n in range(0, 300, 7):
        alone = items.search(asked[n : n + 1], 20)
        np.testing.assert_array_equal(alone.ids[0], together.ids[n])
        np.testing.assert_array_equal(alone.scores[0], together.scores[n])
        pairs = {*alone.ids[0][:19].tolist()}
        assert all(id - 2000 in pairs for id in pairs if id >= 3000)


def test_items_with_more_than_an_id(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tables = [hb.Table("user", 4), hb.Table("item", 4), hb.Table("tag", 4, rows=6, combiner="mean")]
    model = hb.models.TwoTower(tables, dim=4, item=("item", "tag"), hidden=(8,), out=6, seed=1)
    tags = hb.Jagged(torch.arange(34) % 6, lengths=torch.ones(34, dtype=torch.long))
    batch = {"user": torch.arange(34) % 9, "item": ITEMS, "tag": tags}
    trained(model, batch)
    sample = {name: each[:8] for name, each in batch.items()}
    rows = [{"user": n} for n in range(9)]
    path = hb.export(model, tmp_path / "bundle", sample=sample)
    assert "topk" not in json.loads((path / "bundle.json").read_text())
    with serving(path) as client:
        response = client.post(TOPK, json={"instances": rows})
        assert response.status_code == 400 and "no vectors of items" in response.json()["error"]
    of_items = {"item": ITEMS, "tag": tags}
    again = {
        "item": ITEMS[:3],
        "tag": hb.Jagged(torch.tensor([5, 5, 5]), lengths=torch.ones(3, dtype=torch.long)),
    }  # the first one counts
    halves = [{name: each[a:b] for name, each in of_items.items()} for a, b in ((0, 9), (9, 34))]
    path = hb.export(model, tmp_path / "bundle", sample=sample, items=[*halves, again])
    with torch.no_grad():
        scores = torch.stack([model({**of_items, "user": torch.full((34,), n)}) for n in range(9)])
    with serving(path) as client:
        for asked in (rows, [*range(9)]):  # of one input the values alone
            answer = client.post(TOPK, json={"instances": asked, "k": 12}).json()
            check_best(answer, scores, ITEMS, 12)
        assert "/v1/models/pairs:topk" in client.get("/openapi.json").json()["paths"]
        about = client.get("/v1/models/pairs/metadata").json()["metadata"]
        assert about["topk"] == {"inputs": ["user"], "items": 34, "width": 6}
    for items, told in (
        ([], "items has no batches"),
        ([{"item": ITEMS}], "has no 'tag'"),
        ([{"item": ITEMS[:3], "tag": tags}], "has 3 ids, and 'tag' of 34 items"),
    ):
        with pytest.raises(hb.serve.ExportError, match=told):
            hb.export(model, tmp_path / "bundle", sample=sample, items=items)
    with pytest.raises(hb.errors.IdError, match="outside"):
        wrong = {"item": ITEMS[:1], "tag": hb.Jagged(torch.tensor([6]), lengths=torch.tensor([1]))}
        hb.export(model, tmp_path / "bundle", sample=sample, items=[wrong])
    with serving(path) as client:  # which stays
        assert client.post(TOPK, json={"instances": rows}).status_code == 200


def test_models_that_score_otherwise(tmp_path: Path) -> None:
    class Doubled(hb.models.TwoTower):
        def forward(self, batch: Any) -> Tensor:
            return 2 * super().forward(batch)

    sample = {"user": torch.arange(6), "item": torch.arange(6)}
    model = Doubled(["user", "item"], dim=4).eval()
    model(sample)
    path = hb.export(model, tmp_path / "bundle", sample=sample)
    assert "topk" not in json.loads((path / "bundle.json").read_text())
    with pytest.raises(hb.serve.ExportError, match="are not the scores that the model answers"):
        hb.export(model, path, sample=sample, items=[{"item": torch.arange(6)}])
    other = hb.models.DLRM(["item"], dim=4, num_dense=1)
    with pytest.raises(hb.serve.ExportError, match="the model is DLRM"):
        sample = {"dense": torch.rand(6, 1), "item": torch.arange(6)}
        hb.export(other, path, sample=sample, items=[{"item": torch.arange(6)}])


@pytest.mark.parametrize("rows", [None, 40])
def test_columns_and_what_is_missing(tmp_path: Path, rows: int | None) -> None:
    """The row of a missing item is no item; a user's columns are encoded as in training."""
    pytest.importorskip("pyarrow")
    schema = hb.data.Schema(
        {
            "clicked": hb.data.Label(),
            "user": hb.data.Id(),
            "item": hb.data.Id(rows=rows),
            "seen": hb.data.Ids(table="item", rows=rows),
        }
    )
    torch.manual_seed(0)
    model = hb.models.TwoTower.from_schema(
        schema, dim=4, user=("user", "seen"), hidden=(8,), out=6, seed=1
    )
    with open(tmp_path / "pairs.csv", "w") as file:
        file.write("clicked,user,item,seen\n")
        for n in range(60):
            file.write(f"1,u{n % 7},{'' if n % 6 == 5 else f'i{n % 11}'},i{n % 3}|i{n % 4}\n")
    reader = hb.data.open(tmp_path / "pairs.csv", schema, batch_size=60)
    (batch,) = reader
    trained(model, batch)
    path = hb.export(model, tmp_path / "bundle", sample=batch)
    ids = batch["item"].unique()
    ids = ids[ids != (-1 if rows is None else rows)]
    ids = ids if rows is None else torch.arange(rows)
    with torch.no_grad():
        scores = model(
            {
                "user": batch["user"][:1].expand(len(ids)),
                "seen": hb.Jagged.concatenate([batch["seen"][:1]] * len(ids)),
                "item": ids,
            }
        )
    with serving(path) as client:
        record = {"user": "u0", "seen": ["i0", None]}
        answer = client.post(TOPK, json={"records": [record], "k": 40})
        check_best(answer.json(), scores[None], ids, 40)
        whole = {**record, "item": "i1", "clicked": 1}
        assert client.post(TOPK, json={"records": [whole], "k": 40}).json() == answer.json()
        seen = batch["seen"][0].tolist()
        instance = {"user": int(batch["user"][0]), "seen": seen}
        assert client.post(TOPK, json={"instances": [instance], "k": 40}).json() == answer.json()


WRONG: list[tuple[dict[str, Any], int, str]] = [
    ({"k": 0}, 400, "k: is a whole number from 1 to 40"),
    ({"k": 41}, 400, "k: is a whole number from 1 to 40"),
    ({"k": 1.0}, 400, "k: is a whole number from 1 to 40"),
    ({"k": True}, 400, "k: is a whole number from 1 to 40"),
    ({"k": None}, 400, "k: is a whole number from 1 to 40"),
    ({"instances": []}, 400, "There are no samples"),
    ({"instances": [{"user": 1, "dense": [0, 0], "item": 3}]}, 400, "item: is not known"),
    ({"instances": [{"user": 1}]}, 400, "dense: is missing"),
    ({"instances": users() * 5, "k": 9}, 413, "45 samples of 9 items are asked"),
    ({"instances": users() * 6, "k": 1}, 413, "There are 54 samples"),
    ({"other": 1}, 400, "The body has 'other'"),
]


@pytest.mark.parametrize(("changes", "status", "told"), WRONG)
def test_wrong_requests(
    client: TestClient, changes: dict[str, Any], status: int, told: str
) -> None:
    response = client.post(TOPK, json={"instances": users(), **changes})
    assert response.status_code == status, response.json()
    assert response.json()["error"].startswith(told), response.json()
    assert client.post(TOPK, json=[]).status_code == 400
    assert client.post("/v1/models/other:topk", json={}).status_code == 404


def test_where_searches_wait_too_long_no_body_is_read(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.post(TOPK, content=b"no JSON").status_code == 400
    monkeypatch.setattr("hotbed.serve.http.batching._Seconds.of", lambda *_: 1e9)
    assert client.post(TOPK, content=b"no JSON").status_code == 503


def test_a_table_without_rows(tmp_path: Path) -> None:
    model = hb.models.TwoTower(["user", "item"], dim=4).eval()
    sample = {"user": torch.arange(6), "item": torch.arange(6)}
    tables = {"embeddings.item": torch.arange(6) + 100}
    with serving(hb.export(model, tmp_path / "b", sample=sample, tables=tables)) as client:
        answer = client.post(TOPK, json={"instances": [{"user": 1}, {"user": 2}]}).json()
        assert answer == {"items": [[], []], "scores": [[], []]}


@pytest.mark.process
def test_users_rows_of_other_processes(bundle: Path, client: TestClient) -> None:
    body = {"instances": users(), "k": 12}
    with served(bundle, "--shards", 2, "--name", "pairs") as server:
        assert server.post(TOPK, body) == (200, client.post(TOPK, json=body).json())


def test_damaged_files(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "topk").mkdir()
    about: Any = {"inputs": ["user"], "items": 34, "width": 6}
    for name, contents in (
        ("ids", np.arange(33)),
        ("ids", np.arange(34, dtype=np.int32)),
        ("vectors", np.zeros((34, 7), np.float32)),
        ("vectors", np.asfortranarray(np.zeros((34, 6), np.float32))),
    ):
        for file in ("ids", "vectors"):
            good = (bundle / "topk" / f"{file}.npy").read_bytes()
            (tmp_path / "topk" / f"{file}.npy").write_bytes(good)
        ItemVectors(str(tmp_path), about)
        np.save(tmp_path / "topk" / f"{name}.npy", contents)
        with pytest.raises(hb.serve.BundleError, match=f"{name}.npy is damaged"):
            ItemVectors(str(tmp_path), about)
        (tmp_path / "topk" / f"{name}.npy").write_bytes(b"\x93NUMPY")
        with pytest.raises(hb.serve.BundleError, match=f"{name}.npy is damaged"):
            ItemVectors(str(tmp_path), about)
