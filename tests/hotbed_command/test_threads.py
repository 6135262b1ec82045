"""How many threads the command uses, and that OpenMP hears of it in time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotbed_command.threads import SPINS, allocate, cpu_quotas, usable_cores

V2 = "37 24 0:30 {top} {at} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "32 31 0:29 {top} {at} rw,relatime - cgroup cgroup rw,{controllers}"


def machine(root: Path, *, mounts: list[str], groups: list[str], files: dict[str, str]) -> Path:
    """A file system of a machine with these control groups."""
    proc = {"proc/self/mountinfo": "\n".join(mounts), "proc/self/cgroup": "\n".join(groups)}
    for name, text in {**proc, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def allowed(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(numbers))


@pytest.mark.parametrize(
    ("files", "quotas"),
    [
        ({}, []),
        ({"a/b/cpu.max": "max 100000"}, []),
        ({"a/b/cpu.max": "150000 100000"}, [1.5]),
        ({"a/cpu.max": "50000 100000", "a/b/cpu.max": "max 100000"}, [0.5]),
        ({"a/cpu.max": "400000 100000", "a/b/cpu.max": "300000 100000"}, [4.0, 3.0]),
        ({"a/cpu.max": "100000 0", "a/b/cpu.max": "no numbers"}, []),
        ({"other/cpu.max": "1000 100000"}, []),
    ],
)
def test_quotas_of_the_second_version(
    tmp_path: Path, files: dict[str, str], quotas: list[float]
) -> None:
    root = machine(
        tmp_path,
        mounts=["junk", V2.format(top="/", at="/sys/fs/cgroup")][1:],
        groups=["0::/a/b"],
        files={f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    )
    assert list(cpu_quotas(root)) == quotas


def test_quotas_of_the_first_version(tmp_path: Path) -> None:
    at = "sys/fs/cgroup/cpu,cpuacct"
    root = machine(
        tmp_path,
        mounts=[
            V1.format(top="/", at="/sys/fs/cgroup/memory", controllers="memory"),
            V1.format(top="/", at=f"/{at}", controllers="cpu,cpuacct"),
        ],
        groups=["4:memory:/x", "3:cpu,cpuacct:/jobs/7", "1:name=systemd:/x"],
        files={
            f"{at}/cpu.cfs_quota_us": "-1",
            f"{at}/cpu.cfs_period_us": "100000",
            f"{at}/jobs/7/cpu.cfs_quota_us": "250000",
            f"{at}/jobs/7/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/x/cpu.cfs_quota_us": "1000",
            "sys/fs/cgroup/memory/x/cpu.cfs_period_us": "100000",
        },
    )
    assert list(cpu_quotas(root)) == [2.5]


@pytest.mark.parametrize("top", ["/docker/7", "/docker/8"])
def test_a_container_sees_its_own_group_at_the_mount_point(tmp_path: Path, top: str) -> None:
    """Its group as it is named outside, or with nothing of it visible."""
    root = machine(
        tmp_path,
        mounts=[V2.format(top=top, at=r"/sys/fs/c\040group")],
        groups=["0::/docker/7"],
        files={"sys/fs/c group/cpu.max": "200000 100000"},
    )
    assert list(cpu_quotas(root)) == [2.0]


def test_cores_are_those_that_may_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    root = machine(
        tmp_path,
        mounts=[V2.format(top="/", at="/groups")],
        groups=["0::/"],
        files={topology.format(n): f"{n % 4},{n % 4 + 4}" for n in range(8)},
    )
    allowed(monkeypatch, *range(8))
    assert usable_cores(root) == 4
    allowed(monkeypatch, 1, 2, 5)
    assert usable_cores(root) == 2
    for quota, cores in ((10_000, 1), (100_000, 1), (100_001, 2), (9_900_000, 2)):
        machine(root, mounts=[V2.format(top="/", at="/groups")], groups=["0::/"], files={})
        (root / "groups").mkdir(exist_ok=True)
        (root / "groups/cpu.max").write_text(f"{quota} 100000\n")
        assert usable_cores(root) == cores


def test_a_machine_that_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed(monkeypatch, 0, 7)
    assert usable_cores(tmp_path) == 2


@given(chosen=st.sets(st.sampled_from(["OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])))
def test_what_the_user_has_set_wins(chosen: set[str]) -> None:
    environment = {name: "mine" for name in chosen}
    allocate(environment)
    assert all(environment[name] == "mine" for name in chosen)
    assert environment.keys() >= {"OMP_NUM_THREADS"} and ("OMP_WAIT_POLICY" in environment) == (
        "OMP_WAIT_POLICY" in chosen
    )
    # How threads wait is one choice with two names.
    own = not chosen & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
    assert (environment.get("GOMP_SPINCOUNT") == SPINS) == own


RUN = """
import contextlib, os, sys
os.sched_setaffinity(0, {next(iter(os.sched_getaffinity(0)))})
import hotbed_command
assert "torch" not in sys.modules
sys.argv = ["hotbed", "--version"]
with contextlib.suppress(SystemExit):
    hotbed_command.main()
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("mine", "threads", "spins"),
    [
        ({}, 1, SPINS),
        ({"OMP_NUM_THREADS": "3"}, 3, SPINS),
        ({"GOMP_SPINCOUNT": "77"}, 1, "77"),
        ({"OMP_WAIT_POLICY": "passive"}, 1, "0"),
    ],
)
def test_openmp_is_told_before_it_is_loaded(mine: dict[str, str], threads: int, spins: str) -> None:
    """OpenMP itself says what it has read."""
    plain = {k: v for k, v in os.environ.items() if not re.match("OMP_|GOMP_|MKL_", k)}
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        env={**plain, **mine, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert f"OMP_NUM_THREADS = '{threads}'" in done.stderr
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr
