"""Optimizers over tables and dense parameters alike; see docs/optimizers.md."""

from hotbed.optim.adaptive import Adadelta, Adagrad, RMSprop, RowwiseAdagrad
from hotbed.optim.base import TableOptimizer
from hotbed.optim.gradients import split_parameters
from hotbed.optim.linear import FTRL, SGD
from hotbed.optim.moments import Adam, Adamax, AdamW, RowwiseAdam, SparseAdam

__all__ = [
    "FTRL",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "RMSprop",
    "RowwiseAdagrad",
    "RowwiseAdam",
    "SparseAdam",
    "TableOptimizer",
    "split_parameters",
]

RULES: tuple[type[TableOptimizer], ...] = (
    SGD,
    Adagrad,
    RowwiseAdagrad,
    Adam,
    AdamW,
    RowwiseAdam,
    Adamax,
    Adadelta,
    RMSprop,
    FTRL,
)
"""One class for each rule."""


def __dir__() -> list[str]:
    """Only what is public, for completion."""
    return __all__
