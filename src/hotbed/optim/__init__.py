"""Optimizers over tables and dense parameters alike; see docs/optimizers.md."""

from hotbed import _core
from hotbed.optim import adaptive, linear, moments
from hotbed.optim.adaptive import *  # noqa: F403  (classes are named once, in their module)
from hotbed.optim.base import TableOptimizer
from hotbed.optim.from_torch import convert
from hotbed.optim.gradients import split_parameters
from hotbed.optim.linear import *  # noqa: F403
from hotbed.optim.moments import *  # noqa: F403

__all__ = ["TableOptimizer", "convert", "split_parameters"]
__all__ += adaptive.__all__
__all__ += linear.__all__
__all__ += moments.__all__
__all__.sort()

_CLASSES: list[type[TableOptimizer]] = [
    getattr(module, name) for module in (adaptive, linear, moments) for name in module.__all__
]

RULES: tuple[type[TableOptimizer], ...] = tuple(
    sorted(
        (kind for kind in _CLASSES if "_rule" in vars(kind)),
        key=lambda kind: int(getattr(_core.Rule, kind.declared_rule().core).value),
    )
)
"""One class for each rule, in the order of the core."""


def __dir__() -> list[str]:
    """Only what is public, for completion."""
    return __all__
