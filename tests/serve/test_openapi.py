"""The OpenAPI page tells what the server does: requests that are made of it, right and wrong ones, are
answered as it says."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import schemathesis
import torch
from effort import examples
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    negative_data_rejection,
    positive_data_acceptance,
)
from serve.test_requests import LIMITS, Clicks, sample_of
from torch import Tensor, nn

import hotbed as hb
from hotbed.serve.http.app import app_of
from hotbed.serve.http.settings import ServeSettings


class Kinds(nn.Module):
    """One input, of narrow ids, and outputs of all types, one of them not finite where no id has a row."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = hb.EmbeddingCollection([hb.Table("a/b", 4, padding_idx=-5)], seed=1)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        found = self.vectors(batch)["a/b"]
        kinds = {"bool": found > 0, "whole": (10 * found).long(), "half": found.half()}
        log = found.abs().sum(1).log()
        return {**kinds, "sum": found.sum(1), "double": found.double(), "log": log}


class Rows(nn.Module):
    """Bags of a table with a padding id."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = hb.EmbeddingCollection([hb.Table("id", 4, rows=5, padding_idx=2)], seed=1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.vectors(batch)["id"]


MODELS: dict[str, tuple[type[nn.Module], Any]] = {
    "clicks": (Clicks, sample_of(6)),
    "{kinds} ü": (Kinds, {"a/b": torch.arange(6, dtype=torch.int32)}),
    "rows": (Rows, {"id": torch.arange(4).reshape(2, 2)}),
}


@pytest.fixture(scope="module", params=MODELS)
def page(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.manual_seed(0)
    kind, sample = MODELS[request.param]
    model = kind()
    model(sample)
    path = tmp_path_factory.mktemp("bundle") / "bundle"
    hb.export(model.eval(), path, sample=sample)
    limits = dataclasses.replace(LIMITS, body=1 << 20)
    app = app_of(ServeSettings(bundle=str(path), name=request.param, limits=limits))
    return schemathesis.openapi.from_asgi("/openapi.json", app)


@pytest.mark.parametrize("mode", GenerationMode)
def test_requests_are_answered_as_the_page_says(page: Any, mode: GenerationMode) -> None:
    is_right = mode is GenerationMode.POSITIVE
    for operation in [found.ok() for found in page.get_all_operations()]:
        asks = operation.method == "post"
        if not asks and not is_right:
            continue  # it takes nothing that can be wrong

        @settings(
            max_examples=examples(20 if asks else 4),
            deadline=None,
            suppress_health_check=[*HealthCheck],
        )
        @given(operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            response = case.call()
            # A schema cannot say that all lists have as many samples.
            without = [positive_data_acceptance]
            if response.status_code == 413:
                without.append(negative_data_rejection)  # it does not count as one there
            case.validate_response(response, excluded_checks=without)
            if is_right and isinstance(case.body, dict) and "instances" in case.body:
                # 1.0 is an integer for a schema, and not here.
                is_strict = "ids are integers" in response.text
                assert response.status_code == 200 or is_strict, response.text

        check()


def test_every_row_can_be_asked_for(page: Any, request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["page"] != "rows":
        return
    operation = page["/v1/models/rows:predict"]["POST"]
    for ids, status in ((range(5), 200), ([5], 400), ([-1], 400)):
        for id_ in ids:
            case = operation.Case(body={"inputs": [[id_, id_]]}, media_type="application/json")
            answer = case.call()
            assert answer.status_code == status, (id_, answer.text)
