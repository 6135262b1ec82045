"""A training loop over batches with labels, and its evaluation."""

from __future__ import annotations

import itertools
import math
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from hotbed import trace
from hotbed.checkpoint.randomness import give_random_states, random_states
from hotbed.checkpoint.ranks import ranks_of
from hotbed.data.position import Position, RandomStates, generators_of, seek, wrapped_by
from hotbed.dist.loaders import Slice
from hotbed.dist.timeouts import BACKWARD
from hotbed.errors import HotbedError
from hotbed.modules.owner import owners_of, tables_of
from hotbed.train.callbacks import Callback, Step
from hotbed.train.metrics import auc, logloss

Batch = Mapping[str, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


class TrainingError(HotbedError, RuntimeError):
    """Training cannot go on; the message says at which step and why."""


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
    """True if a callback ended the run, by its ``should_stop()``."""

    @property
    def samples_per_second(self) -> float:
        """Rows trained on, over the seconds that it took."""
        return self.rows / self.seconds if self.seconds else 0.0


class Evaluation(NamedTuple):
    """Quality of a model's scores."""

    auc: float
    logloss: float
    rows: int
    seconds: float
    interrupted: bool


def fit(
    model: nn.Module,
    batches: Iterable[Batch],
    optimizer: torch.optim.Optimizer,
    *,
    epochs: int = 1,
    loss: Loss = nn.functional.binary_cross_entropy_with_logits,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    callbacks: Sequence[Callback] = (),
    device: torch.device | str | None = None,
    position: Position | None = None,
    progress: bool = False,
    **former: Callable[[], bool],
) -> FitResult:
    """Train `model` on `batches`; `model(batch)` returns the logits of ``batch["label"]``.

    Args:
        model: put into training mode, and left in it.
        batches: iterated once an epoch; batches of no rows are passed over.
        optimizer: one over dense parameters and tables.
        epochs: passes over the batches.
        loss: of (logits, labels), to a scalar.
        scheduler: stepped after each optimizer step.
        callbacks: told of each step, in this order, and asked whether to stop (see `stop_on_interrupt`).
        device: where batches are moved; None leaves them where they are. Ids of tables in tiers stay,
            as they are looked up on the host, and look-ahead knows them by where they lie.
        position: where to begin; it goes along with the training, and is right whenever a callback is told
            of a step. Default: the beginning. Batches before it are passed over by the loader, if it has a
            method ``seek(epoch, batches)``, as `CriteoLog` and `lookahead` have; else they are asked for.
        progress: draw a bar on standard error, if that is a terminal: loss and AUC of recent samples, samples
            a second, rows that the tables hold.
        former: ``should_stop=``, a function, as earlier versions had it: a callback's method now.

    Of a distributed model all ranks call it, each with batches of its own, or with those of
    `hotbed.dist.slices`; they end after the same step, where one is to stop.

    Raises:
        TrainingError: the loss of a batch is NaN or infinite; that step is not taken. On a device nothing
            waits for the loss: there a gradient that is not finite is found by the step, which is not
            taken either, and told one step later. Or an iterator has no batches for a second epoch; or
            there are fewer batches than the position is behind.
        NotFiniteError: of such a gradient.
    """
    result = FitResult()
    given, position = position is not None, position or Position()
    callbacks = [*callbacks, *_former_options(former)]
    trainer = _Trainer(model, optimizer, loss, scheduler, device, position)
    ranks = trainer.ranks
    if progress and ranks.rank == 0:
        from hotbed.train.progress import (
            progress_bar,
        )  # of rich, which import hotbed does not wait for

        callbacks = [*progress_bar(model, batches, epochs, alone=ranks.size == 1), *callbacks]
    model.train()
    for callback in callbacks:
        callback.on_start(model)
    began, rows = time.perf_counter(), position.rows
    try:
        for epoch in range(position.epoch, epochs + 1):
            for batch in _from(batches, epoch, position) if given else batches:
                position.batch += 1
                step = trainer.step(batch, epoch)
                if step is None:
                    continue
                result.steps += 1
                result.rows = position.rows - rows
                result.seconds = time.perf_counter() - began
                for callback in callbacks:
                    callback.on_step(step)
                if ranks.ends(lambda: any(callback.should_stop() for callback in callbacks)):
                    result.interrupted = True
                    return result
            if not position.batch and result.steps and _is_iterated_once(batches):
                raise TrainingError(
                    f"Epoch {epoch}: there are no batches, as a generator, or another iterator, gives them "
                    "once. Pass a list, a DataLoader, or whatever can be iterated again."
                )
            result.epochs = epoch
            position.epoch, position.batch = epoch + 1, 0
            position.random = _random_of(generators_of(batches))
            for callback in callbacks:
                callback.on_epoch(epoch)
    finally:
        ranks.ends(_never)
        for callback in callbacks:
            callback.on_end()
    return result


def _former_options(former: Mapping[str, Callable[[], bool]]) -> Iterator[Callback]:
    """Callbacks for options that `fit` had in earlier versions."""
    for name, value in former.items():
        if name != "should_stop":
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


class _Trainer:
    """Takes the steps of `fit`, whose arguments it has."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None,
        device: torch.device | str | None,
        position: Position,
    ) -> None:
        self.model, self.optimizer, self.loss = model, optimizer, loss
        self.scheduler, self.device = scheduler, device
        self.position, self.ranks = position, ranks_of(tables_of(model), model)
        self.staying = _ids_of_tiers(model)

    def step(self, batch: Batch, epoch: int) -> Step | None:
        """Train on one batch. None: it has no rows, so there was no step.

        Raises:
            TrainingError: the loss is not finite.
        """
        position, ranks = self.position, self.ranks
        of_all = batch.samples if isinstance(batch, Slice) else None
        batch = _moved(batch, self.device, self.staying)
        labels = batch["label"]
        samples = len(labels) if of_all is None else of_all
        if not samples and (ranks.size == 1 or of_all is not None):
            return None
        with trace.span("forward"):
            logits = self.model(batch)
            value = self.loss(logits, labels) if len(labels) else logits.sum()
            if of_all:  # ranks with more samples count more
                value = value * (ranks.size * len(labels) / of_all)
        if value.device.type == "cpu" and ranks.size == 1 and not math.isfinite(value.item()):
            raise TrainingError(
                f"Step {position.steps + 1}, epoch {epoch}: the loss is {value.item()}, so the "
                "step was not taken. Lower the learning rate, or look for extreme inputs."
            )
        with trace.span("backward"), ranks.listening(BACKWARD):
            value.backward()
        with trace.span("step"):
            self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        position.steps += 1
        position.rows += samples
        return Step(position.steps, epoch, position.rows, value.detach(), logits.detach(), labels)


def _from(batches: Iterable[Batch], epoch: int, position: Position) -> Iterator[Batch]:
    """The batches of an epoch that are not done, in the order in which they would have come."""
    passed = seek(batches, epoch, position.batch)
    generators, begun = generators_of(batches), position.random
    if begun is not None and (position.batch or position.loaded):
        for generator, state in zip(generators, begun.get("generators", []), strict=False):
            generator.set_state(state)
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


def _random_of(generators: Sequence[torch.Generator]) -> RandomStates:
    states = [generator.get_state() for generator in generators]
    return {**random_states(), "generators": states}


def scored(
    model: nn.Module, batches: Iterable[Batch], device: torch.device | str | None = None
) -> Iterator[tuple[Batch, Tensor]]:
    """Each batch with its logits (B,), the model in evaluation mode and without gradients.

    The model's mode is as it was between batches and afterwards.
    """
    staying = _ids_of_tiers(model)
    for batch in batches:
        batch = _moved(batch, device, staying)
        training = model.training
        model.eval()
        try:
            with torch.no_grad():
                logits = model(batch)
        finally:
            model.train(training)
        yield batch, logits


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    device: torch.device | str | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Evaluation:
    """Return the exact AUC and log loss of `model` on `batches`; nothing in the model changes.

    A distributed model is evaluated on the batches of all ranks.
    """
    began, ranks, asked = (
        time.perf_counter(),
        ranks_of(tables_of(model), model),
        should_stop or _never,
    )
    logits: list[Tensor] = [torch.empty(0, device="cpu")]
    labels: list[Tensor] = [torch.empty(0, device="cpu")]
    interrupted = False
    for batch, scores in scored(model, batches, device):
        logits.append(scores.to(torch.promote_types(scores.dtype, torch.float32)).cpu())
        labels.append(batch["label"].cpu())
        if ranks.ends(asked):
            interrupted = True
            break
    of_ranks = ranks.values_of_all("figures", (torch.cat(logits), torch.cat(labels)))
    z, y = (torch.cat(parts) for parts in zip(*of_ranks, strict=True))
    seconds = time.perf_counter() - began
    return Evaluation(auc(z, y), logloss(z, y), len(z), seconds, interrupted)


def _never() -> bool:
    return False


class Interrupts(Callback):
    """How often Ctrl-C was pressed inside `stop_on_interrupt`; a callback that stops a run then."""

    def __init__(self) -> None:
        self.count = 0

    def should_stop(self) -> bool:
        return self()

    def __call__(self) -> bool:
        return self.count > 0


@contextmanager
def stop_on_interrupt() -> Iterator[Interrupts]:
    """Let the first Ctrl-C be asked for instead of raised, so that no step is cut in two.

    Pass the yielded object to `fit` as a callback. From the second Ctrl-C on KeyboardInterrupt is
    raised as usual. Outside the main thread, where no handler can be set, nothing changes.

    Where torchrun has started the process, it sends SIGTERM when it gets Ctrl-C: that is asked for, too.
    """
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return

    def note(number: int, frame: FrameType | None) -> None:
        interrupts.count += 1
        if interrupts.count > 1:
            raise KeyboardInterrupt

    def note_end(number: int, frame: FrameType | None) -> None:
        interrupts.count = max(1, interrupts.count)

    noted = {signal.SIGINT: note}
    if torch_dist.is_available() and torch_dist.is_torchelastic_launched():
        noted[signal.SIGTERM] = note_end
    before = {number: signal.signal(number, handler) for number, handler in noted.items()}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ids_of_tiers(model: nn.Module) -> frozenset[str]:
    """The features of tables in tiers."""
    return frozenset(
        feature
        for name, module in owners_of(model).items()
        if module.tiers is not None
        for feature in module.features_of(name)
    )


def _moved(batch: Batch, device: torch.device | str | None, staying: frozenset[str]) -> Batch:
    if device is None:
        return batch
    return {name: value if name in staying else _to(value, device) for name, value in batch.items()}


def _to(value: Tensor, device: torch.device | str) -> Tensor:
    return value.to(device, non_blocking=True) if hasattr(value, "to") else value
