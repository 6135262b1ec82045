"""Arguments, batches, files and callbacks that `fit` cannot use, and labels that it can."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from train.clicks_and_buys import BCE, Towers, batches, one_label, optimizer_of

import hotbed as hb
from hotbed.errors import HotbedError
from hotbed.train import Auc, Callback, CsvLog, Run, Step, Task, Validation, fit
from hotbed.train.page import page
from hotbed.train.report import OutputError
from hotbed.train.run_files import FORMAT, HISTORY, RECORD, RunError, read_run


def _fit(model: Towers, data: Any, **options: Any) -> list[float]:
    losses: list[float] = []

    class Losses(Callback):
        def on_step(self, step: Step) -> None:
            losses.append(float(step.loss))

    options["callbacks"] = [*options.pop("callbacks", ()), Losses()]
    fit(model, data, optimizer_of(model), **options)
    return losses


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_clicks_may_be_integers_or_bools(dtype: torch.dtype) -> None:
    one = one_label(3)
    as_given = [{**batch, "label": batch["label"].to(dtype)} for batch in one]
    assert _fit(Towers(1, one=True), as_given) == _fit(Towers(1, one=True), one)
    two, tasks = batches(3, missing=0.0), [Task("click"), Task("buy")]
    as_given = [{**batch, "label": batch["label"].to(dtype)} for batch in two]
    assert _fit(Towers(2), as_given, tasks=tasks) == _fit(Towers(2), two, tasks=tasks)


def _by_sample(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return BCE(logits, labels, reduction="none")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 1.5}, "epochs is 1.5"),
        ({"epochs": -1}, "epochs is -1"),
        ({"callbacks": [Validation]}, "takes a list of hotbed.train.Callback"),
        ({"scheduler": [1]}, "method step"),
        ({"loss": _by_sample}, r"got \(16,\)"),
        ({"loss": lambda z, y: 1.0}, "got float"),
        ({"tasks": [Task("click", loss=_by_sample)]}, r"Task 'click': the loss .* got \(16,\)"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(HotbedError, match=message):
        _fit(Towers(1, one=True), one_label(2), **options)


def test_a_schedule_by_a_figure_is_refused_before_the_first_step() -> None:
    model = Towers(1, one=True)
    optimizer = optimizer_of(model)
    scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(HotbedError, match="on_validation"):
        fit(model, one_label(1), optimizer, scheduler=scheduler)
    assert model.embeddings.count() == 0


def test_logits_of_one_column_need_a_task() -> None:
    with pytest.raises(HotbedError, match=r"logits\[:, 0\]"):
        _fit(Towers(1), one_label(1), loss=torch.nn.functional.mse_loss)


@pytest.mark.parametrize("batch", [{"user": torch.tensor([1])}, (torch.tensor([1]),)])
def test_a_batch_without_labels_is_named(batch: Any) -> None:
    with pytest.raises(HotbedError, match="dict with a label"):
        _fit(Towers(1), [batch])


@pytest.mark.parametrize(
    ("metrics", "message"), [([Auc()], "give a dict"), ({"auc": Auc}, r"Auc\(\)")]
)
def test_metrics_are_objects_by_name(metrics: Any, message: str) -> None:
    with pytest.raises(HotbedError, match=message):
        Task("click", metrics=metrics)


class _Ends(Callback):
    def __init__(self) -> None:
        self.count = 0

    def on_end(self) -> None:
        self.count += 1


class _Fails(Callback):
    def __init__(self, where: str) -> None:
        self.where = where

    def on_run(self, run: Run) -> None:
        if self.where == "on_run":
            raise RuntimeError("on_run")

    def on_end(self) -> None:
        if self.where == "on_end":
            raise RuntimeError("on_end")


@pytest.mark.parametrize(("where", "ended"), [("on_run", [1, 0]), ("on_end", [1, 1])])
def test_callbacks_that_have_begun_end_whatever_another_raises(
    where: str, ended: list[int]
) -> None:
    first, last = _Ends(), _Ends()
    with pytest.raises(RuntimeError, match=where):
        _fit(Towers(1, one=True), one_label(1), callbacks=[first, _Fails(where), last])
    assert [first.count, last.count] == ended


def test_a_log_takes_no_device_and_no_file_of_others(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("a line that does not end")
    for path in ("/dev/full", notes):  # whoever reads /dev/full never ends
        with pytest.raises(OutputError, match="Name another file"):
            _fit(Towers(1, one=True), one_label(1), callbacks=[CsvLog(path)])
    assert notes.read_text() == "a line that does not end"


def test_a_file_for_the_best_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "best").write_text("x")
    model = Towers(1, one=True)
    with pytest.raises(OutputError, match="is a file"):
        _fit(model, one_label(2), callbacks=[Validation(one_label(1), best=tmp_path / "best")])
    assert model.embeddings.count() == 0


def test_a_delta_is_a_number() -> None:
    delta: Any = "a"
    with pytest.raises(ValueError, match="min_delta"):
        Validation([], min_delta=delta)


def test_hostile_records_have_a_page_or_an_error(tmp_path: Path) -> None:
    (tmp_path / RECORD).write_text(json.dumps({"format": FORMAT, "command": "\ud800"}))
    (tmp_path / HISTORY).write_text("rows_used,rows_missed\n8,5\n")
    assert "Command" in page(read_run(str(tmp_path))).encode().decode()
    (tmp_path / HISTORY).write_text("step\n" + "9" * (csv.field_size_limit() + 1) + "\n")
    with pytest.raises(RunError, match="field"):
        read_run(str(tmp_path))


@pytest.mark.parametrize(
    ("option", "value"),
    [("callbacks", Callback()), ("callbacks", 3), ("position", 5), ("loss", "bce")],
)
def test_arguments_of_another_kind(option: str, value: object) -> None:
    layer: Any = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    given: Any = {option: value}
    with pytest.raises(hb.InputError, match=option):
        hb.train.fit(layer, [], optimizer, **given)


class _Breaking:
    """A scheduler whose second step raises."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps == 2:
            raise ZeroDivisionError


@pytest.mark.parametrize("breaks", ["scheduler", "forward"])
def test_an_error_leaves_the_position_behind_the_last_step(breaks: str) -> None:
    layer: Any = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    asked: list[int] = []

    class Model(torch.nn.Module):
        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            asked.append(1)
            if breaks == "forward" and len(asked) == 3:
                raise ZeroDivisionError
            return layer(batch["x"])[:, 0]

    position, scheduler = hb.train.Position(), _Breaking() if breaks == "scheduler" else None
    given: Any = {"scheduler": scheduler, "position": position}
    data = [{"x": torch.ones(2, 1), "label": torch.ones(2)} for _ in range(5)]
    with pytest.raises(ZeroDivisionError):
        hb.train.fit(Model(), data, optimizer, **given)
    assert (position.batch, position.steps, position.rows) == (2, 2, 4)
