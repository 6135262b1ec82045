"""The real rows, read in place."""

import os
from pathlib import Path

import launching
import pytest
import torch

from hotbed.data import CATEGORIES, CriteoLog


@pytest.mark.process
@pytest.mark.parametrize("there", ["", "data"])
def test_data_that_are_promised_and_missing_are_no_reason_to_skip(
    tmp_path: Path, there: str
) -> None:
    (tmp_path / there).mkdir(exist_ok=True)
    done = launching.run(
        launching.python,
        ["-m", "pytest", "-q", f"{__file__}::test_the_whole_log"],
        tmp_path / "said",
        {**os.environ, "HOTBED_SHARED": str(tmp_path)},
    )
    assert done.returncode == 1
    assert "no real data: " in done.stdout and str(tmp_path) in done.stdout


@pytest.mark.data
def test_the_whole_log(criteo_log):
    log = CriteoLog(criteo_log, 4096)
    assert log.count_rows() == 137_139
    batches = list(log)
    label = torch.cat([batch["label"] for batch in batches])
    assert len(label) == 137_139
    assert round(float(label.mean()), 4) == 0.2568
    ids = {name: torch.cat([batch[name] for batch in batches]) for name in CATEGORIES}
    distinct = {name: len(torch.unique(values)) for name, values in ids.items()}
    assert sum(distinct.values()) == 316_191
    largest = {"C3": 61_764, "C12": 56_397, "C21": 52_250, "C16": 46_382, "C4": 32_223}
    assert {name: distinct[name] for name in largest} == largest
    dense = torch.cat([batch["dense"] for batch in batches])
    assert float(dense.min()) == 0 and dense.isfinite().all()


@pytest.mark.data
def test_the_split_by_time(criteo_log):
    train, test = CriteoLog(criteo_log, 512).split(0.1)
    assert (train.count_rows(), test.count_rows()) == (123_425, 13_714)
    whole = list(CriteoLog(criteo_log, 512, rows=(123_425, None)))
    tested = list(test)
    assert len(whole) == len(tested) == 27
    assert all(torch.equal(a["C3"], b["C3"]) for a, b in zip(whole, tested, strict=True))
