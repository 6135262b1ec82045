"""A Criteo log that workers of a DataLoader read."""

import traceback

import pytest
import torch
from data.click_logs import good_line
from data.test_criteo import assert_rows, rows_of, write
from dist.worlds import STARTS
from torch.utils.data import DataLoader

from hotbed.data import CriteoLog, DataError


def processes(test):
    """Mark a test of DataLoader workers; their number and the fork itself draw warnings."""
    ignored = [
        "ignore:This DataLoader will create",
        "ignore:This process .* is multi-threaded:DeprecationWarning",
    ]
    return pytest.mark.process(pytest.mark.filterwarnings(*ignored)(test))


def use_openmp():
    """A training step large enough that torch starts its OpenMP threads in this process."""
    layer = torch.nn.Linear(512, 512)
    layer(torch.randn(4096, 512)).square().mean().backward()
    torch.optim.SGD(layer.parameters(), 0.1).step()


@processes
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_give_the_same_batches_in_the_same_order(tmp_path, workers):
    lines = [good_line(i) for i in range(61)]
    paths = [write(tmp_path / "a", lines[:30]), write(tmp_path / "b", lines[30:], compress=True)]
    log = CriteoLog(paths, 4, rows=(3, 60))
    use_openmp()
    loader = DataLoader(log, batch_size=None, num_workers=workers)
    for _ in range(2):
        batches = list(loader)
        assert len(batches) == 15
        assert_rows(batches, lines[3:60])
        use_openmp()
    shuffled = DataLoader(CriteoLog(paths, 4, shuffle=8), batch_size=None, num_workers=workers)
    assert sorted(rows_of(shuffled)) == list(range(61))


@processes
@pytest.mark.parametrize("way", ["fork", "forkserver"])
def test_workers_report_malformed_lines(tmp_path, way):
    lines = [good_line(i) for i in range(40)]
    for i in (1, 5, 22):
        lines[i] = "broken"
    path = write(tmp_path / "a", lines)
    log = CriteoLog(path, 4, on_error="skip")
    for workers in (
        (3, 2, 0, 1) if way == "fork" else (1,)
    ):  # what more workers counted before is not counted again
        context = {"fork": "fork", "forkserver": STARTS}[way] if workers else None
        loader = DataLoader(
            log, batch_size=None, num_workers=workers, multiprocessing_context=context
        )
        assert rows_of(loader) == [i for i in range(40) if i not in (1, 5, 22)]
        assert log.skipped.lines == 3
        numbers = [int(e.split("line ")[1].split(":")[0]) for e in log.skipped.examples]
        assert sorted(numbers) == [2, 6, 23]
        assert f"{path}, line 6: 1 columns, expected 40" in "".join(log.skipped.examples)
    strict = DataLoader(CriteoLog(path, 4), batch_size=None, num_workers=2)
    with pytest.raises(DataError, match="line 2: 1 columns, expected 40") as raised:
        list(strict)
    traceback.clear_frames(
        raised.tb
    )  # ends the workers; found by the garbage collector they wait 5 s


@processes
def test_a_spawned_copy_reads_the_same(tmp_path):
    path = write(tmp_path / "a", [good_line(i) for i in range(10)])
    loader = DataLoader(
        CriteoLog(path, 4, on_error="skip"),
        batch_size=None,
        num_workers=1,
        multiprocessing_context="spawn",
    )
    assert rows_of(loader) == list(range(10))
