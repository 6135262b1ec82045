"""What `import hotbed` brings along, and what the installed package declares."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Each would cost a user who only trains a model 0.1 to 3 seconds at start-up. What torch itself
# imports is torch's affair, so torch comes first and only what hotbed adds is counted.
HEAVY = (
    "typer",
    "rich",
    "pyarrow",
    "fsspec",
    "s3fs",
    "pandas",
    "torchmetrics",
    "sklearn",
    "tomli",
    "tomllib",
    "onnx",
    "triton",
    "torch._dynamo",
    "torch._inductor",
    "torch.onnx",
)


def run_python(code: str) -> str:
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.process
def test_import_brings_no_heavy_modules() -> None:
    added = run_python(
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import hotbed\n"
        "print('\\n'.join(sorted(set(sys.modules) - before)))"
    ).split()
    assert "hotbed" in added
    heavy = [m for m in added if any(m == h or m.startswith(h + ".") for h in HEAVY)]
    assert heavy == []


@pytest.mark.parametrize(
    "name", ["", ".data", ".dist", ".init", ".models", ".nn", ".optim", ".train"]
)
def test_completion_offers_what_is_public(name: str) -> None:
    module = importlib.import_module("hotbed" + name)
    assert set(dir(module)) - {"__version__"} == set(module.__all__)
    assert all(hasattr(module, each) for each in dir(module))


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="reads the loaded libraries from /proc")
def test_core_shares_the_openmp_runtime_of_torch() -> None:
    libraries = run_python(
        "import torch, hotbed, hotbed._core\n"
        "lines = open('/proc/self/maps').read().splitlines()\n"
        "paths = {line.split()[-1] for line in lines if 'libgomp' in line}\n"
        "print('\\n'.join(sorted(paths)))"
    ).split()
    assert len(libraries) == 1, libraries


def test_public_names_exist() -> None:
    import hotbed

    missing = [name for name in hotbed.__all__ if not hasattr(hotbed, name)]
    assert missing == []


def test_no_source_file_has_outgrown_its_limit() -> None:
    limits = {".py": 400, ".cpp": 600, ".hpp": 600, ".inl": 600}
    too_long = {
        str(path.relative_to(ROOT)): lines
        for folder in ("src", "csrc")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in limits
        and (lines := len(path.read_text().splitlines())) > limits[path.suffix]
    }
    assert too_long == {}


def check_machine(python: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(ROOT / "tools" / "check_machine.sh"), python],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.process
def test_a_machine_without_a_compiler_is_told_what_to_install() -> None:
    done = check_machine(sys.executable, CXX="false")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "install g++" in done.stderr


@pytest.mark.process
@pytest.mark.parametrize("version", ["2.7", "3.9", "3.14"])
def test_an_unsupported_python_is_told_which_to_use(tmp_path: Path, version: str) -> None:
    python = tmp_path / "python3"
    python.write_text(f"#!/bin/sh\necho {version}\n")
    python.chmod(0o755)
    done = check_machine(str(python))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert version in done.stderr and "3.10 to 3.13" in done.stderr


def test_test_files_have_distinct_names() -> None:
    """Folders of tests are no packages, so pytest takes two files of one name for the same module."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))
