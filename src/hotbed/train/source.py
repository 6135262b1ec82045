"""Where the samples of a run come from: click logs, or files of columns that a schema describes."""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import nn

from hotbed.data import CATEGORIES, DENSE, ColumnFiles, CriteoLog, Schema
from hotbed.data.windows import SampleReader
from hotbed.models import MODELS, ClickModel
from hotbed.train.settings import SettingsError, TrainSettings
from hotbed.train.tasks import Task, tasks_of

__all__ = ["Source", "source_of"]


class Source(ABC):
    """Samples of a run, and the model that fits them."""

    reader: SampleReader
    """All samples, in their order."""
    tasks: tuple[Task, ...] = ()
    """One a label where there are several."""

    def __init__(self, settings: TrainSettings) -> None:
        self.settings = settings

    @abstractmethod
    def make_model(self) -> nn.Module:
        """Return the model of the settings.

        Raises:
            TableError, TypeError: a setting of --set is unknown, or the model does not fit the samples.
        """

    def options_of_model(self) -> dict[str, object]:
        """Return arguments of the model beside its tables and the columns of its batches.

        Raises:
            SettingsError: a setting of --set is unknown, or no value of its type.
        """
        settings, kind = self.settings, MODELS[self.settings.model]
        options: dict[str, object] = {"dim": settings.dim, "seed": settings.seed}
        options |= {"storage": settings.storage(), "device": settings.on}
        if settings.set_:
            known = kind.Settings if issubclass(kind, ClickModel) else None
            if known is None:
                raise SettingsError(f"--set: the model {settings.model!r} has no settings.")
            options |= known.from_text(settings.set_)
        return options


class ClickLogs(Source):
    """Logs in Criteo's format."""

    def __init__(self, settings: TrainSettings) -> None:
        super().__init__(settings)
        self.reader = CriteoLog(
            settings.data,
            settings.batch_size,
            on_error="skip" if settings.on_error == "skip" else "raise",
            shuffle=settings.shuffle,
            seed=settings.seed,
        )
        _refuse_what_is_read_once(self.reader)

    def make_model(self) -> nn.Module:
        options = {"num_dense": len(DENSE), **self.options_of_model()}
        return MODELS[self.settings.model](CATEGORIES, **options)


class Columns(Source):
    """Parquet, CSV or TSV files, by --schema."""

    def __init__(self, settings: TrainSettings) -> None:
        super().__init__(settings)
        assert settings.schema is not None
        if settings.on_error == "skip":
            raise SettingsError("--on-error skip is of click logs; leave it out with --schema.")
        self.schema = Schema.read(settings.schema)
        if not self.schema.labels:
            raise SettingsError(
                f'--schema {settings.schema} has no label to train on. Give a column the kind "label".'
            )
        if len(self.schema.labels) > 1:
            self.tasks = tasks_of([Task(name) for name in self.schema.labels])
        self.reader = ColumnFiles(
            settings.data,
            self.schema,
            settings.batch_size,
            shuffle=settings.shuffle,
            seed=settings.seed,
        )
        _refuse_what_is_read_once(self.reader)

    def make_model(self) -> nn.Module:
        kind = MODELS[self.settings.model]
        if not issubclass(kind, ClickModel):
            raise SettingsError(
                f"--model {self.settings.model} cannot be made of a schema, as it is no "
                "hotbed.models.ClickModel."
            )
        make: Callable[..., ClickModel] = kind.from_schema
        model = make(self.schema, **self.options_of_model())
        if self.tasks and not hasattr(model.settings, "tasks"):
            raise SettingsError(
                f"--model {self.settings.model} has one logit, and --schema {self.settings.schema} "
                f"{len(self.tasks)} labels. Take --model mmoe, or keep one label."
            )
        return model


def source_of(settings: TrainSettings) -> Source:
    """Return where the samples of a run come from.

    Raises:
        HotbedError, OSError: there are none, or the schema cannot be read.
    """
    return ClickLogs(settings) if settings.schema is None else Columns(settings)


def _refuse_what_is_read_once(reader: SampleReader) -> None:
    """Refuses pipes and terminals: samples are counted before they are trained on."""
    for path in reader.paths:
        kind = os.stat(path).st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISBLK(kind)):
            raise SettingsError(
                f"--data {path} is a pipe or a device, which can be read once; train reads its data several "
                "times. Write them to a file."
            )
