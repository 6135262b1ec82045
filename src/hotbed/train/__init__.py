"""Training: a loop, its metrics, its progress bar."""

from hotbed.train.loop import (
    Callback,
    Evaluation,
    FitResult,
    Step,
    TrainingError,
    evaluate,
    fit,
    scored,
    stop_on_interrupt,
)
from hotbed.train.metrics import RunningAuc, auc, logloss

__all__ = [
    "Callback",
    "Evaluation",
    "FitResult",
    "RunningAuc",
    "Step",
    "TrainingError",
    "auc",
    "evaluate",
    "fit",
    "logloss",
    "scored",
    "stop_on_interrupt",
]


def __dir__() -> list[str]:
    """Only what is public, for completion."""
    return __all__
