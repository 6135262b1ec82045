"""Processes of one Gloo group that run a function together, each on one thread."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist

from benchmarks.machine import ROOT

__all__ = ["run", "tell"]

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
TOLD = "told: "
LAST_LINES = 30


def run(
    world: int,
    function: Callable[..., Any],
    *arguments: Any,
    progress: Callable[[str], None] = lambda text: None,
    prefix: Callable[[int], Sequence[str]] = lambda rank: (),
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """What ``function(rank, world, *arguments)`` returns in each of `world` processes.

    Args:
        function: of a module, by whose name the processes find it.
        progress: gets what rank 0 says by `tell`.
        prefix: words of a command that runs a rank's command elsewhere.
        environment: of the processes, beside this one's.

    Raises:
        RuntimeError: one failed; with the end of what it wrote.
    """
    environment = {**os.environ, **ONE_THREAD, "GLOO_SOCKET_IFNAME": "lo", **(environment or {})}
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch)
        task = folder / "task"
        named = (function.__module__, function.__qualname__)
        task.write_bytes(pickle.dumps((*named, world, arguments)))
        processes = []
        for rank in range(world):
            process = subprocess.Popen(
                [*prefix(rank), sys.executable, "-m", "benchmarks.worlds", str(task), str(rank)],
                env=environment,
                cwd=ROOT,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=stack.enter_context((folder / f"errors-{rank}").open("wb")),
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        assert processes[0].stdout is not None
        for line in processes[0].stdout:
            if line.startswith(TOLD):
                progress(line.removeprefix(TOLD).strip())
        failed = [rank for rank, process in enumerate(processes) if process.wait()]
        if failed:
            ends = []
            for rank in failed:
                errors = (folder / f"errors-{rank}").read_text().splitlines()
                ends.append("\n".join([f"rank {rank} of {world} failed:", *errors[-LAST_LINES:]]))
            raise RuntimeError("\n".join(ends))
        return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world)]


def tell(text: str) -> None:
    """Says what is going on; of rank 0."""
    print(TOLD + text, flush=True)


def _work(task: Path, rank: int) -> None:
    module, name, world, arguments = pickle.loads(task.read_bytes())
    torch.set_num_threads(1)
    torch_dist.init_process_group(
        "gloo", init_method=f"file://{task.parent}/store", rank=rank, world_size=world
    )
    try:
        result = getattr(importlib.import_module(module), name)(rank, world, *arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # without waiting for the others
    (task.parent / f"result-{rank}").write_bytes(pickle.dumps(result))
    torch_dist.barrier()
    torch_dist.destroy_process_group()


if __name__ == "__main__":
    _work(Path(sys.argv[1]), int(sys.argv[2]))
