"""Validation while a model trains: early stopping, and the best checkpoint."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

from hotbed.arrays import is_one_of
from hotbed.checkpoint import latest, load, save
from hotbed.checkpoint.folder import order_of, root_of
from hotbed.checkpoint.randomness import give_random_states, random_states
from hotbed.checkpoint.ranks import ranks_of
from hotbed.data.arguments import whole
from hotbed.modules.owner import tables_of
from hotbed.text import brief
from hotbed.train.alike import FIGURES
from hotbed.train.batches import Batch
from hotbed.train.callbacks import Callback, Run, Step, Validated
from hotbed.train.evaluation import ONE_LABEL, Evaluation, evaluate
from hotbed.train.metrics import Auc, LogLoss, Metric
from hotbed.train.saved import Mark, refuse_other_checkpoints
from hotbed.train.trainer import TrainingError

__all__ = ["Validation"]

_MARK = Mark("hotbed.train.Validation", "Validation")
_OF_ONE_LABEL: dict[str, type[Auc | LogLoss]] = {"auc": Auc, "logloss": LogLoss}


class Validation(Callback):
    """A callback of `fit` that evaluates the model now and then, stops early and keeps the best checkpoint.

    Training is the same to the bit with it and without, but for where it ends. Give one to one training;
    ``Checkpoints(beside=[validation])``, behind it among the callbacks, saves what it has found, so that a
    run that goes on stops at the same step. All ranks stop at the same step.

    Args:
        batches: iterated at each validation; on ranks each has as many, see `evaluate`.
        every: steps between two validations. Default: after each epoch.
        metric: the figure that is compared: ``"logloss"`` or ``"auc"`` (of several tasks: of the first),
            ``"task/metric"``, or a function of an `Evaluation`.
        mode: ``"min"`` or ``"max"``. Default: as the metric's ``higher_is_better`` says.
        patience: stop when so many validations in a row are no better than the best; None: never.
        min_delta: by how much a better figure must be better, from 0 on. A figure that is NaN is no better.
        best: a folder for the checkpoint of the best validation, with the optimizer, which `hotbed.load`
            reads; it takes the place of the one before.
        restore: load it at the end of a run that no error has ended.

    Raises:
        ValueError: an argument is none of those.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        *,
        every: int | None = None,
        metric: str | Callable[[Evaluation], float] = "logloss",
        mode: Literal["min", "max"] | None = None,
        patience: int | None = None,
        min_delta: float = 0.0,
        best: str | os.PathLike[str] | None = None,
        restore: bool = False,
    ) -> None:
        for name, count in (("every", every), ("patience", patience)):
            if count is not None:
                whole(name, count, 1)
        if not is_one_of(mode, ("min", "max", None)):
            raise ValueError(f'mode must be "min", "max" or None; got {brief(mode)}.')
        if not isinstance(metric, str) and mode is None:
            raise ValueError('A metric that is a function needs mode="min" or mode="max".')
        if not isinstance(min_delta, int | float) or not 0 <= min_delta < math.inf:
            raise ValueError(f"min_delta must be a number from 0 on; got {min_delta!r}.")
        if restore and best is None:
            raise ValueError("restore=True loads the best checkpoint: name its folder, best=.")
        self.batches, self.every, self.metric, self.mode = batches, every, metric, mode
        self.patience, self.min_delta, self.restores = patience, min_delta, restore
        self.best = None if best is None else root_of(best, "best")
        self.history: list[Validated] = []
        """All validations, those of earlier runs that this one goes on with among them."""
        self._run: Run | None = None
        self._is_cut = False

    @property
    def best_found(self) -> Validated | None:
        """The best of all validations; None before the first."""
        return next((one for one in reversed(self.history) if one.is_best), None)

    @property
    def waited(self) -> int:
        """Validations since the best, or since the beginning if none is the best."""
        found = self.best_found
        return (
            len(self.history)
            if found is None
            else len(self.history) - 1 - self.history.index(found)
        )

    def has_ended(self) -> bool:
        return self._is_cut or (self.patience is not None and self.waited >= self.patience)

    def on_run(self, run: Run) -> None:
        self._run, self._is_cut = run, False
        if self.mode is None:
            self.mode = "max" if _higher_is_better(self.metric, run) else "min"
        ranks = ranks_of(tables_of(run.model), run.model)
        with ranks.reporting("a checkpoint"):
            if self.best is not None and ranks.rank == 0:
                refuse_other_checkpoints(self.best, _MARK)
        super().on_run(run)

    def declared(self) -> Mapping[str, object]:
        names = ("every", "metric", "mode", "patience", "min_delta", "best")
        return {**{name: getattr(self, name) for name in names}, "restore": self.restores}

    def on_step(self, step: Step) -> None:
        if self.every is not None and step.number % self.every == 0:
            self._validate(step.epoch)

    def on_epoch(self, epoch: int) -> None:
        if self.every is None:
            self._validate(epoch)

    def on_finish(self) -> None:
        if self.restores:
            self.restore()

    def _validate(self, epoch: int) -> None:
        run = self._run
        assert run is not None
        steps, rows = run.position.steps, run.position.rows
        if self.history and self.history[-1].step >= steps:
            return  # a run that goes on has it from its checkpoint
        others = [callback for callback in run.callbacks if callback is not self]
        with _randomness_kept():
            evaluation = evaluate(
                run.model,
                self.batches,
                tasks=run.tasks or None,
                device=run.device,
                should_stop=lambda: any(other.should_stop() for other in others),
            )
        if evaluation.interrupted:
            self._is_cut = True  # on all ranks; others may have asked once only
            return
        if not evaluation.rows:
            raise TrainingError(
                f"Validation at step {steps}: there are no samples. An iterator gives its batches once: pass "
                "a list, a DataLoader, or whatever can be iterated again."
            )
        value = self._value_on_all(evaluation)
        if math.isnan(value) and run.rank == 0:
            warnings.warn(
                f"Validation at step {steps}: {self._name} is NaN, which is no better than any figure. "
                "Either a score is NaN, or all labels are alike.",
                stacklevel=2,
            )
        found = Validated(steps, epoch, rows, value, self._is_better(value), evaluation)
        if found.is_best and self.best is not None:
            save(self.best, run.model, run.optimizer, step=steps, loader=_MARK, keep=1)
        self.history.append(found)
        for callback in run.callbacks:
            callback.on_validation(found)

    def restore(self) -> None:
        """Load the best checkpoint into the model and the optimizer of the run; none: before the first
        validation. All ranks call this.

        Raises:
            TrainingError: the folder holds another.
        """
        run, found = self._run, self.best_found
        if run is None or found is None or self.best is None:
            return
        there = latest(self.best)
        if there is None or order_of(there)[1] != found.step:
            raise TrainingError(
                f"The best validation was at step {found.step}, and {self.best!r} does not hold its "
                "checkpoint any more. The model is as the last step left it."
            )
        with _randomness_kept():
            load(self.best, run.model, run.optimizer)

    @property
    def _name(self) -> str:
        return self.metric if isinstance(self.metric, str) else "the metric"

    def _value_on_all(self, evaluation: Evaluation) -> float:
        """Return what rank 0 makes of the figures. All ranks call this, and hear of an error in a metric."""
        run = self._run
        assert run is not None
        ranks = ranks_of(tables_of(run.model), run.model)
        with ranks.reporting(FIGURES):
            value = float(self._value_of(evaluation))
        return ranks.values_of_all(FIGURES, value)[0]

    def _value_of(self, evaluation: Evaluation) -> float:
        if not isinstance(self.metric, str):
            return self.metric(evaluation)
        task, slash, name = self.metric.partition("/")
        if slash:
            return evaluation.tasks[task][name]
        return next(iter(evaluation.tasks.values()))[self.metric]

    def _is_better(self, value: float) -> bool:
        found = self.best_found
        if math.isnan(value):
            return False
        gain = (
            0.0
            if found is None
            else value - found.value
            if self.mode == "max"
            else found.value - value
        )
        return found is None or gain > self.min_delta

    def state_dict(self) -> dict[str, object]:
        """Return what `hotbed.save` stores: the history."""
        return {"history": [[*one[:-1], *one.evaluation] for one in self.history]}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Take over what `state_dict` returned."""
        count, history = len(Validated._fields) - 1, state["history"]
        assert isinstance(history, list)
        self.history = [
            Validated(*one[:count], Evaluation(*one[count:]))  # type: ignore[call-arg]
            for one in history
        ]


def _higher_is_better(metric: str | Callable[[Evaluation], float], run: Run) -> bool:
    """Return True if larger figures of a named metric are better.

    Raises:
        ValueError: the run has no such metric, or it does not say.
    """
    known: dict[str, Metric | type[Auc | LogLoss]] = {
        f"{task.name}/{name}": each for task in run.tasks for name, each in task.metrics.items()
    }
    first = run.tasks[0].metrics if run.tasks else _OF_ONE_LABEL
    known.update(first)
    if not run.tasks:
        known.update({f"{ONE_LABEL}/{name}": each for name, each in _OF_ONE_LABEL.items()})
    if metric not in known:
        raise ValueError(f"metric is {brief(metric)}; this run has {', '.join(known)}.")
    higher = getattr(known[metric], "higher_is_better", None)
    if higher is None:
        raise ValueError(
            f'The metric {metric!r} does not say what is better; give mode="min" or "max".'
        )
    return bool(higher)


@contextlib.contextmanager
def _randomness_kept() -> Iterator[None]:
    """Gives random generators their states back: a loader of validation may have drawn from them."""
    states = random_states()
    try:
        yield
    finally:
        give_random_states(states)
