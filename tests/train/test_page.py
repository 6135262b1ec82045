"""The page of a run: its charts, and records that are half written or hostile."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hotbed.train.calibration import calibration
from hotbed.train.charts import Line, bar_chart, line_chart
from hotbed.train.page import page
from hotbed.train.run_files import ReadRun, RunError, read_run

VOID = {"meta", "br", "line", "rect", "circle", "path"}
HOSTILE = "<script>alert(1)</script>\"'&"


class Parsed(HTMLParser):
    """Tags, attributes and text; every tag that is opened is closed in turn, but for cells and rows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID and tag not in ("td", "tr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def check_self_contained(parsed: Parsed) -> None:
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in parsed.tags}
    for _, attributes in parsed.tags:
        assert not {"src", "href", "onclick", "onload"} & attributes.keys()
    assert "url(" not in parsed.text and "@import" not in parsed.text


values = st.floats(allow_nan=True, allow_infinity=True)
columns = st.lists(st.tuples(values, values), max_size=30)


@example([[(0.0, 0.0), (1.0, 5e-324)]], True, False)
@example([[(-1e-320, 2e-301), (1e-320, -2e-301)]], True, True)
@given(st.lists(columns, max_size=3), st.booleans(), st.booleans())
def test_a_line_chart_is_an_svg_whose_points_lie_inside(
    lines: list[list[tuple[float, float]]], marks: bool, diagonal: bool
) -> None:
    given = [
        Line(HOSTILE, [x for x, _ in line], [y for _, y in line]) for n, line in enumerate(lines)
    ]
    text = line_chart(HOSTILE, given, HOSTILE, marks=marks, diagonal=diagonal)
    there = any(abs(x) < 1e300 and abs(y) < 1e300 for line in lines for x, y in line)
    assert ("<svg" in text) == there
    parsed = Parsed(text)
    for tag, attributes in parsed.tags:
        if tag == "circle":
            assert 0 <= float(attributes["cx"] or "nan") <= 640
            assert 0 <= float(attributes["cy"] or "nan") <= 260
    if there:
        ET.fromstring(text[: text.index("</svg>") + 6])


def test_a_line_goes_through_its_points() -> None:
    x = [0.0, 50.0, 100.0]
    text = line_chart("t", [Line("a", x, [0.0, 1.0, 0.5])], "x", marks=True)
    circles = [attributes for tag, attributes in Parsed(text).tags if tag == "circle"]
    assert [(float(c["cx"] or ""), float(c["cy"] or "")) for c in circles] == [
        (64.0, 218.0),
        (346.0, 12.0),
        (628.0, 115.0),
    ]
    long = line_chart("t", [Line("a", [*range(100_000)], [1.0] * 100_000)], "x")
    assert len(long) < 20_000


@given(st.dictionaries(st.text(max_size=30), st.floats(0, 1e18), max_size=5))
def test_bars_are_as_long_as_their_values(bars: dict[str, float]) -> None:
    text = bar_chart("t", {name: (length, HOSTILE) for name, length in bars.items()})
    found = [float(a["width"] or "") for tag, a in Parsed(text).tags if tag == "rect"]
    most = max(bars.values(), default=0.0)
    assert found == pytest.approx(
        [300 * b / most if most else 0.0 for b in bars.values()], abs=0.01
    )


@given(st.lists(st.tuples(st.floats(-5, 5), st.sampled_from([0.0, 1.0])), max_size=80))
def test_bins_of_calibration_have_the_means_of_their_samples(
    rows: list[tuple[float, float]],
) -> None:
    logits = torch.tensor([z for z, _ in rows] + [math.nan, 0.0], dtype=torch.float64)
    labels = torch.tensor([y for _, y in rows] + [1.0, math.nan])
    found = calibration(logits, labels, bins=7)
    scored = sorted((1 / (1 + math.exp(-z)), y) for z, y in rows)
    assert sum(each["samples"] for each in found) == len(rows)
    if rows:
        counts = [each["samples"] for each in found]
        assert max(counts) - min(counts) <= 1 and len(found) == min(7, len(rows))
        mean = sum(each["samples"] * each["predicted"] for each in found) / len(rows)
        assert mean == pytest.approx(sum(p for p, _ in scored) / len(rows))
        first = scored[: int(counts[0])]
        assert found[0]["predicted"] == pytest.approx(sum(p for p, _ in first) / len(first))


def write(folder: Path, record: Any, history: str = "", validation: str = "") -> Path:
    (folder / "run.json").write_text(json.dumps(record))
    for name, text in (("history.csv", history), ("validation.csv", validation)):
        if text:
            (folder / name).write_text(text)
    return folder


RECORD = {
    "format": "hotbed run",
    "state": "running",
    "command": f"hotbed train --data '{HOSTILE}'",
    "settings": {"model": HOSTILE, "data": [HOSTILE], HOSTILE: 1},
    "tables": [{"name": HOSTILE, "rows": 3, "bytes": 300}],
    "error": HOSTILE,
}


def test_names_are_escaped(tmp_path: Path) -> None:
    history = "step,samples,loss\n1,16,0.5\n2,32,0.4\n"
    validation = f'step,samples,"{HOSTILE.replace(chr(34), chr(34) * 2)}/auc"\n1,16,0.5\n'
    text = page(read_run(write(tmp_path, RECORD, history, validation)))
    parsed = Parsed(text)
    check_self_contained(parsed)
    assert parsed.text.count("<script>") >= 3 and "<script" not in text.lower()


def test_names_neither_steer_a_terminal_nor_turn_lines_around(tmp_path: Path) -> None:
    name = "red\x1b[31m\x9b31m\u202e\u2028\ud800"
    record = {**RECORD, "settings": {name: name}, "command": f"hotbed train\n{name}"}
    text = page(read_run(write(tmp_path, record)))
    assert all(line.isprintable() for line in text.split("\n"))
    assert r"hotbed train" + "\n" + r"red\x1b[31m\x9b31m\u202e\u2028\ud800" in Parsed(text).text


def test_a_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    text = page(read_run(write(tmp_path, {"format": "hotbed run", "state": "running"})))
    parsed = Parsed(text)
    check_self_contained(parsed)
    assert "still going on, or killed" in parsed.text and "Nothing to draw yet" in parsed.text


def test_lines_that_are_torn_are_left_out(tmp_path: Path) -> None:
    history = "step,samples,loss\n1,16,0.5\n2,32\n3,48,x\n4,64,0.25\n5,80,0.1"
    run = read_run(write(tmp_path, RECORD, history))
    assert run.history["step"] == [1, 3, 4] and math.isnan(run.history["loss"][1])
    assert run.history["loss"][2] == 0.25


def test_shares_of_tiers_are_of_what_was_used_since_the_line_before(tmp_path: Path) -> None:
    history = {
        "samples": [1.0, 2.0, 3.0],
        "rows_used": [100.0, 200.0, 50.0],  # the process began anew
        "rows_missed": [50.0, 60.0, 0.0],
        "rows_from_host": [0.0, 0.0, 0.0],
        "rows_from_ssd": [0.0, 10.0, 0.0],
    }
    from hotbed.train.page import _of_tiers

    assert {line.name: [*line.y] for line in _of_tiers(history)} == {
        "fastest tier": [0.5, 0.9, 1.0],
        "SSD": [0.0, 0.1, 0.0],
    }


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    max_leaves=9,
)
names = ["state", "figures", "settings", "tables", "calibration", "samples", "versions", "ended"]
columns_of = st.dictionaries(
    st.sampled_from(["step", "samples", "loss", "samples_per_second", "a/auc", "rows_used"]),
    st.lists(values, min_size=2, max_size=2),
)


@given(st.dictionaries(st.sampled_from(names), json_values), columns_of, columns_of)
def test_any_record_has_a_page(
    record: dict[str, Any], history: dict[str, list[float]], validation: dict[str, list[float]]
) -> None:
    check_self_contained(Parsed(page(ReadRun(record, history, validation))))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": "other"}', "[" * 100_000])
def test_what_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(RunError, match="holds no record of a run"):
        read_run(str(tmp_path))
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunError, match="run.json is not the record of a run"):
        read_run(str(tmp_path))
