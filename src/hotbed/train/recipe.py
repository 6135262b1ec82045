"""The whole of `hotbed train`: a click log in, a trained model and its figures out."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import stat
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from torch import nn

from hotbed.ahead.lookahead import IDLE_ON_RANKS, is_idle_on_ranks, lookahead
from hotbed.checkpoint.folder import complete_in
from hotbed.checkpoint.ranks import ranks_of
from hotbed.collection import EmbeddingCollection
from hotbed.data import CATEGORIES, DENSE, CriteoLog
from hotbed.data.position import Position
from hotbed.dist import distribute, slices
from hotbed.errors import StorageError
from hotbed.models import MODELS
from hotbed.modules.owner import tables_of
from hotbed.places.tiered.folder import of_process
from hotbed.storage import Storage
from hotbed.trace import Trace
from hotbed.train.callbacks import Callback, Step
from hotbed.train.loop import (
    Evaluation,
    FitResult,
    evaluate,
    fit,
    stop_on_interrupt,
)
from hotbed.train.processes import first, process_group
from hotbed.train.progress import ProgressBar, closing_table, notice
from hotbed.train.report import check_writable_file, peak_rss_bytes, versions, write_json
from hotbed.train.resuming import RunCheckpoints, begin_from
from hotbed.train.run_note import forget_note, write_note
from hotbed.train.saved import check_writable_folder, save_model
from hotbed.train.settings import OPTIMIZERS, SettingsError, TrainSettings


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

    The bar and notices are drawn on `progress`, the closing table on `results`.

    The first Ctrl-C ends training after the current step, and what follows runs as usual with
    ``"interrupted": true`` in the report; a second one also ends the evaluation.

    Raises:
        HotbedError, OSError: bad input, or an output that cannot be written.
    """
    with process_group() as shared:
        return _train(settings, progress, results, shared=shared)


def _train(
    settings: TrainSettings, progress: Console, results: Console, *, shared: bool
) -> dict[str, Any]:
    """`shared`: with the other processes of a process group."""
    if first():
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
        seed=settings.seed,
    )
    _refuse_what_is_read_once(log.paths)
    with progress.status("Counting samples ..."):
        found = log.fingerprint() if settings.checkpoint is not None else None
        training, test = log.split(settings.test_fraction, None if found is None else found.rows)
    samples = _samples(training)
    if samples == 0:
        raise SettingsError(f"There are no samples to train on in {', '.join(settings.data)}.")
    storage = settings.storage()
    torch.manual_seed(settings.seed)
    model = MODELS[settings.model](
        CATEGORIES,
        settings.dim,
        len(DENSE),
        seed=settings.seed,
        storage=storage,
        device=settings.on,
    )
    for text in _notices(settings, storage, samples, _samples(test)):
        notice(progress, text)
    if settings.ssd is not None:
        forget_note(_rows_at(settings))
    if shared:
        distribute(model)
    ranks = ranks_of(tables_of(model), model)
    optimizer = make_optimizer(settings.optimizer, model, settings.lr)
    if settings.checkpoint is not None:
        for table in tables_of(model).values():
            table.ready()  # a log is there from now on, whose rows can be had again whatever ends the run
        _leave_note(settings, progress, may_go=True)
    position = Position()
    begun = settings.resumes and complete_in(settings.checkpoint or "")
    begun = ranks.tell("a checkpoint", bool(begun or settings.resume_from))[0]
    if settings.from_ is not None and not begun:
        with progress.status("Loading the model ..."):
            told = begin_from(settings.from_, model, optimizer, settings.lr, position)
        if told:
            notice(progress, told)
    saving = None
    if found is not None:
        saving = RunCheckpoints(settings, log, found, optimizer, position)
        with progress.status("Loading the checkpoint ..." if settings.resumes else "Saving ..."):
            told = saving.begin(model)
        if told:
            notice(progress, told)
    resumed_at = position.steps
    embeddings = _embeddings_of(model)
    # The bar is the first process's alone, and asks no other.
    stored = None if shared else embeddings.count
    tiers = embeddings.stats if embeddings.has_tiers else None
    bar = ProgressBar(samples, settings.epochs, progress, stored, tiers)
    reached = _Reached()
    evaluation: Evaluation | None = None
    batches: Any = slices(training) if shared else training
    depth, horizon = (0, 0) if shared else (settings.depth, settings.horizon)
    if settings.depth and is_idle_on_ranks(model):
        notice(progress, IDLE_ON_RANKS)
    ahead = lookahead(batches, model, depth, horizon)
    with stop_on_interrupt() as interrupts, _trace_into(settings.trace if first() else None):
        result = None
        try:
            result = fit(
                model,
                ahead,
                optimizer,
                epochs=settings.epochs,
                callbacks=[
                    *([bar] if first() else []),
                    reached,
                    *([] if saving is None else [saving]),
                ],
                device=settings.on,
                should_stop=interrupts,
                position=position,
            )
            if saving is not None and saving.at != position.steps:
                with progress.status("Saving ..."):
                    saving.save()
            before = interrupts.count
            with progress.status("Testing ..."):
                evaluation = evaluate(
                    model,
                    slices(test) if shared else test,
                    device=settings.on,
                    should_stop=lambda: interrupts.count > before,
                )
        except KeyboardInterrupt:
            pass
        except BaseException:
            _leave_note(settings, progress, may_go=saving is not None or not reached.result.steps)
            raise
        interrupted = any(ranks.tell("figures", interrupts()))
        report = _report(settings, model, result or reached.result, evaluation, interrupted)
        report |= {"rows": position.rows, "steps": position.steps, "epochs": position.epoch - 1}
        report["resumed_at"] = resumed_at
        _leave_note(settings, progress, may_go=saving is not None)
        if settings.ssd is not None:
            _write_rows(settings, model, progress)
        report["skipped_lines"] = training.skipped.lines + test.skipped.lines
        # The figures first: a disk that is too full for the model must not cost them too.
        if settings.json is not None and first():
            write_json(settings.json, report)
        lines = _lines(report)
        try:
            if settings.save is not None:
                with progress.status("Saving ..."):
                    save_model(settings.save, model, optimizer, position.steps)
                lines["saved to"] = settings.save
                _leave_note(settings, progress, may_go=True)
            if settings.checkpoint is not None:
                lines["checkpoints in"] = settings.checkpoint
        finally:
            results.print(closing_table("Interrupted" if interrupted else "Done", lines))
    return report


def _refuse_what_is_read_once(paths: Sequence[str]) -> None:
    """Refuses pipes and terminals: samples are counted before they are trained on."""
    for path in paths:
        kind = os.stat(path).st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISBLK(kind)):
            raise SettingsError(
                f"--data {path} is a pipe or a device, which can be read once; train reads its data several "
                "times. Write them to a file."
            )


def _samples(log: CriteoLog) -> int:
    """Of a part of a log, as `CriteoLog.split` has counted them."""
    assert log.stop is not None
    return log.stop - log.start


def _notices(
    settings: TrainSettings, storage: Storage | None, training: int, testing: int
) -> Iterator[str]:
    """What is to be known before hours of training."""
    if storage is not None and storage.reset and not settings.reset_ssd:
        yield (
            f"the rows that an earlier run left in --ssd {settings.ssd} were deleted: it had saved them, "
            "or trained nothing."
        )
    if settings.test_fraction and not testing:
        yield (
            f"nothing will be tested: --test-fraction {settings.test_fraction:g} of "
            f"{training:,} {'sample' if training == 1 else 'samples'} is none. Raise it, or give more "
            "samples."
        )


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
    kind: Any = OPTIMIZERS[name]
    dense = kind._rule.command_dense
    made: torch.optim.Optimizer = kind(
        model.parameters(), lr=lr, **({} if dense is None else {"dense": dense})
    )
    return made


def _leave_note(settings: TrainSettings, progress: Console, *, may_go: bool) -> None:
    """Leaves beside the log what `hotbed inspect` and the next run want to know."""
    if settings.ssd is not None:
        with _told_if_not_written(settings.ssd, progress):
            write_note(_rows_at(settings), may_go=may_go)


def _rows_at(settings: TrainSettings) -> str:
    """Where on the SSD this process has its rows."""
    return str(of_process(settings.ssd))


def _write_rows(settings: TrainSettings, model: nn.Module, progress: Console) -> None:
    """Writes to --ssd what is not there yet: all rows, if they are saved nowhere else."""
    embeddings = _embeddings_of(model)
    assert settings.ssd is not None
    if settings.save is not None:
        with _told_if_not_written(settings.ssd, progress):
            embeddings.group.note_hottest()
        return
    try:
        with progress.status("Writing rows to the SSD ..."):
            embeddings.flush()
    except StorageError as error:
        notice(progress, f"rows of this run are missing in --ssd {settings.ssd}: {error}")


@contextlib.contextmanager
def _told_if_not_written(ssd: str, progress: Console) -> Iterator[None]:
    """A disk too full for a note costs nothing else."""
    try:
        yield
    except OSError as error:
        notice(progress, f"what the rows in --ssd {ssd} are was not noted: {error}")


def _embeddings_of(model: nn.Module) -> EmbeddingCollection:
    embeddings = model.embeddings
    assert isinstance(embeddings, EmbeddingCollection)
    return embeddings


def _tiers_of(embeddings: EmbeddingCollection) -> dict[str, float]:
    """Its counters, if rows lie in tiers; else none."""
    return embeddings.stats() if embeddings.has_tiers else {}


def _report(
    settings: TrainSettings,
    model: nn.Module,
    result: FitResult,
    evaluation: Evaluation | None,
    interrupted: bool,
) -> dict[str, Any]:
    ranks = ranks_of(tables_of(model), model)
    of_ranks = ranks.tell("figures", (peak_rss_bytes(), _tiers_of(_embeddings_of(model))))
    return {
        "auc": None if evaluation is None else evaluation.auc,
        "logloss": None if evaluation is None else evaluation.logloss,
        "samples_per_second": result.samples_per_second,
        "rows": result.rows,
        "epochs": result.epochs,
        "steps": result.steps,
        "test_rows": 0 if evaluation is None else evaluation.rows,
        "stored_rows": _embeddings_of(model).count(),
        "seconds": result.seconds,
        "processes": ranks.size,
        "peak_rss_bytes": max(peak for peak, _ in of_ranks),
        "interrupted": interrupted,
        "tiers": _together([tiers for _, tiers in of_ranks]),
        "config": dataclasses.asdict(settings),
        "versions": versions(),
    }


def _together(tiers: list[dict[str, float]]) -> dict[str, float]:
    """Counters of all processes."""
    if len(tiers) == 1 or not tiers[0]:
        return tiers[0]
    summed = {name: sum(one.get(name, 0.0) for one in tiers) for name in tiers[0]}
    summed["hit_rate"] = 1 - summed["rows_missed"] / max(1.0, summed["rows_used"])
    return summed


def _lines(report: dict[str, Any]) -> dict[str, str]:
    config = report["config"]
    lines = {
        "model": f"{config['model']}, dim {config['dim']}, {config['optimizer']} {config['lr']:g}",
        "samples trained on": f"{report['rows']:,}",
        "samples a second": f"{report['samples_per_second']:,.0f}",
        "samples tested on": "none",
    }
    if report["test_rows"]:
        lines["samples tested on"] = f"{report['test_rows']:,} (the last by time)"
        lines["test AUC"] = f"{report['auc']:.4f}"
        if math.isnan(report["auc"]):
            why = "a score is NaN" if math.isnan(report["logloss"]) else "all labels are alike"
            lines["test AUC"] = f"none: {why}"
        lines["test log loss"] = f"{report['logloss']:.4f}"
    if report["skipped_lines"]:
        lines["malformed lines skipped"] = f"{report['skipped_lines']:,}"
    lines["rows stored"] = f"{report['stored_rows']:,}"
    if tiers := report["tiers"]:
        lines["rows found in fast memory"] = f"{tiers['hit_rate']:.1%}"
        lines["rows brought up"] = f"{tiers['rows_missed'] - tiers['rows_created']:,.0f}"
        lines["rows written back"] = f"{tiers['rows_written_back']:,.0f}"
        lines["waited for rows"] = f"{tiers['wait_ms'] / 1e3:.1f} s"
    if report["processes"] > 1:
        lines["processes"] = f"{report['processes']}"
    lines["peak memory"] = f"{report['peak_rss_bytes'] / 2**20:,.0f} MiB"
    if config["json"]:
        lines["figures in"] = config["json"]
    if config["trace"]:
        lines["trace in"] = f"{config['trace']} (open it in ui.perfetto.dev)"
    return lines
