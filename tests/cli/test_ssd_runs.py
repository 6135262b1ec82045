"""Runs with rows on an SSD, and what `hotbed inspect` shows of them."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
from cli.command_line import run
from typer.testing import Result

from hotbed import _core
from hotbed.data import CATEGORIES
from hotbed.train import checkpoints, recipe, resuming
from hotbed.train.run_note import rows_may_go

pytestmark = pytest.mark.filterwarnings("default:The budget holds:UserWarning")


def train(
    log: Path, tmp_path: Path, *arguments: Any, host: str = "8MB", columns: int = 80
) -> Result:
    usual = ("--dim", 4, "--batch-size", 64, "--host", host, "--ssd", tmp_path / "rows")
    return run("train", "--data", log, *usual, *arguments, columns=columns)


def words(result: Result) -> str:
    return " ".join(result.stderr.split())


def test_a_run_that_saved_its_rows_is_followed_by_the_same(wide_log: Path, tmp_path: Path) -> None:
    saving = ("--save", tmp_path / "m")
    assert "were deleted" not in train(wide_log, tmp_path, *saving).stderr
    for options in (saving, ()):
        result = train(wide_log, tmp_path, *options)
        assert result.exit_code == 0, result.output
        assert f"Notice: the rows that an earlier run left in --ssd {tmp_path / 'rows'} were" in (
            words(result)
        )
    # What the last one has left is saved nowhere.
    before = contents(tmp_path / "rows")
    for options in (saving, ()):
        result = train(wide_log, tmp_path, *options)
        assert result.exit_code == 2 and "and pass --reset-ssd to delete them." in result.stderr
        assert f"Error: --ssd {tmp_path / 'rows'} holds rows of an earlier run" in result.stderr
        assert contents(tmp_path / "rows") == before
    assert train(wide_log, tmp_path, *saving, "--reset-ssd").exit_code == 0


def contents(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_run_that_could_not_save_keeps_its_rows(
    wide_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(recipe, "save_model", full)
        failed = train(wide_log, tmp_path, "--save", tmp_path / "m", host="1600KB")
        assert failed.exit_code == 2
    del failed
    gc.collect()
    result = train(wide_log, tmp_path, "--save", tmp_path / "m")
    assert result.exit_code == 2 and "holds rows of an earlier run" in result.stderr


def test_rows_beside_checkpoints_may_go_whatever_ends_the_run(
    wide_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it goes on, and ends before it has saved again."""
    seen = []

    def noted(function: Any) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            seen.append((function.__name__, rows_may_go(str(tmp_path / "rows"))))
            return function(*given, **options)

        return call

    for module, name in ((checkpoints, "save"), (resuming, "load"), (recipe, "fit")):
        monkeypatch.setattr(module, name, noted(getattr(module, name)))
    more = ("--checkpoint", tmp_path / "run", "--resume")
    for _ in range(2):
        assert train(wide_log, tmp_path, *more, host="1600KB").exit_code == 0
    names = ["save", "fit", "save", "load", "fit"]
    assert seen == [(name, True) for name in names]


def test_a_run_that_took_no_step_leaves_nothing_to_lose(wide_log: Path, tmp_path: Path) -> None:
    result = train(wide_log, tmp_path, host="100KB")
    assert result.exit_code == 2 and "Raise --host 100KB to at least" in result.stderr
    del result  # its traceback holds the model, which holds the folder
    gc.collect()
    result = train(wide_log, tmp_path)
    assert result.exit_code == 0, result.output
    assert "or trained nothing." in words(result)


def test_a_model_that_memory_cannot_hold_is_saved_and_predicts(
    wide_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = scores(wide_log, tmp_path, save(wide_log, tmp_path / "in memory"))
    # From here on whoever copies all rows of a table is refused.
    monkeypatch.setattr(_core, "available_memory", lambda: 10_000)
    saved = tmp_path / "saved"
    result = train(wide_log, tmp_path, "--save", saved, "--reset-ssd", host="1600KB")
    assert result.exit_code == 0, result.output
    tiers = ("--host", "1600KB", "--ssd", tmp_path / "for scores")
    assert scores(wide_log, tmp_path, saved, *tiers) == expected
    # What is there is the model's, which is elsewhere too.
    assert scores(wide_log, tmp_path, saved, *tiers) == expected
    # The rows of a run that are saved nowhere else are not touched.
    train(wide_log, tmp_path, "--reset-ssd", host="1600KB")
    refused = run(
        "predict", saved, "--data", wide_log, "--out", tmp_path / "x.csv",
        "--host", "1600KB", "--ssd", tmp_path / "rows",
    )  # fmt: skip
    assert refused.exit_code == 2 and "pass --reset-ssd to delete them" in words(refused)
    assert run("inspect", tmp_path / "rows").exit_code == 0
    assert "holds rows" in words(train(wide_log, tmp_path))


def save(log: Path, path: Path) -> Path:
    usual = ("--dim", 4, "--batch-size", 64)
    assert run("train", "--data", log, *usual, "--save", path).exit_code == 0
    return path


def scores(log: Path, tmp_path: Path, saved: Path, *options: object) -> str:
    out = tmp_path / "scores.csv"
    result = run("predict", saved, "--data", log, "--out", out, *options)
    assert result.exit_code == 0, result.output
    return out.read_text()


def test_all_rows_of_a_run_are_on_the_ssd_when_it_ends(wide_log: Path, tmp_path: Path) -> None:
    trained = tmp_path / "trained.json"
    train(wide_log, tmp_path, "--json", trained)  # in a budget that holds them all
    figures = tmp_path / "figures.json"
    assert run("inspect", tmp_path / "rows", "--json", figures).exit_code == 0
    shown = json.loads(figures.read_text())
    rows = sum(table["rows"] for log in shown["logs"] for table in log["tables"])
    assert rows == json.loads(trained.read_text())["stored_rows"] > 0


def test_inspect_shows_ids_as_the_log_has_them(wide_log: Path, tmp_path: Path) -> None:
    train(wide_log, tmp_path, "--batch-size", 16, host="1600KB")
    figures = tmp_path / "figures.json"
    result = run("inspect", tmp_path / "rows", "--json", figures)
    assert result.exit_code == 0, result.output
    used = json.loads(figures.read_text())["hottest"]
    assert used and used.keys() <= set(CATEGORIES)
    written = {field for line in wide_log.read_text().splitlines() for field in line.split("\t")}
    for rows in used.values():
        for row, *_ in rows[:5]:
            shown = "missing" if row < 0 else f"{row:08x}"
            assert shown in result.stdout and (row < 0 or shown in written)


def test_inspect_leaves_out_what_is_empty(wide_log: Path, tmp_path: Path) -> None:
    train(wide_log, tmp_path, "--save", tmp_path / "m")
    result = run("inspect", tmp_path / "rows")
    assert result.exit_code == 0 and "bytes a row" not in result.stdout
    assert "rows-1: no rows of C1, C2," in " ".join(result.stdout.split())


def test_inspect_writes_over_no_file_of_the_run(wide_log: Path, tmp_path: Path) -> None:
    train(wide_log, tmp_path)
    before = contents(tmp_path / "rows")
    for name in ("hottest.json", "rows-1/manifest", "in-use", "hotbed-run.json"):
        result = run("inspect", tmp_path / "rows", "--json", tmp_path / "rows" / name)
        assert result.exit_code == 2 and "Name another." in words(result)
    assert contents(tmp_path / "rows") == before


def test_look_ahead_that_does_not_fit_is_a_notice(wide_log: Path, tmp_path: Path) -> None:
    # Rows of three batches.
    result = train(wide_log, tmp_path, "--dim", 64, "--depth", 8, "--horizon", 8, host="3500KB")
    assert result.exit_code == 0, result.output
    assert "Notice: The budget holds" in words(result) and "not --depth 8:" in words(result)
    assert ".py" not in result.stderr and "UserWarning" not in result.stderr


@pytest.mark.parametrize("columns", [40, 60, 80, 132])
def test_the_bar_fits_into_the_line(
    wide_log: Path, tmp_path: Path, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "")
    result = train(wide_log, tmp_path, columns=columns)
    bars = [line for line in result.stderr.splitlines() if "train" in line or "hits" in line]
    assert len(bars) >= 2 and max(map(len, bars)) <= columns
    assert "…" not in result.stderr and "loss 0." in result.stderr
    assert ("samples/s" in result.stderr) == (columns >= 80)
