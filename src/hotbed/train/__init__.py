"""Training: a loop, its metrics, its progress bar."""

from hotbed.data.position import Position
from hotbed.train.callbacks import Callback, Run, Step, Validated
from hotbed.train.checkpoints import Checkpoints
from hotbed.train.csv_log import CsvLog
from hotbed.train.evaluation import Evaluation, evaluate, scored
from hotbed.train.interrupts import stop_on_interrupt
from hotbed.train.loop import FitResult, fit
from hotbed.train.metrics import Auc, LogLoss, MeanLoss, Metric, RunningAuc, auc, logloss
from hotbed.train.retrieval import RetrievalQuality, evaluate_retrieval
from hotbed.train.tasks import Task, TaskError
from hotbed.train.tensorboard_log import TensorBoardLog
from hotbed.train.trainer import TrainingError
from hotbed.train.validation import Validation

__all__ = [
    "Auc",
    "Callback",
    "Checkpoints",
    "CsvLog",
    "Evaluation",
    "FitResult",
    "LogLoss",
    "MeanLoss",
    "Metric",
    "Position",
    "RetrievalQuality",
    "Run",
    "RunningAuc",
    "Step",
    "Task",
    "TaskError",
    "TensorBoardLog",
    "TrainingError",
    "Validated",
    "Validation",
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
