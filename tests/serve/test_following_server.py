"""Servers that follow a training run: answers are those of one version each, and none is lost meanwhile."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import torch
from effort import examples
from serve.servers import Running, served, soon
from torch import Tensor, nn

import hotbed as hb

PREDICT = "/v1/models/bundle:predict"
VERSIONS = examples(6, 100)


class Telling(nn.Module):
    """Answers what a row and a weight say, which are both the number of the version."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = hb.EmbeddingCollection([hb.Table("user", 1), hb.Table("city", 1, rows=5)])
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        found = self.vectors({name: batch[name] for name in ("user", "city")})
        weight = self.weight + batch["x"]
        return {"row": found["user"], "static row": found["city"], "weight": weight}

    def become(self, number: float) -> None:
        for name in ("user", "city"):
            self.vectors.assign(name, torch.arange(5), torch.full((5, 1), number))
        with torch.no_grad():
            self.weight.fill_(number)


def asked(*ids: int) -> dict[str, Any]:
    return {"instances": [{"user": id, "city": id, "x": [0.0]} for id in ids]}


def numbers_of(server: Running) -> set[float]:
    """All numbers that an answer has: one, of one version."""
    status, answer = server.post(PREDICT, asked(0, 1, 2, 3, 4))
    assert status == 200, answer
    return {each[name][0] for each in answer["predictions"] for name in each}


def test_versions_are_swapped_under_load(tmp_path: Path) -> None:
    model = Telling()
    model.become(1)
    optimizer = hb.optim.SGD(model.parameters(), lr=0.1)
    run, bundle = tmp_path / "run", tmp_path / "bundle"
    hb.save(run, model, optimizer, step=1)
    sample = {"user": torch.arange(5), "city": torch.arange(5), "x": torch.zeros(5, 1)}
    hb.export(model, bundle, sample=sample, step=1)
    with served(bundle, "--follow", run, "--workers", 2, "--max-wait", 5) as server:
        seen: list[set[float]] = []
        failed: list[BaseException] = []
        ended = threading.Event()

        def load() -> None:
            while not ended.is_set():
                try:
                    seen.append(numbers_of(server))
                except BaseException as error:
                    failed.append(error)

        loads = [threading.Thread(target=load) for _ in range(3)]
        for each in loads:
            each.start()
        took = []
        try:
            for number in range(2, VERSIONS + 2):
                model.become(number)
                hb.save(run, model, optimizer, step=number, delta=number % 4 != 0)
                begun = time.monotonic()
                soon(lambda number=number: seen and seen[-1] == {number}, 30)
                took.append(time.monotonic() - begun)
        finally:
            ended.set()
            for each in loads:
                each.join()
        assert not failed, failed[0]
        assert all(len(each) == 1 for each in seen)
        assert {*range(2, VERSIONS + 2)} <= {n for each in seen for n in each}
        soon(lambda: _is_alone(server, VERSIONS + 1))
        status, there = server.ask("POST", "/v2/repository/index")
        assert status == 200 and [each["state"] for each in there].count("READY") == 1
        first = there[0]["version"]
        assert first.startswith("1-")
        body = {"parameters": {"version": first}}
        status, told = server.post("/v2/repository/models/bundle/load", body)
        assert status == 200 and told == {"version": first}
        soon(lambda: _is_alone(server, 1))
        status, told = server.ask("POST", "/v2/repository/models/bundle/load")
        assert status == 200 and told["version"].startswith(f"{VERSIONS + 1}-")
        soon(lambda: _is_alone(server, VERSIONS + 1))
        for body, wrong in (
            ({"parameters": {"version": "none"}}, 400),
            ({"parameters": {"version": 3}}, 400),
            ({"parameters": 3}, 400),
            (3, 400),
        ):
            assert server.post("/v2/repository/models/bundle/load", body)[0] == wrong
        assert server.post("/v2/repository/models/other/load", {})[0] == 404
        assert server.post("/v2/repository/models/bundle/unload", {})[0] == 400


def _is_alone(server: Running, number: int) -> bool:
    """Whether both workers, as far as they have answered, have a version."""
    return all(numbers_of(server) == {number} for _ in range(8))
