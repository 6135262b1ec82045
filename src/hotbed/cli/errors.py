"""How a command speaks of what is wrong: one sentence in its own words, exit code 2, no traceback."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import typer

from hotbed.errors import HotbedError
from hotbed.text import printable

if TYPE_CHECKING:
    from rich.console import Console

_VALUE = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[\w.]+(?:,\d+)*|"""
_SETTINGS = "device|host|ssd|reset|depth|horizon|batch_size|shuffle"
_IN_STORAGE = re.compile(rf"Storage\(({_SETTINGS})=({_VALUE}|\.\.\.)\)")
_ALONE = re.compile(rf"\b({_SETTINGS})=({_VALUE})")
_NOT_HERE = {
    " Pass labels=False for lines without a label; training needs one.": " Training needs a label.",
    " Pass labels=True for lines with a label.": " The first line decides for all.",
    "Raise the budget, or lower depth.": "Raise --host or --device, or lower --depth.",
    "Use a smaller dtype, such as torch.bfloat16, or a smaller dim.": "Use a smaller --dim.",
}
"""Remedies that the command line does not offer, and its own."""
_NO_MEMORY = (
    "can't allocate memory",
    "out of memory",
    "Storage size calculation overflowed",
    "numel: integer multiplication overflow",
)
"""Parts of messages of torch's."""


@contextlib.contextmanager
def in_one_sentence(
    typed: Mapping[str, object] | None = None, console: Console | None = None
) -> Iterator[None]:
    """Turn errors that a user can act on into a message and exit code 2, and warnings into notices.

    Args:
        typed: options as they were given, by the names of the library's settings.
        console: where notices go, beside a progress bar; None: to standard error.
    """
    words = {} if typed is None else typed

    def tell(message: object) -> None:
        from rich.console import Console

        from hotbed.train.progress import notice

        notice(console or Console(stderr=True), in_options(str(message), words))

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            tell(record.getMessage())

    handler = Told()
    logger = logging.getLogger("hotbed")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: tell(message)
            yield
    except BrokenPipeError:
        raise
    except (HotbedError, OSError, MemoryError, RuntimeError) as error:
        if not (said := _sentence(error)):
            raise
        text = printable(in_options(said, words))
        typer.echo(f"Error: {text}", err=True)
        raise typer.Exit(2) from None
    finally:
        logger.removeHandler(handler)


def in_options(text: str, typed: Mapping[str, object]) -> str:
    """A message of the library, as the command line has it: ``Storage(host=4,000,000)`` is ``--host 4MB``.

    >>> in_options("Raise Storage(host=4,000,000), or pass reset=True.", {"host": "4MB"})
    'Raise --host 4MB, or pass --reset-ssd.'
    """

    def option(found: re.Match[str]) -> str:
        name, value = found[1], found[2].strip("'\"")
        if name == "reset":
            return "--reset-ssd"
        named = "--" + name.replace("_", "-")
        if found.re is _IN_STORAGE and value != "...":  # as the user wrote it, not as it is kept
            value = str(typed.get(name) or value)
        return named if value in ("", "...") else f"{named} {value}"

    for remedy, own in _NOT_HERE.items():
        text = text.replace(remedy, own)
    return _ALONE.sub(option, _IN_STORAGE.sub(option, text))


def _sentence(error: BaseException) -> str:
    """Empty for one that is nothing a user can act on."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'input or output'}: {error.strerror}."
    if isinstance(error, RuntimeError) and not isinstance(error, HotbedError):
        if not any(said in str(error) for said in _NO_MEMORY):
            return ""
        return (
            "Not enough memory for the model's layers. Lower --batch-size, --dim or what --set has."
        )
    return str(error) or "Not enough memory."
