"""Who may ask: tokens in a file."""

from __future__ import annotations

import codecs
import hmac
from collections.abc import Sequence

from hotbed.errors import InputError

__all__ = ["is_known", "read_tokens"]

MARK = codecs.BOM_UTF8.decode("latin-1")
"""What some editors begin a file with."""


def read_tokens(path: str) -> list[str]:
    """Return the tokens in a file, one a line; empty lines and those that begin with # are none.

    Raises:
        OSError: it cannot be read.
        InputError: it has none.
    """
    with open(path, encoding="latin-1") as file:
        lines = [line.strip() for line in file.read().removeprefix(MARK).split("\n")]
    tokens = [line for line in lines if line and not line.startswith("#")]
    if not tokens:
        raise InputError(f"{path} has no token. Write one a line.")
    return tokens


def is_known(header: str | None, tokens: Sequence[bytes]) -> bool:
    """Return whether the value of an ``Authorization`` header has one of the tokens."""
    how, _, given = (header or "").partition(" ")
    token = given.strip().encode("latin-1")
    known = [hmac.compare_digest(token, each) for each in tokens]
    return how.lower() == "bearer" and any(known)
