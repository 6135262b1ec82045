"""Runs with rows on an SSD, and what `hotbed inspect` shows of them."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
from command_line import run
from typer.testing import Result

from hotbed import _core
from hotbed.data import CATEGORIES, CriteoLog
from hotbed.train import recipe

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
        assert train(wide_log, tmp_path, "--save", tmp_path / "m").exit_code == 2
    result = train(wide_log, tmp_path, "--save", tmp_path / "m")
    assert result.exit_code == 2 and "holds rows of an earlier run" in result.stderr


def test_a_run_that_took_no_step_leaves_nothing_to_lose(wide_log: Path, tmp_path: Path) -> None:
    result = train(wide_log, tmp_path, host="100KB")
    assert result.exit_code == 2 and "Raise --host 100KB to at least" in result.stderr
    del result  # its traceback holds the model, which holds the folder
    gc.collect()
    result = train(wide_log, tmp_path)
    assert result.exit_code == 0, result.output
    assert "or trained nothing." in words(result)


@pytest.mark.parametrize(("free", "rows"), [(10**9, None), (8_500_000, 5_000), (8_500_000, 10**5)])
def test_a_model_that_memory_cannot_hold_is_refused_before_training(
    wide_log: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    rows: int | None,
) -> None:
    """900 samples of at most 26 rows of 32 bytes, beside 8 MB of --host."""
    counted = []

    def distinct_ids(*arguments: object) -> int:
        counted.append(rows)
        return rows or 0

    monkeypatch.setattr(_core, "available_memory", lambda: free)
    monkeypatch.setattr(recipe, "_distinct_ids", distinct_ids)
    result = train(wide_log, tmp_path, "--save", tmp_path / "m")
    assert counted == ([] if rows is None else [rows])
    if rows == 10**5:
        assert result.exit_code == 2
        assert "Error: --save cannot save this model: it copies all rows to" in words(result)
        assert not (tmp_path / "rows").exists() and not (tmp_path / "m").exists()
    else:
        assert result.exit_code == 0, result.output


def test_ids_are_counted_by_a_sample_of_them(wide_log: Path) -> None:
    settings = recipe.TrainSettings(data=(str(wide_log),))
    training, _ = CriteoLog(wide_log).split(0.1)
    distinct: set[tuple[str, int]] = set()
    for batch in training:
        distinct.update((name, int(i)) for name in CATEGORIES for i in batch[name])
    found = recipe._distinct_ids(settings, training)
    # One in 1,024 is looked at: the standard deviation of the count is 32 times its root.
    assert abs(found - len(distinct)) < 4 * 32 * len(distinct) ** 0.5
    assert 3_000 < len(distinct)


def test_inspect_shows_ids_as_the_log_has_them(wide_log: Path, tmp_path: Path) -> None:
    train(wide_log, tmp_path, "--batch-size", 16, host="2400KB")
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
