"""Errors of one rank in evaluations and callbacks: the others hear of them at once, and all go on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from dist.test_loader_errors import BATCHES, Loader, Model
from dist.worlds import run
from torchmetrics.classification import BinaryAccuracy

import hotbed as hb
from hotbed.dist import PeerError
from hotbed.train import Auc, Callback, Task, Validation, evaluate, fit

SECONDS = 20.0
"""That a rank waits for the others; what is told takes less."""


class Unlabelled(Loader):
    """Its third batch has no label."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number, batch in enumerate(Loader(False), 1):
            if self.fails and number == 3:
                del batch["label"]
            yield batch


class Broken(Callback):
    """Raises in one of its methods."""

    def __init__(self, method: str, fails: bool) -> None:
        if fails:
            setattr(self, method, self._fail)

    def _fail(self, *arguments: Any) -> bool:
        raise ValueError("the third callback is damaged")


def _evaluated(fails: bool, model: Any, optimizer: Any) -> None:
    evaluate(model, Loader(fails))


def _unlabelled(fails: bool, model: Any, optimizer: Any) -> None:
    try:
        evaluate(model, Unlabelled(fails))
    except KeyError as error:
        raise ValueError("the third batch is damaged") from error


def _stopping(fails: bool, model: Any, optimizer: Any) -> None:
    evaluate(model, Loader(False), should_stop=Broken("should_stop", fails).should_stop)


def _validated(fails: bool, model: Any, optimizer: Any) -> None:
    validation = Validation(Loader(fails), every=2)
    fit(model, Loader(False), optimizer, callbacks=[validation])


def _called(method: str) -> Callable[[bool, Any, Any], None]:
    def trained(fails: bool, model: Any, optimizer: Any) -> None:
        callbacks: list[Callback] = [Broken(method, fails)]
        if method == "on_validation":
            callbacks.append(Validation(Loader(False)))
        fit(model, Loader(False), optimizer, epochs=2, callbacks=callbacks)

    return trained


WAYS: dict[str, Callable[[bool, Any, Any], None]] = {
    "evaluate": _evaluated,
    "unlabelled": _unlabelled,
    "asked to stop": _stopping,
    "Validation": _validated,
    **{
        method: _called(method)
        for method in ("on_step", "on_epoch", "on_validation", "should_stop", "has_ended")
    },
}


def one_fails(rank: int, world: int, how: str, failing: list[int]) -> None:
    model = hb.distribute(Model(), timeout=SECONDS)
    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.1)
    fit(model, Loader(False), optimizer)
    began = time.perf_counter()
    fails = rank in failing
    error: type[Exception] = ValueError if fails else PeerError
    with pytest.raises(error, match="damaged|label"):
        WAYS[how](fails, model, optimizer)
    assert time.perf_counter() - began < SECONDS / 2
    assert fit(model, Loader(False), optimizer).steps == BATCHES
    assert evaluate(model, Loader(False)).rows == 2 * 4 * BATCHES


@pytest.mark.process
@pytest.mark.parametrize("failing", [[1], [0, 1]], ids=["one", "all"])
@pytest.mark.parametrize("how", WAYS)
def test_others_hear_of_an_error(how: str, failing: list[int]) -> None:
    run(2, one_fails, how, failing)


def other_metrics(rank: int, world: int) -> None:
    model = hb.distribute(Model(), timeout=SECONDS)
    metrics: dict[str, Any] = {"auc": Auc()} if rank else {"accuracy": BinaryAccuracy()}
    batches: Iterable[Any] = Loader(False)
    with pytest.raises(PeerError, match=r"metrics of task 0.*hotbed.train.evaluate alike"):
        evaluate(model, batches, tasks=[Task("click", metrics=metrics)])
    evaluate(model, batches)


@pytest.mark.process
def test_other_metrics_on_another_rank() -> None:
    run(2, other_metrics)


def gone_while_connecting(rank: int, world: int) -> None:
    if rank == 1:
        torch.distributed.new_group = lambda *a, **b: os._exit(1)
    with pytest.raises(PeerError, match="could not connect the ranks"):
        hb.distribute(Model(), timeout=3)
    raise SystemExit("heard")


@pytest.mark.process
def test_a_rank_that_ends_while_the_ranks_connect() -> None:
    with pytest.raises(AssertionError, match="heard"):
        run(2, gone_while_connecting)
