"""Tables in the formats of others: what `hotbed import` reads and `hotbed dump` writes."""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Mapping
from typing import TypeVar

from hotbed.formats import kinds
from hotbed.formats.tables import FormatError, Found, Hints, Reader, Writer
from hotbed.tables import MAX_DIM
from hotbed.text import brief

__all__ = ["READERS", "WRITERS", "FormatError", "Hints", "found_in", "writer_of"]

READERS: dict[str, Reader] = {
    module.name: importlib.import_module(f"{kinds.__name__}.{module.name}").FORMAT
    for module in pkgutil.iter_modules(kinds.__path__)
}
"""By the names of modules in `hotbed.formats.kinds`."""
WRITERS: dict[str, Writer] = {
    name: reader for name, reader in READERS.items() if isinstance(reader, Writer)
}

_Format = TypeVar("_Format", Reader, Writer)


def found_in(path: str, format_: str | None, hints: Hints) -> Found:
    """Return what is there, in the format of that name, else the one that the path looks like.

    Raises:
        FormatError: it cannot be read, or there is no such format, or several fit.
        OSError: there is nothing at the path.
    """
    os.stat(path)
    if format_ is None and os.path.isdir(path):
        fits = [name for name, reader in READERS.items() if reader.is_in(path)]
        reader = _only(READERS, path, fits)
    else:
        reader = _by_name(READERS, path, format_)
    for name, hint in hints._asdict().items():
        if hint is not None and name not in reader.hints:
            raise FormatError(f"--{name} is not for this format, which tells it itself.")
    if hints.dim is not None and not 0 < hints.dim <= MAX_DIM:
        raise FormatError(
            f"--dim is {brief(hints.dim)}; a table has from 1 to {MAX_DIM:,} columns."
        )
    return reader.read(path, hints)


def writer_of(path: str, name: str | None) -> Writer:
    """The format of that name, else the one that a path ends like.

    Raises:
        FormatError: there is none.
    """
    return _by_name(WRITERS, path, name)


def _by_name(formats: Mapping[str, _Format], path: str, name: str | None) -> _Format:
    if name is not None and name not in formats:
        raise FormatError(f"There is no format {name!r}. There are {', '.join(formats)}.")
    ending = os.path.splitext(path)[1]
    return _only(
        formats, path, [name] if name else [n for n, f in formats.items() if ending in f.endings]
    )


def _only(formats: Mapping[str, _Format], path: str, fits: list[str]) -> _Format:
    if len(fits) != 1:
        why = f"looks like {' and '.join(fits)}" if fits else "does not tell its format"
        raise FormatError(f"{path} {why}. Say --format: {', '.join(formats)}.")
    return formats[fits[0]]
