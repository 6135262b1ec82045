"""The checkpoints of `hotbed train`: a run that goes on, and one that begins with what another has left."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from hotbed.checkpoint import Saved, Saving, load
from hotbed.checkpoint.errors import others_loaded_by
from hotbed.checkpoint.folder import complete_in, opened
from hotbed.checkpoint.manifest import read_manifest
from hotbed.checkpoint.models import description_of
from hotbed.checkpoint.ranks import ranks_of
from hotbed.checkpoint.stores import store_of
from hotbed.checkpoint.values import Stateful, decoded
from hotbed.data.position import Position
from hotbed.data.windows import Fingerprint, SampleReader
from hotbed.modules.owner import tables_of
from hotbed.train.checkpoints import Checkpoints
from hotbed.train.options import SAME_RUN
from hotbed.train.settings import OPTIONS, SettingsError, TrainSettings, absolute

__all__ = ["RunCheckpoints", "begin_from"]


class RunCheckpoints(Checkpoints):
    """The checkpoints of a run."""

    def __init__(
        self,
        settings: TrainSettings,
        log: SampleReader,
        found: Fingerprint,
        optimizer: Optimizer,
        position: Position,
        beside: Sequence[Stateful] = (),
    ) -> None:
        assert settings.checkpoint is not None
        self.same = _SameRun(settings, log, found)
        super().__init__(
            settings.checkpoint,
            optimizer,
            position,
            every=settings.every,
            keep=settings.keep,
            full_every=settings.full_every,
            background=settings.background,
            linked=settings.linked,
            beside=[self.same, *beside],
        )
        self.settings = settings
        self.at = -1
        """The step of the latest in this folder; -1: this run has none there."""

    def begin(self, model: nn.Module) -> str:
        """Goes on with the run that is there, or saves the beginning of a new one. Returns what is to be
        told.

        Raises:
            SettingsError: there is one, and it is not to go on; or it is another.
        """
        self.on_start(model)
        ranks, note = ranks_of(tables_of(model), model), ""
        begun = ranks.values_of_all("figures", complete_in(self.path))[0]
        if not begun and self.settings.resume_from is None:
            self.save()
        elif self.settings.resumes:
            path = self.settings.checkpoint_to_resume()
            run, found = (store_of(one).resolved(one) for one in (self.path, path))
            is_own = run in (found, os.path.dirname(found))
            with others_loaded_by(f"--resume-from {'{name}' if is_own else '{path}'}"):
                with ranks.reporting("a checkpoint"):
                    note = self.same.check(path)
                load(path, model, self.optimizer, loader=[self.position, *self.beside])
            if is_own:
                self.at = self.position.steps
        else:
            raise SettingsError(
                f"--checkpoint {self.settings.checkpoint} holds checkpoints of a run. Go on with it by "
                "--resume, or name another folder."
            )
        return note

    def save(self) -> Saved | Saving:
        saved = super().save()
        self.at = saved.step
        return saved


class _SameRun:
    """Settings and data that must not change when a run goes on."""

    def __init__(self, settings: TrainSettings, log: SampleReader, found: Fingerprint) -> None:
        self.settings, self.log, self.found = settings, log, found

    def state_dict(self) -> dict[str, object]:
        state = self.settings.of_same_run()
        return {**state, "samples": self.found.rows, "crc32c": self.found.crc32c}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Nothing: it was checked before anything was read."""

    def check(self, path: str) -> str:
        """Returns what is to be told.

        Raises:
            SettingsError: the latest checkpoint there is of another run.
        """
        with opened(path) as folder:
            position, saved = _states_in(path, read_manifest(folder)["values"])
        saved["from_"] = absolute(saved["from_"])  # earlier versions kept it as it was typed
        now = self.state_dict()
        grown = self._has_grown(position, saved)
        for name in now:
            if name == "crc32c":
                # Checkpoints of earlier versions have none.
                if not grown and saved.get(name, now[name]) != now[name]:
                    raise SettingsError(
                        f"--resume: the lines of --data are not those that the run in {path} reads. There "
                        "are as many, but some have changed or changed places. Give it the data as they "
                        "were, or begin a new run in another folder."
                    )
            elif saved.get(name) != now[name] and not (grown and name == "samples"):
                option = "samples in --data" if name == "samples" else f"--{OPTIONS[name].key}"
                was, own = (
                    " ".join(map(str, v)) if isinstance(v, (list, tuple)) else v
                    for v in (saved.get(name), now[name])
                )
                was, own = ("nothing" if v is None or v == "" else v for v in (was, own))
                raise SettingsError(
                    f"--resume: the run in {path} has {option} {was}, and now it is {own}. "
                    "Give it as it was, or begin a new run in another folder."
                )
        return (
            f"--data has {now['samples']:,} samples, and had {saved['samples']:,} when the run in {path} was "
            "saved. It goes on as one that has had all of them from its beginning."
            if grown
            else ""
        )

    def _has_grown(self, position: dict[str, int], saved: dict[str, object]) -> bool:
        """Return True if samples were appended to the data and all batches so far would be the same
        with them."""
        match position, saved:
            case {"epoch": 1, "batch": int(batch)}, {
                "samples": int(samples),
                "crc32c": int(crc32c),
            }:
                pass
            case _:
                return False
        if samples >= self.found.rows or self.settings.on_error == "skip":
            return False  # or batches do not tell how many lines were read
        if self.settings.validation_fraction:
            return False  # earlier validations were on other samples
        size = self.settings.batch_size
        window = -(-self.settings.shuffle // size) * size or size
        read = -(-batch * size // window) * window
        trained_on = samples - round(samples * self.settings.test_fraction)
        return read <= trained_on and self.log.fingerprint(samples).crc32c == crc32c


_LATER: dict[str, object] = {"validation_fraction": 0.0, "schema": None, "set_": []}
"""Settings that checkpoints of earlier versions do not have, as runs had them."""
_NAMES = {name for name, option in OPTIONS.items() if SAME_RUN in option.marks}


def _states_in(path: str, values: Mapping[str, object]) -> tuple[dict[str, int], dict[str, object]]:
    """Return the states of the position and of the run in a checkpoint.

    Raises:
        SettingsError: another program has saved it.
    """
    match values.get("loaders"):
        case [{"dict": list(pairs)}, {"dict": list()} as encoded, *_]:
            with contextlib.suppress(TypeError, ValueError):
                # But for its random states, which are tensors.
                position = {name: value for name, value in pairs if isinstance(value, int)}
                run = decoded(encoded, {})
                if {*_NAMES, "samples"} <= {*run, *_LATER}:
                    return position, {**_LATER, **run}
    raise SettingsError(
        f"--checkpoint {path} holds no checkpoints of a run of `hotbed train`. Name another folder."
    )


def begin_from(
    path: str, model: nn.Module, optimizer: Optimizer, lr: float, position: Position
) -> str:
    """Reads rows, states and steps that an earlier run has left; the rest is this run's. Returns what is to
    be told."""
    with others_loaded_by("--from {path}"):
        return _begin_from(path, model, optimizer, lr, position)


def _begin_from(
    path: str, model: nn.Module, optimizer: Optimizer, lr: float, position: Position
) -> str:
    with opened(path) as folder:
        left, own = read_manifest(folder).get("model"), description_of(model)
    if left and own:
        for option, before, now in (
            ("model", left["name"], own["name"]),
            ("dim", left["arguments"]["dim"], own["arguments"]["dim"]),
        ):
            if before != now:
                raise SettingsError(
                    f"--from {path} has --{option} {before}, and now it is {now}. Give it as it was."
                )
    position.steps = load(path, model, optimizer).step
    rates = {group["lr"] for group in optimizer.param_groups} - {lr}
    for group in optimizer.param_groups:
        group["lr"] = lr
    was = ", ".join(f"{rate:g}" for rate in sorted(rates))
    return was and f"--lr is {lr:g} from here on; the model in --from {path} had {was}."
