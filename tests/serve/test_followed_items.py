"""Versions of a followed run answer top-k as a new export of the same checkpoint does."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from effort import examples
from serve.followed_pairs import ITEMS, LATER, Pairs, asked_of_users
from serve.followed_runs import applied, reseal, served_from
from serve.servers import Running, served, soon
from starlette.testclient import TestClient

import hotbed as hb
from hotbed.serve.bundles import item_tower
from hotbed.serve.bundles.versions import current, pin, versions_of
from hotbed.serve.following.follower import Follower
from hotbed.serve.http.app import app_of
from hotbed.serve.http.limits import Limits
from hotbed.serve.http.model import ServedModel
from hotbed.serve.http.settings import ServeSettings
from hotbed.serve.http.topk import TopK

TOPK = "/v1/models/pairs:topk"
LIMITS = Limits(samples=50, k=40, items=400)
VERSIONS = 5


def serving(bundle: Path) -> TestClient:
    app = app_of(ServeSettings(bundle=str(bundle), name="pairs", limits=LIMITS))
    return TestClient(app, raise_server_exceptions=False)


def asked(bundle: Path) -> dict[str, Any]:
    with serving(bundle) as client:
        answer = client.post(TOPK, json={"instances": asked_of_users(), "k": len(ITEMS)})
        assert answer.status_code == 200, answer.json()
        found: dict[str, Any] = answer.json()
    return found


def check_alike(answer: dict[str, Any], expected: dict[str, Any]) -> None:
    """All items have the scores that are expected, and are in their order but where these are equal."""
    assert len(answer["items"]) == len(asked_of_users())
    for items, scores, own, told in zip(*answer.values(), *expected.values(), strict=True):
        assert sorted(items) == sorted(own) == sorted(ITEMS.tolist())
        score_of = dict(zip(own, told, strict=True))
        wanted = np.array([score_of[id] for id in items])
        np.testing.assert_allclose(scores, wanted, rtol=0, atol=1e-5)
        assert (np.diff(wanted) <= 1e-5).all() and (np.diff(scores) <= 0).all()


KINDS = [(True, "int8"), (False, "float16"), (True, "float32")]


@pytest.mark.parametrize(("tags", "rows"), KINDS[: examples(1, len(KINDS))])
def test_versions_answer_as_new_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tags: bool, rows: str
) -> None:
    monkeypatch.setattr(item_tower, "AT_ONCE", 5)
    run = Pairs(tmp_path, tags=tags)
    run.save()
    bundle = run.export(rows=rows)
    first, before = asked(bundle), versions_of(bundle)[0]
    changes = [run.change_rows, run.change_weights, run.train, run.change_rows]
    with Follower(bundle, run.root, most_layers=2) as follower:
        for number, change in enumerate(changes):
            change()
            if number == 2:
                run.train(LATER)  # which get rows, and are no items
            saved = run.save(delta=number != 2)
            applied(follower)
            answer, again = asked(bundle), run.exported_again(saved.path, rows=rows)
            check_alike(answer, asked(again))
            assert answer["scores"] != first["scores"]
            follower.wait_for_merges()
            vectors = [np.load(each / "topk" / "vectors.npy") for each in (again, bundle)]
            served_now = served_from(bundle).items
            assert served_now is not None
            np.testing.assert_allclose(served_now.vectors.vectors, vectors[0], rtol=0, atol=1e-6)
            assert (vectors[0] != vectors[1]).any()  # which stay as exported
    pin(bundle, before.model_version)
    assert asked(bundle) == first


def test_rows_of_the_items_table(tmp_path: Path) -> None:
    """Items are those that had rows at the export: erased ones stay, with the default."""
    run = Pairs(tmp_path)
    run.save()
    bundle = run.export(items=None)
    gone = ITEMS[:3]
    with Follower(bundle, run.root) as follower:
        run.train(LATER)
        hb.erase(run.model, {"item": gone})
        saved = run.save(delta=True)
        applied(follower)
    answer = asked(bundle)
    check_alike(answer, asked(run.exported_again(saved.path)))
    for items, scores in zip(answer["items"], answer["scores"], strict=True):
        assert len({scores[items.index(id)] for id in gone.tolist()}) == 1


def test_bundles_without_the_items_tower(tmp_path: Path) -> None:
    run = Pairs(tmp_path)
    run.save()
    bundle = run.export()
    about = json.loads((bundle / "bundle.json").read_text())
    del about["towers"]
    about["files"] = [each for each in about["files"] if each["name"] != "topk/item.onnx"]
    os.unlink(bundle / "topk" / "item.onnx")
    reseal(bundle / "bundle.json", about)
    run.train()
    run.save(delta=True)
    with Follower(bundle, run.root) as follower:
        version = applied(follower).version.model_version
    body, base = {"instances": asked_of_users()}, about["model_version"]
    with serving(bundle) as client:
        response = client.post(TOPK, json=body)
        assert response.status_code == 409
        error = response.json()["error"]
        assert version in error and f"Export the bundle again, or load version {base}." in error
        rows = [{**asked_of_users()[0], "item": 3}]
        predict = "/v1/models/pairs:predict"
        assert client.post(predict, json={"instances": rows}).status_code == 200
        load = {"parameters": {"version": base}}
        assert client.post("/v2/repository/models/pairs/load", json=load).status_code == 200
        assert client.post(TOPK, json=body).status_code == 200


def parts_in(bundle: Path) -> list[str]:
    where = bundle / "versions"
    return [str(each) for each in where.rglob("*.part")] if where.exists() else []


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Pairs(tmp_path)
    run.save()
    bundle = run.export()
    run.train()
    saved = run.save(delta=True)
    made = item_tower.ItemTower.vectors

    def full(*args: Any) -> Any:
        with contextlib.suppress(IndexError):
            return left.pop()(*args)
        raise OSError(errno.ENOSPC, "No space left on device")

    left = [made, made]
    with Follower(bundle, run.root) as follower:
        with monkeypatch.context() as patch:
            patch.setattr(item_tower, "AT_ONCE", 9)
            patch.setattr(item_tower.ItemTower, "vectors", full)
            with pytest.raises(OSError, match="No space left"):
                follower.poll()
        assert len(versions_of(bundle)) == 1 and not parts_in(bundle)
        applied(follower)
    check_alike(asked(bundle), asked(run.exported_again(saved.path)))


def test_vectors_that_are_not_finite(tmp_path: Path) -> None:
    run = Pairs(tmp_path)
    run.save()
    bundle = run.export()
    before = asked(bundle)
    with torch.no_grad():
        kept = [each.clone() for each in run.model.item_tower.parameters()]
        for each in run.model.item_tower.parameters():
            each.fill_(3e38)
    run.step += 1
    run.save(delta=True)
    with Follower(bundle, run.root) as follower:
        lowest = ITEMS.min()
        with pytest.raises(hb.serve.BundleError, match=f"item {lowest} has a number that is not"):
            follower.poll()
        assert len(versions_of(bundle)) == 1 and not parts_in(bundle)
        assert asked(bundle) == before
        with torch.no_grad():
            for each, value in zip(run.model.item_tower.parameters(), kept, strict=True):
                each.copy_(value)
        run.train()
        saved = run.save(delta=True)
        applied(follower)
    check_alike(asked(bundle), asked(run.exported_again(saved.path)))


def test_damaged_files_of_items(tmp_path: Path) -> None:
    run = Pairs(tmp_path, tags=True)
    run.save()
    bundle = run.export()
    topk = bundle / "topk"
    assert sorted(os.listdir(topk)) == sorted(
        ["1.ids.npy", "1.offsets.npy", "ids.npy", "item.onnx", "user.onnx", "vectors.npy"]
    )
    run.train()
    run.save(delta=True)
    offsets = np.load(topk / "1.offsets.npy")
    for name, contents in (
        ("1.offsets", offsets[::-1].copy()),
        ("1.offsets", np.where(offsets == 3, 40, offsets)),
        ("1.offsets", offsets + 1),
        ("1.ids", np.zeros(50, np.int64)),
        ("ids", np.arange(33)),
        ("item", None),
        ("user", None),
    ):
        path = topk / (f"{name}.npy" if contents is not None else f"{name}.onnx")
        good = path.read_bytes()
        if contents is None:
            path.write_bytes(good[:-9] + b"123456789")
        else:
            np.save(path, contents)
        with Follower(bundle, run.root) as follower:
            with pytest.raises(hb.serve.BundleError, match=f"{path.name} is damaged"):
                follower.poll()
        assert len(versions_of(bundle)) == 1 and not parts_in(bundle)
        path.write_bytes(good)
    with Follower(bundle, run.root) as follower:
        folder = Path(applied(follower).version.folder)
    for name, told in (("user.onnx", "CRC32C"), ("vectors.npy", "bytes")):
        path = folder / "topk" / name
        good = path.read_bytes()
        path.write_bytes(good[:-9] + b"123456789" if name == "user.onnx" else good[:-1])
        with pytest.raises(hb.serve.BundleError, match=f"{name}.*{told}"):
            served_from(bundle)
        path.write_bytes(good)
    asked(bundle)


def test_items_that_no_tower_takes(tmp_path: Path) -> None:
    run = Pairs(tmp_path)
    one = hb.Jagged(ITEMS, lengths=torch.ones(len(ITEMS), dtype=torch.long))
    with pytest.raises(hb.errors.InputError, match="It is the item's id"):
        run.export(items=[{"item": one}])
    row = torch.full((1, 4), 3e38)
    run.model.embeddings.assign("item", ITEMS[-1:], row)
    few = run.batch(ITEMS[:8])
    with pytest.raises(hb.serve.ExportError, match=f"item {ITEMS[-1]} has a number that is not"):
        run.export(sample=few)


class Load:
    """Threads that ask for the best items, and compare the scores with those of the version that answers.

    Args:
        expected: (USERS, N) scores of ITEMS, in the order of their ids, by step.
    """

    def __init__(self, server: Running, expected: dict[int, torch.Tensor]) -> None:
        self._server, self._expected = server, expected
        self.steps: list[int] = []
        self.failed: list[BaseException] = []
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(3)]

    def __enter__(self) -> Load:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for each in self._threads:
            each.join()

    def _ask(self) -> None:
        while not self._ended.is_set() and not self.failed:
            try:
                self.steps.append(check_version(self._server, self._expected))
            except BaseException as error:
                self.failed.append(error)


def check_version(server: Running, expected: dict[int, torch.Tensor]) -> int:
    """Whether scores are those of the version that an answer names. Returns its step."""
    body = {"instances": asked_of_users(), "k": 10}
    status, answer, headers = server.told("POST", TOPK, json.dumps(body).encode())
    assert status == 200, answer
    step = int(headers["x-model-version"].partition("-")[0])
    at = {id: n for n, id in enumerate(sorted(ITEMS.tolist()))}
    for row, items, scores in zip(expected[step], answer["items"], answer["scores"], strict=True):
        best = row.sort(descending=True).values[:10]
        own = row[[at[id] for id in items]]
        torch.testing.assert_close(torch.tensor(scores), best, atol=2e-5, rtol=0)
        torch.testing.assert_close(own, best, atol=2e-5, rtol=0)
    return step


def test_vectors_of_earlier_versions_are_given_back(tmp_path: Path) -> None:
    """When a server has another version, not when memory is collected: their files may be removed."""
    run = Pairs(tmp_path)
    run.save()
    bundle = run.export()
    settings = ServeSettings(bundle=str(bundle), name="pairs", limits=LIMITS)
    gc.collect()
    gc.disable()
    try:
        model = ServedModel(settings, current(bundle))
        assert isinstance(model.topk, TopK)
        parts = {
            name: each.of_lists([users[name] for users in asked_of_users()])
            for name, each in model.topk.inputs.items()
        }
        assert model.topk.best(3) is (best := model.topk.best(3))
        assert best.answers(parts, model.tables)["items"].shape == (len(asked_of_users()), 3)
        held = weakref.ref(model.topk)
        del model, best
        assert held() is None
    finally:
        gc.enable()


def test_a_list_without_items(tmp_path: Path) -> None:
    run = Pairs(tmp_path)
    run.save()
    bundle = run.export(items=None, tables={"embeddings.item": LATER})
    run.train()
    run.save(delta=True)
    with Follower(bundle, run.root) as follower:
        applied(follower)
    with serving(bundle) as client:
        answer = client.post(TOPK, json={"instances": asked_of_users()[:1]})
        assert answer.json() == {"items": [[]], "scores": [[]]}


@pytest.mark.process
@pytest.mark.parametrize("shards", [("--shards", 2), ()][: examples(1, 2)])
def test_versions_are_swapped_under_load(tmp_path: Path, shards: tuple[object, ...]) -> None:
    run = Pairs(tmp_path)
    run.save()
    bundle = run.export()
    expected = {run.step: run.scores()}
    options = ("--follow", run.root, "--workers", 2, "--max-wait", 5, "--name", "pairs", *shards)
    with served(bundle, *options) as server:
        with Load(server, expected) as load:
            soon(lambda: load.failed or load.steps)
            for number in range(VERSIONS):
                run.train()
                expected[run.step] = run.scores()
                run.save(delta=number % 3 != 2)
                soon(lambda: load.failed or run.step in load.steps[-6:])
        assert not load.failed, load.failed[0]
        assert {*load.steps} == {*expected}
        first = versions_of(bundle)[0].model_version
        body = {"parameters": {"version": first}}
        assert server.post("/v2/repository/models/pairs/load", body)[0] == 200
        step = int(first.partition("-")[0])
        soon(lambda: all(check_version(server, expected) == step for _ in range(8)))
