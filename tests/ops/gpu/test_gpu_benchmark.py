"""The GPU benchmark, as far as it goes without a device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from devices import DEVICE

from benchmarks import gpu, gpu_checks, gpu_dense
from benchmarks.__main__ import main
from benchmarks.gpu_roof import Roof
from benchmarks.gpu_scenarios import Run, Scenario
from benchmarks.report import Report

ROOT = Path(__file__).resolve().parents[3]


def test_a_kernel_that_is_off_is_named(monkeypatch):
    monkeypatch.setitem(gpu_checks.LIMITS, "bfloat16", 1e-9)
    with pytest.raises(AssertionError, match="interaction in bfloat16 is off by"):
        gpu_checks.errors(DEVICE.type, True, lambda text: None)
    assert torch.get_float32_matmul_precision() == "highest"


def test_floors_count_bytes_or_operations():
    roof = Roof(1e12, {"tf32": 1e13})
    assert roof.floor_ms(1e9) == pytest.approx(1.0)
    assert roof.floor_ms(1e9, 1e11, "tf32") == pytest.approx(10.0)
    # One layer without a gradient of its input: the product, and that of the weight's gradient.
    floors, moved = gpu_dense._mlp_floors(roof, 100, (10, 20), "tf32", False)
    assert moved == (4 * (1000 + 200 + 2000), 2 * 4 * (1000 + 200 + 2000))
    assert floors[1] == pytest.approx(2 * floors[0])


def test_only_some_parts():
    one = Run(Report("gpu", True, hardware={}), torch.device("cpu"))
    names = [part.name for part in gpu.chosen(one, gpu.KINDS)]
    assert len(names) == len(set(names)) and {name.split()[0].strip(",") for name in names} == {
        "roof", *gpu.KINDS,
    }  # fmt: skip
    assert [part.name for part in gpu.chosen(one, ("cache",))] == [
        "roof", "cache, sgd", "cache, adam",
    ]  # fmt: skip


def test_a_part_that_fails_is_in_the_file_and_in_the_exit_status(tmp_path, monkeypatch, capsys):
    out = tmp_path / "gpu.json"

    def look(run):
        found = json.loads(out.read_text())
        assert list(found["failed"]) == ["check a"] and list(found["skipped"])[-1] == "check b"

    def fail(run):
        raise ValueError("kernels are off")

    parts = [Scenario("roof", fail), Scenario("check a", fail), Scenario("check b", look)]
    monkeypatch.setattr(gpu, "chosen", lambda run, only: parts)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # which the run sets for good
    monkeypatch.setattr(
        sys, "argv", ["benchmarks", "gpu", "--quick", "--only", "check", "--json", str(out)]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    found = json.loads(out.read_text())
    assert found["failed"] == {"check a": "ValueError: kernels are off"}
    assert found["skipped"] == {"roof": "torch sees no CUDA device"}
    assert "FAILED check a: ValueError: kernels are off" in capsys.readouterr().out


def test_an_unknown_part_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "gpu", "--quick", "--only", "cash"])
    with pytest.raises(SystemExit):
        main()
    assert "there is no 'cash'" in capsys.readouterr().err


@pytest.mark.process
@pytest.mark.skipif(DEVICE.type == "cuda", reason="there is a device, so it would be measured")
def test_without_a_device_it_checks_and_says_what_it_skipped(tmp_path):
    out = tmp_path / "gpu.json"

    def run(*arguments):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        environment.pop("TRITON_INTERPRET", None)
        return subprocess.run(
            [sys.executable, "-m", "benchmarks", "gpu", "--json", str(out), *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    done = run("--quick")
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["rows"] == [] and report["failed"] == {}
    assert {"roof", "mlp", "lookup", "cache, adam"} <= set(report["skipped"])
    assert report["figures"]["largest error: interaction, float32"] < 1e-5
    done = run()
    assert done.returncode == 1 and "--quick" in done.stderr
