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
from torch.distributed.algorithms.join import Join
from torchmetrics.classification import BinaryAccuracy

import hotbed as hb
from hotbed.dist import PeerError
from hotbed.train import Auc, Callback, Task, TaskError, Validation, evaluate, fit

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
    except TaskError as error:
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


class Normed(Model):
    """Has buffers, which travel before its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, batch: dict[str, Any]) -> Any:
        return self.top(self.norm(self.embeddings({"item": batch["item"]})["item"]))[:, 0]


class First(Loader):
    """Its first, or second, batch fails."""

    def __init__(self, fails: bool, at: int) -> None:
        super().__init__(fails)
        self.at = at

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number, batch in enumerate(Loader(False)):
            if self.fails and number == self.at:
                raise ValueError("the third batch is damaged")
            yield batch


def _fit_unlabelled(fails: bool, model: Any, optimizer: Any) -> None:
    try:
        fit(model, Unlabelled(fails), optimizer)
    except TaskError as error:
        raise ValueError("the third batch is damaged") from error


def _even(fails: bool, model: Any, optimizer: Any) -> None:
    loader = hb.dist.even(Loader(False))
    fit(model, loader, optimizer, epochs=2, callbacks=[Broken("on_step", fails)])


def _forward(fails: bool, model: Any, optimizer: Any) -> None:
    class Without(Loader):
        """Its batches lack what the model asks for."""

        def __iter__(self) -> Iterator[dict[str, Any]]:
            for number, batch in enumerate(Loader(False)):
                if fails and number == 3:
                    del batch["item"]
                yield batch

    try:
        fit(model, Without(fails), optimizer)
    except KeyError as error:
        raise ValueError("the third batch is damaged") from error


def _position(fails: bool, model: Any, optimizer: Any) -> None:
    """The same one is good for the rest."""
    position = hb.train.Position()
    try:
        fit(model, Loader(fails), optimizer, position=position)
    finally:
        rest = fit(model, Loader(False), optimizer, position=position)
        assert position.batch == 0 and rest.steps == BATCHES - 2


WAYS: dict[str, Callable[[bool, Any, Any], None]] = {
    "evaluate": _evaluated,
    "unlabelled": _unlabelled,
    "asked to stop": _stopping,
    "Validation": _validated,
    "fit unlabelled": _fit_unlabelled,
    "first": lambda fails, model, optimizer: fit(model, First(fails, 0), optimizer),
    "second": lambda fails, model, optimizer: fit(model, First(fails, 1), optimizer),
    "position": _position,
    "even": _even,
    "forward": _forward,
    **{
        method: _called(method)
        for method in (
            "on_step",
            "on_epoch",
            "on_validation",
            "on_finish",
            "should_stop",
            "has_ended",
        )
    },
}


def one_fails(rank: int, world: int, how: str, failing: list[int]) -> None:
    for kind in (Model, Normed):
        for is_trained in (True, False):
            told_of(kind, how, rank in failing, is_trained=is_trained)


def told_of(kind: type[Model], how: str, fails: bool, *, is_trained: bool) -> None:
    model = hb.distribute(kind(), timeout=SECONDS)
    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.1)
    if is_trained:
        fit(model, Loader(False), optimizer)
    began = time.perf_counter()
    error: type[Exception] = ValueError if fails else PeerError
    with pytest.raises(error, match="damaged|label|KeyError: 'item'"):
        WAYS[how](fails, model, optimizer)
    assert time.perf_counter() - began < SECONDS / 2
    assert fit(model, Loader(False), optimizer).steps == BATCHES
    assert evaluate(model, Loader(False)).rows == 2 * 4 * BATCHES


@pytest.mark.process
@pytest.mark.parametrize("failing", [[1], [0, 1]], ids=["one", "all"])
@pytest.mark.parametrize("how", WAYS)
def test_others_hear_of_an_error(how: str, failing: list[int]) -> None:
    run(2, one_fails, how, failing)


def in_join(rank: int, world: int) -> None:
    """Rank 0 has ended; what rank 1 does wrong ends nobody's process."""
    model = hb.distribute(Model(), timeout=5)
    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.1)
    batches = list(Loader(False))
    with pytest.raises((PeerError, RuntimeError)), Join(hb.dist.joinables(model)):
        for number, batch in enumerate(batches[: 1 + 3 * rank]):
            if number == 2:
                with pytest.raises(hb.TableError, match="training forwards only"), torch.no_grad():
                    model(batch)
                with pytest.raises(hb.InputError):
                    model({**batch, "item": torch.tensor([0.5])})
                with pytest.raises(PeerError, match="A forward inside of Join has failed here"):
                    model(batch)
                raise RuntimeError("as a script that gives up")
            torch.nn.functional.binary_cross_entropy_with_logits(
                model(batch), batch["label"]
            ).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.process
def test_nothing_goes_on_behind_a_forward_that_has_failed_in_join() -> None:
    run(2, in_join)


def uneven_fit(rank: int, world: int) -> None:
    for kind in (Model, Normed):
        model = hb.distribute(kind(), timeout=SECONDS)
        optimizer = hb.optim.Adagrad(model.parameters(), lr=0.1)
        batches = list(Loader(False))[: 2 + 2 * rank]
        with Join(hb.dist.joinables(model)):
            assert fit(model, batches, optimizer).steps == 2 + 2 * rank


@pytest.mark.process
def test_fit_inside_of_join() -> None:
    run(2, uneven_fit)


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
