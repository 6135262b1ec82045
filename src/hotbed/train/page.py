"""The report of a run as one HTML page, which needs no other file."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence

from rich.filesize import decimal

from hotbed.files import Json
from hotbed.text import printable
from hotbed.train.charts import STYLE, Line, bar_chart, line_chart
from hotbed.train.run_files import ReadRun

__all__ = ["page"]

_PAGE_STYLE = """
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 0 auto;
  max-width: 1100px; padding: 24px; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 16px; margin: 0 0 8px; }
.state { color: var(--faint); margin: 4px 0 20px; }
.tiles, .charts { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }
.charts { grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); margin: 16px 0; }
.tiles div, section { border: 1px solid var(--rule); border-radius: 8px; padding: 12px 16px; min-width: 0; }
.tiles b { display: block; font-size: 20px; } .tiles span, .none, .legend { color: var(--faint); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 8px 0 0; font-size: 13px; }
.legend i { border-radius: 2px; display: inline-block; height: 10px; margin-right: 6px; width: 10px; }
table { border-collapse: collapse; width: 100%; } td { border-top: 1px solid var(--rule);
  padding: 3px 8px 3px 0; overflow-wrap: anywhere; vertical-align: top; }
td:first-child { color: var(--faint); }
pre { margin: 0; overflow-wrap: anywhere; white-space: pre-wrap; }
"""
_TIERS = {
    "fastest tier": "rows_missed",
    "RAM below a device": "rows_from_host",
    "SSD": "rows_from_ssd",
    "new rows": "rows_created",
}
_MOST_TABLES = 40


def page(run: ReadRun) -> str:
    """Return the page of a run, also of one that is not over: with what there is."""
    record = run.record
    settings = _mapping(record.get("settings"))
    title = f"{settings.get('model', 'A run')}: run of hotbed train"
    sections = "".join(
        f"<section><h2>{html.escape(name)}</h2>{body}</section>" for name, body in _sections(run)
    )
    tiles = "".join(
        f"<div><span>{html.escape(name)}</span><b>{html.escape(value)}</b></div>"
        for name, value in _tiles(run)
    )
    text = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"
        f"<title>{html.escape(title)}</title><style>{STYLE}{_PAGE_STYLE}</style></head><body>"
        f'<h1>{html.escape(title)}</h1><p class="state">{html.escape(_state(record))}</p>'
        f'<div class="tiles">{tiles}</div><div class="charts">{sections}</div></body></html>\n'
    )
    return "\n".join(map(printable, text.split("\n")))


def _state(record: Mapping[str, Json]) -> str:
    said = {
        "running": "still going on, or killed",
        "ended": "ended",
        "interrupted": "ended by Ctrl-C",
        "failed": f"failed: {record.get('error')}",
    }
    state = record.get("state")
    times = [f"{name} {record[name]}" for name in ("began", "resumed", "ended") if record.get(name)]
    return "; ".join(
        [said.get(state, "in an unknown state") if isinstance(state, str) else "", *times]
    )


def _tiles(run: ReadRun) -> Iterator[tuple[str, str]]:
    figures = _mapping(run.record.get("figures"))
    steps, samples = (_last(run.history.get(name, [])) for name in ("step", "samples"))
    yield "steps", _count(figures.get("steps", steps))
    yield "samples trained on", _count(figures.get("rows", samples))
    speeds = [speed for speed in run.history.get("samples_per_second", []) if math.isfinite(speed)]
    speed = figures.get("samples_per_second", _last(speeds))
    yield "samples a second", _count(speed)
    if figures:
        yield "test AUC", _figure(figures.get("auc"))
        yield "test log loss", _figure(figures.get("logloss"))
        yield "rows stored", _count(figures.get("stored_rows"))
        yield "peak memory", _bytes(figures.get("peak_rss_bytes"))
    best = _mapping(figures.get("validation"))
    if best.get("best_step") is not None:
        yield "best validation", f"{_figure(best.get('best'))} at step {_count(best['best_step'])}"


def _sections(run: ReadRun) -> Iterator[tuple[str, str]]:
    record, history = run.record, run.history
    samples = history.get("samples", [])
    yield "Loss", line_chart("Loss", [Line("loss", samples, history.get("loss", []))], "samples")
    yield from _of_validation(run.validation)
    bins = [_mapping(one) for one in _sequence(record.get("calibration"))]
    if bins:
        predicted, observed = (
            [_number(one.get(name)) for one in bins] for name in ("predicted", "observed")
        )
        lines = [Line("observed share of clicks", predicted, observed)]
        chart = line_chart("Calibration", lines, "predicted probability", marks=True, diagonal=True)
        yield "Calibration on the test samples", chart
    speeds = history.get("samples_per_second", [])
    yield "Speed", line_chart("Speed", [Line("samples a second", samples, speeds)], "samples")
    if "rows_used" in history:
        lines = [*_of_tiers(history)]
        yield "Where rows were found", line_chart("Where rows were found", lines, "samples")
    yield from _of_tables(record)
    figures = _mapping(record.get("figures"))
    yield "Command", f"<pre>{html.escape(str(record.get('command', '')))}</pre>"
    yield "Settings", _table(_mapping(record.get("settings")))
    about = {**_mapping(record.get("versions")), **_mapping(record.get("hardware"))}
    about |= {"processes": record.get("processes"), "interrupted": figures.get("interrupted")}
    about |= {f"{name} samples": n for name, n in _mapping(record.get("samples")).items()}
    yield "Versions and hardware", _table(about)


def _of_validation(columns: Mapping[str, Sequence[float]]) -> Iterator[tuple[str, str]]:
    """A chart for each metric, with a line for each task."""
    tasks: dict[str, list[Line]] = {}
    for name, values in columns.items():
        task, slash, metric = name.rpartition("/")
        if slash:
            tasks.setdefault(metric, []).append(Line(task, columns.get("samples", []), values))
    for metric, lines in tasks.items():
        title = f"Validation: {metric}"
        yield title, line_chart(title, lines, "samples", marks=True)


def _of_tiers(history: Mapping[str, Sequence[float]]) -> Iterator[Line]:
    """Shares of the rows used since the line before, by where they were."""
    used = _changes(history["rows_used"])
    for name, column in _TIERS.items():
        if column in history:
            shares = [
                part / whole if whole > 0 else math.nan
                for part, whole in zip(_changes(history[column]), used, strict=True)
            ]
            if column == "rows_missed":
                shares = [1 - share for share in shares]
            if any(history[column]):
                yield Line(name, history.get("samples", []), shares)


def _changes(counter: Sequence[float]) -> list[float]:
    """Return by how much a counter rose from line to line; one that fell began anew with its process."""
    before = [0.0, *counter[:-1]]
    return [n - b if n >= b else n for n, b in zip(counter, before, strict=True)]


def _of_tables(record: Mapping[str, Json]) -> Iterator[tuple[str, str]]:
    tables = [_mapping(one) for one in _sequence(record.get("tables"))]
    tables.sort(key=lambda one: _number(one.get("bytes"), 0.0), reverse=True)
    if not tables:
        return
    bars = {
        str(one.get("name")): (
            _number(one.get("bytes"), 0.0),
            f"{_bytes(one.get('bytes'))}, {_count(one.get('rows'))} rows",
        )
        for one in tables[:_MOST_TABLES]
    }
    more = len(tables) - len(bars)
    rest = f'<p class="none">and {more} smaller ones</p>' if more else ""
    yield "Bytes by table", bar_chart("Bytes by table", bars) + rest


def _table(values: Mapping[str, object]) -> str:
    rows = (
        f"<tr><td>{html.escape(str(name))}<td>{html.escape(_shown(value))}"
        for name, value in values.items()
        if value is not None
    )
    return f"<table>{''.join(rows)}</table>"


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _mapping(value: object) -> dict[str, Json]:
    return value if isinstance(value, dict) else {}


def _sequence(value: object) -> list[Json]:
    return value if isinstance(value, list) else []


def _number(value: object, otherwise: float = math.nan) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e300 else otherwise  # type: ignore[arg-type]


def _last(values: Sequence[float]) -> float | None:
    return values[-1] if values else None


def _count(value: object) -> str:
    number = _number(value)
    return f"{number:,.0f}" if math.isfinite(number) else "–"


def _figure(value: object) -> str:
    number = _number(value)
    return f"{number:.4f}" if math.isfinite(number) else "–"


def _bytes(value: object) -> str:
    number = _number(value)
    return decimal(int(number)) if math.isfinite(number) else "–"
