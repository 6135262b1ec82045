"""The settings of `hotbed train`, checked before anything is read."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection
from typing import Annotated, Any

import torch

from hotbed.checkpoint.folder import is_of_checkpoints
from hotbed.checkpoint.stores import store_of
from hotbed.errors import HotbedError, StorageError
from hotbed.models import MODELS
from hotbed.optim import RULES
from hotbed.places.tiered.folder import of_process
from hotbed.storage import Storage, parse_bytes
from hotbed.train.options import FILE, FOLDER, SAME_RUN, SIZE, Kind, OneOf, Option, options_of
from hotbed.train.paths import Folder, Named, refuse_clashes
from hotbed.train.run_files import is_of_a_record
from hotbed.train.run_note import is_of_a_run, rows_may_go

OPTIMIZERS = {kind.declared_rule().command: kind for kind in RULES}
"""By the names of the command line."""

BEST = "best"
"""The folder in --checkpoint that has the best model's checkpoint."""


def _is_of_a_training(name: str) -> bool:
    """Return True for files of checkpoints of a run, or of the best model in them."""
    first, _, rest = name.partition(os.sep)
    return is_of_checkpoints(name) or (first == BEST and is_of_checkpoints(rest))


SAVED = Kind("DIR", owns=is_of_checkpoints)
CHECKPOINTS = Kind("DIR", owns=_is_of_a_training)
RECORD = Kind("DIR", owns=is_of_a_record)
ROWS = Kind("DIR", owns=is_of_a_run)
_MOST_LR = 1e30
"""Far from what float32 holds, as optimizers divide it by small numbers."""


class SettingsError(HotbedError, ValueError):
    """A setting of a run that cannot be honoured; the message names it as the user wrote it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """The settings of a training run: the options of `hotbed train`, and the keys of its TOML files."""

    data: Annotated[tuple[str, ...], Kind("PATH..."), SAME_RUN]
    """Click logs in Criteo's format, or with --schema Parquet, CSV or TSV files, in order of time."""
    schema: Annotated[str | None, Kind("FILE.toml"), SAME_RUN] = None
    """Columns of the files and what each is; hotbed data stats writes one."""
    from_: Annotated[str | None, FOLDER, SAME_RUN] = None
    """Begin with the model and optimizer that an earlier run has left (--save, --checkpoint)."""
    model: Annotated[str, OneOf(MODELS), SAME_RUN] = "dlrm"
    """{choices}."""
    set_: Annotated[tuple[str, ...], Kind("NAME=VALUE", is_path=False), SAME_RUN] = ()
    """A setting of the model, such as hidden=512,256 or dropout=0.1; may be given several times."""
    dim: Annotated[int, SAME_RUN] = 16
    """Width of the embeddings."""
    optimizer: Annotated[str, OneOf(OPTIMIZERS), SAME_RUN] = "adam"
    """{choices}; for tables and dense layers alike."""
    lr: Annotated[float, SAME_RUN] = 1e-3
    """Learning rate."""
    batch_size: Annotated[int, SAME_RUN] = 512
    """Samples a step."""
    epochs: int = 1
    """Passes over the training samples."""
    test_fraction: Annotated[float, SAME_RUN] = 0.1
    """Share of the samples, the last ones, that is kept for testing."""
    validation_fraction: Annotated[float, SAME_RUN] = 0.0
    """Share of the samples, the last before those for testing, on which the model is validated while it
    trains."""
    validate_every: int | None = None
    """Steps between two validations. Default: after each epoch."""
    patience: int | None = None
    """Stop when so many validations in a row bring no better log loss. With --checkpoint the best model is
    tested and saved, else the last."""
    shuffle: Annotated[int, SAME_RUN] = 0
    """Shuffle within windows of so many samples; 0 keeps the order of time."""
    on_error: Annotated[str, SAME_RUN] = "raise"
    """At a malformed line: raise, or skip (and count)."""
    seed: Annotated[int, SAME_RUN] = 0
    """Of first values and shuffling."""
    json: Annotated[str | None, FILE] = None
    """Write the figures here."""
    run: Annotated[str | None, RECORD] = None
    """Keep a record of the run here, for hotbed report: settings and figures, the loss over time,
    validations. Under torchrun: -m -- hotbed train --run DIR."""
    log: Annotated[str | None, OneOf(("tensorboard",))] = None
    """{choices}: write its events to --run, too."""
    save: Annotated[str | None, SAVED] = None
    """Save the model here at the end, with its optimizer, in place of one that is there."""
    checkpoint: Annotated[str | None, CHECKPOINTS] = None
    """Save the run here every so many steps (--every), so that it can go on; with --validation-fraction also
    the best model, in DIR/best."""
    every: int = 1000
    """Steps between two checkpoints."""
    keep: int = 3
    """Checkpoints that stay in --checkpoint."""
    full_every: int = 1
    """One of so many checkpoints is whole; the others hold the rows that have changed since the last one."""
    background: bool = False
    """Go on training while a checkpoint is written."""
    linked: bool = False
    """Rows of a whole checkpoint are hard links to files of --ssd, so that it takes the time of those that
    memory alone has; hotbed checkpoint pack makes it portable."""
    resume: bool = False
    """Go on from the latest in --checkpoint; begin if there is none. The end is the same to the bit as that
    of a run that was never stopped; --epochs may be more."""
    resume_from: Annotated[str | None, Kind("NAME")] = None
    """As --resume, from this checkpoint in --checkpoint, such as step-000000001000, and not from the latest,
    which may be damaged; hotbed checkpoint show lists them."""
    on: str = "cpu"
    """Where the model computes: cpu, cuda or cuda:N. See --device."""
    host: Annotated[str | None, SIZE] = None
    """Memory that tables and optimizer states may take, like 2GB; the rest goes to --ssd."""
    ssd: Annotated[str | None, ROWS] = None
    """Where rows go that do not fit into --host."""
    reset_ssd: bool = False
    """Delete the rows that an earlier run left in --ssd, also where it did not save them."""
    device: Annotated[str | None, SIZE] = None
    """Memory of the device that computes, above --host."""
    depth: int = 2
    """Batches whose rows are brought up ahead, on each process; 0 disables it."""
    horizon: int | None = None
    """Batches whose ids are known ahead, so that their rows are kept. Default: 32, of small ones up to
    128."""
    prefetch: int = 0
    """1: under torchrun, rows of the next batch travel while this one computes, but for those that its step
    changes. Results are the same."""
    local_world_size: int | None = None
    """Under torchrun on several machines: processes of each. Ids, rows and gradients that they share cross to
    other machines once, which is slower where they share few."""
    trace: Annotated[str | None, FILE] = None
    """Write what ran when, for ui.perfetto.dev."""

    def __post_init__(self) -> None:
        if not self.data:
            raise SettingsError("Name at least one file of samples: --data PATH.")
        for option in OPTIONS.values():
            _check(option, getattr(self, option.field))
        for name in ("dim", "batch_size", "epochs", "every", "keep", "full_every"):
            self._require(getattr(self, name) > 0, name, "positive")
        for name in ("validate_every", "patience", "local_world_size"):
            value = getattr(self, name)
            self._require(value is None or value > 0, name, "positive")
        self._require(self.prefetch in (0, 1), "prefetch", "0 or 1")
        self._require(0 < self.lr <= _MOST_LR, "lr", f"positive, and at most {_MOST_LR:g}")
        if self.resumes and self.checkpoint is None:
            typed = "--resume" if self.resume_from is None else "--resume-from"
            raise SettingsError(
                f"{typed} goes on from a checkpoint: name their folder, --checkpoint DIR."
            )
        if self.linked and (self.ssd is None or self.checkpoint is None):
            raise SettingsError(
                "--linked links files of an SSD into checkpoints: pass --ssd DIR and --checkpoint DIR."
            )
        self._require(self.on_error in ("raise", "skip"), "on_error", "raise or skip")
        self._require(0 <= self.test_fraction < 1, "test_fraction", "in [0, 1)")
        self._check_validation()
        self._require(self.shuffle >= 0, "shuffle", "0 or a number of samples")
        self._require(self.depth >= 0, "depth", "0 or a number of batches")
        self._require((self.horizon or 0) >= 0, "horizon", "0 or a number of batches")
        self._require(self.on.partition(":")[0] in ("cpu", "cuda"), "on", "cpu, cuda or cuda:N")
        if self.on != "cpu":
            self._check_device()
        self._require(0 <= self.seed < 2**63, "seed", "in [0, 2**63)")

    def _require(self, good: bool, name: str, wanted: str) -> None:
        if not good:
            raise _error(OPTIONS[name], getattr(self, name), wanted)

    def check_processes(self, count: int) -> None:
        """Refuse a --local-world-size that does not divide the number of processes.

        Raises:
            SettingsError: it does not.
        """
        divides = count % (self.local_world_size or 1) == 0
        self._require(divides, "local_world_size", f"a divisor of the number of processes, {count}")

    def _check_validation(self) -> None:
        self._require(0 <= self.validation_fraction < 1, "validation_fraction", "in [0, 1)")
        if self.test_fraction + self.validation_fraction >= 1:
            raise SettingsError(
                f"--test-fraction {self.test_fraction:g} and --validation-fraction "
                f"{self.validation_fraction:g} leave nothing to train on. Lower one."
            )
        for name in ("validate_every", "patience"):
            value = getattr(self, name)
            if value is not None and not self.validation_fraction:
                raise SettingsError(
                    f"--{OPTIONS[name].key} needs samples to validate on: pass --validation-fraction."
                )
        if self.log is not None and self.run is None:
            raise SettingsError(
                f"--log {self.log} writes to the record of a run: name it, --run DIR."
            )

    def of_same_run(self) -> dict[str, object]:
        """Return, by field, what does not change when a run goes on; with absolute paths, as JSON has it."""
        found = {name: getattr(self, name) for name, o in OPTIONS.items() if SAME_RUN in o.marks}
        found["data"] = [os.path.realpath(path) for path in self.data]
        found["set_"] = list(self.set_)
        for name in ("from_", "schema"):
            found[name] = absolute(found[name])
        return found

    @property
    def resumes(self) -> bool:
        """True if the run continues an earlier one."""
        return self.resume or self.resume_from is not None

    def checkpoint_to_resume(self) -> str:
        """The folder of checkpoints, whose latest is meant, or the one of --resume-from: by its name in it,
        or a path."""
        assert self.checkpoint is not None
        if self.resume_from is None:
            return self.checkpoint
        inside = os.path.join(self.checkpoint, self.resume_from)
        return inside if store_of(inside).is_folder(inside) else self.resume_from

    def _check_device(self) -> None:
        if not torch.cuda.is_available():
            raise SettingsError(
                f"--on is {self.on}, and torch {torch.__version__} sees no CUDA device. Install a CUDA "
                "build of torch, or leave --on out."
            )
        if self.device is None or self.host is None:
            raise SettingsError(
                f"--on {self.on} needs --device and --host: the tables grow with the ids of the log, so "
                "say how much of the GPU's memory they may take, and how much RAM below it."
            )

    def check_paths(self, config: str | None = None) -> None:
        """Refuse paths of which one would be lost to another, before any is opened for writing.

        Raises:
            OutputError: two options name one file, or one names a file of --save, --checkpoint or --ssd.
        """
        reads = [Named("--data", path) for path in self.data]
        reads += [] if config is None else [Named("--config", config)]
        reads += [] if self.schema is None else [Named("--schema", self.schema)]
        writes: list[Named] = []
        folders: list[Folder] = []
        for option in OPTIONS.values():
            kind, path = option.mark(Kind), getattr(self, option.field)
            if kind is not None and path is not None:
                named = Named(f"--{option.key}", path)
                writes += [named] if kind is FILE else []
                folders += [] if kind.owns is None else [Folder(named, kind.owns)]
        refuse_clashes(reads, writes, folders)

    def storage(self) -> Storage | None:
        """The tiers that were asked for, if any."""
        paths = (self.checkpoint, self.resume_from and self.checkpoint_to_resume(), self.from_)
        saved_in = [path for path in paths if path]
        return storage_of(self.host, self.ssd, self.reset_ssd, self.device, saved_in)


def storage_of(
    host: str | None,
    ssd: str | None,
    reset_ssd: bool,
    device: str | None = None,
    saved_in: Collection[str] = (),
) -> Storage | None:
    """The tiers that --host, --ssd and --device ask for, if any. Rows with which nothing is lost need not
    stay; `saved_in`: checkpoints that may have them."""
    if device is None and host is None and ssd is None:
        return None
    reset = reset_ssd or (ssd is not None and rows_may_go(str(of_process(ssd)), saved_in))
    return Storage(device=device, host=host, ssd=ssd, reset=reset)


def _check(option: Option, value: Any) -> None:
    """Raise SettingsError where a value is not what the option's annotation says."""
    choices, kind = option.mark(OneOf), option.mark(Kind)
    if choices is not None and value not in choices.choices and value != option.default:
        raise _error(option, value, f"one of {choices}")
    if kind is SIZE:
        try:
            parse_bytes(0 if value is None else value)
        except StorageError:
            wanted = "a size such as 8GB or 512MiB, or a number of bytes, up to 2**60"
            raise _error(option, value, wanted) from None
    elif kind is not None and "\0" in "".join(value or ""):
        raise _error(option, repr(value), "a path, without a zero byte")


def absolute(path: object) -> object:
    """Return an absolute path; what is no text stays."""
    return store_of(path).absolute(path) if isinstance(path, str) else path


def _error(option: Option, value: object, wanted: str) -> SettingsError:
    return SettingsError(f"--{option.key} is {value}; it must be {wanted}.")


OPTIONS = options_of(TrainSettings)
"""The options of a run, by the names of their fields."""
