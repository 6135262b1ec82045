"""The validation of `hotbed train`."""

from __future__ import annotations

import os

from hotbed.data.windows import SampleReader
from hotbed.dist import slices
from hotbed.table.alone import Processes
from hotbed.train.interrupts import Interrupts
from hotbed.train.settings import BEST, SettingsError, TrainSettings
from hotbed.train.validation import Validation

__all__ = ["RunValidation", "samples_in", "split_validation"]


def split_validation(
    training: SampleReader, test: SampleReader, fraction: float
) -> tuple[SampleReader, SampleReader | None]:
    """Return the samples to train on and, behind them, those to validate on; None where `fraction` is 0.

    Args:
        fraction: of all samples, those for testing among them.

    Raises:
        SettingsError: that are none.
    """
    if not fraction:
        return training, None
    own, testing = (samples_in(part) for part in (training, test))
    count = round((own + testing) * fraction)
    if not count:
        raise SettingsError(
            f"--validation-fraction {fraction:g} of {own + testing:,} samples is none. Raise it, or "
            "give more samples."
        )
    if count >= own:
        raise SettingsError(
            f"--validation-fraction {fraction:g} of {own + testing:,} samples, and those for testing, leave "
            "nothing to train on. Lower it, or give more samples."
        )
    return training.split(count / own, own)


def samples_in(log: SampleReader) -> int:
    """Return the samples of a part of a log, as its `split` has counted them."""
    assert log.stop is not None
    return log.stop - log.start


class RunValidation:
    """Validation of a run as its settings say; without --validation-fraction there is none."""

    def __init__(self, settings: TrainSettings, held: SampleReader | None, *, shared: bool) -> None:
        self._held = held
        self._keeps_best = settings.patience is not None and settings.checkpoint is not None
        self.restored: int | None = None
        """Step of the best checkpoint, where it was loaded at the end."""
        self.callbacks: list[Validation] = []
        if held is not None:
            self.callbacks.append(
                Validation(
                    slices(held) if shared else held,
                    every=settings.validate_every,
                    patience=settings.patience,
                    best=settings.checkpoint and os.path.join(settings.checkpoint, BEST),
                )
            )

    @property
    def samples(self) -> int:
        return 0 if self._held is None else samples_in(self._held)

    @property
    def skipped_lines(self) -> int:
        return 0 if self._held is None else self._held.skipped.lines

    def restore(self, ranks: Processes, interrupts: Interrupts) -> None:
        """Load the best model of a run with --patience that is over. All ranks call this."""
        for validation in self.callbacks:
            found = validation.best_found
            if not self._keeps_best or found is None:
                continue
            if not any(ranks.values_of_all("figures", interrupts())):
                validation.restore()
                self.restored = found.step

    def figures(self) -> dict[str, object] | None:
        """Return the figures of the best validation for --json; None without any."""
        for validation in self.callbacks:
            best = validation.best_found
            return {
                "samples": self.samples,
                "count": len(validation.history),
                "best": None if best is None else best.value,
                "best_step": None if best is None else best.step,
                "stopped_early": validation.has_ended(),
                "restored": self.restored,
            }
        return None
