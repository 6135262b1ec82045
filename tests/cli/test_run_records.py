"""`hotbed train --run`, validation and early stopping from the command line."""

from __future__ import annotations

import csv
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import launching
import pytest
from cli.command_line import run, train
from typer.testing import Result

import hotbed as hb
from hotbed.checkpoint.inspect import differences
from hotbed.data import CriteoLog
from hotbed.train import Callback, Step, evaluate, report, resuming, run_record
from hotbed.train.paths import Named, refuse_clashes
from hotbed.train.report import OutputError
from hotbed.train.run_record import command_of
from hotbed.train.run_validation import split_validation
from hotbed.train.settings import TrainSettings

VALIDATED = ("--validation-fraction", 0.1, "--validate-every", 10)


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def recorded(folder: Path) -> Any:
    return json.loads((folder / "run.json").read_text())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def words(result: Result) -> str:
    return " ".join(result.stderr.split())


def test_a_record_has_all_of_a_run_and_changes_nothing(log: Path, tmp_path: Path) -> None:
    _, plain = train(log, tmp_path)
    result, figures = train(log, tmp_path, "--run", tmp_path / "r")
    assert result.exit_code == 0, result.output
    for name in ("auc", "logloss", "rows", "stored_rows"):
        assert figures[name] == plain[name]
    record = recorded(tmp_path / "r")
    assert record["state"] == "ended" and record["began"] <= record["ended"]
    assert record["samples"] == {"training": 3600, "validation": 0, "test": 400}
    assert record["figures"]["auc"] == figures["auc"]
    assert record["hardware"]["cores"] >= 1 and record["versions"]["hotbed"]
    assert sum(table["rows"] for table in record["tables"]) == figures["stored_rows"]
    assert all(table["bytes"] > 0 for table in record["tables"])
    bins = record["calibration"]
    assert sum(each["samples"] for each in bins) == 400 and 10 <= len(bins) <= 20
    assert [each["predicted"] for each in bins] == sorted(each["predicted"] for each in bins)
    clicks = sum(each["samples"] * each["observed"] for each in bins)
    labels = [batch["label"].sum() for batch in CriteoLog(log, rows=(3_600, None))]
    assert clicks == pytest.approx(float(sum(labels)))
    assert [row["step"] for row in rows_of(tmp_path / "r/history.csv")] == ["57"]
    assert "hotbed train --data" in record["command"] and "--dim 4" in record["command"]


def test_the_command_is_typed_as_it_was() -> None:
    settings = TrainSettings(data=("a b.tsv", "c.tsv"), dim=4, reset_ssd=True, lr=0.5)
    assert (
        command_of(settings)
        == "hotbed train --data 'a b.tsv' --data c.tsv --dim 4 --lr 0.5 --reset-ssd"
    )
    many = command_of(TrainSettings(data=("a.tsv",)), processes=4)
    assert many == "torchrun --nproc-per-node 4 -m -- hotbed train --data a.tsv"


def test_validation_is_on_the_last_samples_before_the_test(log: Path) -> None:
    whole = CriteoLog(log, 64, shuffle=256, seed=3)
    for test, fraction in [(0.1, 0.1), (0.0, 0.3333), (0.5, 0.499)]:
        first, last = whole.split(test)
        training, held = split_validation(first, last, fraction)
        assert held is not None and not held.shuffle and training.shuffle
        assert (training.start, held.stop) == (0, last.start) and training.stop == held.start
        assert held.stop - held.start == round(4_000 * fraction)


def test_patience_ends_a_run_whose_best_is_tested_and_saved(log: Path, tmp_path: Path) -> None:
    more = ("--epochs", 30, "--lr", 0.05, "--patience", 3, "--checkpoint", tmp_path / "c")
    kept = ("--save", tmp_path / "m", "--run", tmp_path / "r")
    result, figures = train(log, tmp_path, *VALIDATED, *more, *kept)
    assert result.exit_code == 0, result.output
    found = figures["validation"]
    assert found["stopped_early"] and found["restored"] == found["best_step"]
    assert (
        figures["steps"] == 10 * found["count"] == found["best_step"] + 30
        and found["samples"] == 400
    )
    lines = rows_of(tmp_path / "r/validation.csv")
    best = min(lines, key=lambda line: float(line["value"]))
    assert int(best["step"]) == found["best_step"] and float(best["value"]) == found["best"]
    assert all(
        (table.only_first, table.only_second, table.changed) == (0, 0, 0)
        for table in differences(str(tmp_path / "c/best"), str(tmp_path / "m"))
    )
    model = hb.checkpoint.load_model(tmp_path / "m")
    held = CriteoLog(log, 64, rows=(3_200, 3_600))
    assert evaluate(model, held).logloss == pytest.approx(found["best"], rel=1e-6)
    test = CriteoLog(log, 64, rows=(3_600, None))
    assert evaluate(model, test).logloss == pytest.approx(figures["logloss"], rel=1e-6)
    assert "best validation" in result.stdout and "adam 0.05, the best" in result.stdout
    # What has stopped stays so.
    result, again = train(log, tmp_path, *VALIDATED, *more, "--resume", *kept)
    assert result.exit_code == 0, result.output
    assert (again["steps"], again["validation"]) == (figures["steps"], found)
    assert again["logloss"] == figures["logloss"]
    assert len(hb.checkpoint.list(tmp_path / "c")) == 2


@pytest.mark.process
def test_ranks_keep_one_record_and_stop_together(log: Path, tmp_path: Path) -> None:
    folders = ("--run", tmp_path / "r", "--checkpoint", tmp_path / "c")
    size = ("--dim", 4, "--batch-size", 64, "--lr", 0.05, "--epochs", 30, "--patience", 2)
    command = ("-m", "--", "hotbed", "train", "--data", log, *size, *VALIDATED, *folders)
    arguments = ["--standalone", "--nproc-per-node", "2", *map(str, command)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join(part for part in sys.path if part)
    done = launching.run(launching.torchrun_anew, arguments, tmp_path / "said", environment)
    assert done.returncode == 0, done.stderr
    record = recorded(tmp_path / "r")
    found = record["figures"]["validation"]
    assert record["state"] == "ended" and record["processes"] == 2
    assert found["stopped_early"] and found["restored"] == found["best_step"]
    steps = [int(row["step"]) for row in rows_of(tmp_path / "r/validation.csv")]
    assert steps == [*range(10, found["best_step"] + 30, 10)]
    stored = sum(table["rows"] for table in record["tables"])
    assert stored == record["figures"]["stored_rows"]


class Killed(Exception):
    pass


@pytest.mark.parametrize("at", [3, 12, 25, 33])
def test_a_run_that_goes_on_keeps_one_record(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    usual = (*VALIDATED, "--every", 6, "--patience", 9)

    def begun(folder: Path, *more: Any) -> Any:
        places = ("--checkpoint", folder / "c", "--run", folder / "r")
        return train(log, tmp_path, *usual, *places, *more)

    assert begun(tmp_path / "whole")[0].exit_code == 0
    plain = resuming.RunCheckpoints.on_step

    def on_step(self: resuming.RunCheckpoints, step: Step) -> None:
        plain(self, step)
        if step.number == at:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(resuming.RunCheckpoints, "on_step", on_step)
        patch.setattr(run_record, "_STEPS", 5)
        patch.setattr(run_record.RunRecord, "end", lambda *_, **__: None)  # as one that is killed
        assert isinstance(begun(tmp_path / "cut")[0].exception, Killed)
    assert recorded(tmp_path / "cut/r")["state"] == "running"
    with open(tmp_path / "cut/r/history.csv", "a") as file:
        file.write("99,1,6")
    page = run("report", tmp_path / "cut/r", "--out", tmp_path / "cut.html")
    assert page.exit_code == 0 and "still going on" in (tmp_path / "cut.html").read_text()
    result, _ = begun(tmp_path / "cut", "--resume")
    assert result.exit_code == 0, result.output
    record = recorded(tmp_path / "cut/r")
    assert record["state"] == "ended" and record["resumed"] >= record["began"]
    assert rows_of(tmp_path / "cut/r/validation.csv") == rows_of(
        tmp_path / "whole/r/validation.csv"
    )
    steps = [int(row["step"]) for row in rows_of(tmp_path / "cut/r/history.csv")]
    assert steps == sorted({*steps}) and steps[-1] == 50
    figures, expected = record["figures"], recorded(tmp_path / "whole/r")["figures"]
    assert figures["validation"] == expected["validation"] and figures["auc"] == expected["auc"]


def test_the_record_of_another_run_stays(log: Path, tmp_path: Path) -> None:
    folder, usual = tmp_path / "r", ("--run", tmp_path / "r", "--checkpoint", tmp_path / "c")
    assert train(log, tmp_path, *usual)[0].exit_code == 0
    before, size = contents(tmp_path), ("--dim", 4, "--batch-size", 64, "--lr", 0.01)
    for more, message in [
        (("--run", folder), "holds the record of a run. Go on with that run by --resume, or name"),
        ((*usual, "--resume", "--seed", 5), "the record of another run: --seed is 0 there and 5"),
        (
            ("--run", folder, "--checkpoint", tmp_path / "d", "--resume"),
            "the record of another run: --checkpoint is",
        ),
        (("--json", folder / "history.csv"), "is a file of the record of a run. Name another"),
        (("--run", folder, "--json", folder / "validation.csv"), "is a file of the record"),
        (("--run", folder, "--checkpoint", folder), "are the same file"),
    ]:
        result = run("train", "--data", log, *size, *more)
        assert result.exit_code == 2 and message in words(result), result.output
        assert contents(tmp_path) == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/history.csv").write_text("my own")
    result = run("train", "--data", log, "--run", tmp_path / "mine")
    assert result.exit_code == 2 and "has a file history.csv, and no run.json" in words(result)
    (tmp_path / "mine/history.csv").rename(tmp_path / "mine/run.json")
    result = run("train", "--data", log, "--run", tmp_path / "mine", *usual[2:], "--resume")
    assert result.exit_code == 2 and "is not the record of a run" in words(result)
    assert (tmp_path / "mine/run.json").read_text() == "my own"


def test_figures_named_as_a_record_is_are_none(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"auc": 0.5}')
    for name in ("run.json", "history.csv"):
        refuse_clashes([], [Named("--json", str(tmp_path / name))])
    (tmp_path / "run.json").write_text('{"format": "hotbed run", ')  # of a disk that was full
    with pytest.raises(OutputError, match="is a file of the record of a run"):
        refuse_clashes([], [Named("--json", str(tmp_path / "run.json"))])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--patience", 2), "--patience needs samples to validate on: pass --validation-fraction"),
        (("--validate-every", 2), "--validate-every needs samples to validate on"),
        (("--validation-fraction", 0.1, "--patience", 0), "--patience is 0; it must be positive"),
        (("--validation-fraction", 1), "--validation-fraction is 1.0; it must be in [0, 1)"),
        (("--validation-fraction", 0.5, "--test-fraction", 0.5), "leave nothing to train on"),
        (("--validation-fraction", 0.0001), "0.0001 of 4,000 samples is none. Raise it"),
        (("--validation-fraction", 0.8999), "leave nothing to train on"),
        (("--log", "tensorboard"), "writes to the record of a run: name it, --run DIR"),
        (("--log", "csv", "--run", "r"), "--log is csv; it must be one of tensorboard"),
        (("--run", "/proc/r"), "/proc/r"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    log: Path, options: tuple[Any, ...], message: str
) -> None:
    result = run("train", "--data", log, *options)
    assert result.exit_code == 2 and message in words(result), result.output


def test_a_disk_that_is_full_at_the_end_costs_the_record_only(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, writes = report.write_json, []

    def write_json(path: str, record: Any) -> None:
        writes.append(path)
        if len(writes) > 1:
            raise OSError(28, "No space left on device")
        plain(path, record)

    monkeypatch.setattr(run_record, "write_json", write_json)
    result, _ = train(log, tmp_path, "--run", tmp_path / "r", "--save", tmp_path / "m")
    assert result.exit_code == 0 and hb.checkpoint.latest(tmp_path / "m")
    assert "the record of this run was not completed" in words(result)
    assert recorded(tmp_path / "r")["state"] == "running"


class InterruptAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, step: Step) -> None:
        if step.number == self.step:
            signal.raise_signal(signal.SIGINT)


def test_an_interrupted_run_keeps_its_last_model(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run_record.RunRecord.callbacks
    monkeypatch.setattr(
        run_record.RunRecord,
        "callbacks",
        lambda self, tiers: [*plain(self, tiers), InterruptAt(25)],
    )
    more = ("--patience", 2, "--checkpoint", tmp_path / "c", "--run", tmp_path / "r")
    result, figures = train(log, tmp_path, *VALIDATED, *more)
    assert result.exit_code == 130, result.output
    assert figures["steps"] == 25 and figures["validation"]["restored"] is None
    assert figures["validation"]["count"] == 2
    assert recorded(tmp_path / "r")["state"] == "interrupted"
    steps = [row["step"] for row in rows_of(tmp_path / "r/history.csv")]
    assert steps == ["25"]


def test_a_run_that_fails_says_why(log: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.tsv"
    lines = log.read_text().splitlines(True)
    broken.write_text("".join([*lines[:2_000], "broken\n", *lines[2_000:]]))
    result, _ = train(broken, tmp_path, "--run", tmp_path / "r")
    assert result.exit_code == 2
    record = recorded(tmp_path / "r")
    assert record["state"] == "failed" and "line 2001" in record["error"]
    result = run("report", tmp_path / "r")
    assert result.exit_code == 0 and "line 2001" in (tmp_path / "r.html").read_text()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_events_for_tensorboard_lie_in_the_record(log: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    result, _ = train(log, tmp_path, "--run", tmp_path / "r", "--log", "tensorboard")
    assert result.exit_code == 0, result.output
    assert any("tfevents" in file.name for file in (tmp_path / "r/tensorboard").iterdir())


def test_a_checkpoint_from_before_there_was_validation_goes_on(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = resuming._SameRun.state_dict

    def former(self: Any) -> dict[str, object]:
        return {k: v for k, v in plain(self).items() if k != "validation_fraction"}

    more = ("--checkpoint", tmp_path / "c")
    with monkeypatch.context() as patch:
        patch.setattr(resuming._SameRun, "state_dict", former)
        assert train(log, tmp_path, *more)[0].exit_code == 0
    result, figures = train(log, tmp_path, *more, "--resume", "--epochs", 2)
    assert result.exit_code == 0 and figures["epochs"] == 2
    result, _ = train(log, tmp_path, *more, "--resume", *VALIDATED)
    assert result.exit_code == 2 and "has --validation-fraction 0.0, and now it is 0.1" in words(
        result
    )


def test_malformed_lines_of_the_validation_part_are_counted(log: Path, tmp_path: Path) -> None:
    lines = log.read_text().splitlines(True)
    lines[3_300] = "broken\n"
    (tmp_path / "broken.tsv").write_text("".join(lines))
    more = ("--on-error", "skip", "--validation-fraction", 0.1)
    result, figures = train(tmp_path / "broken.tsv", tmp_path, *more)
    assert result.exit_code == 0 and figures["skipped_lines"] == 1
