"""Codecs: how rows, and gradients of rows, lie in messages between ranks.

A codec that is written in Python row by row is a subclass of `ByRow` and an entry in `CODECS`.
"""

from typing import NamedTuple

from hotbed import _core
from hotbed.dist.row_codecs.by_row import ByRow
from hotbed.dist.row_codecs.codec import RowCodec
from hotbed.dist.row_codecs.shorter import Shorter
from hotbed.dist.row_codecs.stored import Stored
from hotbed.errors import TableError
from hotbed.tables import Table

__all__ = ["CODECS", "ByRow", "Codecs", "RowCodec", "codecs_of", "wire_of"]

CODECS: dict[str, RowCodec] = {
    "stored": Stored(),
    "float16": Shorter(_core.WireForm.float16),
    "bfloat16": Shorter(_core.WireForm.bfloat16),
    "int8": Shorter(_core.WireForm.int8),
}
"""By the names that `hotbed.distribute` takes."""

_INT8 = CODECS["int8"]
_OF_GRADIENTS = Shorter(_core.WireForm.int8, at_random=True)


class Codecs(NamedTuple):
    """How rows of a table travel."""

    rows: RowCodec
    """Of rows, and of vectors of bags, on their way from owners to a forward."""
    gradients: RowCodec
    """Of gradients on their way to owners."""


def codecs_of(rows: object, gradients: object, named: str = "") -> Codecs:
    """Return the codecs of these names.

    Args:
        named: what is given them, for errors.

    Raises:
        TableError: there is none of that name.
    """
    for what, name in (("rows", rows), ("gradients", gradients)):
        if not isinstance(name, str) or name not in CODECS:
            raise TableError(f"{named}{what}: expected one of {', '.join(CODECS)}, got {name!r}.")
    of_gradients = CODECS[str(gradients)]
    return Codecs(CODECS[str(rows)], _OF_GRADIENTS if of_gradients is _INT8 else of_gradients)


def wire_of(spec: Table, rows: str, gradients: str) -> Codecs:
    """Return how rows of a table travel.

    Args:
        rows, gradients: names for tables that say nothing.

    Raises:
        TableError: there is no codec of that name.
    """
    if spec.wire is None:
        return codecs_of(rows, gradients)
    names = (spec.wire, spec.wire) if isinstance(spec.wire, str) else spec.wire
    return codecs_of(*names, f"Table {spec.name!r}: wire of ")
