"""Examples that need other libraries train, and say how it goes."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import hotbed as hb

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.mark.parametrize(
    ("name", "library", "arguments"),
    [
        ("converted_deepctr.py", "deepctr_torch", ["rows", "60"]),
        ("with_lightning.py", "pytorch_lightning", ["clicks.tsv", "runs"]),
    ],
)
def test_it_trains(
    name: str,
    library: str,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip(library, reason="make foreign installs it")
    monkeypatch.chdir(tmp_path)
    hb.data.write_criteo_tsv("clicks.tsv", rows=102 * 512, seed=0)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert len(losses) == 2 and losses[1] < losses[0]
    if "lightning" in name:
        assert [saved.step for saved in hb.checkpoint.list("runs")] == [100]


@pytest.mark.process
def test_workers_of_ray_train_share_tables(tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason="make foreign installs it")
    command = [sys.executable, str(EXAMPLES / "with_ray.py"), str(tmp_path / "run"), "2"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-3000:]
    assert "The rows of step 40 are in" in found.stdout
    assert [saved.step for saved in hb.checkpoint.list(tmp_path / "run")] == [40]
