"""Commands in processes that are copies of one that has imported torch, which takes a processor seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dist.worlds import STARTS

Command = Callable[[list[str]], None]


def torchrun(arguments: list[str]) -> None:
    """What `torchrun` calls."""
    from torch.distributed import run

    run.main(arguments)


def hotbed(arguments: list[str]) -> None:
    """What `hotbed` calls."""
    from hotbed_command import main

    sys.argv = ["hotbed", *arguments]
    main()


def start(
    command: Command, arguments: list[str], said: Path, environment: Mapping[str, str] | None = None
) -> Any:
    """Start it, and return its process. It and its children print into `said` / stdout and stderr."""
    given = dict(os.environ if environment is None else environment)
    process = STARTS.Process(target=_begin, args=(command, arguments, said, given))
    process.start()
    return process


def run(
    command: Command,
    arguments: list[str],
    said: Path,
    environment: Mapping[str, str] | None = None,
    seconds: float = 100,
) -> subprocess.CompletedProcess[str]:
    """Run it to its end, as `subprocess.run` would.

    Raises:
        subprocess.TimeoutExpired: it has not ended in time, and was killed.
    """
    process = start(command, arguments, said, environment)
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        raise subprocess.TimeoutExpired(arguments, seconds)
    out, err = ((said / name).read_text() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(arguments, process.exitcode, out, err)


def _begin(command: Command, arguments: list[str], said: Path, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    said.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(("stdout", "stderr"), start=1):
        os.dup2(os.open(said / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    command(arguments)
