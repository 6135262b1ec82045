"""Options of optimizers that are numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import numpy as np
from torch import Tensor

from hotbed import _core
from hotbed.text import brief

__all__ = ["Number"]


@dataclasses.dataclass(frozen=True)
class Number:
    """An option that is a number, or several of one kind.

    Args:
        name: in a parameter group.
        span: the interval that it must lie in, as mathematicians write it.
        core: what the core calls it, a name for each number; None: the same; (): it is not of a step.
    """

    name: str
    span: str
    core: tuple[str, ...] | None = None
    low: float = dataclasses.field(init=False)
    high: float = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        low, high = (float(end) for end in self.span[1:-1].split(","))
        low = math.nextafter(low, math.inf) if self.span[0] == "(" else low
        high = math.nextafter(high, -math.inf) if self.span[-1] == ")" else high
        object.__setattr__(self, "low", low)
        object.__setattr__(self, "high", high)
        if self.core is None:
            object.__setattr__(self, "core", (self.name,))

    def read(self, value: object, hyper: _core.Hyperparameters, *, loaded: bool = False) -> str:
        """Puts it into the core's numbers of a step; or says what is wrong with it. `loaded`: it may be the
        lower end of an open interval, at which a schedule may have ended."""
        core = self.core or ()
        if len(core) < 2:
            values = [value]
        else:
            try:
                values = list(value) if isinstance(value, Iterable) else []
            except TypeError:  # of a tensor without dimensions
                values = []
            if len(values) != len(core):
                return f"is {value!r} and must be {len(core)} numbers"
        for k, one in enumerate(values):
            if type(one) is float:
                number = one
            elif (found := _number(one)) is not None:
                number = found
            else:
                return f"is {brief(value)}, which is no number"
            end = float(self.span[1:].split(",")[0])
            low = end if loaded and math.isfinite(end) else self.low
            if not low <= number <= self.high:
                hint = "" if math.isfinite(number) else "; look for a division in what sets it"
                return f"is {brief(value)}, which is outside {self.span}{hint}"
            if core:
                setattr(hyper, core[k], number)
        return ""


def _number(value: object) -> float | None:
    """Return the value of what torch's steps take for a number, too; None for others, such as texts, arrays,
    fractions and True."""
    is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not (is_number or (isinstance(value, Tensor) and value.dim() == 0)):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (OverflowError, RuntimeError, TypeError, ValueError):
        return None
