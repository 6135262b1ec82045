"""The settings of `hotbed train`, checked before anything is read."""

from __future__ import annotations

import dataclasses
import os

import torch

from hotbed.checkpoint.folder import is_of_checkpoints
from hotbed.errors import HotbedError, StorageError
from hotbed.models import MODELS
from hotbed.optim import RULES
from hotbed.places.tiered.folder import of_process
from hotbed.storage import Storage, parse_bytes
from hotbed.train.paths import Folder, Named, refuse_clashes
from hotbed.train.run_note import is_of_a_run, rows_may_go

OPTIMIZERS = {kind._rule.command: kind for kind in RULES}
"""By the names of the command line."""


_MOST_LR = 1e30
"""Far from what float32 holds, as optimizers divide it by small numbers."""


class SettingsError(HotbedError, ValueError):
    """A setting of a run that cannot be honoured; the message names it as the user wrote it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """The options of `hotbed train`, which explains them; a TOML file has the same names."""

    data: tuple[str, ...]
    from_: str | None = None
    model: str = "dlrm"
    dim: int = 16
    optimizer: str = "adam"
    lr: float = 1e-3
    batch_size: int = 512
    epochs: int = 1
    test_fraction: float = 0.1
    shuffle: int = 0
    on_error: str = "raise"
    seed: int = 0
    json: str | None = None
    save: str | None = None
    checkpoint: str | None = None
    every: int = 1000
    keep: int = 3
    resume: bool = False
    resume_from: str | None = None
    on: str = "cpu"
    device: str | None = None
    host: str | None = None
    ssd: str | None = None
    reset_ssd: bool = False
    depth: int = 2
    horizon: int | None = None
    trace: str | None = None

    def __post_init__(self) -> None:
        if not self.data:
            raise SettingsError("Name at least one click log: --data PATH.")
        _require(self.model in MODELS, "model", self.model, f"one of {', '.join(MODELS)}")
        _require(
            self.optimizer in OPTIMIZERS,
            "optimizer",
            self.optimizer,
            f"one of {', '.join(OPTIMIZERS)}",
        )
        _require(self.on_error in ("raise", "skip"), "on-error", self.on_error, "raise or skip")
        _require(self.dim > 0, "dim", self.dim, "positive")
        _require(0 < self.lr <= _MOST_LR, "lr", self.lr, f"positive, and at most {_MOST_LR:g}")
        _require(self.batch_size > 0, "batch-size", self.batch_size, "positive")
        _require(self.epochs > 0, "epochs", self.epochs, "positive")
        _require(self.every > 0, "every", self.every, "positive")
        _require(self.keep > 0, "keep", self.keep, "positive")
        if self.resumes and self.checkpoint is None:
            option = "--resume" if self.resume_from is None else "--resume-from"
            raise SettingsError(
                f"{option} goes on from a checkpoint: name their folder, --checkpoint DIR."
            )
        _require(0 <= self.test_fraction < 1, "test-fraction", self.test_fraction, "in [0, 1)")
        _require(self.shuffle >= 0, "shuffle", self.shuffle, "0 or a number of samples")
        _require(self.depth >= 0, "depth", self.depth, "0 or a number of batches")
        _require((self.horizon or 0) >= 0, "horizon", self.horizon, "0 or a number of batches")
        _require(self.on.partition(":")[0] in ("cpu", "cuda"), "on", self.on, "cpu, cuda or cuda:N")
        if self.on != "cpu":
            self._check_device()
        _require(0 <= self.seed < 2**63, "seed", self.seed, "in [0, 2**63)")
        for name in ("device", "host"):
            size = getattr(self, name)
            try:
                parse_bytes(0 if size is None else size)
            except StorageError:
                wanted = "a size such as 8GB or 512MiB, or a number of bytes, up to 2**60"
                _require(False, name, size, wanted)
        paths = ("data", "from_", "json", "save", "checkpoint", "resume_from", "ssd", "trace")
        for name in paths:
            value = getattr(self, name) or ""
            _require(
                "\0" not in "".join(value),
                name.rstrip("_"),
                repr(value),
                "a path, without a zero byte",
            )

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
        return inside if os.path.isdir(inside) else self.resume_from

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
        writes = [
            Named(f"--{name}", path)
            for name in ("json", "trace")
            if (path := getattr(self, name)) is not None
        ]
        folders = [
            Folder(Named(f"--{name}", path), owns)
            for name, owns in (
                ("save", is_of_checkpoints),
                ("checkpoint", is_of_checkpoints),
                ("ssd", is_of_a_run),
            )
            if (path := getattr(self, name)) is not None
        ]
        refuse_clashes(reads, writes, folders)

    def storage(self) -> Storage | None:
        """The tiers that were asked for, if any."""
        return storage_of(self.host, self.ssd, self.reset_ssd, self.device)


def storage_of(
    host: str | None, ssd: str | None, reset_ssd: bool, device: str | None = None
) -> Storage | None:
    """The tiers that --host, --ssd and --device ask for, if any. Rows with which nothing is lost need not
    stay."""
    if device is None and host is None and ssd is None:
        return None
    reset = reset_ssd or (ssd is not None and rows_may_go(str(of_process(ssd))))
    return Storage(device=device, host=host, ssd=ssd, reset=reset)


def _require(good: bool, name: str, value: object, wanted: str) -> None:
    if not good:
        raise SettingsError(f"--{name} is {value}; it must be {wanted}.")
