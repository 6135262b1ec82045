"""The whole of `hotbed train`: a click log in, a trained model and its figures out."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console
from torch import nn

from hotbed.collection import EmbeddingCollection
from hotbed.data import CATEGORIES, DENSE, CriteoLog
from hotbed.errors import HotbedError, StorageError
from hotbed.models import MODELS
from hotbed.resolve.lookahead import lookahead
from hotbed.storage import Storage
from hotbed.trace import Trace
from hotbed.train.loop import (
    Callback,
    Evaluation,
    FitResult,
    Step,
    evaluate,
    fit,
    stop_on_interrupt,
)
from hotbed.train.progress import ProgressBar, closing_table
from hotbed.train.report import check_writable_file, peak_rss_bytes, versions, write_json
from hotbed.train.saved import save_model, stored_rows
from hotbed.train.saved_folder import check_writable_folder

# Command-line name -> (hotbed.optim class, torch.optim class for dense parameters where torch
# lacks the rule itself).
OPTIMIZERS: dict[str, tuple[str, str | None]] = {
    "sgd": ("SGD", None),
    "adagrad": ("Adagrad", None),
    "rowwise-adagrad": ("RowwiseAdagrad", "Adagrad"),
    "adam": ("Adam", None),
    "adamw": ("AdamW", None),
    "rowwise-adam": ("RowwiseAdam", "Adam"),
    "adamax": ("Adamax", None),
    "adadelta": ("Adadelta", None),
    "rmsprop": ("RMSprop", None),
    "ftrl": ("FTRL", "Adagrad"),
}


class SettingsError(HotbedError, ValueError):
    """A setting of a run that cannot be honoured; the message names it as the user wrote it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """The options of `hotbed train`, which explains them; a TOML file has the same names."""

    data: tuple[str, ...]
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
    on: str = "cpu"
    device: str | None = None
    host: str | None = None
    ssd: str | None = None
    reset_ssd: bool = False
    depth: int = 2
    horizon: int = 32
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
        _require(0 < self.lr < float("inf"), "lr", self.lr, "positive")
        _require(self.batch_size > 0, "batch-size", self.batch_size, "positive")
        _require(self.epochs > 0, "epochs", self.epochs, "positive")
        _require(0 <= self.test_fraction < 1, "test-fraction", self.test_fraction, "in [0, 1)")
        _require(self.shuffle >= 0, "shuffle", self.shuffle, "0 or a number of rows")
        _require(self.depth >= 0, "depth", self.depth, "0 or a number of batches")
        _require(self.horizon >= 0, "horizon", self.horizon, "0 or a number of batches")
        _require(self.on.partition(":")[0] in ("cpu", "cuda"), "on", self.on, "cpu, cuda or cuda:N")
        if self.on != "cpu":
            self._check_device()
        _require(0 <= self.seed < 2**63, "seed", self.seed, "in [0, 2**63)")

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

    def storage(self) -> Storage | None:
        """The tiers that were asked for, if any."""
        if self.device is None and self.host is None and self.ssd is None:
            return None
        return Storage(device=self.device, host=self.host, ssd=self.ssd, reset=self.reset_ssd)


class _Reached(Callback):
    """Keeps what was done, for the case that `fit` is left by an exception."""

    def __init__(self) -> None:
        self.result = FitResult(interrupted=True)
        self._began = 0.0

    def on_start(self, model: nn.Module) -> None:
        self._began = time.perf_counter()

    def on_step(self, step: Step) -> None:
        seconds = time.perf_counter() - self._began
        self.result = FitResult(step.rows, step.number, step.epoch - 1, seconds, True)


def train(settings: TrainSettings, progress: Console, results: Console) -> dict[str, Any]:
    """Train, evaluate, save and report as `settings` say; returns what --json writes.

    The bar is drawn on `progress`, the closing table on `results`.

    The first Ctrl-C ends training after the current step, and what follows runs as usual with
    ``"interrupted": true`` in the report; a second one also ends the evaluation.

    Raises:
        HotbedError, OSError: bad input, or an output that cannot be written.
    """
    if settings.json is not None:
        check_writable_file(settings.json)
    if settings.save is not None:
        check_writable_folder(settings.save)
    if settings.trace is not None:
        check_writable_file(settings.trace)
    log = CriteoLog(
        settings.data,
        settings.batch_size,
        on_error="skip" if settings.on_error == "skip" else "raise",
        shuffle=settings.shuffle,
    )
    training, test = log.split(settings.test_fraction)
    train_rows = training.count_rows()
    if train_rows == 0:
        raise SettingsError(f"There are no rows to train on in {', '.join(settings.data)}.")
    torch.manual_seed(settings.seed)
    model = MODELS[settings.model](
        CATEGORIES,
        settings.dim,
        len(DENSE),
        seed=settings.seed,
        storage=settings.storage(),
        device=settings.on,
    )
    optimizer = make_optimizer(settings.optimizer, model, settings.lr)
    bar = ProgressBar(
        train_rows, settings.epochs, progress, lambda: stored_rows(model), model.embeddings.stats
    )
    reached = _Reached()
    evaluation: Evaluation | None = None
    ahead = lookahead(training, model, settings.depth, settings.horizon)
    with stop_on_interrupt() as interrupts, _trace_into(settings.trace):
        result = None
        try:
            result = fit(
                model,
                ahead,
                optimizer,
                epochs=settings.epochs,
                callbacks=[bar, reached],
                device=settings.on,
                should_stop=interrupts,
            )
            before = interrupts.count
            evaluation = evaluate(
                model, test, device=settings.on, should_stop=lambda: interrupts.count > before
            )
        except KeyboardInterrupt:
            pass
        report = _report(settings, model, result or reached.result, evaluation, interrupts())
        note_hottest(model)
        report["skipped_lines"] = training.skipped.lines + test.skipped.lines
        # The figures first: a disk that is too full for the model must not cost them too.
        if settings.json is not None:
            write_json(settings.json, report)
        lines = _lines(report)
        try:
            if settings.save is not None:
                save_model(model, settings.save)
                lines["saved to"] = settings.save
        finally:
            results.print(closing_table("Interrupted" if interrupts() else "Done", lines))
    return report


@contextlib.contextmanager
def _trace_into(path: str | None) -> Iterator[None]:
    if path is None:
        yield
        return
    with Trace() as trace:
        try:
            yield
        finally:
            trace.write(path)


def make_optimizer(name: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """The optimizer of that command-line name over all parameters of `model`."""
    from hotbed import optim

    rule, dense = OPTIMIZERS[name]
    options = {} if dense is None else {"dense": getattr(torch.optim, dense)}
    made: torch.optim.Optimizer = getattr(optim, rule)(model.parameters(), lr=lr, **options)
    return made


def note_hottest(model: nn.Module) -> None:
    """Leaves the hottest ids beside the log; a disk too full for them costs nothing else."""
    embeddings = model.embeddings
    assert isinstance(embeddings, EmbeddingCollection)
    try:
        if embeddings.tiers is not None:
            embeddings.tiers.note_hottest()
    except StorageError as error:
        warnings.warn(f"The hottest ids were not noted: {error}", stacklevel=2)


def _tiers(model: nn.Module) -> dict[str, float]:
    embeddings = model.embeddings
    assert isinstance(embeddings, EmbeddingCollection)
    return embeddings.stats()


def _report(
    settings: TrainSettings,
    model: nn.Module,
    result: FitResult,
    evaluation: Evaluation | None,
    interrupted: bool,
) -> dict[str, Any]:
    return {
        "auc": None if evaluation is None else evaluation.auc,
        "logloss": None if evaluation is None else evaluation.logloss,
        "samples_per_second": result.samples_per_second,
        "rows": result.rows,
        "epochs": result.epochs,
        "steps": result.steps,
        "test_rows": 0 if evaluation is None else evaluation.rows,
        "stored_rows": stored_rows(model),
        "seconds": result.seconds,
        "peak_rss_bytes": peak_rss_bytes(),
        "interrupted": interrupted,
        "tiers": _tiers(model),
        "config": dataclasses.asdict(settings),
        "versions": versions(),
    }


def _lines(report: dict[str, Any]) -> dict[str, str]:
    config = report["config"]
    lines = {
        "model": f"{config['model']}, dim {config['dim']}, {config['optimizer']} {config['lr']:g}",
        "rows trained on": f"{report['rows']:,}",
        "rows a second": f"{report['samples_per_second']:,.0f}",
    }
    if report["test_rows"]:
        lines["rows tested on"] = f"{report['test_rows']:,} (the last by time)"
        lines["test AUC"] = f"{report['auc']:.4f}"
        lines["test log loss"] = f"{report['logloss']:.4f}"
    if report["skipped_lines"]:
        lines["malformed lines skipped"] = f"{report['skipped_lines']:,}"
    lines["rows stored"] = f"{report['stored_rows']:,}"
    if tiers := report["tiers"]:
        lines["rows found in fast memory"] = f"{tiers['hit_rate']:.1%}"
        lines["rows brought up"] = f"{tiers['rows_missed'] - tiers['rows_created']:,.0f}"
        lines["rows written back"] = f"{tiers['rows_written_back']:,.0f}"
        lines["waited for rows"] = f"{(tiers['stall_ms'] + tiers['wait_ms']) / 1e3:.1f} s"
    lines["peak memory"] = f"{report['peak_rss_bytes'] / 2**20:,.0f} MiB"
    if config["json"]:
        lines["figures in"] = config["json"]
    if config["trace"]:
        lines["trace in"] = f"{config['trace']} (open it in ui.perfetto.dev)"
    return lines


def _require(good: bool, name: str, value: object, wanted: str) -> None:
    if not good:
        raise SettingsError(f"--{name} is {value}; it must be {wanted}.")
