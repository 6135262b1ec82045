"""How a command ends when something is wrong: one sentence, exit code 2, no traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from hotbed.errors import HotbedError


@contextmanager
def told_in_one_sentence() -> Iterator[None]:
    """Turn errors that a user can act on into a message and exit code 2."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (HotbedError, OSError, MemoryError) as error:
        typer.echo(f"Error: {_sentence(error)}", err=True)
        raise typer.Exit(2) from None


def _sentence(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'input or output'}: {error.strerror}."
    return str(error) or "Not enough memory."
