"""`hotbed train --from`: a model goes on with the next day's data."""

from __future__ import annotations

import gzip
import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cli.command_line import run

import hotbed as hb
from hotbed.checkpoint import load_model
from hotbed.checkpoint.inspect import differences
from hotbed.train.report import OutputError
from hotbed.train.saved import save_model

SIZE = ("--dim", 4, "--batch-size", 128, "--test-fraction", 0, "--lr", 0.01)
DAY = 128 * 16


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory, criteo_log: Path) -> list[Path]:
    """Three consecutive slices of the Criteo log."""
    folder = tmp_path_factory.mktemp("days")
    with gzip.open(criteo_log, "rt") as log:
        made = []
        for number in range(3):
            made.append(folder / f"day_{number}.tsv")
            made[-1].write_text("".join(itertools.islice(log, DAY)))
    return made


def train(days: Sequence[Path], *arguments: Any) -> str:
    result = run("train", "--data", *days, *SIZE, *arguments)
    assert result.exit_code == 0, result.output
    return " ".join(result.stderr.split())


@pytest.mark.data
@pytest.mark.parametrize("model", ["dlrm", "wide-deep"])
@pytest.mark.parametrize("tiers", [False, True])
def test_day_after_day_is_as_all_days_at_once(
    tmp_path: Path, days: list[Path], model: str, tiers: bool
) -> None:
    """Rows, states and steps stay, and new ids enter: the same bits as in one run."""
    kind = ("--model", model)
    train(days, *kind, "--save", tmp_path / "all")
    rows = []
    for number, day in enumerate(days):
        begun = ("--from", tmp_path / "model") if number else ()
        storage = ("--host", "64MB", "--ssd", tmp_path / "rows") if tiers else ()
        figures = tmp_path / "figures.json"
        train([day], *kind, *begun, *storage, "--save", tmp_path / "model", "--json", figures)
        rows.append(json.loads(figures.read_text())["stored_rows"])
    assert rows[0] < rows[1] < rows[2]
    assert json.loads(figures.read_text())["steps"] == 3 * 16
    names = [path.name for path in (tmp_path / "model").iterdir()]
    assert names == ["step-000000000048"]
    for table in differences(str(tmp_path / "all"), str(tmp_path / "model")):
        assert (table.only_first, table.only_second, table.changed) == (0, 0, 0) and table.equal
    expected = scores(tmp_path / "all", days[0], tmp_path)
    assert scores(tmp_path / "model", days[0], tmp_path) == expected


def scores(model: Path, log: Path, folder: Path) -> str:
    out = folder / "scores.csv"
    assert run("predict", model, "--data", log, "--out", out).exit_code == 0
    return out.read_text()


def test_a_run_that_was_killed_goes_on_and_does_not_begin_again(tmp_path: Path, log: Path) -> None:
    train([log], "--save", tmp_path / "first")
    both = (
        "--from",
        tmp_path / "first",
        "--checkpoint",
        tmp_path / "run",
        "--resume",
        "--every",
        4,
        "--keep",
        2,
    )
    train([log], *both)
    assert len(list((tmp_path / "run").iterdir())) == 2
    steps = figures_of(tmp_path, log, *both)
    assert steps["resumed_at"] == steps["steps"] == 2 * figures_of(tmp_path, log)["steps"]
    result = run("train", "--data", log, *SIZE, "--checkpoint", tmp_path / "run", "--resume")
    assert result.exit_code == 2 and "--from" in result.stderr


def test_a_run_goes_on_from_another_directory(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    train([log], "--save", "first")
    train([log], "--from", "first", "--checkpoint", "run")
    for here, up in ((".", ""), ("there", "../")):
        monkeypatch.chdir(tmp_path / here)
        for first in (f"{up}first", f"{up}./first/", tmp_path / "first"):
            train([log], "--from", first, "--checkpoint", f"{up}run", "--resume")
    result = run(
        *("train", "--data", log, *SIZE, "--from", tmp_path / "run"),
        *("--checkpoint", tmp_path / "run", "--resume"),
    )
    assert result.exit_code == 2 and "and now it is" in result.stderr


def figures_of(folder: Path, log: Path, *arguments: Any) -> dict[str, Any]:
    train([log], *arguments, "--json", folder / "figures.json")
    found: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    return found


def test_what_does_not_fit_is_told(tmp_path: Path, log: Path) -> None:
    train([log], "--save", tmp_path / "first")
    told = train([log], "--from", tmp_path / "first", "--lr", 0.5)
    assert f"--lr is 0.5 from here on; the model in --from {tmp_path / 'first'} had 0.01" in told
    for options, message in (
        (("--dim", 8), "has --dim 4, and now it is 8"),
        (("--model", "wide-deep"), "has --model dlrm, and now it is wide-deep"),
        (("--optimizer", "sgd"), "was saved with another optimizer"),
    ):
        result = run("train", "--data", log, *SIZE, "--from", tmp_path / "first", *options)
        assert result.exit_code == 2 and message in " ".join(result.stderr.split()), result.output
    result = run("train", "--data", log, *SIZE, "--from", tmp_path / "none")
    assert result.exit_code == 2 and "There is no folder" in result.stderr


def test_save_takes_the_place_of_what_it_has_written_only(tmp_path: Path, log: Path) -> None:
    train([log], "--save", tmp_path / "model")
    train([log], "--save", tmp_path / "model")
    (saved,) = (tmp_path / "model").iterdir()
    model = load_model(saved)
    own = hb.save(tmp_path / "own", model, step=7).path
    with pytest.raises(OutputError, match="checkpoints that --save has not written"):
        save_model(str(tmp_path / "own"), model, None, 8)
    mixed = tmp_path / "mixed"
    hb.save(mixed, model, step=7)
    shutil.copytree(saved, mixed / saved.name)  # the latest
    run_folder = tmp_path / "run"
    train([log], "--checkpoint", run_folder)
    for folder in (tmp_path / "own", mixed, run_folder, saved, Path(own)):
        before = sorted(folder.rglob("*"))
        result = run("train", "--data", log, *SIZE, "--save", folder)
        assert result.exit_code == 2 and "Cannot save to" in result.stderr
        assert sorted(folder.rglob("*")) == before
    result = run("train", "--data", log, *SIZE, "--checkpoint", tmp_path / "own", "--resume")
    assert result.exit_code == 2 and "no checkpoints of a run of" in " ".join(result.stderr.split())


def test_a_log_that_has_grown_is_another_run(tmp_path: Path, log: Path) -> None:
    own = tmp_path / "log.tsv"
    own.write_text(log.read_text())
    train([own], "--checkpoint", tmp_path / "run")
    (tmp_path / "link.tsv").symlink_to(own)
    train([tmp_path / "link.tsv"], "--checkpoint", tmp_path / "run", "--resume")
    own.write_text(log.read_text() * 2)
    result = run("train", "--data", own, *SIZE, "--checkpoint", tmp_path / "run", "--resume")
    told = " ".join(result.stderr.split())
    assert result.exit_code == 2 and "has samples in --data 4000, and now it is 8000" in told


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, log: Path) -> Path:
    folder = tmp_path_factory.mktemp("begun") / "run"
    train([log], "--checkpoint", folder)
    return folder


@pytest.mark.parametrize(
    ("option", "was", "now"),
    [
        ("model", "dlrm", "wide-deep"),
        ("dim", 4, 8),
        ("optimizer", "adam", "sgd"),
        ("lr", 0.01, 0.5),
        ("batch-size", 128, 64),
        ("test-fraction", 0.0, 0.25),
        ("shuffle", 0, 512),
        ("on-error", "raise", "skip"),
        ("seed", 0, 1),
    ],
)
def test_a_run_goes_on_with_the_options_that_it_had(
    begun: Path, log: Path, option: str, was: Any, now: Any
) -> None:
    given = ("--checkpoint", begun, "--resume", f"--{option}", now)
    result = run("train", "--data", log, *SIZE, *given)
    told = " ".join(result.stderr.split())
    assert result.exit_code == 2 and f"has --{option} {was}, and now it is {now}." in told


def test_a_run_goes_on_with_the_data_and_the_model_that_it_had(
    tmp_path: Path, begun: Path, log: Path
) -> None:
    own = tmp_path / "log.tsv"
    own.write_text(log.read_text())
    result = run("train", "--data", own, *SIZE, "--checkpoint", begun, "--resume")
    told = " ".join(result.stderr.split())
    assert result.exit_code == 2 and f"has --data {log.resolve()}, and now it is {own}" in told
    result = run("train", "--data", log, *SIZE, "--checkpoint", begun, "--resume", "--from", begun)
    told = " ".join(result.stderr.split())
    assert result.exit_code == 2 and f"has --from nothing, and now it is {begun}." in told


def test_names_that_look_like_markup(tmp_path: Path) -> None:
    model = hb.EmbeddingCollection([hb.Table("a[/b]", 4, rows=3)])
    folder = tmp_path / "x[bold]"
    hb.save(folder, model, step=1)
    for command in (("verify", folder), ("show", folder), ("diff", folder, folder)):
        result = run("checkpoint", *command)
        assert result.exit_code == 0, result.output
        assert "x[bold]" in result.stdout.replace("\n", "") or command[0] == "diff"
    assert "a[/b]" in run("checkpoint", "show", folder).stdout
