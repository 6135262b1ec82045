"""Tasks, validation and logs on several processes: as on one."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import math
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from dist.worlds import run
from rich.console import Console
from torch import Tensor, nn
from train.clicks_and_buys import Towers, batches, one_label

import hotbed as hb
from hotbed.data import write_criteo_tsv
from hotbed.dist import PeerError
from hotbed.dist.distribute import needed_sharing
from hotbed.train import (
    Checkpoints,
    CsvLog,
    Evaluation,
    Position,
    Task,
    Validation,
    evaluate,
    fit,
    recipe,
)
from hotbed.train.settings import SettingsError, TrainSettings

Batch = dict[str, Tensor]


def tasks_of() -> list[Task]:
    return [Task("click"), Task("buy", weight=0.3)]


def optimizer_of(model: Towers) -> hb.optim.SGD:
    return hb.optim.SGD(model.parameters(), lr=0.1)


def uneven(world: int) -> list[list[Batch]]:
    """Batches of each rank, of other sizes and with other shares of missing labels."""
    found = [batches(4, 6 + 5 * rank, 2, 0.2 + 0.25 * rank, seed=rank) for rank in range(world)]
    found[0][2]["label"][:, 1] = math.nan
    for own in found:
        own[3]["label"][:, 0] = math.nan
    return found


def whole(parts: list[list[Batch]]) -> list[Batch]:
    return [
        {name: torch.cat([part[name] for part in of_ranks]) for name in of_ranks[0]}
        for of_ranks in zip(*parts, strict=True)
    ]


def expect_alike(model: Towers, data: list[Batch], found: Evaluation, tasks: list[Task]) -> None:
    """The model as one process would have trained and evaluated it."""
    alone = Towers(2)
    fit(alone, data, optimizer_of(alone), tasks=tasks_of())
    torch.testing.assert_close(model.layer.weight, alone.layer.weight)
    ids = torch.arange(30)
    mine, theirs = (m.embeddings.lookup("user", ids) for m in (model, alone))
    torch.testing.assert_close(mine, theirs)
    expected = evaluate(alone, data, tasks=tasks)
    assert found.rows == expected.rows
    for name, figures in expected.tasks.items():
        assert found.tasks[name] == pytest.approx(figures, abs=1e-5)


def with_tasks(rank: int, world: int, sliced: bool, metrics: bool) -> None:
    tasks = tasks_of()
    if metrics:
        torchmetrics = pytest.importorskip("torchmetrics")
        tasks[0] = Task("click", metrics={"auc": torchmetrics.classification.BinaryAUROC()})
    parts = uneven(world)
    data = whole(parts)
    model = hb.distribute(Towers(2))
    own: Any = hb.dist.slices(data) if sliced else parts[rank]
    fit(model, own, optimizer_of(model), tasks=tasks_of())
    found = evaluate(model, own, tasks=tasks)
    expect_alike(model, data, found, tasks)


@pytest.mark.process
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("sliced", [False, True])
def test_losses_and_figures_are_of_the_labels_of_all_ranks(world: int, sliced: bool) -> None:
    run(world, with_tasks, sliced, world == 2)


def stops_together(rank: int, world: int, folder: str) -> None:
    data, path = one_label(8), Path(folder)

    def begun(steps: int | None) -> tuple[Any, Validation]:
        model, position = hb.distribute(Towers(1, one=True)), Position()
        optimizer = optimizer_of(model)
        values = [3.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]
        validation = Validation(
            hb.dist.slices(one_label(2, seed=9)),
            every=1,
            metric=lambda evaluation: values[len(validation.history)],
            mode="min",
            patience=3,
            best=path / "best",
            restore=True,
        )
        beside = [position, validation]
        if hb.checkpoint.latest(path / "run"):
            hb.load(path / "run", model, optimizer, loader=beside)
        saving = Checkpoints(path / "run", optimizer, position, every=2, beside=[validation])
        log = CsvLog(path / "h.csv", 1, validation=path / "v.csv")
        loader = hb.dist.slices(data[:steps])
        callbacks = [validation, log, saving]
        return fit(model, loader, optimizer, position=position, callbacks=callbacks), validation

    begun(3)  # as if it was killed behind step 3
    result, validation = begun(None)
    assert result.interrupted and result.steps == 3  # 3 to 5
    assert validation.best_found is not None and validation.best_found.step == 2
    with open(path / "v.csv") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["1", "2", "3", "4", "5"]
    again = Towers(1, one=True)
    assert hb.load(path / "best", hb.distribute(again)).step == 2


@pytest.mark.process
def test_ranks_stop_after_the_same_step_and_keep_one_best(tmp_path: Path) -> None:
    run(2, stops_together, str(tmp_path))


def different_sizes(rank: int, world: int) -> None:
    data = one_label(4)
    model = hb.distribute(Towers(1, one=True))
    own = one_label(2 + rank, seed=9)
    ends = Validation(hb.dist.even(own), every=2)
    fit(model, hb.dist.slices(data), optimizer_of(model), callbacks=[ends])
    assert [one.evaluation.rows for one in ends.history] == [64, 64]
    uneven_ends = Validation(own, every=2)
    with pytest.raises(PeerError, match=r"hotbed\.dist\.even"):
        fit(model, hb.dist.slices(data), optimizer_of(model), callbacks=[uneven_ends])


@pytest.mark.process
def test_ranks_with_other_numbers_of_validation_batches_are_told_of_even() -> None:
    run(2, different_sizes)


def interrupted(rank: int, world: int) -> None:
    class Stopping(hb.train.Callback):
        def should_stop(self) -> bool:
            return rank == 1 and len(validation.history) == 1

    data = one_label(8)
    model = hb.distribute(Towers(1, one=True))
    validation = Validation(hb.dist.slices(one_label(3)), every=1)
    loader = hb.dist.slices(data)
    result = fit(model, loader, optimizer_of(model), callbacks=[validation, Stopping()])
    assert result.interrupted and result.steps <= 4 and len(validation.history) <= 2


@pytest.mark.process
def test_what_one_rank_wants_cuts_a_validation_short_on_all() -> None:
    run(2, interrupted)


def command(rank: int, world: int, folder: str) -> None:
    """`hotbed train` on ranks that are a process group already, by one level and by two, and rows ahead."""
    console, asked, sent = Console(file=io.StringIO()), [], []

    def kept(model: nn.Module, **options: Any) -> nn.Module:
        asked.append(options)
        found = hb.distribute(model, **options)
        sent.append(needed_sharing(found, "").ranks.sent)
        return found

    figures = []
    with (
        mock.patch.object(recipe, "process_group", lambda: contextlib.nullcontext(True)),
        mock.patch.object(recipe, "distribute", kept),
        mock.patch.dict(os.environ, {"RANK": str(rank), "WORLD_SIZE": str(world)}),
    ):
        for local, prefetch in ((None, 0), (2, 0), (None, 1)):
            settings = TrainSettings(
                data=(f"{folder}/clicks.tsv",),
                dim=4,
                batch_size=64,
                local_world_size=local,
                prefetch=prefetch,
            )
            figures.append(recipe.train(settings, console, console))
        with pytest.raises(SettingsError, match="size is 3; it must be a divisor .* processes, 4"):
            recipe.train(dataclasses.replace(settings, local_world_size=3), console, console)
    assert [tuple(options.values()) for options in asked] == [(None, 0), (2, 0), (None, 1)]
    assert ["ids inside" in of for of in sent] == [False, True, False]
    assert ["rows ahead" in of for of in sent] == [False, False, True] and sent[2]["ids ahead"]
    one, two, ahead = figures
    assert one["stored_rows"] == two["stored_rows"] == ahead["stored_rows"]
    assert two["logloss"] == pytest.approx(one["logloss"], abs=1e-4)
    assert ahead["logloss"] == one["logloss"]


@pytest.mark.process
def test_the_command_takes_machines_of_two_ranks(tmp_path: Path) -> None:
    write_criteo_tsv(str(tmp_path / "clicks.tsv"), rows=500, seed=2)
    run(4, command, str(tmp_path))
