"""How a user describes a table."""

from __future__ import annotations

import dataclasses

import torch

from hotbed import init as initializers
from hotbed.errors import TableError

__all__ = ["Table", "COMBINERS", "DTYPES"]

COMBINERS = ("none", "sum", "mean", "sqrtn", "max")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """One embedding table.

    >>> Table("item", dim=64, rows=10_000_000, combiner="mean")   # static: ids 0 .. rows-1
    >>> Table("user", dim=64)                                     # dynamic: any int64 id

    Raises:
        TableError: a field that cannot be honoured; the message names the table and the value.
    """

    name: str
    """Names the table in errors, checkpoints and ``collection.parameter(name)``. Together with the
    collection's seed it fixes the first values: renaming a table changes them."""

    dim: int
    """Length of a row's vector; any positive number."""

    rows: int | None = None
    """Number of rows of a static table, whose ids are 0 .. rows-1; ``None`` makes the table dynamic:
    any 64-bit id, a row for each id that training has met."""

    combiner: str | None = "sum"
    """How the rows of a bag become one vector: ``"sum"``, ``"mean"`` (Σwv / Σw), ``"sqrtn"``
    (Σwv / √Σw²), ``"max"``, or ``None``/``"none"``: no pooling, one vector an id. An empty bag is
    zeros."""

    dtype: torch.dtype = torch.float32
    """What rows are stored as. float16 and bfloat16 halve memory and traffic; updates then round
    stochastically, so small ones are kept on average. Arithmetic, gradients and pooled vectors are
    float32 (float64 for float64 rows)."""

    init: initializers.Initializer = dataclasses.field(default_factory=initializers.Normal)
    """First value of a row, a pure function of (seed, table name, id, column)."""

    padding_idx: int | None = None
    """An id that stands for "nothing": never in a bag, never updated, and zeros when not pooled."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise TableError(f"A table's name must be a non-empty string, not {self.name!r}.")
        if not isinstance(self.dim, int) or isinstance(self.dim, bool) or self.dim <= 0:
            raise TableError(
                f"Table {self.name!r}: dim must be a positive integer, got {self.dim!r}."
            )
        if self.rows is not None and (
            not isinstance(self.rows, int) or isinstance(self.rows, bool) or self.rows <= 0
        ):
            raise TableError(
                f"Table {self.name!r}: rows must be a positive integer, or None for open-ended ids, "
                f"got {self.rows!r}."
            )
        if self.combiner is None:
            object.__setattr__(self, "combiner", "none")
        if self.combiner not in COMBINERS:
            raise TableError(
                f"Table {self.name!r}: combiner must be one of {', '.join(COMBINERS)}, "
                f"got {self.combiner!r}."
            )
        if self.dtype not in DTYPES:
            raise TableError(
                f"Table {self.name!r}: dtype must be one of "
                f"{', '.join(str(d).removeprefix('torch.') for d in DTYPES)}, got {self.dtype!r}."
            )
        if self.padding_idx is not None:
            if not isinstance(self.padding_idx, int) or isinstance(self.padding_idx, bool):
                raise TableError(
                    f"Table {self.name!r}: padding_idx must be an integer or None, "
                    f"got {self.padding_idx!r}."
                )
            if self.rows is not None and not 0 <= self.padding_idx < self.rows:
                raise TableError(
                    f"Table {self.name!r}: padding_idx {self.padding_idx} is outside "
                    f"[0, {self.rows})."
                )
        self.init.resolve(self.rows, self.dim)  # raises where the initializer needs what is missing

    @property
    def compute_dtype(self) -> torch.dtype:
        """dtype of gradients, optimizer states and pooled vectors."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32
