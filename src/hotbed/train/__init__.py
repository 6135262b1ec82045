"""Training: a loop, its metrics, its progress bar."""

from hotbed.data.position import Position
from hotbed.train.callbacks import Callback, Step
from hotbed.train.checkpoints import Checkpoints
from hotbed.train.loop import (
    Evaluation,
    FitResult,
    TrainingError,
    evaluate,
    fit,
    scored,
    stop_on_interrupt,
)
from hotbed.train.metrics import RunningAuc, auc, logloss
from hotbed.train.retrieval import RetrievalQuality, evaluate_retrieval

__all__ = [
    "Callback",
    "Checkpoints",
    "Evaluation",
    "FitResult",
    "Position",
    "RetrievalQuality",
    "RunningAuc",
    "Step",
    "TrainingError",
    "auc",
    "evaluate",
    "evaluate_retrieval",
    "fit",
    "logloss",
    "scored",
    "stop_on_interrupt",
]


def __dir__() -> list[str]:
    """Only what is public, for completion."""
    return __all__
