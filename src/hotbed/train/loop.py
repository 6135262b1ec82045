"""A training loop over batches with labels."""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from typing_extensions import TypedDict, Unpack

from hotbed.arrays import iterated
from hotbed.checkpoint.randomness import give_random_states, random_states
from hotbed.data.arguments import whole
from hotbed.data.position import (
    Position,
    RandomStates,
    generators_of,
    seek,
    start_workers,
    wrapped_by,
)
from hotbed.dist.join import is_in_join
from hotbed.dist.loaders import Even
from hotbed.errors import InputError
from hotbed.table.alone import Processes
from hotbed.text import brief
from hotbed.train.alike import (
    FIGURES,
    declared_tasks,
    refuse_others,
    telling_errors,
    told_of_errors,
)
from hotbed.train.batches import Batch, Loss
from hotbed.train.callbacks import Callback, Run
from hotbed.train.tasks import Task, tasks_of
from hotbed.train.trainer import Trainer, TrainingError

__all__ = ["FitOptions", "FitResult", "fit"]


@dataclass(slots=True)
class FitResult:
    """Result of a call of `fit`."""

    rows: int = 0
    """Samples trained on, over all epochs."""
    steps: int = 0
    epochs: int = 0
    """Epochs that were completed."""
    seconds: float = 0.0
    """Time from asking for the first batch to the end of the last step."""
    interrupted: bool = False
    """True if a callback ended the run, by its ``should_stop()`` or ``has_ended()``."""

    @property
    def samples_per_second(self) -> float:
        """Rows trained on, over the seconds that it took."""
        return self.rows / self.seconds if self.seconds else 0.0


class FitOptions(TypedDict, total=False):
    """Further options of `fit`."""

    progress: bool
    """Draw a bar on standard error, if that is a terminal: loss and AUC of recent samples, samples a second,
    rows that the tables hold."""
    should_stop: Callable[[], bool]
    """A function, as earlier versions had it: a callback's method now."""


def fit(
    model: nn.Module,
    batches: Iterable[Batch],
    optimizer: torch.optim.Optimizer,
    *,
    epochs: int = 1,
    loss: Loss | None = None,
    tasks: Sequence[Task] | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    callbacks: Sequence[Callback] = (),
    device: torch.device | str | None = None,
    position: Position | None = None,
    **options: Unpack[FitOptions],
) -> FitResult:
    """Train `model` on `batches`; `model(batch)` returns the logits of ``batch["label"]``.

    Args:
        model: put into training mode, and left in it.
        batches: iterated once an epoch; batches of no rows are passed over.
        optimizer: one over dense parameters and tables.
        epochs: passes over the batches.
        loss: of (logits, labels), to a scalar. Default: the model's own ``loss``, if it has one, else
            ``binary_cross_entropy_with_logits``.
        tasks: one for each column of logits and labels (B, T), in place of `loss`. The loss of a batch is
            the sum of their weights times their mean losses over the samples whose label is not NaN.
        scheduler: stepped after each optimizer step.
        callbacks: told of each step, in this order, and asked whether to stop (see `stop_on_interrupt`).
        device: where batches are moved; None leaves them where they are. Ids of tables in tiers stay,
            as they are looked up on the host, and look-ahead knows them by where they lie.
        position: where to begin; it goes along with the training, and is right whenever a callback is told
            of a step. Default: the beginning. Batches before it are passed over by the loader, if it has a
            method ``seek(epoch, batches)``, as `CriteoLog` and `lookahead` have; else they are asked for.
        options: ``progress=True`` draws a bar on standard error, if that is a terminal: loss and AUC of
            recent samples, samples a second, rows that the tables hold. ``should_stop=``, a function, as
            earlier versions had it, is a callback's method now.

    Of a distributed model all ranks call it, each with batches of its own, or with those of
    `hotbed.dist.slices`; they end after the same step, where one is to stop. They compare epochs, loss,
    tasks, position and what callbacks declare before the first batch.

    Raises:
        TrainingError: the loss of a batch is NaN or infinite; that step is not taken. On a device nothing
            waits for the loss: there a gradient that is not finite is found by the step, which is not
            taken either, and told one step later. Or an iterator has no batches for a second epoch; or
            there are fewer batches than the position is behind.
        NotFiniteError: of such a gradient.
        TaskError: logits, labels or losses do not fit each other, or the tasks.
        InputError: epochs, scheduler or callbacks are none.
        PeerError: another rank trains otherwise, or could not begin, or not make its next batch, or its
            callbacks have failed.
    """
    _check_kinds(callbacks, position, loss)
    progress, former = options.pop("progress", False), list(_former_options(options))
    given, position, known = position is not None, position or Position(), tasks_of(tasks)
    loss = loss or _loss_of(model)
    trainer = Trainer(model, optimizer, loss, known, scheduler, device, position)
    if isinstance(batches, Even):  # which the others ask for their next batch
        trainer.between_batches = batches.telling_errors
    ranks, all_callbacks = trainer.ranks, [*callbacks, *former]
    if progress and ranks.rank == 0:
        from hotbed.train.progress import (
            progress_bar,
        )  # of rich, which import hotbed does not wait for

        all_callbacks[:0] = progress_bar(model, batches, epochs, alone=ranks.size == 1)
    with ranks.reporting(FIGURES):
        _check(epochs, scheduler, all_callbacks)
    model.train()
    run = Run(model, optimizer, known, device, position, all_callbacks, ranks.rank)
    result, begun = FitResult(), list[Callback]()
    try:
        with ranks.reporting(FIGURES):
            for callback in all_callbacks:
                callback.on_run(run)
                begun.append(callback)
            declared = _declared(epochs, loss, known, position, all_callbacks)
        refuse_others(declared, ranks, "hotbed.train.fit")
        _train(trainer, batches, epochs, all_callbacks, result, given=given)
        with telling_errors(ranks):
            for callback in all_callbacks:
                callback.on_finish()
        if not is_in_join(model):
            ranks.values_of_all(FIGURES, None)  # where errors of others are heard
    finally:
        with contextlib.ExitStack() as ending:  # each, also where another raises
            for callback in reversed(begun):
                ending.callback(callback.on_end)
            ranks.ends(_never)
    return result


def _check_kinds(callbacks: object, position: object, loss: object) -> None:
    """Raise InputError where an argument of `fit` is of another kind."""
    if isinstance(callbacks, Callback) or iterated(callbacks) is None:
        raise InputError(
            f"callbacks= takes a list of hotbed.train.Callback; got {brief(callbacks)}."
        )
    if not (position is None or isinstance(position, Position)):
        raise InputError(f"position is {brief(position)}; give a hotbed.train.Position.")
    if not (loss is None or callable(loss)):
        raise InputError(f"loss is {brief(loss)}; give a function of (logits, labels).")


def _check(epochs: object, scheduler: object, callbacks: Sequence[object]) -> None:
    """Raise InputError where an argument of `fit` cannot be honoured."""
    whole("epochs", epochs)
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise InputError(
            "scheduler= is stepped after each step, without a figure; ReduceLROnPlateau takes one. Step it "
            "in on_validation() of a callback."
        )
    if scheduler is not None and not hasattr(scheduler, "step"):
        raise InputError(f"scheduler is {brief(scheduler)}; give one with a method step().")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise InputError(
                f"callbacks= takes a list of hotbed.train.Callback; got {brief(callback)} in it."
            )


def _train(
    trainer: Trainer,
    batches: Iterable[Batch],
    epochs: int,
    callbacks: Sequence[Callback],
    result: FitResult,
    *,
    given: bool,
) -> None:
    """Take the steps of `fit`, and keep `result` up to date. `given`: the position is the user's."""
    position, ranks, between = trainer.position, trainer.ranks, trainer.between_batches
    began, rows = time.perf_counter(), position.rows
    with telling_errors(ranks):
        result.interrupted = any(callback.has_ended() for callback in callbacks)
    if result.interrupted:
        return
    for epoch in range(position.epoch, epochs + 1):
        with telling_errors(ranks):
            begun = _from(batches, epoch, position) if given else batches
        for batch in told_of_errors(begun, ranks):
            position.batch += 1
            taken = position.steps
            try:
                step = trainer.step(batch, epoch)
            except BaseException:
                if position.steps == taken:  # on each rank, as all take a step or none
                    position.batch -= 1
                raise
            if step is None:
                continue
            result.steps += 1
            result.rows = position.rows - rows
            result.seconds = time.perf_counter() - began
            with between():
                for callback in callbacks:
                    callback.on_step(step)
                stops = _stops(callbacks, ranks)
            if stops:
                result.interrupted = True
                return
        if not position.batch and result.steps and _is_iterated_once(batches):
            raise TrainingError(
                f"Epoch {epoch}: there are no batches, as a generator, or another iterator, gives them "
                "once. Pass a list, a DataLoader, or whatever can be iterated again."
            )
        result.epochs = epoch
        position.epoch, position.batch = epoch + 1, 0
        position.random = _random_of(generators_of(batches))
        with between() if epoch < epochs else telling_errors(ranks):
            for callback in callbacks:
                callback.on_epoch(epoch)
            ended = any(callback.has_ended() for callback in callbacks)
        if epoch < epochs and ended:
            result.interrupted = True
            return


def _declared(
    epochs: int,
    loss: Loss,
    tasks: Sequence[Task],
    position: Position,
    callbacks: Sequence[Callback],
) -> dict[str, object]:
    """Return by name the arguments of `fit` that decide what is trained and where it ends."""
    found: dict[str, object] = {"epochs": epochs}
    found |= {f"{name} of the position": getattr(position, name) for name in _PLACE}
    if not tasks:
        found["the loss"] = loss
    found |= declared_tasks(tasks)
    counts: dict[str, int] = {}
    for callback in callbacks:
        if options := callback.declared():
            kind = type(callback).__name__
            counts[kind] = count = counts.get(kind, 0) + 1
            which = f"{kind} {count}" if count > 1 else kind
            found |= {f"{name} of {which}": value for name, value in options.items()}
    return found


_PLACE = "epoch", "batch", "steps"


def _stops(callbacks: Sequence[Callback], ranks: Processes) -> bool:
    """Return True if the run ends after this step, on all ranks. All call this."""
    ended = any(callback.has_ended() for callback in callbacks)
    return ended or ranks.ends(lambda: any(callback.should_stop() for callback in callbacks))


def _loss_of(model: nn.Module) -> Loss:
    loss: Loss = getattr(model, "loss", nn.functional.binary_cross_entropy_with_logits)
    return loss


def _former_options(options: FitOptions) -> Iterator[Callback]:
    """Callbacks for options that `fit` had in earlier versions."""
    for name, value in options.items():
        if name != "should_stop" or not callable(value):
            raise TypeError(f"fit() got an unexpected keyword argument {name!r}")
        warnings.warn(
            "fit(should_stop=...) becomes a callback: override should_stop() of hotbed.train.Callback, or "
            "pass what stop_on_interrupt() gives in callbacks=.",
            DeprecationWarning,
            stacklevel=3,
        )
        yield _Asking(value)


class _Asking(Callback):
    """Stops a run when a function says so."""

    def __init__(self, asked: Callable[[], bool]) -> None:
        self.should_stop = asked  # type: ignore[method-assign]


def _never() -> bool:
    return False


def _from(batches: Iterable[Batch], epoch: int, position: Position) -> Iterator[Batch]:
    """The batches of an epoch that are not done, in the order in which they would have come."""
    generators, begun = generators_of(batches), position.random
    if epoch > 1:
        before = _random_of(generators)
        start_workers(batches)
        _give(before, generators)
    passed = seek(batches, epoch, position.batch)
    if begun is not None and (position.batch or position.loaded):
        _give_generators(begun, generators)
    position.loaded = False
    if not position.batch:
        position.random = _random_of(generators)
        return iter(batches)
    now = random_states()
    if begun is not None:
        give_random_states(begun)
    iterator = iter(batches)
    count, first = 0, []
    # Whatever draws an order has drawn it with the first batch that it gives.
    for batch in itertools.islice(iterator, max(1, passed)):
        count, first = count + 1, [batch]
    give_random_states(now)
    if count < passed:
        raise TrainingError(
            f"Epoch {epoch}: {passed} of its batches are done, and the loader has {count}. Give fit the data "
            "that the training began with, or no position."
        )
    return iterator if passed else itertools.chain(first, iterator)


def _is_iterated_once(batches: object) -> bool:
    """Return True for a generator or another iterator, also inside of a loader that wraps it."""
    return isinstance(wrapped_by(batches)[-1], Iterator)


def _give(states: RandomStates, generators: Sequence[torch.Generator]) -> None:
    give_random_states(states)
    _give_generators(states, generators)


def _give_generators(states: RandomStates, generators: Sequence[torch.Generator]) -> None:
    for generator, state in zip(generators, states.get("generators", []), strict=False):
        generator.set_state(state)


def _random_of(generators: Sequence[torch.Generator]) -> RandomStates:
    states = [generator.get_state() for generator in generators]
    return {**random_states(), "generators": states}
