"""`hotbed plan`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cli.command_line import run
from effort import SOAK

import hotbed as hb
from hotbed.checkpoint import write
from hotbed.dist import Plan, RowWise, TableWise, measuring

TABLES = """
[tables.item]
rows = 10_000_000
dim = 64
dtype = "bfloat16"

[tables.city]
rows = 300
dim = 8
sharding = "table"

[tables.user]
dim = 32
expected_rows = 1_000_000
"""


def test_tables_of_a_file(tmp_path: Path) -> None:
    file, written = tmp_path / "tables.toml", tmp_path / "plan.toml"
    file.write_text(TABLES)
    result = run("plan", "--tables", file, "--world-size", 4, "--memory", "1GB", "--write", written)
    assert result.exit_code == 0, result.output
    assert "3 tables on 4 ranks" in result.stdout and "~1,000,000" in result.stdout
    made = [
        hb.Table("user", 32),
        hb.Table("item", 64, 10_000_000, dtype=torch.bfloat16),
        hb.Table("city", 8, 300),
    ]
    plan = Plan.read(written, made)
    assert plan.shardings["item"] == RowWise("modulo") and plan.shardings["user"] == RowWise("hash")
    assert isinstance(plan.shardings["city"], TableWise)


@pytest.mark.parametrize("model", ["dlrm", "wide-deep"])
def test_models_on_click_logs(model: str) -> None:
    result = run("plan", "--model", model, "--expected-rows", "C1=5_000", "--expected-rows", "70")
    assert result.exit_code == 0, result.output
    assert "~5,000" in result.stdout and "~70" in result.stdout and "C26" in result.stdout
    result = run("plan", "--model", model)
    assert "Nobody said how many rows to expect of C1, C2, C3" in result.stdout


def test_a_checkpoint_says_rows_and_optimizer(tmp_path: Path) -> None:
    model = hb.models.DLRM([hb.Table("user", 16), hb.Table("item", 16, 5000)])
    optimizer = hb.optim.Adam(model.parameters())
    batch = {"dense": torch.rand(4, 13), "user": torch.arange(4), "item": torch.arange(4)}
    model(batch).sum().backward()
    optimizer.step()
    hb.save(tmp_path / "runs", model, optimizer, step=1)
    result = run("plan", tmp_path / "runs", "--world-size", 2, "--memory", "10MB")
    assert result.exit_code == 0, result.output
    words = result.stdout.split()
    assert "user" in words and "~4" in words and "1.9" in words  # 5,000 x 16 x 3 x 4 bytes, twice


def test_a_plan_is_written_over_nothing_that_it_is_made_of(tmp_path: Path) -> None:
    tables, link = tmp_path / "tables.toml", tmp_path / "link.toml"
    tables.write_text("[tables.a]\nrows = 10\ndim = 4\n")
    link.symlink_to(tables)
    write(tmp_path / "run", {"a": [(torch.arange(3), torch.ones(3, 4))]})
    (manifest,) = tmp_path.glob("run/*/checkpoint.json")
    for source, target in (
        (("--tables", tables), tables),
        (("--tables", tables), link),
        (("--tables", tables), manifest),
        ((tmp_path / "run",), manifest),
        ((manifest.parent,), manifest.parent / "rows-0-0.safetensors"),
    ):
        before = target.read_bytes()
        result = run("plan", *source, "--world-size", 2, "--write", target)
        assert result.exit_code == 2 and "Name another." in result.stderr, result.output
        assert target.read_bytes() == before
    assert (
        run("plan", "--tables", tables, "--world-size", 2, "--write", tmp_path / "p").exit_code == 0
    )


def test_the_remedies_are_told(tmp_path: Path) -> None:
    file = tmp_path / "tables.toml"
    file.write_text(TABLES)
    usual = ("plan", "--tables", file, "--world-size", 2, "--optimizer", "adagrad")
    result = run(*usual, "--host", "1GB")
    assert result.exit_code == 2 and not result.stdout
    assert "It would fit with any of these, the cheapest first: (1) the optimizer" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "Name the tables to plan by one of DIR, --tables FILE or --model NAME."),
        (("runs", "--model", "dlrm"), "by one of DIR"),
        (("--model", "dlrmm"), "--model is 'dlrmm'; it must be one of autoint, dcn, dcn-v1,"),
        (("--model", "dlrm", "--world-size", 0), "world_size must be a number from 1"),
        (("--model", "dlrm", "--strategy", "bsic"), "Did you mean 'basic'?"),
        (("--model", "dlrm", "--expected-rows", "C1=many"), "give a number of rows"),
        (("--model", "dlrm", "--expected-rows", "X=3"), "'X' is no dynamic table"),
        (("--model", "dlrm", "--memory", "much"), "A size is a number of bytes"),
        (("--tables", "none.toml"), "--tables none.toml: No such file"),
        (("none",), "none"),
    ],
)
def test_what_is_wrong_is_told_in_one_sentence(arguments: tuple[object, ...], told: str) -> None:
    result = run("plan", *arguments)
    assert result.exit_code == 2 and told in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has no [tables.NAME]"),
        ("tables = 3", "has no [tables.NAME]"),
        ("[tables.T]\nrows = 3", "table 'T': dim is missing"),
        ("[tables.T]\ndim = 3\nrow = 3", "table 'T': unknown key 'row'"),
        ("[tables.T]\ndim = 0", "Table 'T': dim must be"),
        ("[tables.T]\ndim = 3\ndtype = 'int3'", "Table 'T': dtype must be"),
        ("[tables.T]\ndim = 3\nsharding = 'rows'", "Table 'T': A sharding is"),
        ("[tables.T]\ndim = 3\nexpected_rows = 'many'", "'T' cannot have 'many' rows"),
        ("[tables", "is not TOML"),
    ],
)
def test_a_wrong_file_of_tables_is_told(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "tables.toml"
    file.write_text(text)
    result = run("plan", "--tables", file)
    assert result.exit_code == 2 and told in " ".join(result.stderr.split()), result.output


SCHEMA = """
[columns.user]
kind = "id"
rows = 5000

[columns.seen]
kind = "ids"
rows = 3000

[columns.clicked]
kind = "label"
"""


def samples(folder: Path) -> tuple[Path, Path]:
    """A schema, and a file of its columns."""
    schema, data = folder / "schema.toml", folder / "clicks.csv"
    schema.write_text(SCHEMA)
    lines = [f"{n * 7 % 4000},{'|'.join(str(n * k) for k in range(1, 9))},1" for n in range(2000)]
    data.write_text("user,seen,clicked\n" + "\n".join(lines) + "\n")
    return schema, data


def test_a_plan_by_figures_and_a_sample(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="files of columns are read by it")
    (schema, data), rates, written = samples(tmp_path), tmp_path / "rates.toml", tmp_path / "plan"
    hb.dist.Rates().write(rates)
    usual = ("plan", "--schema", schema, "--data", data, "--batch-size", 512, "--world-size", 2)
    result = run(*usual, "--rates", rates, "--write", written, columns=120)
    assert result.exit_code == 0, result.output
    assert "is predicted to take" in result.stdout and "else, ms" in result.stdout
    Plan.read(written, hb.data.Schema.read(schema).tables(16))
    basic = run(*usual, "--rates", rates, "--strategy", "basic", columns=120)
    assert "else, ms" in basic.stdout and "by auto" not in basic.stdout
    plain = run("plan", "--schema", schema, "--world-size", 2)
    assert plain.exit_code == 0 and "predicted" not in plain.stdout


@pytest.mark.process
def test_figures_of_this_machine_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not SOAK:  # it takes half a minute, and tests/dist/test_rates.py measures
        monkeypatch.setattr(measuring, "_in_processes", lambda shared_memory: hb.dist.Rates())
    rates = tmp_path / "rates.toml"
    usual = ("plan", "--model", "dlrm", "--expected-rows", 70, "--world-size", 2)
    result = run(*usual, "--measure", "--rates", rates)
    assert result.exit_code == 0 and "is predicted to take" in result.stdout, result.output
    assert hb.dist.Rates.read(rates).forward_call > 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--strategy", "measured"), "give --measure, or --rates FILE"),
        (("--data", "clicks.tsv"), "give --measure, or --rates FILE, too"),
        (("--rates", "none.toml"), "none.toml: No such file"),
        (("--rates", "none.toml", "--data", "none.tsv"), "none.tsv"),
        (("--rates", "r", "--data", "d", "--batch-size", 3), "--batch-size 3 of all ranks leaves"),
        (("--schema", "none.toml", "--rates", "r", "--data", "d"), "none.toml"),
    ],
)
def test_figures_that_are_missing_are_told(arguments: tuple[object, ...], told: str) -> None:
    result = run("plan", "--model", "dlrm", *arguments)
    assert result.exit_code == 2 and told in result.stderr and "Traceback" not in result.stderr
