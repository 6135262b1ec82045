"""The GPU benchmark, as far as it goes without a device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from devices import DEVICE

from benchmarks import gpu_checks, gpu_dense
from benchmarks.gpu_roof import Roof

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
    assert report["rows"] == [] and any("skipped: roof" in r for r in report["remarks"])
    assert report["figures"]["largest error: interaction, float32"] < 1e-5
    done = run()
    assert done.returncode == 1 and "--quick" in done.stderr
