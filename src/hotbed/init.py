"""First values of rows.

An initializer describes a distribution; the rows are drawn by the core. A row's first value is a
pure function of (table key, id, column): it depends neither on when or with which other ids the
row is first asked for, nor on the device, the number of threads or the processor.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch  # before the core, which shares torch's OpenMP runtime

from hotbed import _core
from hotbed.arrays import integer
from hotbed.errors import TableError

__all__ = [
    "Columns",
    "Constant",
    "Distribution",
    "Initializer",
    "Kind",
    "Normal",
    "Ones",
    "TruncatedNormal",
    "Uniform",
    "XavierNormal",
    "XavierUniform",
    "Zeros",
]


def __dir__() -> list[str]:
    """Only what is public, for completion."""
    return __all__


class Kind(IntEnum):
    """The distributions that the core draws from."""

    constant = 0
    uniform = 1
    normal = 2
    truncated_normal = 3


class Distribution(NamedTuple):
    """A distribution as the core takes it.

    constant: value ``a``. uniform: from ``a`` to ``b``. normal: mean ``a``, standard deviation
    ``b``. truncated_normal: the same within ``[c, d]``.
    """

    kind: Kind
    a: float = 0.0
    b: float = 0.0
    c: float = 0.0
    d: float = 0.0


@runtime_checkable
class Initializer(Protocol):
    """Object that can say which distribution the rows of a table start from."""

    def resolve(self, rows: int | None, dim: int) -> Distribution:
        """Return the distribution for a table of ``rows`` rows (None: dynamic) and ``dim`` columns."""
        ...


def _require_finite(owner: object, **values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(
                f"{type(owner).__name__}: {name} is {value!r} of type {type(value).__name__}. "
                "Pass a number."
            )
        if not math.isfinite(value):
            raise TableError(f"{type(owner).__name__}: {name} is {value}. Pass a finite number.")


def _check(distribution: Distribution) -> None:
    try:
        _core.check_initial(*distribution)
    except ValueError as error:
        raise TableError(str(error)) from None


def _require_not_negative(owner: object, name: str, value: float) -> None:
    if value < 0:
        raise TableError(
            f"{type(owner).__name__}: {name} is {value}. Pass a number that is not negative."
        )


@dataclass(frozen=True, slots=True)
class Constant:
    """Every element is ``value``."""

    value: float

    def __post_init__(self) -> None:
        _require_finite(self, value=self.value)

    def resolve(self, rows: int | None, dim: int) -> Distribution:
        return Distribution(Kind.constant, self.value)


@dataclass(frozen=True, slots=True)
class Zeros:
    """Every element is 0."""

    def resolve(self, rows: int | None, dim: int) -> Distribution:
        return Distribution(Kind.constant, 0.0)


@dataclass(frozen=True, slots=True)
class Ones:
    """Every element is 1."""

    def resolve(self, rows: int | None, dim: int) -> Distribution:
        return Distribution(Kind.constant, 1.0)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Evenly between ``low`` and ``high``; either end may be reached by rounding."""

    low: float = -0.05
    high: float = 0.05

    def __post_init__(self) -> None:
        _require_finite(self, low=self.low, high=self.high)
        if self.low > self.high:
            raise TableError(
                f"Uniform: low {self.low} is above high {self.high}. Pass low <= high."
            )
        _check(self.resolve(None, 1))

    def resolve(self, rows: int | None, dim: int) -> Distribution:
        return Distribution(Kind.uniform, self.low, self.high)


@dataclass(frozen=True, slots=True)
class Normal:
    """Normal with mean ``mean`` and standard deviation ``std``.

    float64 rows reach 8.2 standard deviations from the mean, the other dtypes 6.2: the tail
    beyond has a probability of ``2**-53`` and ``2**-32``.
    """

    mean: float = 0.0
    std: float = 0.01

    def __post_init__(self) -> None:
        _require_finite(self, mean=self.mean, std=self.std)
        _require_not_negative(self, "std", self.std)

    def resolve(self, rows: int | None, dim: int) -> Distribution:
        return Distribution(Kind.normal, self.mean, self.std)


@dataclass(frozen=True, slots=True)
class TruncatedNormal:
    """Normal with mean ``mean`` and standard deviation ``std``, drawn again while outside bounds.

    ``low`` and ``high`` are values, as in ``torch.nn.init.trunc_normal_``, not multiples of
    ``std``; left out, each lies two standard deviations from the mean. ``std`` is that of the
    normal before it is cut. (The rows are drawn by the inverse of the distribution function,
    which has the same distribution as drawing again.)
    """

    mean: float = 0.0
    std: float = 0.01
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        _require_finite(self, mean=self.mean, std=self.std)
        _require_not_negative(self, "std", self.std)
        _, _, _, low, high = self.resolve(None, 1)
        _require_finite(self, low=low, high=high)
        if low > high or (low == high and self.std > 0):
            raise TableError(
                f"TruncatedNormal: nothing lies between low {low} and high {high}. "
                "Pass low < high; they are values, not multiples of std."
            )
        _check(self.resolve(None, 1))

    def resolve(self, rows: int | None, dim: int) -> Distribution:
        low = self.mean - 2 * self.std if self.low is None else self.low
        high = self.mean + 2 * self.std if self.high is None else self.high
        return Distribution(Kind.truncated_normal, self.mean, self.std, low, high)


def _fans(owner: object, rows: int | None, dim: int) -> int:
    if rows is None:
        raise TableError(
            f"{type(owner).__name__} scales with the number of rows, and rows=None (a dynamic "
            "table) has none. Pass rows=N, or an initializer with a fixed scale such as "
            "Uniform(-0.05, 0.05) or Normal(0.0, 0.01)."
        )
    return rows + dim


@dataclass(frozen=True, slots=True)
class XavierUniform:
    """Uniform in ±gain·sqrt(6 / (rows + dim)); static tables only.

    As ``torch.nn.init.xavier_uniform_`` does for a weight of shape (rows, dim), whose fan-in is
    ``dim`` and fan-out ``rows`` (Glorot and Bengio, 2010, equation 16).
    """

    gain: float = 1.0

    def __post_init__(self) -> None:
        _require_finite(self, gain=self.gain)
        _require_not_negative(self, "gain", self.gain)

    def resolve(self, rows: int | None, dim: int) -> Distribution:
        bound = self.gain * math.sqrt(6 / _fans(self, rows, dim))
        return Distribution(Kind.uniform, -bound, bound)


@dataclass(frozen=True, slots=True)
class XavierNormal:
    """Normal with mean 0 and standard deviation gain·sqrt(2 / (rows + dim)); static tables only.

    As ``torch.nn.init.xavier_normal_`` does for a weight of shape (rows, dim) (Glorot and Bengio,
    2010, equation 12).
    """

    gain: float = 1.0

    def __post_init__(self) -> None:
        _require_finite(self, gain=self.gain)
        _require_not_negative(self, "gain", self.gain)

    def resolve(self, rows: int | None, dim: int) -> Distribution:
        return Distribution(Kind.normal, 0.0, self.gain * math.sqrt(2 / _fans(self, rows, dim)))


@dataclass(frozen=True, slots=True)
class Columns:
    """Consecutive columns that start as different things: several vectors of an id in one row.

    >>> hb.Table("user", dim=17, init=hb.init.Columns([(16, hb.init.Normal()), (1, hb.init.Zeros())]))

    Optimizers with one state for a whole row (`RowwiseAdagrad`, `RowwiseAdam`) refuse such a table.

    Raises:
        TableError: there are no parts, one has no columns, or its initializer is none or another Columns.
    """

    parts: Sequence[tuple[int, Initializer]]
    """(number of columns, their initializer), in their order; the numbers add up to the table's dim."""

    def __post_init__(self) -> None:
        try:
            parts = tuple((integer(width) or width, each) for width, each in self.parts)
        except (TypeError, ValueError):
            raise TableError(
                f"Columns: parts is {self.parts!r}. Pass (number of columns, initializer) pairs."
            ) from None
        object.__setattr__(self, "parts", parts)
        if not self.parts:
            raise TableError(
                "Columns: parts is empty. Pass (number of columns, initializer) pairs."
            )
        for width, each in self.parts:
            if (integer(width) or 0) < 1:
                raise TableError(f"Columns: a part has {width!r} columns. Pass a positive integer.")
            if not isinstance(each, Initializer):
                raise TableError(
                    f"Columns: the initializer of {width} columns is {each!r}. Pass another of hotbed.init, "
                    "such as Normal(0.0, 0.01)."
                )


Band: TypeAlias = tuple[int, int, float, float, float, float]
"""Columns that start from one distribution: the column before which they end, and the distribution."""


def bands_of(initializer: Initializer | Columns, rows: int | None, dim: int) -> tuple[Band, ...]:
    """Return the consecutive bands of a table of `rows` rows (None: dynamic) and `dim` columns.

    Raises:
        TableError: the parts of `Columns` have another number of columns together.
    """
    parts = initializer.parts if isinstance(initializer, Columns) else [(dim, initializer)]
    ends = [*accumulate(width for width, _ in parts)]
    if ends[-1] != dim:
        raise TableError(
            f"its init.Columns has {ends[-1]} columns, and the table {dim}. Make them equal."
        )
    return tuple(
        (end, *each.resolve(rows, width)) for end, (width, each) in zip(ends, parts, strict=True)
    )


def table_key(seed: int, name: str) -> int:
    """The 64-bit key that, with a row's id and column, decides its first value.

    The same for the same seed and table name on every machine and in every version: the first 8
    bytes, little-endian, of BLAKE2b over the seed in decimal, a zero byte and the name in UTF-8.
    """
    text = f"{seed:d}\0{name}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def derive_key(seed: int | None, name: str) -> int:
    """The key of a table: from (seed, name), or from torch's default generator if seed is None."""
    if seed is None:
        seed = int(torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device="cpu"))
    given = integer(seed)
    if given is None:
        raise TableError(f"seed must be an integer, or None to draw one, got {seed!r}.")
    return table_key(given, name)
