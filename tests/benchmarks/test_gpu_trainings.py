"""The GPU benchmark's trainings, at toy size on the CPU."""

from __future__ import annotations

import pytest
import torch

import hotbed as hb
from benchmarks import gpu_cache, gpu_dlrm, gpu_synthetic
from benchmarks.gpu_scenarios import Run, run_all
from benchmarks.gpu_sizes import QUICK
from benchmarks.report import Report
from benchmarks.steps import timed_steps
from benchmarks.tables import Counts, cut_to_fit, write_all
from benchmarks.workload import least_step_bytes


def toy_run() -> Run:
    return Run(Report("gpu", quick=True, hardware={}), torch.device("cpu"))


def test_every_training_runs_and_tells_its_sizes() -> None:
    run = toy_run()
    modules = (gpu_synthetic, gpu_dlrm, gpu_cache)
    run_all(run, [one for module in modules for one in module.scenarios(run.sizes)])
    report = run.report
    assert report.failed == {} and report.skipped == {}
    configs = [row["config"] for row in report.rows]
    kinds = [c.split(",")[0].split()[0] for c in configs]
    assert kinds == ["synthetic"] * 2 + ["dlrm"] * 8 + ["cache"] * 26
    assert sum("as a CUDA graph" in c for c in configs) == 3
    assert all(row["iterations"] == QUICK.steps for row in report.rows)
    over_ram = "dlrm over RAM, 0.0002 GB on the device, AMP, look-ahead"
    assert report.figures[f"{over_ram}: rows brought up a step"] > 0
    assert 0 < report.figures[f"{over_ram}: hit rate"] < 1
    assert report.figures[f"{over_ram}: ids a second resolved by one core"] > 0
    assert sum("what binds: " in remark for remark in report.remarks) == 2
    over_ssd = "dlrm over SSD, 0.0002 GB on the device, AMP, look-ahead"
    assert report.figures[f"{over_ssd}: rows brought up a step"] > 0
    assert f"{over_ssd}: rows read from SSD a step" in report.figures
    assert f"{over_ram} / all in GPU memory" in report.ratios


def test_ids_of_all_batches_are_written_once() -> None:
    def batch(*ids: int) -> dict[str, torch.Tensor]:
        return {"t0": torch.tensor(ids), "dense": torch.rand(2, 13), "label": torch.rand(2)}

    lists = [[batch(5, 1), batch(1, 1)], [batch(7, 5)]]
    used = gpu_dlrm._used(lists, torch.device("cpu"))
    assert {name: ids.tolist() for name, ids in used.items()} == {"t0": [1, 5, 7]}


def test_the_least_bytes_of_a_step() -> None:
    first, second = torch.tensor([[1, 2], [1, 1]]), torch.tensor([2, 3])
    ids, vectors_and_gradients, rows = 6 * 8, 2 * 4 * (2 + 2) * 4, 3 * (4 + 2 * (4 + 4)) * 4
    found = least_step_bytes([("a", first, 4), ("a", second, 4)], "adagrad")
    assert found == ids + vectors_and_gradients + rows


def test_a_training_needs_no_other_before_it() -> None:
    run = toy_run()
    run_all(run, gpu_dlrm.scenarios(run.sizes)[1:])
    assert len(run.report.rows) == 4 and run.report.failed == {} and run.report.ratios == {}


@pytest.mark.parametrize(("room", "expected"), [(10**9, (900, 30, 5)), (4000, (365, 30, 5))])
def test_tables_are_cut_to_fit(room: int, expected: tuple[int, ...]) -> None:
    assert cut_to_fit((900, 30, 5), 10, room) == expected
    run = toy_run()
    assert run.fitting((900, 30, 5), 10, room, "tables") == expected
    assert len(run.report.remarks) == (room == 4000)


@pytest.mark.parametrize("zeros", [False, True])
def test_every_row_is_written_once(zeros: bool) -> None:
    init = hb.init.Zeros() if zeros else hb.init.Uniform(-1, 1)
    table = hb.Table("a", dim=4, rows=200_000, init=init)
    plain = hb.EmbeddingCollection([table], seed=0)
    tiered = hb.EmbeddingCollection([table], seed=0, storage=hb.Storage(host="64MB"))
    write_all(tiered, "a", torch.arange(200_000), zeros)
    assert len(tiered.table("a").stored_ids()) == 200_000
    some = torch.tensor([0, 131_071, 131_072, 199_999])
    assert torch.equal(tiered.lookup("a", some), plain.lookup("a", some))


def test_counts_are_differences() -> None:
    before = {"rows_used": 5.0, "rows_missed": 5.0, "batches": 1.0, "move_ms": 0.5}
    after = {"rows_used": 25.0, "rows_missed": 10.0, "batches": 3.0, "move_ms": 2.0}
    counts = Counts.between(before, after)
    assert counts == Counts(20.0, 5.0, 2.0, 1.5) and counts.hit_rate == 0.75
    assert Counts.between({}, {}).hit_rate == 1.0


def test_steps_are_timed_after_the_warm_up() -> None:
    seen: list[int] = []
    timing = timed_steps(seen.append, range(100), torch.device("cpu"), 3, 5)
    assert seen == list(range(8)) and len(timing.ms) == 5
    with pytest.raises(ValueError, match="8 batches are needed, 6 came"):
        timed_steps(seen.append, range(6), torch.device("cpu"), 3, 5)
