"""Logs of a run: CSV files that survive kills and full disks, and TensorBoard's events."""

from __future__ import annotations

import csv
import errno
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from train.clicks_and_buys import Towers, batches, one_label, optimizer_of

import hotbed as hb
from hotbed.train import (
    Callback,
    Checkpoints,
    CsvLog,
    Position,
    Step,
    Task,
    TensorBoardLog,
    Validation,
    fit,
    line_file,
)
from hotbed.train.report import OutputError


class Killed(Exception):
    pass


class Watch(Callback):
    def __init__(self, kill: int | None = None) -> None:
        self.losses: dict[int, float] = {}
        self.kill = kill

    def on_step(self, step: Step) -> None:
        self.losses[step.number] = float(step.loss)
        if step.number == self.kill:
            raise Killed


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def run(
    folder: Path, *, kill: int | None = None, every: int = 2, saves: int = 4
) -> dict[int, float]:
    """12 steps, or as many as are missing."""
    folder.mkdir(exist_ok=True)
    model, position = Towers(1, one=True), Position()
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    watch, validation = Watch(kill), Validation(one_label(2, seed=9), every=3)
    saving = Checkpoints(
        folder / "run", optimizer, position, every=saves, scheduler=schedule, beside=[validation]
    )
    if hb.checkpoint.latest(folder / "run"):
        beside = [position, validation]
        hb.load(folder / "run", model, optimizer, scheduler=schedule, loader=beside)
    log = CsvLog(folder / "history.csv", every, validation=folder / "validation.csv")
    try:
        fit(
            model,
            one_label(6),
            optimizer,
            epochs=2,
            scheduler=schedule,
            position=position,
            callbacks=[validation, log, saving, watch],
        )
    except Killed:
        pass
    return watch.losses


def test_lines_have_the_mean_loss_since_the_line_before(tmp_path: Path) -> None:
    losses = run(tmp_path, every=5)
    rows = rows_of(tmp_path / "history.csv")
    assert [int(row["step"]) for row in rows] == [5, 10, 12]
    for row, first in zip(rows, [1, 6, 11], strict=True):
        own = [losses[n] for n in range(first, int(row["step"]) + 1)]
        assert float(row["loss"]) == pytest.approx(sum(own) / len(own), rel=1e-6)
        assert int(row["samples"]) == 16 * int(row["step"])
        assert float(row["lr"]) == pytest.approx(0.05 * 0.9 ** int(row["step"]))
        assert float(row["samples_per_second"]) > 0
    assert [row["epoch"] for row in rows] == ["1", "2", "2"]
    checked = rows_of(tmp_path / "validation.csv")
    assert [int(row["step"]) for row in checked] == [3, 6, 9, 12]
    assert all(row["value"] == row["label/logloss"] for row in checked)
    assert checked[0]["best"] == "1" and 0 <= float(checked[0]["label/auc"]) <= 1


@pytest.mark.parametrize("kill", [2, 3, 4, 5, 6, 9, 11])
@pytest.mark.parametrize("torn", [b"", b"7", b"7,1,112,0.5", b"\xff\x00,"])
def test_a_run_that_goes_on_has_each_step_once(tmp_path: Path, kill: int, torn: bytes) -> None:
    """Wherever a line was torn when the process died."""
    run(tmp_path / "whole")
    run(tmp_path / "cut", kill=kill)
    for name in ("history.csv", "validation.csv"):
        with open(tmp_path / "cut" / name, "ab") as file:
            file.write(torn)
    run(tmp_path / "cut")
    for name in ("history.csv", "validation.csv"):
        expected, found = (rows_of(tmp_path / which / name) for which in ("whole", "cut"))
        for row in (*expected, *found):
            row.pop("samples_per_second", None)
        assert found == expected


def test_the_log_of_another_run_stays(tmp_path: Path) -> None:
    model = Towers(1, one=True)
    path = tmp_path / "history.csv"
    fit(model, one_label(), optimizer_of(model), callbacks=[CsvLog(path, 2)])
    before = path.read_bytes()
    for count in (1, 2):
        fit(model, one_label(), optimizer_of(model), callbacks=[CsvLog(path, 2)])
        assert (tmp_path / "history.csv.1").read_bytes() == before
        assert (tmp_path / "history.csv.2").exists() == (count == 2)
    assert len(rows_of(path)) == 3
    before = path.read_bytes()
    other = tmp_path / "notes.csv"
    other.write_text("my,notes\n")
    with pytest.raises(OutputError, match="begins with 'my,notes', and this run's log with 'step,"):
        fit(model, one_label(), optimizer_of(model), callbacks=[CsvLog(other, 2)])
    with pytest.raises(OutputError, match="does not exist"):
        fit(model, one_label(), optimizer_of(model), callbacks=[CsvLog(tmp_path / "a/b.csv")])
    assert path.read_bytes() == before and other.read_text() == "my,notes\n"


def test_a_full_disk_costs_lines_and_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes half of a line, then nothing, then has room again."""
    writes = 0

    class Disk:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Disk:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def write(self, data: bytes) -> int:
            nonlocal writes
            writes += 1
            if writes == 2:
                return int(self.file.write(data[: len(data) // 2]))
            if writes == 3:
                raise OSError(errno.ENOSPC, "No space left on device")
            return int(self.file.write(data))

    def opening(path: str, mode: str = "r", **options: Any) -> Any:
        return Disk(open(path, mode, **options)) if mode == "ab" else open(path, mode, **options)

    monkeypatch.setattr(line_file, "open", opening, raising=False)
    model, path = Towers(1, one=True), tmp_path / "history.csv"
    with pytest.warns(
        UserWarning, match="history.csv could not be written: .*Training goes on"
    ) as w:
        result = fit(model, one_label(), optimizer_of(model), callbacks=[CsvLog(path, 1)])
    assert result.steps == 6 and len(w) == 1
    assert [int(row["step"]) for row in rows_of(path)] == [1, 4, 5, 6]


def test_further_columns_and_names_of_tasks(tmp_path: Path) -> None:
    model, count = Towers(2), iter(range(100))
    log = CsvLog(
        tmp_path / "h.csv",
        3,
        validation=tmp_path / "v.csv",
        figures=lambda: {"rows, stored": next(count), '"x"': math.nan},
    )
    tasks = [Task('click, "now"'), Task("<script>")]
    validation = Validation(batches(1), metric="<script>/auc")
    fit(model, batches(), optimizer_of(model), tasks=tasks, callbacks=[validation, log])
    assert [row["rows, stored"] for row in rows_of(tmp_path / "h.csv")] == ["1", "2"]
    (row,) = rows_of(tmp_path / "v.csv")
    assert row["value"] == row["<script>/auc"] and 'click, "now"/logloss' in row


@pytest.mark.parametrize("kind", [CsvLog, TensorBoardLog])
def test_every_is_a_count(tmp_path: Path, kind: Any) -> None:
    with pytest.raises(ValueError, match="every is 0; it must be an integer, at least 1"):
        kind(tmp_path / "log", 0)


class Lazy:
    """A loss that says when it is read."""

    def __init__(self, reads: list[int]) -> None:
        self.reads = reads

    def double(self) -> Lazy:
        return self

    def __add__(self, other: Lazy) -> Lazy:
        return self

    def __float__(self) -> float:
        self.reads.append(1)
        return 0.5


@pytest.mark.parametrize("kind", ["csv", "tensorboard"])
def test_a_loss_is_read_when_it_is_written_only(tmp_path: Path, kind: str) -> None:
    reads: list[int] = []

    class Log(CsvLog if kind == "csv" else TensorBoardLog):
        def on_step(self, step: Step) -> None:
            super().on_step(step._replace(loss=Lazy(reads)))

    model = Towers(1, one=True)
    if kind == "tensorboard":
        pytest.importorskip("tensorboard")
    fit(model, one_label(6), optimizer_of(model), callbacks=[Log(tmp_path / "log", 3)])
    assert len(reads) == 2


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {
        tag: [(event.step, event.value) for event in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_the_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    model, watch = Towers(1, one=True), Watch()
    validation = Validation(one_label(2), every=3)
    log = TensorBoardLog(tmp_path / "events", 2)
    fit(model, one_label(), optimizer_of(model), callbacks=[validation, watch, log])
    found = events(tmp_path / "events")
    losses = watch.losses
    assert [step for step, _ in found["train/loss"]] == [2, 4, 6]
    assert found["train/loss"][1][1] == pytest.approx((losses[3] + losses[4]) / 2, rel=1e-6)
    assert [step for step, _ in found["validation/label/auc"]] == [3, 6]
    assert found["train/lr"][0][1] == pytest.approx(0.05)


def test_without_tensorboard_its_log_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(hb.errors.HotbedError, match="pip install tensorboard"):
        TensorBoardLog(tmp_path)
