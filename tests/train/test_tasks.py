"""Several labels: losses and metrics over the samples that have them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from train.clicks_and_buys import BCE, Towers, batches, labels_of, one_label, optimizer_of

from hotbed.table.alone import ALONE
from hotbed.train import (
    Auc,
    Callback,
    LogLoss,
    MeanLoss,
    Step,
    Task,
    TaskError,
    TrainingError,
    auc,
    evaluate,
    fit,
    logloss,
)
from hotbed.train.task_loss import labelled, loss_of_tasks


class Losses(Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_step(self, step: Step) -> None:
        self.found.append(float(step.loss))


def naive(logits: Tensor, labels: Tensor, weights: list[float]) -> float:
    """Sample by sample."""
    total = 0.0
    for t, weight in enumerate(weights):
        terms = [
            math.log1p(math.exp(-z if y else z))
            for z, y in zip(logits[:, t].tolist(), labels[:, t].tolist(), strict=True)
            if not math.isnan(y)
        ]
        total += weight * sum(terms) / len(terms) if terms else 0.0
    return total


@given(st.integers(1, 9), st.integers(1, 4), st.floats(0, 1), st.integers(0, 999))
def test_the_loss_is_that_of_labels_that_are_there(
    rows: int, count: int, missing: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    labels = labels_of(rows, count, missing, generator)
    logits = torch.randn(rows, count, dtype=torch.float64, generator=generator).requires_grad_()
    weights = [0.5 + t for t in range(count)]
    tasks = [Task(f"t{t}", weight=weight) for t, weight in enumerate(weights)]
    found = labelled(tasks, labels, ALONE)
    loss = loss_of_tasks(tasks, logits, labels.double(), found)
    assert loss.item() == pytest.approx(naive(logits.detach(), labels, weights), rel=1e-9)
    (grad,) = torch.autograd.grad(loss, logits)
    assert torch.equal(grad == 0, torch.isnan(labels)) and torch.isfinite(grad).all()


def trained(
    data: list[dict[str, Tensor]], count: int, one: bool = False, **options: object
) -> tuple[list[float], Towers]:
    model, losses = Towers(count, one=one), Losses()
    fit(model, data, optimizer_of(model), epochs=2, callbacks=[losses], **options)
    return losses.found, model


def bits(model: Towers) -> list[Tensor]:
    rows = model.embeddings.rows("user")
    return [*model.layer.state_dict().values(), rows.ids, rows.values]


def test_one_task_has_the_bits_of_one_label() -> None:
    expected, model = trained(one_label(), 1, one=True)
    for one in (True, False):
        losses, other = trained(one_label(), 1, one, tasks=[Task("click")])
        assert losses == expected
        assert all(map(torch.equal, bits(model), bits(other)))


def test_samples_without_any_label_change_nothing() -> None:
    data = batches(missing=0.0)
    mixed = []
    for batch in data:
        other = {**batch, "label": torch.full((16, 2), math.nan), "dense": batch["dense"] * 1e3}
        mixed.append({name: torch.cat([batch[name], other[name]]) for name in batch})
    tasks = [Task("click"), Task("buy", weight=0.5)]
    expected, model = trained(data, 2, tasks=tasks)
    losses, other_model = trained(mixed, 2, tasks=tasks)
    assert losses == pytest.approx(expected, rel=1e-6)
    for mine, theirs in zip(bits(model), bits(other_model), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_no_label_at_all_is_a_step_that_changes_nothing() -> None:
    data = [{**batch, "label": torch.full((16, 2), math.nan)} for batch in batches(2)]
    losses, model = trained(data, 2, tasks=[Task("click"), Task("buy")])
    assert losses == [0.0] * 4
    assert torch.equal(model.layer.weight, Towers(2).layer.weight)
    found = evaluate(model, data, tasks=[Task("click"), Task("buy")])
    assert found.rows == 32 and math.isnan(found.tasks["buy"]["auc"]) and math.isnan(found.auc)


def test_a_label_that_is_missing_without_tasks_is_told() -> None:
    model = Towers(2)
    with pytest.raises(TrainingError, match=r"Labels are NaN: with tasks=\[hotbed.train.Task"):
        fit(model, batches(), optimizer_of(model))


def test_regression_learns_its_labels() -> None:
    data = batches(20, missing=0.2)
    for batch in data:
        batch["label"][:, 1] = batch["dense"].sum(1)
    tasks = [Task("click"), Task("price", loss=nn.functional.mse_loss)]
    before = evaluate(Towers(2), data, tasks=tasks).tasks["price"]["loss"]
    _, model = trained(data, 2, tasks=tasks)
    found = evaluate(model, data, tasks=tasks)
    z = torch.cat([model(batch).detach() for batch in data])[:, 1].double()
    y = torch.cat([batch["label"] for batch in data])[:, 1].double()
    assert found.tasks["price"] == {"loss": pytest.approx(float(((z - y) ** 2).mean()), rel=1e-9)}
    assert found.tasks["price"]["loss"] < 0.5 * before


def test_figures_are_of_samples_with_the_label() -> None:
    model, data = Towers(2), batches()
    found = evaluate(model, data, tasks=[Task("click"), Task("buy")])
    z = torch.cat([model(batch).detach() for batch in data])
    y = torch.cat([batch["label"] for batch in data])
    for t, name in enumerate(["click", "buy"]):
        there = ~y[:, t].isnan()
        expected = {
            "auc": auc(z[there, t], y[there, t]),
            "logloss": logloss(z[there, t], y[there, t]),
        }
        assert found.tasks[name] == expected
    assert (found.auc, found.logloss) == (*found.tasks["click"].values(),)
    assert found.rows == 96
    alone = evaluate(Towers(1, one=True), one_label())
    assert alone.tasks == {"label": {"auc": alone.auc, "logloss": alone.logloss}}


@pytest.mark.parametrize("figure", [Auc, LogLoss, lambda: MeanLoss(nn.functional.l1_loss)])
def test_a_metric_is_of_all_rows_since_the_reset(figure) -> None:
    metric, generator = figure(), torch.Generator().manual_seed(0)
    z, y = torch.randn(40, generator=generator), torch.arange(40) % 2
    assert math.isnan(metric.compute())
    for cut in (7, 40):
        metric.reset()
        for part in zip(z.split(cut), y.split(cut), strict=True):
            metric.update(*part)
        whole = figure()
        whole.update(z, y)
        assert metric.compute() == whole.compute()


def test_metrics_of_torchmetrics_are_taken() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    model, data = Towers(2), batches(missing=0.3)
    given = torchmetrics.classification.BinaryAUROC()
    error = torchmetrics.MeanSquaredError()
    tasks = [
        Task("click", metrics={"auroc": given, "auc": Auc()}),
        Task("buy", loss=nn.functional.mse_loss, metrics={"mse": error}),
    ]
    for _ in range(2):  # nothing stays in a metric
        found = evaluate(model, data, tasks=tasks).tasks
        assert found["click"]["auroc"] == pytest.approx(found["click"]["auc"], abs=1e-6)
        z = torch.cat([model(batch).detach() for batch in data])[:, 1]
        y = torch.cat([batch["label"] for batch in data])[:, 1]
        there = ~y.isnan()
        assert found["buy"]["mse"] == pytest.approx(float(((z - y)[there] ** 2).mean()), rel=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Task("a/b"), "A task's name is 'a/b'; give printable text without a slash"),
        (lambda: Task(""), "A task's name is ''"),
        (lambda: Task("a\nb"), "A task's name is"),
        (lambda: Task("a", weight=-1.0), "'a': weight is -1.0; give a number from 0 on"),
        (lambda: Task("a", weight=math.nan), "weight is nan"),
        (lambda: Task("a", loss=3), "'a': loss is 3; give a function"),
        (lambda: Task("a", metrics={"m": 3}), "metric 'm': expected an object with update"),
        (lambda: Task("a", metrics={"m/n": Auc()}), "a metric's name is 'm/n'"),
        (lambda: fit(Towers(1), [], None, tasks=[]), "takes a list of hotbed.train.Task"),
        (lambda: fit(Towers(1), [], None, tasks=["a"]), "got 'a' in it"),
        (lambda: fit(Towers(1), [], None, tasks=[Task("a"), Task("a")]), "Two tasks are named 'a'"),
    ],
)
def test_wrong_tasks_are_refused(make, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        make()


def test_logits_and_labels_have_a_column_for_each_task() -> None:
    tasks = [Task("click"), Task("buy")]
    for model, data, what in [
        (Towers(3), batches(1), r"logits of shape \(B, 2\).*'click', 'buy'; got \(16, 3\)"),
        (Towers(2), one_label(1), r"labels of shape \(B, 2\).*got \(16,\)"),
    ]:
        for call in (
            lambda m=model, d=data: fit(m, d, optimizer_of(m), tasks=tasks),
            lambda m=model, d=data: evaluate(m, d, tasks=tasks),
        ):
            with pytest.raises(TaskError, match=what):
                call()


def test_a_loss_is_any_function() -> None:
    def doubled(z: Tensor, y: Tensor) -> Tensor:
        return 2 * BCE(z, y)

    expected, _ = trained(one_label(), 1, tasks=[Task("click", weight=2.0)])
    losses, _ = trained(one_label(), 1, tasks=[Task("click", loss=doubled)])
    assert losses == expected
