"""The scenario `simulate`: arithmetic of its assumptions, and that what it predicts follows them."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

import hotbed as hb
from benchmarks import simulate, simulated_model, simulated_worlds
from benchmarks.simulated_assumptions import (
    ASSUMED,
    NETWORKS,
    Assumption,
    AssumptionError,
    Assumptions,
    host_lines,
)
from benchmarks.simulated_cluster import (
    DENSE,
    DENSE_GRADIENTS,
    Cluster,
    Predicted,
    predicted,
    starts_of,
)
from hotbed.dist import Measured, Plan, Rates, RowWise, TableWise, Traffic, ranks
from hotbed.dist.costs import Costs
from hotbed.dist.rates import PHASES, UNITS
from hotbed.dist.sizes import Sizes

GPUS = (8, 16, 64, 256, 1024)


@functools.cache
def on(gpus: int, network: str = "InfiniBand", change: str = "") -> Predicted:
    return predicted(Cluster(Assumptions().parsed([change] if change else []), gpus, network))


# -- the table ------------------------------------------------------------------------------------


def test_values_have_units_and_sources() -> None:
    lines = Assumptions().lines.values()
    assert len({line.name for line in lines}) == len(list(lines)) > 50
    for line in lines:
        assert line.source and (isinstance(line.value, str) or line.number >= 0)
    assert Assumption("a", 450, "GB/s", "").number == 450e9
    assert Assumption("a", 6.6, "µs", "").number == pytest.approx(6.6e-6)


def test_every_unit_of_work_has_a_price() -> None:
    rates = Cluster(Assumptions(), 16).rates(below=0.5)
    assert [name for name in UNITS if getattr(rates, name) == 0] == ["ssd_row"]


def test_the_model_is_the_published_one() -> None:
    assert len(simulated_model.ROWS) == len(simulated_model.IDS) == 26
    assert sum(simulated_model.IDS) == 214 and max(simulated_model.ROWS) == 40_000_000
    bottom = 13 * 512 + 512 * 256 + 256 * 128
    crossed = 3 * 2 * 27 * 128 * 512
    top = 27 * 128 * 1024 + 1024 * 1024 + 1024 * 512 + 512 * 256 + 256
    assert simulated_model.FLOP_A_SAMPLE == 6 * (bottom + crossed + top)


def test_a_handshake_has_the_bytes_that_ranks_gather() -> None:
    assert Assumptions()["handshake"] == 8 * (ranks._HEADER + ranks._MOST_VALUES)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("NVLnk=1", "Did you mean 'NVLink'"),
        ("NVLink", "NAME=VALUE"),
        ("NVLink=fast", "must be a number"),
        ("NVLink=-1", "from 0 on"),
        ("NVLink=inf", "from 0 on"),
        ("tables=3", "change 'rows'"),
        ("NVLink share=1.1", "from 0 to 1"),
        ("host work not hidden=2", "from 0 to 1"),
        ("memory bandwidth=0", "above 0"),
        ("batch=0.5", "a whole number"),
    ],
)
def test_wrong_changes_are_refused(text: str, said: str) -> None:
    with pytest.raises(AssumptionError, match=said):
        Assumptions().parsed([text])
    with pytest.raises(SystemExit, match=said):
        simulate.run(quick=True, progress=lambda text: None, changes=[text], checks=False)


@pytest.mark.parametrize("text", ["optimizer=best", "rows travel as=int4", "rows=1000"])
def test_what_the_planner_refuses_is_said(text: str) -> None:
    with pytest.raises(
        SystemExit, match="optimizer must be|expected one of stored|lack .* GB each"
    ):
        simulate.run(quick=True, progress=lambda text: None, changes=[text], checks=False)


@pytest.mark.parametrize("name", ["message to a rank", "handshake", "skew", "dense FLOP"])
def test_what_nothing_is_divided_by_may_be_zero(name: str) -> None:
    assert 0 < on(16, change=f"{name}=0").step


def test_a_change_is_in_the_unit_of_its_line_and_says_so() -> None:
    changed = Assumptions().parsed(["NVLink=300", "optimizer = sgd"])
    assert changed["NVLink"] == 300e9 and changed.text("optimizer") == "sgd"
    assert changed.lines["NVLink"].source == "given by --set"


# -- seconds of a cluster -------------------------------------------------------------------------


def test_bytes_go_over_nvlink_and_nics_at_the_same_time() -> None:
    assumed = Assumptions()
    nvlink, nic = 450e9 * 0.82, 50e9 * 0.78
    assert Cluster(assumed, 1).all_to_all_byte == 0
    assert Cluster(assumed, 8).all_to_all_byte == pytest.approx(1 / nvlink)
    assert Cluster(assumed, 16).all_to_all_byte == pytest.approx(8 / 15 / nic)
    slow = assumed.changed("NVLink", 1.0)
    assert Cluster(slow, 16).all_to_all_byte == pytest.approx(7 / 15 / 0.82e9)


def test_a_ring_has_a_step_for_each_other_gpu() -> None:
    cluster = Cluster(Assumptions(), 32)
    steps = 28 * 1.08e-6 + 3 * 2.7e-6
    assert cluster.all_gather(0) == pytest.approx(6.6e-6 + steps)
    assert cluster.all_gather(1e6) - cluster.all_gather(0) == pytest.approx(31e6 / (450e9 * 0.82))
    assert Cluster(Assumptions(), 1).all_gather(1e9) == Cluster(Assumptions(), 1).all_reduce(1) == 0
    few = Cluster(Assumptions().changed("InfiniBand NIC", 10), 16)
    sent = few.all_reduce(1e9) - few.all_reduce(0)
    assert sent == pytest.approx(2e9 * 15 / 16 / (10e9 * 0.96 * 8))


def test_the_dense_part_is_its_flop() -> None:
    cluster = Cluster(Assumptions().parsed(["batch=1000", "dense utilisation=0.5"]), 8)
    assert cluster.dense()[DENSE] == pytest.approx(1000 * 96.2e6 / (494.7e12 * 0.5))
    hidden = Cluster(Assumptions().parsed(["hidden dense gradients=1"]), 8)
    assert hidden.dense()[DENSE_GRADIENTS] == 0 < cluster.dense()[DENSE_GRADIENTS]


def test_the_step_is_the_planners() -> None:
    """With its own `Costs`, for the plan that was found, but for messages and the dense part."""
    step = on(64)
    traffic = simulated_model.traffic_of(step.cluster.assumed, 64)
    planned = hb.dist.predict(step.plan, Measured(step.cluster.rates(), traffic)).cost
    assert planned is not None
    tables = sum(step.phases[phase] for phase in PHASES)
    more = tables - planned.step
    cluster = step.cluster
    message = 6.6e-6 + 63 * 0.5e-6
    counted = cluster.all_gather(8 * 16 * 64)  # at least those of 16 tables that are cut by row
    assert 0 < more < 2 * counted + 3 * message
    assert set(step.phases) == {*PHASES, DENSE, DENSE_GRADIENTS}
    assert step.sent == pytest.approx(np.array(planned.sent).sum(0).max())


def test_kernels_of_one_gpu_are_near_what_is_published() -> None:
    """FBGEMM on one H100: 10 tables x 128, 104,857 ids of each, a third of them distinct, SGD: 0.34 and 0.61
    ms. An exchange copies rows once more than FBGEMM."""
    free = [Assumption(line.name, 0, "µs", "") for line in host_lines(Rates(), "")]
    rates = Cluster(Assumptions().with_lines(free), 1).rates()
    table = hb.Table("t", 128, 1_680_000)
    traffic = {"t": Traffic(104_857, 104_857, 35_000)}
    cost = Costs(1, rates, traffic, Sizes()).of_table(table, TableWise(0))
    units = Costs(1, rates, traffic, Sizes()).work_of(table, TableWise(0)).units
    grouped = 10e3 * rates.grouped_id * units[UNITS.index("grouped_id"), 0, 0]
    whole = 10e3 * cost.step - grouped
    assert 0.34 + 0.61 < whole < 1.5 * (0.34 + 0.61)


# -- what follows from them -----------------------------------------------------------------------


@pytest.mark.parametrize("network", NETWORKS)
def test_more_gpus_take_longer_steps_and_train_more_samples(network: str) -> None:
    steps = [on(gpus, network) for gpus in GPUS]
    for fewer, more in zip(steps, steps[1:], strict=False):
        assert fewer.step < more.step and fewer.links < more.links
        assert fewer.handshake < more.handshake
        assert more.efficiency(steps[0]) < fewer.efficiency(steps[0])
    assert steps[0].efficiency(steps[0]) == 1
    assert steps[-1].samples_a_second > steps[0].samples_a_second


def test_one_machine_does_not_see_the_network() -> None:
    assert on(8, "Ethernet").step == on(8, "InfiniBand").step
    assert on(64, "Ethernet").step > on(64, "InfiniBand").step
    assert on(1).links == on(1).handshake == on(1).sent == 0


LONGER = (
    *("memory bandwidth=1000", "forward kernels=0.2", "backward kernels=0.2", "deduplication=5"),
    *("dense FLOP/s=100", "dense utilisation=0.1", "InfiniBand NIC=5", "NIC share of an all-to-all=0.2"),
    *("start of a collective=60", "ring step over NVLink=20", "ring step over InfiniBand=100"),
    *("message to a rank=9", "handshake=1000000", "host speed=0.5", "host: forward_call=9000"),
    *("ids a bag=2", "batch=20000", "skew=0", "dim=256", "moved: updated_byte=9", "rows=20"),
    *("optimizer=adam", "dense FLOP=900", "dense parameters=900", "GPUs a machine=2"),
)  # fmt: skip
SHORTER = (
    *("memory bandwidth=9000", "InfiniBand NIC=200", "host work not hidden=0", "host speed=9"),
    *("hidden dense gradients=1", "rows travel as=bfloat16", "gradients travel as=int8", "dim=32"),
    *("skew=1.6", "optimizer=sgd", "GPUs a machine=32", "message to a rank=0"),
)  # fmt: skip


@pytest.mark.parametrize("change", LONGER)
def test_worse_assumptions_make_a_step_longer(change: str) -> None:
    assert on(64, change=change).step > on(64).step


@pytest.mark.parametrize("change", SHORTER)
def test_better_assumptions_make_a_step_shorter(change: str) -> None:
    assert on(64, change=change).step < on(64).step


def test_rows_that_gpus_cannot_hold_go_over_pcie() -> None:
    change = "rows=10"
    step = on(8, change=change)
    total = 10 * sum(simulated_model.ROWS) * 128 * 4 * 2
    assert step.below == pytest.approx(1 - 8 * 64e9 / total, rel=1e-6)
    slower = predicted(
        Cluster(Assumptions().parsed([change, "PCIe=6"]), 8),
    )
    assert slower.step > step.step > on(8).step
    with pytest.raises(AssumptionError, match="lack .* GB each"):
        on(8, change="rows=100")


def test_counts_of_owners_go_to_all_ranks() -> None:
    """Of a table by row one for each rank, from each rank to all: they grow as the square of the ranks."""
    step = on(1024)
    assert all(isinstance(kind, RowWise) for kind in step.plan.shardings.values())
    assert step.handshake == 1023 * (3 * 8264 + 8 * 26 * 1024)


def test_a_search_has_more_starts_than_the_named_strategies() -> None:
    starts = starts_of(Cluster(Assumptions(), 64))
    assert set(starts) == {"auto", "basic", "memory_balanced", "memory_optimized", "row", "grid"}
    assert set(starts_of(Cluster(Assumptions(), 8))) == {*starts} - {"grid"}
    assert all(isinstance(plan, Plan) and plan.world_size == 64 for plan in starts.values())
    for gpus in (8, 1024):
        assert simulate.own_plan(on(gpus)) == pytest.approx(1, abs=0.01)  # as hb.plan has them, too


def test_halving_says_what_matters() -> None:
    lines = simulate.halved(on(1024))
    (heading,) = {key for line in lines for key in line} - {"half of"}
    assert heading == "step on 1,024 GPUs"
    found = {line["half of"]: line[heading] for line in lines}
    assert found["dense utilisation"].startswith("+") and found["message to a rank"].startswith("-")
    assert all(Assumptions().lines[name].source.startswith(ASSUMED) for name in found)


def test_processes_take_turns_on_cores() -> None:
    longer = functools.partial(simulated_worlds.longer_by, Assumptions())
    assert [longer(n, 2) for n in (1, 2, 4, 8)] == [1, 1, 2, 4]
    free = Assumptions().parsed(["turns on cores=0"])
    assert simulated_worlds.longer_by(free, 8, 2) == 1


def test_growth_is_that_between_one_batch_and_all() -> None:
    assumed = Assumptions()
    one, many = (simulated_model.traffic_of(assumed, gpus)["C21"] for gpus in (1, 64))
    all_ = Traffic.assumed(40_000_000, bags=64 * 6912, ids_a_bag=100, skew=1.05)
    assert many.distinct == one.distinct
    assert many.distinct_of(64, None) == pytest.approx(all_.distinct)
    assert math.isclose(simulated_model.traffic_of(assumed, 64)["C6"].growth, 0, abs_tol=1e-6)
