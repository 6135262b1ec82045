"""`hotbed report`, in a real browser where there is one."""

from __future__ import annotations

import subprocess
import zlib
from pathlib import Path

import pytest
from browsers import BROWSER
from cli.command_line import run, train
from train.test_page import Parsed, check_self_contained


@pytest.fixture(scope="module")
def record(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    more = ("--validation-fraction", 0.1, "--validate-every", 20, "--host", "1MB")
    places = ("--ssd", folder / "rows", "--run", folder / "r")
    result, _ = train(log, folder, *more, *places, "--epochs", 4)
    assert result.exit_code == 0, result.output
    return folder / "r"


TITLES = [
    "Loss",
    "Validation: auc",
    "Validation: logloss",
    "Calibration on the test samples",
    "Speed",
    "Where rows were found",
    "Bytes by table",
    "Command",
    "Settings",
    "Versions and hardware",
]


def test_the_page_has_all_of_a_run(record: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.html"
    result = run("report", record, "--out", out)
    assert result.exit_code == 0 and f"is in {out}" in result.output.replace("\n", "")
    parsed = Parsed(out.read_text(encoding="utf-8"))
    check_self_contained(parsed)
    assert all(title in parsed.text for title in TITLES)
    assert sum(tag == "svg" for tag, _ in parsed.tags) == 7
    assert "test AUC" in parsed.text and "C26" in parsed.text and "hotbed train" in parsed.text
    assert "prefers-color-scheme: dark" in parsed.text


def pixels(path: Path) -> set[bytes]:
    """The distinct bytes behind a PNG's filters: more than a few where something is drawn."""
    data, at, packed = path.read_bytes(), 8, b""
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        if data[at + 4 : at + 8] == b"IDAT":
            packed += data[at + 8 : at + 8 + size]
        at += 12 + size
    raw = zlib.decompress(packed)
    return {raw[n : n + 1] for n in range(len(raw))}


@pytest.mark.process
@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_a_browser_draws_it(record: Path, tmp_path: Path) -> None:
    assert BROWSER is not None
    out, shot = tmp_path / "run.html", tmp_path / "run.png"
    assert run("report", record, "--out", out).exit_code == 0
    common = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]

    def browsed(*more: str) -> str:
        done = subprocess.run(
            [*common, *more, out.as_uri()], capture_output=True, text=True, timeout=120, check=True
        )
        return done.stdout

    document = browsed("--dump-dom")
    assert all(title in document for title in TITLES) and document.count("<svg") == 7
    browsed(f"--screenshot={shot}", "--window-size=1100,2000")
    assert len(pixels(shot)) > 50


def test_what_cannot_be_drawn_or_written_is_told(record: Path, tmp_path: Path) -> None:
    for arguments, message in [
        ((tmp_path,), "holds no record of a run"),
        ((tmp_path / "none",), "holds no record of a run"),
        ((record, "--out", record / "run.json"), "is a file"),
        ((record, "--out", tmp_path / "no/run.html"), "does not exist"),
        ((record, "--out", tmp_path), "it is a folder"),
    ]:
        before = (record / "run.json").read_bytes()
        result = run("report", *arguments)
        assert result.exit_code == 2, result.output
        assert message in " ".join(result.stderr.split()), result.output
        assert (record / "run.json").read_bytes() == before
