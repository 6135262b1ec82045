"""Validation beside a training: it changes nothing, stops early, keeps the best and goes on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from train.clicks_and_buys import Towers, batches, one_label, optimizer_of

import hotbed as hb
from hotbed.train import (
    Callback,
    Checkpoints,
    Evaluation,
    Position,
    Step,
    Task,
    TrainingError,
    Validated,
    Validation,
    evaluate,
    fit,
)
from hotbed.train.report import OutputError


class Scripted(Validation):
    """Validation whose figures are given."""

    def __init__(self, values: list[float], **options: Any) -> None:
        super().__init__(one_label(1), metric=self.next, **{"mode": "min", **options})
        self.values = values

    def next(self, evaluation: Evaluation) -> float:
        return self.values[len(self.history)]


class KilledAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, step: Step) -> None:
        if step.number == self.step:
            raise KeyboardInterrupt


def trained(*callbacks: Callback, count: int = 6, **options: Any) -> tuple[Any, Towers]:
    model = Towers(1, one=True)
    options.setdefault("optimizer", optimizer_of(model))
    return fit(model, one_label(count), callbacks=callbacks, **options), model


def bits(model: Towers) -> list[torch.Tensor]:
    rows = model.embeddings.rows("user")
    return [*model.layer.state_dict().values(), rows.ids, rows.values]


def stops_after(values: list[float], patience: int, mode: str, min_delta: float) -> int:
    """Validations until patience ends: a plain loop."""
    best, waited = None, 0
    for count, value in enumerate(values, 1):
        gain = 0.0 if best is None else (best - value if mode == "min" else value - best)
        if not math.isnan(value) and (best is None or gain > min_delta):
            best, waited = value, 0
        else:
            waited += 1
        if waited == patience:
            return count
    return len(values)


SERIES = [
    [3.0, 2.0, 2.5, 1.0, 1.5, 1.4, 1.3, 0.5],
    [1.0] * 8,
    [5.0, 4.9, 4.8, 4.7, 4.6, 4.5, 4.4, 4.3],
    [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
]


@pytest.mark.parametrize("values", SERIES)
@pytest.mark.parametrize("patience", [1, 2, 3])
@pytest.mark.parametrize(("mode", "min_delta"), [("min", 0.0), ("max", 0.0), ("min", 0.15)])
def test_patience_ends_a_run(
    values: list[float], patience: int, mode: str, min_delta: float
) -> None:
    validation = Scripted(values, every=1, mode=mode, patience=patience, min_delta=min_delta)
    result, _ = trained(validation, count=8)
    expected = stops_after(values, patience, mode, min_delta)
    assert result.steps == len(validation.history) == expected
    assert result.interrupted == validation.has_ended()
    assert validation.best_found is not None


def test_figures_are_those_of_evaluate_and_training_is_as_without() -> None:
    data = one_label(4, seed=7)
    seen: list[Validated] = []

    class Seeing(Callback):
        def on_validation(self, validated: Validated) -> None:
            seen.append(validated)

    # A loader of torch's draws from the generator of the training.
    loader = DataLoader(data, batch_size=None, shuffle=True)
    validation = Validation(loader, every=3)
    model = Towers(1, one=True)
    dropping = torch.nn.Sequential(model, torch.nn.Dropout(0.5))
    torch.manual_seed(5)
    fit(dropping, one_label(), optimizer_of(dropping), callbacks=[Seeing(), validation])
    twin = Towers(1, one=True)
    dropping = torch.nn.Sequential(twin, torch.nn.Dropout(0.5))
    torch.manual_seed(5)
    fit(dropping, one_label(), optimizer_of(dropping))
    assert all(map(torch.equal, bits(model), bits(twin)))
    assert [one.step for one in validation.history] == [3, 6] and seen == validation.history
    last = evaluate(model, data)
    assert validation.history[-1].evaluation.logloss == pytest.approx(last.logloss, rel=1e-12)
    assert validation.history[-1].value == validation.history[-1].evaluation.logloss
    assert (seen[0].epoch, seen[0].rows) == (1, 48)


def test_each_epoch_is_the_usual_time() -> None:
    validation = Validation(one_label(1), patience=2, metric="auc")
    assert trained(validation, epochs=3)[0].epochs == len(validation.history)
    assert [one.step for one in validation.history][:2] == [6, 12]
    assert validation.mode == "max"


@pytest.mark.parametrize(("metric", "mode"), [("buy/auc", "max"), ("click/logloss", "min")])
def test_a_metric_of_a_task_is_named(metric: str, mode: str) -> None:
    validation = Validation(batches(2, seed=3), metric=metric)
    model = Towers(2)
    tasks = [Task("click"), Task("buy")]
    fit(model, batches(), optimizer_of(model), tasks=tasks, callbacks=[validation])
    task, name = metric.split("/")
    assert validation.mode == mode
    assert validation.history[0].value == validation.history[0].evaluation.tasks[task][name]


def test_the_best_is_kept_and_restored(tmp_path: Path) -> None:
    values = [3.0, 1.0, 2.0, 2.0, 2.0, 0.5]
    validation = Scripted(values, every=1, patience=3, best=tmp_path / "best", restore=True)
    result, model = trained(validation)
    assert result.steps == 5 and validation.best_found.step == 2
    _, two = trained(count=2)
    assert all(map(torch.equal, bits(model), bits(two)))
    (kept,) = (tmp_path / "best").iterdir()
    other = Towers(1, one=True)
    optimizer = optimizer_of(other)
    assert hb.load(tmp_path / "best", other, optimizer).step == 2 and kept.name.endswith("2")
    assert all(map(torch.equal, bits(other), bits(two)))


def test_a_folder_of_other_checkpoints_is_refused(tmp_path: Path) -> None:
    model = Towers(1, one=True)
    hb.save(tmp_path, model, step=3)
    with pytest.raises(OutputError, match="it holds checkpoints that Validation has not written"):
        trained(Validation(one_label(1), best=tmp_path))
    assert len(list(tmp_path.iterdir())) == 1


def test_a_best_that_is_gone_is_told(tmp_path: Path) -> None:
    validation = Scripted([1.0] * 6, every=1, best=tmp_path / "best", restore=True)
    validation.on_validation = lambda validated: hb.save(
        tmp_path / "best", Towers(1), step=100, keep=1
    )
    with pytest.raises(TrainingError, match="best validation was at step 1, and .* does not hold"):
        trained(validation)


VALUES = [3.0, 2.0, 2.5, 1.0, 1.5, 1.6, 1.7, 1.8, 1.9, 1.9, 1.9, 1.9]


@pytest.mark.parametrize("at", [1, 3, 4, 5, 7, 8, 11])
@pytest.mark.parametrize(("every", "per_epoch"), [(1, 12), (2, 6), (None, 2)])
def test_a_run_that_goes_on_stops_at_the_same_step(
    tmp_path: Path, at: int, every: int | None, per_epoch: int
) -> None:
    def begun(folder: Path, kill: int | None) -> tuple[Any, Scripted, Towers]:
        model, position = Towers(1, one=True), Position()
        optimizer = optimizer_of(model)
        validation = Scripted(VALUES, every=every, patience=3, best=folder / "best", restore=True)
        saving = Checkpoints(folder / "run", optimizer, position, every=2, beside=[validation])
        if hb.checkpoint.latest(folder / "run"):
            hb.load(folder / "run", model, optimizer, loader=[position, validation])
        callbacks = [validation, saving, *([KilledAt(kill)] if kill else [])]
        result = None
        try:
            result = fit(
                model,
                one_label(per_epoch),
                optimizer,
                epochs=24 // per_epoch,
                position=position,
                callbacks=callbacks,
            )
        except KeyboardInterrupt:
            pass
        return result, validation, model

    whole, expected, model = begun(tmp_path / "whole", None)
    assert expected.best_found.value == 1.0 and whole.interrupted
    begun(tmp_path / "cut", at)
    result, validation, other = begun(tmp_path / "cut", None)

    def told(history: list[Validated]) -> list[tuple[object, ...]]:
        return [(*one[:5], one.evaluation.logloss) for one in history]

    assert told(validation.history) == told(expected.history) and result.interrupted
    assert all(map(torch.equal, bits(model), bits(other)))
    again, validation, _ = begun(tmp_path / "cut", None)  # it has ended already
    assert told(validation.history) == told(expected.history) and again.interrupted


def test_checkpoints_come_behind_what_they_save(tmp_path: Path) -> None:
    model, position = Towers(1, one=True), Position()
    optimizer, validation = optimizer_of(model), Validation(one_label(1), every=2)
    saving = Checkpoints(tmp_path, optimizer, position, beside=[validation])
    with pytest.raises(ValueError, match="Validation before Checkpoints, which saves its state"):
        fit(
            model,
            one_label(),
            optimizer,
            position=position,
            callbacks=[saving, validation],
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every is 0; it must be an integer, at least 1"),
        ({"patience": 0}, "patience is 0; it must be an integer, at least 1"),
        ({"patience": True}, "patience is True; it must be an integer"),
        ({"mode": "least"}, "mode must be"),
        ({"metric": len}, "needs mode="),
        ({"min_delta": -1.0}, "min_delta must be a number from 0 on; got -1.0"),
        ({"min_delta": math.nan}, "min_delta"),
        ({"restore": True}, "name its folder, best="),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Validation([], **options)


def test_a_metric_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="metric is 'acc'; this run has auc, logloss, label/auc"):
        trained(Validation(one_label(1), metric="acc"))


def test_a_metric_that_does_not_say_what_is_better() -> None:
    class Mean:
        def reset(self) -> None:
            self.sum = 0.0

        def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
            self.sum += float(preds.sum())

        def compute(self) -> float:
            return self.sum

    model, tasks = Towers(1), [Task("click", metrics={"mean": Mean()})]
    with pytest.raises(ValueError, match="'click/mean' does not say what is better; give mode="):
        validation = Validation(one_label(1), metric="click/mean")
        fit(model, one_label(), optimizer_of(model), tasks=tasks, callbacks=[validation])
    validation = Validation(one_label(1), metric="click/mean", mode="max")
    fit(model, one_label(), optimizer_of(model), tasks=tasks, callbacks=[validation])
    assert len(validation.history) == 1


def test_no_samples_are_an_error() -> None:
    with pytest.raises(TrainingError, match="Validation at step 2: there are no samples"):
        trained(Validation([], every=2))
    once = Validation(iter(one_label(1)), every=2)
    with pytest.raises(TrainingError, match="step 4: there are no samples. An iterator"):
        trained(once)
    assert len(once.history) == 1


def test_labels_that_are_all_alike_are_told_and_no_better() -> None:
    data = [{**batch, "label": torch.ones(16)} for batch in one_label(1)]
    validation = Validation(data, every=1, metric="auc", patience=2)
    with pytest.warns(UserWarning, match="auc is NaN, which is no better than any figure"):
        result, _ = trained(validation)
    assert result.steps == 2 and validation.best_found is None


def test_another_callback_cuts_a_validation_short(tmp_path: Path) -> None:
    class Stopping(Callback):
        asked = 0

        def should_stop(self) -> bool:
            self.asked += 1
            return self.asked == 4  # during the second validation, once

    validation = Validation(one_label(2), every=1)
    result, _ = trained(Stopping(), validation)
    assert result.steps == 2 and result.interrupted and len(validation.history) == 1


def test_it_reads_past_tiers_and_look_ahead(tmp_path: Path) -> None:
    model = hb.models.DLRM(hb.data.CATEGORIES, 4, storage=hb.Storage(host="2MB", ssd=tmp_path))
    data = list(hb.data.synthetic_clicks(rows=1024, batch_size=128))
    twin = hb.models.DLRM(hb.data.CATEGORIES, 4)
    twin.load_state_dict(model.state_dict())
    histories = []
    for one, loader in ((model, hb.lookahead(data, model)), (twin, data)):
        validation = Validation(data[:3], every=3)
        fit(one, loader, optimizer_of(one), callbacks=[validation])
        histories.append([each.value for each in validation.history])
    assert len(histories[0]) == 2 and histories[0] == histories[1]
