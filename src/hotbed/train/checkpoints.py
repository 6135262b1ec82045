"""Checkpoints while a model trains."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import TypedDict

from torch import nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from hotbed.checkpoint import Saved, Saving, save
from hotbed.checkpoint.folder import root_of
from hotbed.checkpoint.new import check_keep
from hotbed.checkpoint.values import Saveable, Stateful
from hotbed.data.arguments import flag, whole
from hotbed.data.position import Position
from hotbed.train.callbacks import Callback, Run, Step

__all__ = ["Checkpoints"]


class _How(TypedDict, total=False):
    background: bool
    linked: bool


def _how(background: bool = False, linked: bool = False) -> tuple[bool, bool]:
    return flag("background", background), flag("linked", linked)


class Checkpoints(Callback):
    """A callback of `fit` that saves every so many steps, so that a run that was killed can go on.

    It is one of the ``callbacks`` of `fit`, and has the ``position`` that fit is given. A run that goes on
    first calls ``hotbed.load(path, model, optimizer, loader=position)``.

    Args:
        path: a folder of checkpoints, which stays the same if the current directory changes, or a URL of
            object storage.
        optimizer, scheduler: as `hotbed.save` takes them.
        position: the one that `fit` is given.
        beside: what else is saved by its ``state_dict()``, such as a `Validation`; `hotbed.load` takes it as
            ``loader=[position, *beside]``.
        every: steps between two checkpoints.
        keep: how many stay; None: all.
        full_every: of how many checkpoints one is whole. The others hold the rows that have changed since the
            one before (``delta=`` of `hotbed.save`), as far as that is known.
        how: ``background=True``: steps go on while a checkpoint is written (``blocking=False`` of
            `hotbed.save`); its error is raised by the next one, or at the end of `fit`. ``linked=True``: rows
            over an SSD are hard links to its files in those that are whole, which are complete at once.

    Raises:
        ValueError: `every`, `keep` or `full_every` is no positive integer, or the path is empty.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        optimizer: Optimizer | Sequence[Optimizer],
        position: Position,
        *,
        every: int = 1000,
        keep: int | None = 3,
        full_every: int = 1,
        scheduler: Saveable | Sequence[Saveable] | None = None,
        beside: Sequence[Stateful] = (),
        **how: Unpack[_How],
    ) -> None:
        every = whole("every", every, 1)
        check_keep(keep)
        self.full_every = whole("full_every", full_every, 1)
        self.background, self.linked = _how(**how)
        self.path = root_of(path)
        self.optimizer, self.position = optimizer, position
        self.every, self.keep, self.scheduler = every, keep, scheduler
        self.beside = beside
        self.last: Saved | Saving | None = None
        """What was saved last; with ``background=True`` what is saved, or was."""
        self._model: nn.Module | None = None

    def on_run(self, run: Run) -> None:
        saved = {id(one) for one in self.beside}
        for callback in run.callbacks[run.callbacks.index(self) :]:
            if id(callback) in saved:
                name = type(callback).__name__
                raise ValueError(
                    f"Give fit {name} before Checkpoints, which saves its state: callbacks=[..., {name}, "
                    "..., Checkpoints]."
                )
        super().on_run(run)

    def declared(self) -> Mapping[str, object]:
        counts = {"every": self.every, "keep": self.keep, "full_every": self.full_every}
        how = {"background": self.background, "linked": self.linked}
        return {"path": self.path, **how, **counts}

    def on_start(self, model: nn.Module) -> None:
        self._model = model

    def on_step(self, step: Step) -> None:
        if step.number != self.position.steps:
            raise ValueError(
                "Give fit the position that Checkpoints has: fit(..., position=position)."
            )
        if step.number % self.every == 0:
            self.save()

    def on_finish(self) -> None:
        self.wait()

    def wait(self) -> None:
        """Wait until what was saved last is complete; raise its error."""
        if isinstance(self.last, Saving):
            self.last.wait()

    def save(self) -> Saved | Saving:
        """Save now."""
        assert self._model is not None
        write = functools.partial(
            save,
            self.path,
            self._model,
            self.optimizer,
            step=self.position.steps,
            scheduler=self.scheduler,
            loader=[self.position, *self.beside],
            keep=self.keep,
            delta=self.full_every > 1 and self.full_every,
            linked=self.linked,
        )
        self.last = write(blocking=False) if self.background else write()
        return self.last
