"""Codecs: how rows, and gradients of rows, lie in messages between ranks.

A codec that is written in Python row by row is a subclass of `ByRow` and an entry in `CODECS`.
"""

from typing import NamedTuple

from hotbed.dist.row_codecs.by_row import ByRow
from hotbed.dist.row_codecs.codec import RowCodec
from hotbed.dist.row_codecs.stored import Stored
from hotbed.errors import TableError

__all__ = ["AS_STORED", "CODECS", "STORED", "ByRow", "Codecs", "RowCodec", "codecs_of"]

STORED = Stored()

CODECS: dict[str, RowCodec] = {"stored": STORED}
"""By the names that `hotbed.distribute` takes."""


class Codecs(NamedTuple):
    """Names of the codecs, of `CODECS`, by which rows of a model travel."""

    rows: str = "stored"
    """Of rows on their way from owners to a forward."""
    gradients: str = "stored"
    """Of gradients on their way to owners."""


AS_STORED = Codecs()


def codecs_of(names: Codecs) -> tuple[RowCodec, RowCodec]:
    """Return the codecs of rows and of gradients.

    Raises:
        TableError: there is none of that name.
    """
    if not isinstance(names, Codecs):
        raise TableError(
            f"codecs: expected hotbed.dist.Codecs(rows=..., gradients=...), got {names!r}."
        )
    for name in names:
        if name not in CODECS:
            raise TableError(f"codecs: expected one of {', '.join(CODECS)}, got {name!r}.")
    return CODECS[names.rows], CODECS[names.gradients]
