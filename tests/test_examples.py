"""The examples train, and say how it goes."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import hotbed as hb

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
ARGUMENTS = {
    "dlrm.py": ["clicks.tsv"],
    "larger_than_memory.py": ["clicks.tsv", "rows", "16MB"],
    "two_towers.py": ["60"],
    "histories.py": ["60"],
    "ratings.py": ["ratings.csv", "predictions.csv"],
    "several_labels.py": ["200"],
}


def test_each_is_run() -> None:
    elsewhere = {
        "many_processes.py",
        "memory_hosts.py",
        "converted_deepctr.py",
        "with_lightning.py",
        "with_ray.py",
    }  # tests/dist/test_torchrun.py, tests/foreign
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*ARGUMENTS, *elsewhere}


def test_the_script_for_slurm_starts_what_there_is(tmp_path: Path) -> None:
    """With programs of SLURM and torch that say how they were called."""
    said = tmp_path / "said"
    for name, does in {
        "scontrol": "echo node-7; echo node-8",
        "srun": f'echo "$OMP_NUM_THREADS $*" > {said}',
    }.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{does}\n")
        program.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node-[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "32",
        "SLURM_JOB_ID": "11",
    }
    script = ["sh", str(EXAMPLES / "slurm.sh"), "train.tsv", "runs/1"]
    subprocess.run(script, env=environment, check=True)
    threads, started, *arguments = said.read_text().split()
    assert (threads, started) == ("4", "torchrun")
    at = arguments.index("-m")
    assert arguments[at + 1 : at + 3] == ["hotbed", "train"]
    assert arguments[at + 3 :] == ["--data", "train.tsv", "--checkpoint", "runs/1", "--resume"]
    assert arguments[arguments.index("--rdzv-endpoint") + 1] == "node-7:29500"


def test_each_is_short() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 80, path.name


@pytest.mark.parametrize("name", ARGUMENTS)
def test_it_trains(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    hb.data.write_criteo_tsv("clicks.tsv", rows=102 * 512, seed=0)
    monkeypatch.setattr(sys, "argv", [name, *ARGUMENTS[name]])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    before, after = losses[: len(losses) // 2], losses[len(losses) // 2 :]
    assert after and all(last < first for first, last in zip(before, after, strict=True))
