"""Ranks that call `fit` otherwise, or of which one cannot begin, are told before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dist.test_arguments_of_ranks import refused
from dist.worlds import run
from train.clicks_and_buys import Towers, batches, one_label

import hotbed as hb
from hotbed.checkpoint import CheckpointError
from hotbed.dist import PeerError
from hotbed.train import (
    Callback,
    Checkpoints,
    CsvLog,
    Evaluation,
    Position,
    Task,
    Validation,
    fit,
)
from hotbed.train.report import OutputError


def optimizer_of(model: Any) -> hb.optim.SGD:
    return hb.optim.SGD(model.parameters(), lr=0.1)


def other_runs(rank: int, world: int, folder: str) -> None:
    model = hb.distribute(Towers(1, one=True), timeout=10)
    optimizer, place = optimizer_of(model), Position()
    held = hb.dist.slices(one_label(2))

    def saving(every: int) -> Checkpoints:
        return Checkpoints(f"{folder}/c", optimizer, place, every=every)

    others: list[tuple[str, dict[str, Any]]] = [
        ("epochs is 1 on rank 0 and 2 on rank 1", {"epochs": 1 + rank}),
        ("batch of the position is 0", {"position": Position(batch=rank)}),
        ("the loss is ", {"loss": torch.nn.functional.mse_loss} if rank else {}),
        ("metric of Validation is 'auc'", {"callbacks": [Validation(held, metric=METRICS[rank])]}),
        ("patience of Validation", {"callbacks": [Validation(held, patience=1 + rank)]}),
        ("every of Validation is 2 on rank", {"callbacks": [Validation(held, every=2)][rank:]}),
        ("every of Checkpoints", {"callbacks": [saving(3 + rank)], "position": place}),
    ]
    rows = model.embeddings.rows("user").values
    for words, options in others:
        refused(
            PeerError, words, lambda o=options: fit(model, hb.dist.slices(DATA), optimizer, **o)
        )
    assert torch.equal(rows, model.embeddings.rows("user").values)
    log = CsvLog(f"{folder}/nowhere/log.csv", 1)  # which rank 0 alone writes
    kind = PeerError if rank else OutputError
    refused(kind, "nowhere", lambda: fit(model, hb.dist.slices(DATA), optimizer, callbacks=[log]))
    fit(model, hb.dist.slices(DATA), optimizer, callbacks=[*[Callback()][rank:]])


METRICS = "auc", "logloss"
DATA = one_label(4)


def other_tasks(rank: int, world: int) -> None:
    model = hb.distribute(Towers(2), timeout=10)
    data = batches(3)
    for words, tasks in (
        ("weight of task 1 is 1 on rank 0 and 2", [Task("a"), Task("b", weight=1 + rank)]),
        ("name of task 0 is 'a'", [Task("ab"[rank]), Task("ba"[rank])]),
    ):
        refused(
            PeerError,
            words,
            lambda t=tasks: fit(model, hb.dist.slices(data), optimizer_of(model), tasks=t),
        )


def metrics_of_one_rank(rank: int, world: int) -> None:
    """A figure that only one rank can make is an error on all; of other figures rank 0's counts."""

    def failing(evaluation: Evaluation) -> float:
        if rank:
            raise ValueError("no figure here")
        return evaluation.auc

    model = hb.distribute(Towers(1, one=True), timeout=10)
    held = hb.dist.slices(one_label(2))
    loader, kind = hb.dist.slices(DATA), ValueError if rank else PeerError
    broken = Validation(held, metric=failing, mode="max")
    refused(
        kind,
        "no figure here",
        lambda: fit(model, loader, optimizer_of(model), callbacks=[broken]),
    )
    model.zero_grad()
    own = Validation(held, metric=lambda _: float(rank), mode="max", every=1, patience=2)
    result = fit(model, loader, optimizer_of(model), callbacks=[own])
    assert [one.value for one in own.history] == [0.0] * 3 and result.steps == 3


def saved_and_loaded(rank: int, world: int, folder: str) -> None:
    model = hb.distribute(Towers(1), timeout=10)
    hb.save(folder, model, step=1)

    def call() -> None:
        if rank:
            hb.load(folder, model)
        else:
            hb.save(folder, model, step=2)

    refused(CheckpointError, "Rank 0 calls hotbed.save, and rank 1 hotbed.load.", call)
    hb.load(folder, model)


@pytest.mark.process
def test_ranks_that_train_otherwise_are_refused(tmp_path: Path) -> None:
    run(2, other_runs, str(tmp_path))


@pytest.mark.process
def test_ranks_with_other_tasks_are_refused() -> None:
    run(2, other_tasks)


@pytest.mark.process
def test_all_ranks_stop_by_the_figure_of_the_first() -> None:
    run(2, metrics_of_one_rank)


@pytest.mark.process
def test_a_rank_that_saves_while_another_loads_is_refused(tmp_path: Path) -> None:
    run(2, saved_and_loaded, str(tmp_path))
