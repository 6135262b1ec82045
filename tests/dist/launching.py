"""torchrun, whose own process need not import torch again."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dist.worlds import STARTS


def torchrun(arguments: Sequence[str], environment: Mapping[str, str], said: Path) -> Any:
    """Start it. It and its ranks print into `said` / stdout and stderr."""
    process = STARTS.Process(target=_launch, args=(list(arguments), dict(environment), said))
    process.start()
    return process


def torchrun_to_its_end(
    arguments: Sequence[str], environment: Mapping[str, str], said: Path, seconds: float = 100
) -> subprocess.CompletedProcess[str]:
    """Run it, as `subprocess.run` would.

    Raises:
        subprocess.TimeoutExpired: it has not ended in time, and was killed.
    """
    process = torchrun(arguments, environment, said)
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        raise subprocess.TimeoutExpired(list(arguments), seconds)
    out, err = ((said / name).read_text() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(list(arguments), process.exitcode, out, err)


def _launch(arguments: list[str], environment: dict[str, str], said: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    said.mkdir(exist_ok=True)
    for number, name in enumerate(("stdout", "stderr"), start=1):
        os.dup2(os.open(said / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    from torch.distributed import run

    run.main(arguments)
