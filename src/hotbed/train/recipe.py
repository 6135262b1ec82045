"""The whole of `hotbed train`: a click log in, a trained model and its figures out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch
import torch.distributed as torch_dist
from rich.console import Console
from torch import nn

from hotbed.ahead.lookahead import lookahead
from hotbed.checkpoint.folder import complete_in
from hotbed.checkpoint.ranks import ranks_of
from hotbed.data.position import Position
from hotbed.dist import distribute, release_hosts, slices
from hotbed.files import Json
from hotbed.modules.owner import tables_of
from hotbed.storage import Storage
from hotbed.trace import Trace
from hotbed.train.calibration import calibration
from hotbed.train.callbacks import Callback, Step
from hotbed.train.evaluation import Evaluation, evaluated, first_label, score
from hotbed.train.figures import embeddings_of, figures, lines, table_sizes
from hotbed.train.interrupts import Interrupts, stop_on_interrupt
from hotbed.train.loop import FitResult, fit
from hotbed.train.optimizers import make_optimizer
from hotbed.train.processes import first, process_group
from hotbed.train.progress import ProgressBar, closing_table, notice
from hotbed.train.report import check_writable_file, write_json
from hotbed.train.resuming import RunCheckpoints, begin_from
from hotbed.train.row_server import announce
from hotbed.train.run_plan import imbalance_in_words, plan_entry, traffic_entry
from hotbed.train.run_record import RunRecord
from hotbed.train.run_validation import RunValidation, samples_in, split_validation
from hotbed.train.saved import check_writable_folder, save_model
from hotbed.train.settings import SettingsError, TrainSettings
from hotbed.train.source import source_of
from hotbed.train.ssd_rows import SsdRows


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


def train(settings: TrainSettings, progress: Console, results: Console) -> dict[str, object]:
    """Train, evaluate, save and report as `settings` say; returns what --json writes.

    The bar and notices are drawn on `progress`, the closing table on `results`.

    The first Ctrl-C ends training after the current step, and what follows runs as usual with
    ``"interrupted": true`` in the report; a second one also ends the evaluation.

    Raises:
        HotbedError, OSError: bad input, or an output that cannot be written.
    """
    with process_group() as shared:
        settings.check_processes(torch_dist.get_world_size() if shared else 1)
        record = RunRecord(settings, progress, is_first=first())
        if first():
            _check_outputs(settings)
            record.check()
        with record.of_failures():
            run = _Run(settings, progress, record, shared=shared)
            run.begin()
            with (
                stop_on_interrupt() as interrupts,
                _trace_into(settings.trace if first() else None),
            ):
                evaluation = run.fit_and_test(interrupts)
                report = run.finish(evaluation, interrupts, results)
                if shared:
                    release_hosts(run.model)
                return report


class _Run:
    """A run, from the log to the saved model. Its methods are called once each, in their order.

    Args:
        shared: the process belongs to a process group.
    """

    def __init__(
        self, settings: TrainSettings, progress: Console, record: RunRecord, *, shared: bool
    ) -> None:
        self.settings, self.progress, self.shared = settings, progress, shared
        self.record = record
        self.ssd = SsdRows(settings.ssd, progress, of_logs=settings.schema is None)
        self.position, self.reached = Position(), _Reached()
        self.source = source_of(settings)
        self.log = self.source.reader
        with progress.status("Counting samples ..."):
            self.found = self.log.fingerprint() if settings.checkpoint is not None else None
            rows = None if self.found is None else self.found.rows
            parts = self.log.split(settings.test_fraction, rows)
        self.test = parts[1]
        self.training, held = split_validation(*parts, settings.validation_fraction)
        self.validation = RunValidation(settings, held, shared=shared)
        self.samples = samples_in(self.training)
        if self.samples == 0:
            raise SettingsError(f"There are no samples to train on in {', '.join(settings.data)}.")
        self.model = self._make_model()
        self.ranks = ranks_of(tables_of(self.model), self.model)
        self.optimizer = make_optimizer(settings.optimizer, self.model, settings.lr)
        self.saving: RunCheckpoints | None = None
        self.resumed_at = 0
        self.calibration: list[dict[str, float]] = []
        self.asked: dict[str, Json] = {}

    def _make_model(self) -> nn.Module:
        settings, storage = self.settings, self.settings.storage()
        torch.manual_seed(settings.seed)
        model = self.source.make_model()
        for text in _notices(settings, storage, self.samples, samples_in(self.test)):
            notice(self.progress, text)
        self.ssd.forget_note()
        if self.shared:
            announce(settings, model)
            distribute(
                model, local_world_size=settings.local_world_size, prefetch=settings.prefetch
            )
        return model

    def begin(self) -> None:
        """Load what an earlier run has left, as far as the settings ask for it."""
        settings = self.settings
        if settings.checkpoint is not None:
            for table in tables_of(self.model).values():
                table.ready()  # a log is there from now on, whose rows can be had again whatever ends the run
            self.ssd.leave_note(may_go=True)
        found = settings.resumes and complete_in(settings.checkpoint or "")
        begun = self.ranks.values_of_all("figures", bool(found or settings.resume_from))[0]
        if settings.from_ is not None and not begun:
            with self.progress.status("Loading the model ..."):
                note = begin_from(
                    settings.from_, self.model, self.optimizer, settings.lr, self.position
                )
            if note:
                notice(self.progress, note)
        if self.found is not None:
            self.saving = RunCheckpoints(
                settings,
                self.log,
                self.found,
                self.optimizer,
                self.position,
                self.validation.callbacks,
            )
            doing = "Loading the checkpoint ..." if settings.resumes else "Saving ..."
            with self.progress.status(doing):
                note = self.saving.begin(self.model)
            if note:
                notice(self.progress, note)
            self.ssd.leave_note(may_go=True)  # logs that go on from linked files are others now
        self.resumed_at = self.position.steps
        if settings.run is not None and self.shared and first():
            self.asked = traffic_entry(self.model, self.training)
        self.record.begin(
            processes=self.ranks.trainers,
            samples={
                "training": self.samples,
                "validation": self.validation.samples,
                "test": samples_in(self.test),
            },
        )

    def fit_and_test(self, interrupts: Interrupts) -> Evaluation | None:
        """Train and test; None where a second Ctrl-C has ended the test, or the training."""
        try:
            self.reached.result = self._fit(interrupts)
            if self.saving is not None and self.saving.at != self.position.steps:
                with self.progress.status("Saving ..."):
                    self.saving.save()
                    self.saving.wait()
            with self.progress.status("Loading the best model ..."):
                self.validation.restore(self.ranks, interrupts)
            before = interrupts.count
            with self.progress.status("Testing ..."):
                scores = score(
                    self.model,
                    slices(self.test) if self.shared else self.test,
                    device=self.settings.on,
                    should_stop=lambda: interrupts.count > before,
                )
            self.calibration = calibration(*first_label(scores))
            return evaluated(scores, self.source.tasks)
        except KeyboardInterrupt:
            return None
        except BaseException:
            is_saved = self.saving is not None or not self.reached.result.steps
            self.ssd.leave_note(may_go=is_saved)
            raise

    def _fit(self, interrupts: Interrupts) -> FitResult:
        settings, batches = self.settings, self.training
        bars = [self._bar()] if first() else []
        embeddings = embeddings_of(self.model)
        return fit(
            self.model,
            lookahead(
                slices(batches) if self.shared else batches,
                self.model,
                settings.depth,
                settings.horizon,
            ),
            self.optimizer,
            epochs=settings.epochs,
            tasks=self.source.tasks or None,
            callbacks=[
                *bars,
                self.reached,
                *self.validation.callbacks,
                *self.record.callbacks(embeddings.stats if embeddings.has_tiers else None),
                *([] if self.saving is None else [self.saving]),
                interrupts,
            ],
            device=settings.on,
            position=self.position,
        )

    def _bar(self) -> ProgressBar:
        """The bar is the first process's alone, and asks no other."""
        embeddings = embeddings_of(self.model)
        stored = None if self.shared else embeddings.count
        tiers = embeddings.stats if embeddings.has_tiers else None
        return ProgressBar(self.samples, self.settings.epochs, self.progress, stored, tiers)

    def finish(
        self, evaluation: Evaluation | None, interrupts: Interrupts, results: Console
    ) -> dict[str, object]:
        """Write figures, rows and the model, print the closing table, and return the figures."""
        settings = self.settings
        interrupted = any(self.ranks.values_of_all("figures", interrupts()))
        report = figures(settings, self.model, self.reached.result, evaluation, interrupted)
        report |= {"rows": self.position.rows, "steps": self.position.steps}
        report |= {"epochs": self.position.epoch - 1, "resumed_at": self.resumed_at}
        self.ssd.leave_note(may_go=self.saving is not None)
        self.ssd.complete(self.model, is_saved=settings.save is not None)
        skipped = self.training.skipped.lines + self.test.skipped.lines
        report["skipped_lines"] = skipped + self.validation.skipped_lines
        report["validation"] = self.validation.figures()
        sharding = plan_entry(self.model, settings.optimizer, self.asked)
        if told := imbalance_in_words(sharding):
            notice(self.progress, told)
        if settings.run is not None:
            tables = table_sizes(self.model, self.ranks)
            state = "interrupted" if interrupted else "ended"
            self.record.end(
                state,
                figures=report,
                tables=tables,
                calibration=self.calibration,
                **({} if sharding is None else {"sharding": sharding}),
            )
        # The figures first: a disk that is too full for the model must not cost them too.
        if settings.json is not None and first():
            write_json(settings.json, report)
        shown = lines(report)
        try:
            if settings.save is not None:
                with self.progress.status("Saving ..."):
                    step = self.validation.restored or self.position.steps
                    save_model(settings.save, self.model, self.optimizer, step)
                shown["saved to"] = settings.save
                self.ssd.leave_note(may_go=True)
            if settings.checkpoint is not None:
                shown["checkpoints in"] = settings.checkpoint
            if settings.run is not None:
                shown["record in"] = f"{settings.run} (hotbed report draws it)"
        finally:
            results.print(closing_table("Interrupted" if interrupted else "Done", shown))
        return report


def _check_outputs(settings: TrainSettings) -> None:
    """Raise where an output cannot be written, before anything is read."""
    if settings.json is not None:
        check_writable_file(settings.json)
    if settings.save is not None:
        check_writable_folder(settings.save)
    if settings.trace is not None:
        check_writable_file(settings.trace)


def _notices(
    settings: TrainSettings, storage: Storage | None, training: int, testing: int
) -> Iterator[str]:
    """Yield notices that a user wants before hours of training."""
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
