"""The examples train, and say how it goes."""

from __future__ import annotations

import re
import runpy
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
        "converted_deepctr.py",
        "with_lightning.py",
    }  # tests/dist/test_torchrun.py, tests/foreign
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*ARGUMENTS, *elsewhere}


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
