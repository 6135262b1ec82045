"""Text from files, and values that a user gave, on their way to a terminal."""

from __future__ import annotations

import functools
import json
import re
import warnings
from collections.abc import Callable
from typing import TypeVar

__all__ = ["brief", "printable", "renamed_argument", "toml_string", "warn_renamed"]

T = TypeVar("T")


def brief(value: object) -> str:
    """How an error shows a value, which may be of any length."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length():,} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def printable(text: str) -> str:
    r"""The text with its control characters, lone surrogates and other unprintable ones as escapes, so that
    a name in a file can neither steer a terminal nor end a program that prints it.

    >>> printable("item\x1b[2J")
    'item\\x1b[2J'
    """
    if text.isprintable():
        return text
    return re.sub(r"[^ -~]", lambda found: _escaped(found[0]), text)


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def toml_string(text: str) -> str:
    """The text as a basic string of TOML, which JSON's are but for one character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def warn_renamed(old: str, new: str) -> None:
    """Warn the caller's caller, who used a name that goes with the next version."""
    warnings.warn(f"{old} is called {new} now; use that.", DeprecationWarning, stacklevel=3)


def renamed_argument(old: str, new: str) -> Callable[[type[T]], type[T]]:
    """Return a decorator of a class that takes an argument by its earlier name, too, and warns."""

    def taking_both(kind: type[T]) -> type[T]:
        made = kind.__init__

        @functools.wraps(made)
        def init(self: T, *args: object, **options: object) -> None:
            if old in options:
                warn_renamed(old, new)
                options[new] = options.pop(old)
            made(self, *args, **options)

        setattr(kind, "__init__", init)  # noqa: B010
        return kind

    return taking_both
