"""Several processes that run one function, each as a rank."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
import torch.multiprocessing as processes


def run(world: int, function: Callable[..., None], *arguments: Any) -> None:
    """Calls ``function(rank, world, *arguments)`` in each of `world` processes, and raises what one raises."""
    with tempfile.TemporaryDirectory() as folder:
        context = processes.get_context("spawn")
        started = [
            context.Process(target=_begin, args=(rank, world, folder, function, arguments))
            for rank in range(world)
        ]
        for process in started:
            process.start()
        for process in started:
            process.join(120)
        told = [path.read_text() for path in sorted(Path(folder).glob("error-*"))]
        for process in started:
            process.kill()
        assert not told, "\n".join(told)
        assert [process.exitcode for process in started] == [0] * world


def _begin(rank: int, world: int, folder: str, function: Any, arguments: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        torch_dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
        )
        function(rank, world, *arguments)
        torch_dist.barrier()
        torch_dist.destroy_process_group()
    except BaseException:
        (Path(folder) / f"error-{rank}").write_text(traceback.format_exc())
        raise
