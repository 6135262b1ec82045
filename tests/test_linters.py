"""Every source file that git knows is seen by the linters that `make lint` runs, and every test by pytest."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def lines_of(*command: str) -> set[str]:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    if shutil.which(command[0], path=environment["PATH"]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return {os.path.relpath(line, ROOT) for line in done.stdout.splitlines() if line}


def tracked(*patterns: str) -> set[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout of git")
    # Neither deleted ones, nor those that a commit will add.
    listed = lines_of("git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns)
    return {path for path in listed if (ROOT / path).exists()}


@pytest.mark.process
@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff_sees_every_file(command: list[str]) -> None:
    assert re.search(rf"ruff {' '.join(command)}( -q)? \.$", makefile(), re.MULTILINE)
    seen = lines_of("ruff", "check", "--show-files", ".") - {"pyproject.toml"}
    assert seen == tracked("*.py", "*.pyi")


@pytest.mark.process
def test_mypy_sees_every_file(monkeypatch: pytest.MonkeyPatch) -> None:
    mypy = pytest.importorskip("mypy.main", reason="mypy is not installed")
    monkeypatch.chdir(ROOT)
    sources, options = mypy.process_options([])
    assert {os.path.relpath(source.path, ROOT) for source in sources} == tracked("*.py", "*.pyi")
    assert options.disallow_untyped_defs and not options.exclude
    of_package = options.clone_for_module("hotbed.table.live")
    assert {code.code for code in of_package.enabled_error_codes} >= set(options.disable_error_code)


def test_pytest_looks_into_every_folder(pytestconfig: pytest.Config) -> None:
    """Its own list of those that it leaves out has "dist"."""
    left_out = pytestconfig.getini("norecursedirs")
    folders = {Path(path).parent.parts for path in tracked("tests/**/test_*.py")}
    assert ("tests", "dist") in folders
    for folder in folders:
        assert not [part for part in folder for p in left_out if fnmatch.fnmatch(part, p)], folder


@pytest.mark.process
def test_clang_format_sees_every_file() -> None:
    (found,) = re.findall(r"find csrc .*?-print0", makefile())
    seen = lines_of(*re.sub(r"\\[()]", "", found).replace("'", "").replace("-print0", "").split())
    assert seen == tracked("*.c", "*.cc", "*.cpp", "*.cu", "*.h", "*.hpp", "*.inl")


def makefile() -> str:
    return (ROOT / "Makefile").read_text(encoding="utf-8")
