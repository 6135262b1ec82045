"""Text from files on its way to a terminal."""

from __future__ import annotations

import re

__all__ = ["printable"]


def printable(text: str, keep: str = "") -> str:
    r"""The text with its control characters, lone surrogates and other unprintable ones as escapes, so that
    a name in a file can neither steer a terminal nor end a program that prints it.

    Args:
        keep: unprintable characters that stay.

    >>> printable("item\x1b[2J")
    'item\\x1b[2J'
    """
    if text.isprintable():
        return text
    return re.sub(
        r"[^ -~]",
        lambda found: (
            found[0]
            if found[0].isprintable() or found[0] in keep
            else found[0].encode("unicode_escape").decode()
        ),
        text,
    )
