"""Commands in processes that are copies of one that has imported torch, which takes a processor seconds."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from dist.worlds import STARTS

Command = Callable[[list[str]], None]


def torchrun(arguments: list[str]) -> None:
    """What `torchrun` calls. Its workers are copies of this process."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    vars(subprocess_handler)["Popen"] = _Worker
    torchrun_anew(arguments)


def torchrun_anew(arguments: list[str]) -> None:
    """What `torchrun` calls, with workers that have imported nothing, as those of users."""
    from torch.distributed import run

    run.main(arguments)


def hotbed(arguments: list[str]) -> None:
    """What `hotbed` calls."""
    from hotbed_command import main

    sys.argv = ["hotbed", *arguments]
    main()


def python(arguments: list[str]) -> None:
    """What `python` does with ``-c CODE``, ``-m MODULE`` or a script, and arguments behind it. The
    interpreter itself is not taken down, which takes as long as a short training."""
    try:
        _interpret(arguments)
    finally:
        atexit._run_exitfuncs()


def _interpret(arguments: list[str]) -> None:
    kind, *more = arguments
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    if kind == "-c":
        sys.argv, sys.path[:0] = ["-c", *more[1:]], [""]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(more[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    elif kind == "-m":
        sys.argv, sys.path[:0] = more, [os.getcwd()]
        runpy.run_module(more[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:0] = arguments, [str(Path(kind).parent)]
        runpy.run_path(kind, run_name="__main__")


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
    gc.freeze()  # what the process was begun with
    os.environ.clear()
    os.environ.update(environment)
    said.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(("stdout", "stderr"), start=1):
        os.dup2(os.open(said / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    command(arguments)


class _Worker:
    """What torchrun needs of `subprocess.Popen`, for ``python -u ...``."""

    def __init__(
        self,
        args: tuple[str, ...],
        env: dict[str, str],
        stdout: IO[str] | None,
        stderr: IO[str] | None,
        start_new_session: bool,
    ) -> None:
        assert args[:2] == (sys.executable, "-u") and start_new_session
        files = [None if file is None else file.fileno() for file in (stdout, stderr)]
        self._process = multiprocessing.get_context("fork").Process(
            target=_begin_worker, args=(list(args[2:]), env, files)
        )
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("python", timeout or 0)
        return self._process.exitcode


def _begin_worker(
    arguments: list[str], environment: dict[str, str], files: list[int | None]
) -> None:
    os.setsid()
    for number, file in enumerate(files, start=1):
        if file is not None:
            os.dup2(file, number)
    for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # which torchrun handles
        signal.signal(each, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    python(arguments)
