"""Rows that are split over processes: answers have the same bits, also while processes die."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from serve.servers import Running, served, soon
from starlette.testclient import TestClient

import hotbed as hb
from hotbed.errors import InputError
from hotbed.serve.bundles.versions import current, open_layers
from hotbed.serve.http.app import app_of
from hotbed.serve.http.settings import ServeSettings
from hotbed.serve.shards.addresses import Addresses
from hotbed.serve.shards.messages import (
    Wanted,
    read_rows,
    read_wanted,
    rows_message,
    wanted_message,
)
from hotbed.serve.shards.splits import Splits

PREDICT = "/v1/models/bundle:predict"
KILLS = examples(2, 50)


class Summing(torch.nn.Module):
    """Tables of all kinds, whose vectors are answered as they are."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            hb.Table("user", 5),
            hb.Table("city", 3, rows=40, combiner="mean", padding_idx=-1),
            hb.Table("seen", 2, combiner="max"),
        ]
        self.vectors = hb.EmbeddingCollection(tables, seed=3)
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        found = self.vectors({name: batch[name] for name in ("user", "city", "seen")})
        return torch.cat([*found.values()], 1) * self.weight


def bags(count: int, most: int) -> hb.Jagged:
    lengths = torch.randint(0, 4, (count,))
    return hb.Jagged(torch.randint(0, most, (int(lengths.sum()),)), lengths=lengths)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = Summing()
    for _ in range(20):
        sample = {"user": torch.randint(-(1 << 62), 1 << 62, (50,)), "city": bags(50, 40)}
        sample["seen"] = bags(50, 99)
        model(sample)
    folder = tmp_path_factory.mktemp("shards") / "bundle"
    return hb.export(model, folder, sample=sample, default="first")


def requests_of(bundle: Path, count: int) -> list[dict[str, Any]]:
    """Requests whose ids mostly have a row."""
    rng = random.Random(0)
    users = open_layers(bundle, current(bundle)).tables["vectors.user"].layers[0].ids
    assert users is not None and len(users) == 1000
    known = users.tolist()
    return [
        {
            "instances": [
                {
                    "user": rng.choice([*known, rng.getrandbits(60)]),
                    "city": [rng.randrange(40) for _ in range(rng.randrange(4))],
                    "seen": [rng.randrange(120) for _ in range(rng.randrange(4))],
                }
                for _ in range(rng.randrange(1, 9))
            ]
        }
        for _ in range(count)
    ]


def test_answers_are_the_same_while_processes_die(bundle: Path) -> None:
    asked = requests_of(bundle, 40)
    with served(bundle) as one:
        expected = [one.post(PREDICT, each) for each in asked]
    assert {status for status, _ in expected} == {200}
    options = ("--shards", 2, "--replicas", 2, "--workers", 2, "--max-wait", 5)
    with served(bundle, *options) as server:
        assert [server.post(PREDICT, each) for each in asked] == expected
        wrong: list[object] = []
        broken: list[float] = []
        killed: list[float] = []
        ended = threading.Event()

        def load(seed: int) -> None:
            rng = random.Random(seed)
            while not ended.is_set():
                n = rng.randrange(len(asked))
                begun = time.monotonic()
                try:
                    answer = server.post(PREDICT, asked[n])
                except (OSError, HTTPException):
                    broken.append(begun)
                    continue
                if answer != expected[n]:
                    wrong.append(answer)

        loads = [threading.Thread(target=load, args=(seed,)) for seed in range(3)]
        for each in loads:
            each.start()
        rng = random.Random(1)
        try:
            for _ in range(KILLS):
                there = server.workers()
                assert len(there) == 6
                os.kill(rng.choice(there), signal.SIGKILL)
                killed.append(time.monotonic())
                soon(lambda gone=there: _all_live(server, gone), 60)
        finally:
            ended.set()
            for each in loads:
                each.join()
        assert not wrong, wrong[0]
        late = [at for at in broken if not any(at - 2 < when < at + 2 for when in killed)]
        assert not late
        assert len(broken) <= 6 * KILLS  # those that were with one that was killed


def _all_live(server: Running, before: list[int]) -> bool:
    """Whether there are as many processes as before, all of which have opened the bundle."""
    there = server.workers()
    return len(there) == len(before) and there != before and all(map(_has_opened, there))


def _has_opened(pid: int) -> bool:
    """Whether rows are mapped: those that ask a process before that wait for it."""
    try:
        return ".rows.npy" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def test_shards_on_other_machines(bundle: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("secret\n")
    file = tmp_path / "shards.json"
    asked = requests_of(bundle, 5)
    header = {"authorization": "Bearer secret"}

    def answer(server: Running, body: object) -> tuple[int, Any]:
        return server.ask("POST", PREDICT, json.dumps(body).encode(), header)

    one = ("--token-file", tokens)
    with TestClient(app_of(ServeSettings(bundle=str(bundle), name="bundle"))) as alone:
        expected = [alone.post(PREDICT, json=each).json() for each in asked]
    with (
        served(bundle, "--rows-only", *one) as first,
        served(bundle, "--rows-only", *one) as second,
    ):
        names = [[f"localhost:{first.port}"], [f"127.0.0.1:{second.port}"]]
        file.write_text(json.dumps({"shards": names}))
        with served(bundle, "--shards-file", file, "--timeout", 2, *one) as front:
            for each, told in zip(asked, expected, strict=True):
                assert answer(front, each) == (200, told)
            assert first.ask("POST", "/rows", b"{}", header)[0] == 400
            assert first.ask("POST", "/rows", b"{}")[0] == 401
            first.ended()
            status, told = answer(front, asked[0])
            assert status == 503 and "Shard 0 of 2 does not answer" in told["error"]
            with served(bundle, "--rows-only", *one) as third:
                file.write_text(json.dumps({"shards": [[f"127.0.0.1:{third.port}"], names[1]]}))
                soon(lambda: answer(front, asked[0])[0] == 200, 10)
                assert answer(front, asked[0]) == (200, expected[0])


@settings(max_examples=examples(50), deadline=None)
@given(
    st.integers(1, 5), st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=30), st.booleans()
)
def test_every_id_is_with_one_shard(shards: int, ids: list[int], is_static: bool) -> None:
    class Base:
        def __init__(self) -> None:
            self.ids = None if is_static else np.array(sorted({*ids}), np.int64)

    class Table:
        layers = (Base(),)
        about: dict[str, Any] = {"rows": 7 if is_static else len({*ids})}

    table: Any = Table()
    splits = Splits({"t": table}, shards)
    asked = np.unique(np.array([*ids, *range(9)], np.int64))
    cuts = splits.cuts("t", asked)
    assert cuts[0] == 0 and cuts[-1] == len(asked) and cuts == sorted(cuts)
    assert len(cuts) == shards + 1
    own = np.arange(7) if is_static else table.layers[0].ids
    sizes = np.diff(splits.cuts("t", own))
    assert sizes.max(initial=0) - sizes.min(initial=10**9) <= 1
    # An id is with the same shard whatever else is asked.
    for shard in range(shards):
        for id in asked[cuts[shard] : cuts[shard + 1]][:5]:
            alone = splits.cuts("t", np.array([id]))
            assert np.searchsorted(alone, 0, side="right") - 1 == shard


@settings(max_examples=examples(50), deadline=None)
@given(st.dictionaries(st.text(max_size=5), st.lists(st.integers(-5, 5), max_size=4), max_size=4))
def test_messages_are_read_as_they_were_written(ids: dict[str, list[int]]) -> None:
    wanted = Wanted("1-ab", {name: np.array(each, np.int64) for name, each in ids.items()})
    again = read_wanted(wanted_message(wanted))
    assert again.version == "1-ab" and [*again.ids] == [*ids]
    dims = {name: n + 1 for n, name in enumerate(ids)}
    rows = {name: np.random.rand(len(each), dims[name]).astype("f4") for name, each in ids.items()}
    found = read_rows(rows_message([*rows.values()]), again, dims)
    for name, each in rows.items():
        np.testing.assert_array_equal(again.ids[name], ids[name])
        np.testing.assert_array_equal(found[name], each)
    with pytest.raises(ValueError, match="numbers, and"):
        read_rows(rows_message([*rows.values()]) + bytes(4), again, dims)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"[]\n",
        b'{"version": 1, "counts": {}}\n',
        b'{"version": "1", "counts": {"a": -1}}\n',
        b'{"version": "1", "counts": {"a": true}}\n' + bytes(8),
        b'{"version": "1", "counts": {"a": 1}}\n' + bytes(7),
        b'{"version": "1", "counts": {"a": 9999999999999999999999}}\n' + bytes(8),
    ],
)
def test_wrong_messages(message: bytes) -> None:
    with pytest.raises(ValueError):
        read_wanted(message)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"shards": []}', '{"shards": [[]]}', '{"shards": [[1]]}']
)
def test_wrong_files_of_addresses(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(InputError):
        Addresses(str(tmp_path / "file")).replicas()


def test_names_are_resolved(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(
        json.dumps(
            {"shards": [["localhost:1", "127.0.0.1:2"], ["unix:/none", "nowhere.invalid:1"]]}
        )
    )
    first, second = Addresses(str(tmp_path / "file")).replicas()
    assert {"127.0.0.1:1", "127.0.0.1:2"} <= {*first} and second == []
