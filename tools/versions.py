"""The short tests on other versions: python -m tools.versions PYTHON:TORCH ...

For each pair: a virtual environment in build/versions, torch's own wheel, the wheel of Hotbed as `make
wheel` ships it but for that Python, and the tests, without the command line's, the kernels' and some that
take long and meet nothing of torch's that others do not. Wheels of torch for CUDA come without the CUDA
libraries, which are gigabytes and of which no test here calls a function: stand-ins with the same names
let torch be loaded.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import Distribution, requires
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "versions"
LEFT_OUT = [
    "benchmarks",
    "cli",
    "data",
    "device",
    "foreign",
    "hotbed_command",
    "ops/gpu",
    "test_public_names.py",  # of the Python that is developed with, as the next one
    "test_packaging.py",
    "test_random_batches.py",
    "test_row_log.py",
    "checkpoint/test_folders.py",
]
TESTS = ["tests", *(f"--ignore=tests/{name}" for name in LEFT_OUT)]
# What of CUDA torch calls when it is loaded.
LOADED = "cudart"


def main(pairs: list[str]) -> int:
    WORK.mkdir(parents=True, exist_ok=True)
    said = [pair.split(":") for pair in pairs]
    results = [(python, torch, Version(python, torch).run()) for python, torch in said]
    print()
    for python, torch, result in results:
        print(f"Python {python:5} torch {torch:8} {result}")
    return int(any(" passed" not in r or "failed" in r or "error" in r for *_, r in results))


class Version:
    """One pair of versions."""

    def __init__(self, python: str, torch: str) -> None:
        self._python, self._torch = python, torch
        self._folder = WORK / f"{python}-{torch}"
        self._bin = self._folder / "bin"

    def run(self) -> str:
        """The closing line of the tests, or what stood in their way."""
        python = python_of(self._python)
        if python is None:
            return "no such Python here"
        print(f"Python {self._python}, torch {self._torch} ...", flush=True)
        try:
            run(python, "-m", "venv", "--clear", self._folder)
            self._pip("install", "--no-deps", f"torch=={self._torch}")
            needed, triton = self._needed_by_torch()
            own = [
                str(need)
                for need in self._needed_by_hotbed()
                if need.name not in ("torch", "triton")
            ]
            self._pip("install", *needed, *own)
            if triton:
                self._pip("install", "--no-deps", triton)
            stand_in_for_cuda(self._site)
            self._pip("install", "--no-deps", self._wheel())
        except subprocess.CalledProcessError as error:
            return f"{' '.join(map(str, error.cmd))[:200]}\n{error.stdout}"
        chosen = shlex.split(os.environ.get("PYTEST_ARGS", "")) or TESTS
        tests = run(self._bin / "python", "-m", "pytest", *chosen, cwd=ROOT, check=False)
        (self._folder / "tests.log").write_text(tests)
        failed = [line for line in tests.splitlines() if line.startswith(("FAILED", "ERROR"))]
        print("\n".join(failed), flush=True)
        last = tests.strip().splitlines()[-1:]
        return last[0] if last else "nothing"

    def _pip(self, *arguments: object) -> None:
        run(self._bin / "python", "-m", "pip", "-q", *arguments)

    @property
    def _site(self) -> Path:
        return next(self._folder.glob("lib/python*/site-packages"))

    def _needed_by_torch(self) -> tuple[list[str], str]:
        """Packages for this torch without a GPU; and its Triton, where the kernels support it."""
        found = next(self._site.glob("torch-*.dist-info"))
        lines = Distribution.at(found).requires or []
        needed, triton = [], ""
        for need in map(Requirement, lines):
            if need.name == "triton":
                (supported,) = (n for n in self._needed_by_hotbed("gpu") if n.name == "triton")
                lowest = min(need.specifier, key=str).version
                triton = f"triton{need.specifier}" if supported.specifier.contains(lowest) else ""
            elif need.name == "cuda-toolkit":
                needed.append(f"cuda-toolkit[{LOADED}]{need.specifier}")
            elif "cuda-runtime" in need.name or not need.name.startswith(("nvidia-", "cuda-")):
                needed.append(str(need))
        return needed, triton

    def _needed_by_hotbed(self, extra: str = "test") -> list[Requirement]:
        needs = [Requirement(line) for line in requires("hotbed") or []]
        here = {"python_version": self._python, "extra": extra}
        needs = [
            n for n in needs if n.name != "hotbed" and (not n.marker or n.marker.evaluate(here))
        ]
        for need in needs:
            need.marker = None
        return needs

    def _wheel(self) -> Path:
        built, shipped = self._folder / "built", self._folder / "shipped"
        self._pip("wheel", "--no-deps", ROOT, "--wheel-dir", built)
        (wheel,) = built.glob("*.whl")
        auditwheel = Path(sys.executable).parent / "auditwheel"
        run(auditwheel, "repair", "--exclude", "libgomp.so.1", "--wheel-dir", shipped, wheel)
        (wheel,) = shipped.glob("*.whl")
        return wheel


def python_of(version: str) -> Path | None:
    """The first Python of that version that runs: on the path, or one that pyenv or uv has installed."""
    places = [shutil.which(f"python{version}")]
    for pattern in (f".pyenv/versions/{version}.*", f".local/share/uv/python/cpython-{version}.*"):
        places += [str(found / "bin" / "python3") for found in sorted(Path.home().glob(pattern))]
    for place in filter(None, places):
        if subprocess.run([place, "-c", ""], capture_output=True, check=False).returncode == 0:
            return Path(place)
    return None


def stand_in_for_cuda(site: Path) -> None:
    """Puts a library beside torch for each that it links and that is not there. A program that calls
    one of their functions ends."""
    missing: set[str] = set()
    undefined: set[str] = set()
    version_of: dict[str, str] = {}
    for library in (site / "torch" / "lib").glob("*.so"):
        missing |= set(re.findall(r"(\S+) => not found", run("ldd", library)))
        undefined |= set(re.findall(r" U (\S+)", run("nm", "-D", "--undefined-only", library)))
        versions = run("readelf", "-VW", library)
        version_of |= re.findall(r"File: (\S+) .*\n.* Name: (\S+)", versions)
    for soname in sorted(missing - {"libcuda.so.1"}):  # which comes with a driver
        version = version_of.get(soname, "")
        family = re.sub(r"^lib|\.so.*", "", soname).lower()
        names = sorted(
            name.split("@")[0]
            for name in undefined
            if (
                name.endswith(f"@{version}")
                if version
                else name.lower().startswith(family) and "@" not in name
            )
        )
        code = site / "torch" / "lib" / f"{soname}.c"
        code.write_text("".join(f"void {name}(void) {{ __builtin_trap(); }}\n" for name in names))
        script = code.with_suffix(".map")
        script.write_text(f"{version} {{ global: *; }};\n")
        versioned = [f"-Wl,--version-script={script}"] if version else []
        made = code.with_suffix("")
        run("gcc", "-w", "-shared", "-fPIC", code, "-o", made, f"-Wl,-soname,{soname}", *versioned)


def run(*command: object, cwd: Path | None = None, check: bool = True) -> str:
    """What a command prints."""
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        check=check,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
