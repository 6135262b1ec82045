"""The folder of --run: the record of a run of `hotbed train`, which `hotbed report` reads."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hotbed.errors import HotbedError
from hotbed.files import Json
from hotbed.train.line_file import whole_lines

__all__ = [
    "EVENTS",
    "FORMAT",
    "HISTORY",
    "OWN",
    "RECORD",
    "VALIDATION",
    "ReadRun",
    "RunError",
    "holds_file",
    "is_of_a_record",
    "read_record",
    "read_run",
]

RECORD = "run.json"
HISTORY = "history.csv"
VALIDATION = "validation.csv"
OWN = (RECORD, HISTORY, VALIDATION)
EVENTS = "tensorboard"
"""The folder of TensorBoard's events in it."""
FORMAT = "hotbed run"


class RunError(HotbedError, ValueError):
    """A folder that is not the record of a run; the message names the file."""


def is_of_a_record(name: str) -> bool:
    """Return True for files of a record, by their names relative to its folder."""
    return name in OWN or name.startswith(f"{EVENTS}{os.sep}")


def holds_file(folder: str, name: str) -> bool:
    """Return True if a file of this name, relative to `folder`, is of a record that is there."""
    path = os.path.join(folder, RECORD)
    return is_of_a_record(name) and os.path.isfile(path) and not _is_of_others(path)


def _is_of_others(path: str) -> bool:
    """Return True for JSON that is no record; a damaged file may be one."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError, RecursionError):
        return False
    return not isinstance(found, dict) or found.get("format") != FORMAT


class ReadRun(NamedTuple):
    """A record as far as it is written."""

    record: dict[str, Json]
    history: Mapping[str, Sequence[float]]
    """Columns of the log, by name; NaN where a value is missing."""
    validation: Mapping[str, Sequence[float]]
    """Columns of the validations, by name."""


def read_record(folder: str) -> dict[str, Json]:
    """Return what run.json holds.

    Raises:
        RunError: there is none, or it is damaged.
    """
    path = os.path.join(folder, RECORD)
    try:
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
    except FileNotFoundError:
        raise RunError(
            f"{folder} holds no record of a run ({RECORD}). `hotbed train --run DIR` makes one."
        ) from None
    except (ValueError, RecursionError, UnicodeError, NotADirectoryError) as error:
        raise RunError(f"{path} is not the record of a run: {error}.") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise RunError(f"{path} is not the record of a run: it does not say {FORMAT!r}.")
    return record


def read_run(folder: str) -> ReadRun:
    """Read a record, also of a run that goes on.

    Raises:
        RunError: there is none, or it is damaged.
        OSError: a file cannot be read.
    """
    record = read_record(folder)
    columns = (_columns(os.path.join(folder, name)) for name in (HISTORY, VALIDATION))
    return ReadRun(record, *columns)


def _columns(path: str) -> dict[str, list[float]]:
    if not os.path.isfile(path):
        return {}
    try:
        head, *rows = [*csv.reader(whole_lines(path))] or [[]]
    except csv.Error as error:
        raise RunError(f"{path} is not the log of a run: {error}.") from None
    rows = [row for row in rows if len(row) == len(head)]
    return {name: [_number(row[at]) for row in rows] for at, name in enumerate(head)}


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
