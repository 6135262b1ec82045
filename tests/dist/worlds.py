"""Several processes that run one function, each as a rank. They stay for the next function, as importing
torch takes them seconds."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as torch_dist
import torch.multiprocessing as processes

SECONDS = 120
"""A function may take."""

STARTS = processes.get_context("forkserver")
"""Starts processes as copies of one that has imported these, which takes a processor's three seconds.
The first optimizer of a process imports torch._dynamo."""
STARTS.set_forkserver_preload(
    ["torch.distributed.run", "torch._dynamo", "hotbed.cli.app", "pytest"]
)

_ranks: list[tuple[Any, Connection]] = []
"""Processes and how they are told what to do. A function runs in the first of them."""


def run(world: int, function: Callable[..., None], *arguments: Any, seconds: int = SECONDS) -> None:
    """Call ``function(rank, world, *arguments)`` in each of `world` processes; raise what they raise."""
    while len(_ranks) < world:
        _ranks.append(_begun())
    with tempfile.TemporaryDirectory() as folder:
        open_yet = {pipe: rank for rank, (_, pipe) in enumerate(_ranks[:world])}
        for pipe, rank in open_yet.items():
            pipe.send((rank, world, f"file://{folder}/store", function, arguments))
        told = []
        while open_yet:
            ready = wait(list(open_yet), seconds)
            if not ready:
                told.append(f"ranks {list(open_yet.values())} did not end in {seconds} s")
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    error = pipe.recv()
                except (EOFError, ConnectionResetError):
                    error = f"rank {open_yet[pipe]} is gone"
                told += [error] if error else []
                del open_yet[pipe]
    if told:
        end()
        raise AssertionError("\n".join(told))


def shared_files() -> int:
    """Pieces of memory that this process shares with other ranks."""
    names = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum("memfd:hotbed" in os.readlink(name) for name in names if os.path.islink(name))


def end() -> None:
    """Ends the processes, so that the next function gets new ones."""
    while _ranks:
        process, pipe = _ranks.pop()
        pipe.close()
        process.kill()
        process.join()


def _begun() -> tuple[Any, Connection]:
    own, other = STARTS.Pipe()
    process = STARTS.Process(target=_work, args=(other,), daemon=True)
    process.start()
    other.close()
    return process, own


def _work(pipe: Connection) -> None:
    gc.freeze()  # what the process was begun with
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    while True:
        try:
            rank, world, store, function, arguments = pipe.recv()
        except EOFError:
            return
        error = ""
        try:
            torch_dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
            function(rank, world, *arguments)
            torch_dist.barrier()
        except BaseException:
            error = f"rank {rank} of {world}:\n{traceback.format_exc()}"
        with contextlib.suppress(Exception):  # where there is none, or another rank is gone
            torch_dist.destroy_process_group()
        pipe.send(error)  # behind it, as the folder of its store goes then


atexit.register(end)
