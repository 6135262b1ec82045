"""`hotbed data stats`."""

from __future__ import annotations

import json
import xml.dom.minidom
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli.command_line import run

import hotbed as hb
from hotbed.data import Id, Key, Label, Number, Schema


@pytest.fixture
def clicks(tmp_path: Path) -> Path:
    table = {
        "click": [0, 1] * 100,
        "price": [1.5 * i for i in range(200)],
        "user<&>": [f"u{i % 20}" for i in range(200)],
        "[red]key": [f"k{i}" for i in range(200)],
        "nothing": [None] * 200,
    }
    pq.write_table(pa.table(table), tmp_path / "clicks.parquet")
    return tmp_path / "clicks.parquet"


def test_a_schema_is_proposed_that_reads_the_data(clicks: Path, tmp_path: Path) -> None:
    out, figures, page = (tmp_path / name for name in ("schema.toml", "f.json", "skew.html"))
    result = run("data", "stats", clicks, "--out", out, "--json", figures, "--html", page)
    assert result.exit_code == 0, result.output
    assert "[red]key" in result.stdout and "Left out: nothing (no values)." in result.stdout
    assert "1 table of 20 rows (user<&> 20)" in result.stdout
    assert "They fit into memory." in result.stdout
    schema = Schema.read(out)
    price = schema.columns["price"]
    assert isinstance(price, Number) and price.mean == 149.25
    assert list(schema.columns) == ["click", "price", "user<&>", "[red]key"]
    (batch,) = hb.data.open(clicks, schema)
    assert abs(float(batch["dense"].mean())) < 1e-6
    assert float(batch["dense"].std(correction=0)) == pytest.approx(1, rel=1e-4)
    found = json.loads(figures.read_text())
    assert found["rows"] == 200 and Schema.from_json(found["schema"]) == schema
    assert found["tables"] == {"user<&>": {"rows": 20, "bytes": 20 * 200}}
    assert [column["kind"] for column in found["columns"]] == ["label", "number", "id", "key", None]
    text = page.read_text(encoding="utf-8")
    assert "user&lt;&amp;&gt;" in text and "http" not in text and "<script" not in text
    svg = text[text.index("<svg") : text.index("</svg>") + len("</svg>")]
    assert xml.dom.minidom.parseString(svg).getElementsByTagName("polyline")


def test_a_schema_is_kept_and_its_means_are_written_anew(clicks: Path, tmp_path: Path) -> None:
    path = tmp_path / "schema.toml"
    Schema(
        {"price": Number("standard", mean=0, std=1), "user<&>": Id(rows=50), "click": Label()}
    ).write(path)
    result = run("data", "stats", clicks, "--schema", path, "--out", path, "--rows", 101)
    assert result.exit_code == 0, result.output
    assert "The first 101 rows" in result.stdout and "1 table of 51 rows" in result.stdout
    price = Schema.read(path).columns["price"]
    assert isinstance(price, Number) and (price.mean, price.std) == (75.0, 43.7321)


def test_text_without_a_header(tmp_path: Path) -> None:
    (tmp_path / "log.tsv").write_text("1\ta\n0\tb\n" * 60)
    result = run("data", "stats", tmp_path / "log.tsv", "--columns", "y,word", "--all")
    assert result.exit_code == 0, result.output
    assert "label" in result.stdout and "120 rows" in result.stdout
    one = run("data", "stats", tmp_path / "log.tsv", "--columns", "word,y", "--all")
    assert one.exit_code == 0 and "label" in one.stdout.splitlines()[4] + one.output


def test_what_is_wrong_is_said_in_one_sentence(clicks: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.toml"
    Schema({"clicc": Label(), "k": Key()}).write(schema)
    (tmp_path / "empty.csv").write_text("")
    for arguments, message in (
        ([tmp_path / "none.csv"], "none.csv' does not exist"),
        ([tmp_path / "empty.csv"], "empty.csv is empty: there is no header"),
        ([clicks, "--schema", schema], "has no column of the name 'clicc'"),
        ([clicks, "--schema", clicks], "clicks.parquet: not TOML"),
        ([clicks, "--out", clicks], "--out"),
        ([clicks, "--json", tmp_path / "no" / "f.json"], "does not exist"),
        ([clicks, "--schema", schema, "--html", schema], "--html"),
    ):
        result = run("data", "stats", *arguments)
        assert result.exit_code == 2, result.output
        assert message in result.stderr and "Traceback" not in result.output
    assert hb.data.open(clicks, Schema({"click": Label()})).count_rows() == 200
