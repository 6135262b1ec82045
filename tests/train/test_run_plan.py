"""Plans in records of runs: who served how much, what batches asked, and a better plan."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.command_line import run as command
from dist.worlds import run

import hotbed as hb
from hotbed.dist import Plan, RowWise, TableWise, Traffic
from hotbed.train.run_files import RunError
from hotbed.train.run_plan import imbalance_in_words, plan_entry, read_plan, traffic_entry

SAMPLES = 512


def batches() -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [
        {
            "item": torch.randint(20_000, (SAMPLES,), generator=draw),
            "seen": torch.randint(3000, (SAMPLES, 6), generator=draw),
        }
        for _ in range(3)
    ]


class Reader:
    """Counts its epochs, as readers of files do, whose rows are shuffled by them."""

    epochs = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        self.epochs += 1
        yield from batches()


def records(rank: int, world: int, folder: str, kind: str) -> None:
    tables = [hb.Table("item", 16), hb.Table("seen", 8, 3000, combiner="sum")]
    model = hb.EmbeddingCollection(tables, seed=1)
    kinds = {"first": TableWise(0), "row": RowWise()}
    hb.distribute(model, Plan(tables, world, dict.fromkeys(("item", "seen"), kinds[kind])))
    optimizer = hb.optim.Adam(model.parameters())
    for batch in hb.dist.slices(batches()):
        sum(vectors.sum() for vectors in model(batch).values()).backward()
        optimizer.step()
        optimizer.zero_grad()
    reader = Reader()
    entry = plan_entry(model, "adam", traffic_entry(model, reader) if rank == 0 else {})
    assert reader.epochs == 0
    assert entry is not None
    if rank == 0:
        Path(folder, "entry.json").write_text(json.dumps(entry))


def entry_of(folder: Path, kind: str) -> dict[str, Any]:
    run(2, records, str(folder), kind)
    found: dict[str, Any] = json.loads((folder / "entry.json").read_text())
    return found


@pytest.mark.process
def test_a_rank_with_all_tables_serves_all(tmp_path: Path) -> None:
    entry = entry_of(tmp_path, "first")
    halves = [b["item"][half] for b in batches() for half in (slice(0, 256), slice(256, 512))]
    distinct = sum(len(half.unique()) for half in halves)
    assert entry["ids_served"] == [distinct + 3 * SAMPLES * 6, 0]
    assert entry["bytes_sent"][0] > 0 and entry["imbalance"] == 2.0
    assert "Rank 0 was asked for 2.00 times as many ids" in imbalance_in_words(entry)
    found = read_plan({"sharding": entry}, "run")
    assert found.plan.shardings["item"] == TableWise(0) and found.optimizer == "adam"
    assert found.expected_rows == {"item": len(torch.cat([b["item"] for b in batches()]).unique())}
    assert found.traffic["item"].distinct == pytest.approx(
        sum(len(half.unique()) for half in halves[::2]) / 3
    )
    assert found.traffic["seen"].ids == 256 * 6


@pytest.mark.process
def test_rows_by_rank_are_served_evenly(tmp_path: Path) -> None:
    entry = entry_of(tmp_path, "row")
    assert entry["imbalance"] < 1.1 and imbalance_in_words(entry) == ""
    found = read_plan({"sharding": entry}, "run").expected_rows["item"]
    assert found == len(torch.cat([b["item"] for b in batches()]).unique())


def test_one_process_has_no_plan_to_record() -> None:
    model = hb.EmbeddingCollection([hb.Table("item", 16)])
    assert plan_entry(model, "adam", {}) is None and imbalance_in_words(None) == ""
    with pytest.raises(RunError, match="on one process"):
        read_plan({}, "run")


def recorded(folder: Path, kind: str = "table", world: int = 2) -> dict[str, Any]:
    """A record of a run whose first rank had all, or of one with the best plan that is known."""
    tables = [hb.Table(f"t{at}", 64, 100_000, combiner="sum") for at in range(6)]
    asked = {"bags": 4096.0, "ids": 4096.0, "distinct": 4000.0}
    plan = Plan(tables, world, dict.fromkeys((t.name for t in tables), TableWise(0)))
    if kind == "best":
        traffic = {t.name: Traffic(**asked) for t in tables}
        measured = hb.dist.Measured(hb.dist.Rates(), traffic)
        plan = hb.plan(tables, 2, strategy=measured, optimizer="adagrad")
    of_table = {"dim": 64, "rows": 100_000, "dtype": "float32", "combiner": "sum"}
    record = {
        "format": "hotbed run",
        "sharding": {
            "plan": plan.as_json(),
            "optimizer": "adagrad",
            "tables": {t.name: {**of_table, "expected_rows": None} for t in tables},
            "traffic": {t.name: asked for t in tables},
        },
    }
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps(record))
    hb.dist.Rates().write(folder / "rates.toml")
    return record


def test_a_better_plan_is_told_and_written(tmp_path: Path) -> None:
    recorded(tmp_path / "run")
    usual = ("plan", "--from", tmp_path / "run", "--rates", tmp_path / "run/rates.toml")
    result = command(*usual, "--write", tmp_path / "plan.toml", columns=120)
    assert result.exit_code == 0, result.output
    assert "By the plan of the run a step is predicted to take" in result.stdout
    tables = [hb.Table(f"t{at}", 64, 100_000) for at in range(6)]
    better = Plan.read(tmp_path / "plan.toml", tables)
    measured = hb.dist.Measured(
        hb.dist.Rates(), {t.name: Traffic(4096, 4096, 4000) for t in tables}
    )
    old = Plan(tables, 2, {t.name: TableWise(0) for t in tables})
    steps = [hb.dist.predict(plan, measured).cost for plan in (better, old)]
    assert steps[0] is not None and steps[1] is not None
    assert steps[0].step < 0.95 * steps[1].step


@pytest.mark.parametrize(
    ("own", "asked", "counts"), [(2, None, 2), (None, None, None), (2, 1, 1), (None, 2, 2)]
)
def test_machines_are_those_of_the_run(
    tmp_path: Path, own: int | None, asked: int | None, counts: int | None
) -> None:
    record = recorded(tmp_path / "run", world=4)
    if own is not None:
        record["settings"] = {"local_world_size": own}
        (tmp_path / "run/run.json").write_text(json.dumps(record))
    more = () if asked is None else ("--local-world-size", str(asked))
    found = command(
        *("plan", "--from", tmp_path / "run", "--rates", tmp_path / "run/rates.toml"),
        *("--write", tmp_path / "plan.toml", *more),
        columns=120,
    )
    assert found.exit_code == 0, found.output
    run_of = read_plan(record, "run")
    assert run_of.local_world_size == own
    expected = hb.plan(
        run_of.plan.tables.values(),
        4 if counts is None else (4 // counts, counts),
        strategy=hb.dist.Measured(hb.dist.Rates(), run_of.traffic),
        optimizer="adagrad",
    )
    assert Plan.read(tmp_path / "plan.toml", run_of.plan.tables.values()) == expected
    old = Plan(run_of.plan.tables.values(), 4, run_of.plan.shardings, sizes=expected.sizes)
    measured = hb.dist.Measured(hb.dist.Rates(), run_of.traffic, local_world_size=counts)
    cost = hb.dist.predict(old, measured).cost
    assert cost is not None
    assert f"is predicted to take {cost.step * 1e3:.2f} ms" in " ".join(found.stdout.split())


def test_data_is_counted_by_the_ranks_of_the_run(tmp_path: Path) -> None:
    recorded(tmp_path / "run", world=4)
    usual = ("plan", "--from", tmp_path / "run", "--rates", tmp_path / "run/rates.toml")
    found = command(*usual, "--data", tmp_path / "log.tsv", "--batch-size", 3)
    assert found.exit_code == 2 and "leaves some of the 4 none" in " ".join(found.stderr.split())


def test_a_good_plan_stays(tmp_path: Path) -> None:
    recorded(tmp_path / "run", "best")
    result = command(
        *("plan", "--from", tmp_path / "run", "--rates", tmp_path / "run/rates.toml"), columns=120
    )
    assert result.exit_code == 0, result.output
    assert "no other is predicted to be 5 % faster" in result.stdout


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: entry.pop("plan"),
        lambda entry: entry.update(tables=3),
        lambda entry: entry["tables"].update(t0=3),
        lambda entry: entry["tables"]["t0"].update(dtype="int3"),
        lambda entry: entry["tables"]["t0"].update(more=1),
        lambda entry: entry["tables"].pop("t0"),
        lambda entry: entry["traffic"]["t0"].update(ids=-1.0),
        lambda entry: entry["traffic"]["t0"].update(ids="many"),
        lambda entry: entry["plan"].update(version=2),
        lambda entry: entry.update(machines=3),
        lambda entry: entry.update(machines="two"),
    ],
)
def test_a_damaged_record_is_told(tmp_path: Path, damage: Any) -> None:
    record = copy.deepcopy(recorded(tmp_path / "run"))
    record["settings"] = {"local_world_size": None}
    damage(record["sharding"])
    if "machines" in record["sharding"]:
        record["settings"] = {"local_world_size": record["sharding"].pop("machines")}
    (tmp_path / "run/run.json").write_text(json.dumps(record))
    result = command("plan", "--from", tmp_path / "run", "--rates", tmp_path / "run/rates.toml")
    assert result.exit_code == 2 and "the plan of the run is damaged" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_run_names_its_tables(tmp_path: Path) -> None:
    recorded(tmp_path / "run")
    result = command("plan", "--from", tmp_path / "run", "--model", "dlrm")
    assert result.exit_code == 2 and "--from RUN names the tables" in result.stderr
    result = command("plan", "--from", tmp_path / "none")
    assert result.exit_code == 2 and "holds no record of a run" in result.stderr
