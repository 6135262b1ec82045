"""Compiles the GPU kernels in every variant, without a GPU, and tells registers and spills.

`python -m tools.gpu_variants [--arch 80 90] [--kernel NAME] [--first] [--json] [--write] [-j N]`

`--write` writes registers and spilled bytes of all to src/hotbed/ops/gpu/compiled.tsv.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "src" / "hotbed" / "ops" / "gpu" / "compiled.tsv"
ARCHITECTURES = (75, 80, 90)
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_WIDTHS = re.compile(r"\b(LDG|LDGSTS|STG)\.E(?:\.[A-Z0-9]+)*")


@dataclass
class Compiled:
    """One variant, compiled. `spills` are bytes of a thread's registers kept in memory."""

    position: int  # in all_variants()
    kernel: str
    key: str
    arch: int
    types: dict[str, str]
    constants: dict[str, str]
    num_warps: int
    num_stages: int
    registers: int = 0
    spills: int = 0
    shared: int = 0
    loads: dict[str, int] | None = None  # width in bits → global load instructions
    stores: dict[str, int] | None = None
    error: str = ""


def compile_one(position: int, arch: int) -> Compiled:
    """Compiles a variant of `all_variants()` for sm_`arch`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hotbed.ops.gpu.variants import all_variants

    variant = all_variants()[position]
    kernel = variant.kernel
    result = Compiled(
        position,
        variant.name,
        variant.key,
        arch,
        dict(variant.types),
        {name: str(value) for name, value in variant.constants.items()},
        variant.num_warps,
        variant.num_stages,
    )
    # What a launch will compile: its types are the annotations, its values are not looked at.
    for parameter in kernel.params:
        listed = variant.types.get(parameter.name, "*")
        if listed[0] == "*":
            continue
        if parameter.annotation_type != listed or not parameter.do_not_specialize:
            result.error = (
                f"{parameter.name} is listed as {listed}. Annotate it so, and name it in "
                "do_not_specialize."
            )
            return result
    signature = {
        name: "constexpr" if name in variant.constants else variant.types[name]
        for name in kernel.arg_names
    }
    aligned = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in variant.aligned
    }
    source = ASTSource(kernel, signature, dict(variant.constants), aligned)
    try:
        built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=variant.options)
    except Exception as error:
        result.error = f"{type(error).__name__}: {error}"[:2000]
        return result
    result.shared = int(built.metadata.shared)
    _read_binary(result, built.asm["cubin"])
    return result


def _read_binary(result: Compiled, cubin: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        code = _tool("cuobjdump", "-sass", file.name)
    found = _RESOURCES.search(usage)
    if found is None:
        result.error = f"cuobjdump told no registers: {usage[-500:]}"
        return
    result.registers = int(found[1])
    # What a kernel of ours has on its stack or in local memory is spilled: none has an array there.
    result.spills = int(found[2]) + int(found[4])
    result.loads, result.stores = _widths(code, "LDG", "LDGSTS"), _widths(code, "STG")


def _widths(code: str, *instructions: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for found in _WIDTHS.finditer(code):
        if found[1] in instructions:
            parts = found[0].split(".")
            width = next((p for p in ("128", "64", "U16", "S16", "U8", "S8") if p in parts), "32")
            width = width.lstrip("US")
            counts[width] = counts.get(width, 0) + 1
    return counts


def _tool(name: str, *arguments: str) -> str:
    from triton import knobs

    path = getattr(knobs.nvidia, name).path
    nvdisasm = os.path.dirname(knobs.nvidia.nvdisasm.path)
    environment = {**os.environ, "PATH": nvdisasm + os.pathsep + os.environ.get("PATH", "")}
    done = subprocess.run(
        [path, *arguments], capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout + done.stderr


def compile_all(
    positions: Sequence[int], architectures: Sequence[int], workers: int
) -> list[Compiled]:
    """Compiles variants in processes of their own; Triton keeps what it compiled (its cache)."""
    from hotbed.ops.gpu.variants import all_variants

    work = [
        (position, arch)
        for position in positions
        for arch in architectures
        if arch >= all_variants()[position].since
    ]
    if workers <= 1:
        return [compile_one(*one) for one in work]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, context) as pool:
        return list(pool.map(compile_one, *zip(*work, strict=True)))


def write_table(results: Sequence[Compiled]) -> None:
    """One line a variant: registers/bytes spilled for each architecture that it is meant for."""
    architectures = sorted({r.arch for r in results})
    heads = ["kernel", "types", "constants", "warps", "stages"]
    lines = [heads + [f"sm_{arch}" for arch in architectures]]
    for position in dict.fromkeys(r.position for r in results):
        mine = {r.arch: r for r in results if r.position == position}
        any_ = next(iter(mine.values()))
        types = " ".join(dict.fromkeys(v.lstrip("*") for v in any_.types.values() if "*" in v))
        constants = ", ".join(f"{k}={v}" for k, v in any_.constants.items() if v != "None")
        cells = [
            ""
            if a not in mine
            else "fails"
            if mine[a].error
            else f"{mine[a].registers}/{mine[a].spills}"
            for a in architectures
        ]
        about = [any_.kernel, types, constants, str(any_.num_warps), str(any_.num_stages)]
        lines.append(about + cells)
    TABLE.write_text("".join("\t".join(line) + "\n" for line in lines))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_variants", description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHITECTURES))
    parser.add_argument("--kernel", help="only variants of this kernel")
    parser.add_argument("--first", action="store_true", help="only the first variant of a kernel")
    parser.add_argument("--json", action="store_true", help="print everything that is known")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.relative_to(ROOT)}")
    parser.add_argument("-j", type=int, default=os.cpu_count() or 1, help="processes")
    chosen = parser.parse_args(arguments)
    os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels cannot be compiled

    from hotbed.ops.gpu.variants import all_variants

    positions: list[int] = []
    names: set[str] = set()
    for position, variant in enumerate(all_variants()):
        if chosen.kernel not in (None, variant.name) or (chosen.first and variant.name in names):
            continue
        names.add(variant.name)
        positions.append(position)
    results = compile_all(positions, chosen.arch, chosen.j) if positions else []
    if chosen.write:
        write_table(results)
    if chosen.json:
        print(json.dumps([asdict(result) for result in results]))
    else:
        show(results)
    return 1 if any(result.error for result in results) else 0


def show(results: Sequence[Compiled]) -> None:
    """Prints one line a result."""
    for result in results:
        row: dict[str, Any] = {"loads": result.loads, "stores": result.stores}
        print(
            result.error
            or f"sm_{result.arch} {result.registers:4} registers {result.spills:3} spills "
            f"{result.shared:6} shared  {row}",
            f"{result.kernel} {' '.join(dict.fromkeys(result.types.values()))} {result.constants}",
            f"{result.num_warps} warps, {result.num_stages} stages",
        )


if __name__ == "__main__":
    sys.exit(main())
