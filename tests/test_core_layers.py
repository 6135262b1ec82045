"""The C++ core in layers: includes go downward, in the order that docs/internals/architecture.md has."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".hpp", ".cpp", ".inl"}

Includes = dict[str, set[str]]


def includes() -> Includes:
    """By file of csrc/, the files of csrc/ that it includes."""
    core = ROOT / "csrc"
    if not core.is_dir():
        pytest.skip("no sources of the core here")
    return {
        str(path.relative_to(core)): {
            name
            for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.MULTILINE)
            if (core / name).exists()
        }
        for path in sorted(core.rglob("*"))
        if path.suffix in SUFFIXES
    }


def layers() -> dict[str, int]:
    """By folder of csrc/, the layer that it is in; the highest is 0."""
    page = (ROOT / "docs/internals/architecture.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```\nbindings .*?\n```", page, re.DOTALL)
    names = [line.split("  ")[0].split(", ") for line in block.splitlines()[1:-1]]
    return {folder: level for level, folders in enumerate(names) for folder in folders}


def upward(files: Includes, order: dict[str, int]) -> list[str]:
    """Includes of a folder that is not below. Tests include what they like, and nobody includes tests."""
    found = []
    for file, included in files.items():
        own = file.split("/")[0]
        for other in sorted(included):
            folder = other.split("/")[0]
            if folder == own or (own == "tests" and folder in order):
                continue
            if own == "tests" or folder == "tests" or order[own] >= order[folder]:
                found.append(f"{file} includes {other}")
    return found


def circles(files: Includes) -> set[str]:
    """Units, each a header with what defines it, that include themselves by way of others."""
    units: dict[str, set[str]] = {}
    for file, included in files.items():
        units.setdefault(stem(file), set()).update(map(stem, included))
    return {unit for unit in units if unit in reached(units, units[unit] - {unit})}


def stem(file: str) -> str:
    return file.rpartition(".")[0]


def reached(units: Includes, start: Iterable[str]) -> set[str]:
    seen: set[str] = set()
    todo = list(start)
    while todo:
        unit = todo.pop()
        if unit not in seen:
            seen.add(unit)
            todo.extend(units.get(unit, ()))
    return seen


def test_every_folder_has_a_layer() -> None:
    assert {file.split("/")[0] for file in includes()} == {*layers(), "tests"}


def test_includes_go_downward() -> None:
    assert upward(includes(), layers()) == []


def test_no_file_includes_itself_by_others() -> None:
    assert circles(includes()) == set()


def test_includes_are_found() -> None:
    order = {"table": 0, "tiers": 1, "log": 1}
    files = {
        "table/table.hpp": {"tiers/rows.hpp"},
        "tiers/rows.hpp": {"tiers/map.hpp"},
        "tiers/map.hpp": set(),
        "tiers/map.cpp": {"tiers/rows.hpp", "tiers/map.hpp"},
        "tests/map_test.cpp": {"tiers/map.hpp"},
    }
    assert upward(files, order) == []
    assert circles(files) == {"tiers/rows", "tiers/map"}
    for file, other in [
        ("tiers/map.cpp", "table/table.hpp"),
        ("tiers/map.cpp", "log/log.hpp"),
        ("tiers/map.cpp", "tests/check.hpp"),
    ]:
        assert upward({file: {other}}, order) == [f"{file} includes {other}"]


def test_production_headers_know_no_tests() -> None:
    """What tests alone need is in csrc/testing and csrc/tests."""
    for file in includes():
        folder = file.split("/")[0]
        if folder in ("testing", "tests") or not file.endswith((".hpp", ".inl")):
            continue
        text = (ROOT / "csrc" / file).read_text()
        assert not re.search(r"for_test|\b(for|by|in|so that) tests?\b", text, re.IGNORECASE), file
