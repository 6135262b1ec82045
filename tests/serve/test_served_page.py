"""The page of a server, in a browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from browsers import BROWSER, Browser, browser
from serve.servers import Running, served
from torch import Tensor, nn

import hotbed as hb

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(BROWSER is None, reason="needs chromium"),
]
HOSTILE = "<img src=x onerror=document.title='taken'>"


class Pair(nn.Module):
    """Two outputs, and an input whose name is markup."""

    def __init__(self) -> None:
        super().__init__()
        tables = [hb.Table("user", 3), hb.Table("tags", 3, rows=10, combiner="mean")]
        self.vectors = hb.EmbeddingCollection(tables, {HOSTILE: "user", "tags": "tags"}, seed=1)
        self.top = nn.Linear(6, 1)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        found = self.vectors({name: batch[name] for name in (HOSTILE, "tags")})
        score = self.top(torch.cat([*found.values()], 1))[:, 0] + batch["x"][:, 0]
        return {"click": score.sigmoid(), "score": score}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = Pair()
    tags = hb.Jagged(torch.arange(6), lengths=torch.ones(6, dtype=torch.long))
    sample = {HOSTILE: torch.arange(6), "tags": tags, "x": torch.rand(6, 1)}
    model(sample)
    path = tmp_path_factory.mktemp("page") / "bundle"
    return hb.export(model, path, sample=sample, step=5)


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Running]:
    with served(bundle) as server:
        yield server


@pytest.fixture
def page(server: Running, tmp_path: Path) -> Iterator[Browser]:
    with browser(tmp_path) as page:
        page.open(f"http://127.0.0.1:{server.port}/")
        page.soon("document.getElementById('body')?.value")
        yield page
        here = (f"http://127.0.0.1:{server.port}/", "data:")
        assert [url for url in page.asked if not url.startswith(here)] == []
        assert page.value("document.title") == "Hotbed"


def text_of(page: Browser, id: str) -> str:
    found: str = page.value(f"document.getElementById({id!r}).innerText")
    return found


def test_it_shows_the_signature(page: Browser, server: Running) -> None:
    version = server.get("/v1/models/bundle")[1]["model_version_status"][0]["version"]
    assert text_of(page, "title") == f"bundle, version {version}" and version.startswith("5-")
    rows = page.value(
        "[...document.getElementById('signature').rows].map(r => [...r.cells].map(c => c.innerText))"
    )
    assert rows == [
        ["name", "values", "type", "of a sample"],
        [HOSTILE, "ids", "int64", "one"],
        ["tags", "ids", "int64", "any number"],
        ["x", "numbers", "float32", "1"],
        ["click", "answered", "float32", "one"],
        ["score", "answered", "float32", "one"],
    ]
    assert "POST /v1/models/bundle:predict" in text_of(page, "paths")
    assert not page.value("document.getElementById('with-token').checkVisibility()")
    assert page.faults == []


def test_it_asks(page: Browser, server: Running) -> None:
    sample = server.get("/sample")[1]["instances"]
    assert page.value("JSON.parse(document.getElementById('body').value)") == {"instances": sample}
    page.value("document.getElementById('ask').click()")
    page.soon("/^[0-9]+\\.[0-9] ms$/.test(document.getElementById('latency').innerText)")
    answer = page.value("JSON.parse(document.getElementById('answer').innerText)")
    assert answer == server.post("/v1/models/bundle:predict", {"instances": sample})[1]
    assert len(answer["predictions"]) == len(sample)
    page.value("document.getElementById('often').click()")
    found = "document.getElementById('latency').innerText.startsWith('median ')"
    page.soon(found)
    assert text_of(page, "latency").endswith(" ms")
    assert sum(url.endswith(":predict") for url in page.asked) == 101
    assert page.faults == []


def test_it_tells_what_is_wrong(page: Browser) -> None:
    for body, told in (
        ('{"instances": [{"x": [1], "tags": ["<b>"]}]}', "is missing in instances[0]"),
        ("{", "The body is no JSON"),
    ):
        page.value(f"document.getElementById('body').value = {body!r}")
        page.value("document.getElementById('often').click()")
        page.soon(f"document.getElementById('answer').innerText.includes({told!r})")
        assert page.value("document.getElementById('answer').className") == "wrong"
    page.value("window.before = true")
    page.value("location.reload()")
    page.soon("!window.before && document.getElementById('body')?.value")
    page.value("document.getElementById('ask').click()")
    page.soon("document.getElementById('answer').innerText.includes('predictions')")
    assert page.value("document.getElementById('answer').className") == ""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_narrow_screen(page: Browser, scheme: str) -> None:
    page.call(
        "Emulation.setDeviceMetricsOverride",
        width=360,
        height=640,
        deviceScaleFactor=1,
        mobile=True,
    )
    feature = {"name": "prefers-color-scheme", "value": scheme}
    page.call("Emulation.setEmulatedMedia", features=[feature])
    page.value("document.getElementById('ask').click()")
    page.soon("document.getElementById('answer').innerText.includes('predictions')")
    assert page.value("document.documentElement.scrollWidth") <= 360
    colors = (
        "(e => [e.color, e.backgroundColor].map(c => c.match(/\\d+/g).slice(0, 3).map(Number)))"
    )
    for id in ("body", "answer"):
        styled = f"{colors}(getComputedStyle(document.getElementById({id!r})))"
        text, behind = (sum(color) for color in page.value(styled))
        assert (text > behind) == (scheme == "dark") and abs(text - behind) > 300


def test_it_asks_for_a_token(bundle: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("secret\n")
    with served(bundle, "--token-file", tokens) as server, browser(tmp_path / "files") as page:
        page.open(f"http://127.0.0.1:{server.port}/")
        page.soon("document.getElementById('with-token')?.checkVisibility()")
        page.soon("document.getElementById('answer').innerText.includes('A token is needed')")
        for token in ("wrong", "secret"):
            page.value(f"document.getElementById('token').value = {token!r}")
            page.value("document.getElementById('answer').textContent = ''")
            page.value("document.getElementById('enter').click()")
            if token == "wrong":
                page.soon("document.getElementById('answer').innerText.includes('token')")
                assert page.value("document.getElementById('body').value") == ""
        page.soon("document.getElementById('body').value")
        page.value("document.getElementById('ask').click()")
        page.soon("document.getElementById('answer').innerText.includes('predictions')")
        assert not any("secret" in url for url in page.asked)


def test_it_shows_columns_and_topk(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    schema = hb.data.Schema({"user": hb.data.Id(), "item": hb.data.Id(values="int")})
    model = hb.models.TwoTower.from_schema(schema, dim=4)
    sample = {"user": torch.arange(6), "item": torch.arange(6)}
    model(sample)
    path = hb.export(model, tmp_path / "bundle", sample=sample)
    with served(path) as server, browser(tmp_path / "files") as page:
        page.open(f"http://127.0.0.1:{server.port}/")
        page.soon("document.getElementById('body')?.value")
        signature = text_of(page, "signature").splitlines()
        assert signature[1:] == [
            "user\tids\tint64\tone",
            "item\tids\tint64\tone",
            "user\tcolumn of records\tstring, integer, null\tone",
            "item\tcolumn of records\tstring, integer, null\tone",
            "output\tanswered\tfloat32\tone",
        ]
        assert ":topk" in text_of(page, "paths") and page.faults == []
        body = '{"records": [{"user": "<b>u", "item": 3}]}'
        page.value(f"document.getElementById('body').value = {body!r}")
        page.value("document.getElementById('ask').click()")
        page.soon("document.getElementById('answer').innerText.includes('predictions')")
