"""Servers that may have only so much memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hotbed.serve.http.memory_group import held_to

FILL = "a = b'x' * 900_000_000; print(len(a))"


def filled() -> int:
    return subprocess.run([sys.executable, "-c", FILL], capture_output=True).returncode


def test_processes_are_held_to_it() -> None:
    own = Path("/proc/self/cgroup").read_text()
    with held_to(1 << 40) as can:
        if not can:
            pytest.skip("no control group can be made here")
        assert Path("/proc/self/cgroup").read_text() != own
        assert filled() == 0
    assert Path("/proc/self/cgroup").read_text() == own
    assert not [*Path("/sys/fs/cgroup").glob(f"**/hotbed-{os.getpid()}")]
    code = (
        "import subprocess, sys\n"
        "from hotbed.serve.http.memory_group import held_to\n"
        "with held_to(500_000_000):\n"
        "    print(subprocess.run([sys.executable, '-c', sys.argv[1]]).returncode)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, FILL], capture_output=True, text=True)
    assert done.stdout.strip() == "-9", done.stderr
