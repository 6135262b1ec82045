"""Names of files and folders of checkpoints.

::

    step-000000001000/       a checkpoint of step 1000
        checkpoint.json      its manifest, which names all other files; appears last
        dense.safetensors    what is no row of a table
        rows-W-N.safetensors file N of rows that writer W has written
        removed-W.safetensors ids that are no more, of one that has what has changed since another
        log-W-N/             hard links to files of rows on an SSD, see `hotbed.checkpoint.linked`
    step-000000001500.1/     what a run that went back, or began anew, wrote when step 2000 was there already
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

__all__ = [
    "FILE_OF_LOG",
    "LOG",
    "MANIFEST",
    "NEXT",
    "OWN",
    "is_of_checkpoints",
    "name_after",
    "numbered",
    "order_of",
]

MANIFEST = "checkpoint.json"
NEXT = "checkpoint.json.new"
"""A manifest that is complete and not there yet."""
LOG = re.compile(r"log-[0-9]+-[0-9]+")
"""Folders of linked files."""
FILE_OF_LOG = re.compile(r"manifest(\.new)?|lock|[0-9]+-[0-9]{10,20}\.rows")
OWN = re.compile(r"(dense|rows-[0-9]+-[0-9]+|removed-[0-9]+)\.safetensors|checkpoint\.json(\.new)?")
_NAME = re.compile(r"step-([0-9]{12,})(?:\.([0-9]+))?")


def is_of_checkpoints(name: str) -> bool:
    """Whether a file of that name, relative to the folder of a run or a checkpoint, is a checkpoint's."""
    first, _, rest = name.partition(os.sep)
    return bool(
        _NAME.fullmatch(first) or LOG.fullmatch(first) or (not rest and OWN.fullmatch(first))
    )


def order_of(folder: str) -> tuple[int, int]:
    """(turn, step) in the name of a checkpoint's folder, which rise as they are completed; (-1, -1) of
    another folder."""
    found = numbered([os.path.basename(folder)])
    return found[0][0] if found else (-1, -1)


def numbered(names: Iterable[str]) -> list[tuple[tuple[int, int], str]]:
    """((turn, step), name) of folders of checkpoints. A run that goes back, or begins anew, takes the next
    turn, and what it saves is later than all of the turn before."""
    found = [(match, name) for name in names if (match := _NAME.fullmatch(name))]
    return [((int(match[2] or 0), int(match[1])), name) for match, name in found]


def name_after(names: Iterable[str], step: int) -> str:
    """The name of a checkpoint that comes behind all others."""
    turn, last = max((numbers for numbers, _ in numbered(names)), default=(0, -1))
    turn += last >= step
    return f"step-{step:012d}{f'.{turn}' if turn else ''}"
