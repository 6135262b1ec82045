"""Changes a line at a time and runs the tests of it: make mutate, or python -m tools.mutate --help

A change that no test notices is printed as SURVIVED, with its line: it needs a test, or a reason. Works in
a copy of the tree under build/mutants.
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COPY = ROOT / "build" / "mutants"
SECONDS = 600
"""For the tests of one change; those that take longer hang."""

# Tests that are run for a change in a folder or file of src/hotbed, in this order, the longest name first.
TESTS = {
    "table": "test_gradients.py test_parameters.py test_collection.py test_table_owner.py "
    "test_embedding.py optim/test_guards.py optim/test_saving.py places/test_records.py",
    "ahead": "resolve/test_lookahead.py resolve/test_lookahead_batches.py "
    "resolve/test_lookahead_changes.py resolve/test_evaluation.py",
    "tiers": "resolve/test_lookahead.py resolve/test_tiered_models.py resolve/test_tier_counts.py "
    "resolve/test_ssd.py resolve/test_folder.py",
    "step": "optim/test_guards.py optim/test_fused.py optim/test_optimizers.py optim/test_untouched.py",
    "resolve": "test_collection.py test_collection_gradients.py test_embedding_bag.py "
    "resolve/test_lookup.py resolve/test_lookahead_batches.py optim/test_fused.py test_inputs.py",
    "checkpoint": "checkpoint/test_files.py checkpoint/test_values.py checkpoint/test_save_and_load.py "
    "checkpoint/test_folders.py checkpoint/test_made_again.py checkpoint/test_single_tables.py "
    "checkpoint/test_damage.py checkpoint/test_writers.py",
    "dist": "dist/test_sharded.py dist/test_distribute.py dist/test_agreement.py dist/test_known_cases.py "
    "dist/test_uneven.py dist/test_rows_by_id.py dist/test_local_changes.py dist/test_saving_together.py "
    "dist/test_lookahead_on_ranks.py",
    **dict.fromkeys(
        ("dist/codec", "dist/messages", "dist/raw", "dist/wire", "dist/shared_memory"),
        "dist/test_values_between_ranks.py dist/test_wire.py dist/test_agreement.py",
    ),
    **dict.fromkeys(
        ("dist/loaders", "dist/ending"),
        "dist/test_uneven.py dist/test_loaders.py dist/test_out_of_step.py dist/test_habits.py",
    ),
    **dict.fromkeys(
        ("dist/declarations", "dist/opening", "dist/long_work"),
        "dist/test_declarations.py dist/test_agreement.py dist/test_out_of_step.py "
        "dist/test_distribute.py",
    ),
    **dict.fromkeys(
        ("dist/plan", "dist/strategies", "dist/sizes", "dist/remedies", "dist/showing"),
        "dist/test_plans.py dist/test_strategies.py cli/test_plan.py",
    ),
    **dict.fromkeys(
        ("dist/gradients", "dist/merging", "dist/wait"),
        "dist/test_waiting.py dist/test_sharded.py dist/test_merging.py dist/test_uneven.py "
        "dist/test_scaling.py dist/test_out_of_step.py",
    ),
    **dict.fromkeys(
        ("dist/averaging", "dist/dense"), "dist/test_distribute.py dist/test_habits.py"
    ),
}

# File, what stands there, what is put in its place, and the C++ tests of it.
CPP = [
    (
        "csrc/index/key_index.cpp",
        "while (segment->keys >= full_)",
        "while (segment->keys > full_)",
        "key_index_test",
    ),
    (
        "csrc/log/log_format.cpp",
        "header.log == expected.log && ",
        "",
        "row_log_test row_log_crash_test row_log_faults_test",
    ),
    (
        "csrc/log/log_format.cpp",
        "same && header.count <= most",
        "same && header.count < most",
        "row_log_test",
    ),
    ("csrc/table/hold.cpp", "nested || lock->waiting == 0", "true", "hold_test"),
    ("csrc/table/hold.cpp", "if (lock->writing) return false;", "", "hold_test"),
    ("csrc/table/hold.cpp", "lock->readers = 1;", "lock->readers = 0;", "hold_test"),
    (
        "csrc/tiers/host_tier.cpp",
        "if (!moves.evicted_dirty[i]) continue;",
        "if (moves.evicted_dirty[i]) continue;",
        "host_tier_test row_space_test",
    ),
    ("csrc/tiers/host_tier.cpp", "return slot >= limit;", "return slot > limit;", "host_tier_test"),
    (
        "csrc/tiers/residency.cpp",
        "twice |= row.last - batch.first < static_cast<uint32_t>(n);",
        "",
        "residency_test",
    ),
    ("csrc/tiers/residency.cpp", "slots[i] >= used_ || ", "slots[i] > used_ || ", "residency_test"),
    (
        "csrc/tiers/top_uses.cpp",
        "of_leaving = std::max(of_leaving, leaves.uses);",
        "",
        "top_uses_test",
    ),
]

FLIPS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in a node's place."""
    other: Any = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        other.ops = [FLIPS[type(node.ops[0])]()]
        yield other
    elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
        other.test = ast.UnaryOp(ast.Not(), node.test)
        yield other
    elif isinstance(node, ast.BoolOp):
        other.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield other
    elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        other.value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield other
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        other.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        yield other
    elif isinstance(node, ast.Call) and len(node.args) > 1:
        if not any(isinstance(argument, ast.Starred) for argument in node.args[:2]):
            other.args[:2] = reversed(node.args[:2])
            yield other
    elif isinstance(node, ast.With) and not any(item.optional_vars for item in node.items):
        yield ast.If(ast.Constant(True), node.body, [])
    elif isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign)):
        if not isinstance(node.value, (ast.Constant, ast.Yield)):
            yield ast.Pass()


def mutants(source: str) -> Iterator[tuple[int, str, str, str]]:
    """(line, what stood there, what stands there, the whole source) for each change in functions."""
    tree = ast.parse(source)
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))
    seen = set()
    for function in functions:
        for parent in ast.walk(function):
            for field, value in ast.iter_fields(parent):
                if field in ("returns", "annotation", "decorator_list", "args") and not isinstance(
                    parent, ast.Call
                ):
                    continue
                for at, node in enumerate(value if isinstance(value, list) else [value]):
                    if not isinstance(node, ast.AST) or id(node) in seen:
                        continue
                    seen.add(id(node))
                    for other in changed(node):
                        ast.copy_location(other, node)
                        put(parent, field, at, other)
                        yield (
                            getattr(node, "lineno", 0),
                            line_of(node),
                            line_of(other),
                            ast.unparse(ast.fix_missing_locations(tree)),
                        )
                        put(parent, field, at, node)


def put(parent: ast.AST, field: str, at: int, node: ast.AST) -> None:
    if isinstance(getattr(parent, field), list):
        getattr(parent, field)[at] = node
    else:
        setattr(parent, field, node)


def line_of(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(node)).split("\n")[0][:90]


@functools.cache
def tests_of(path: str) -> tuple[str, ...]:
    """A command that runs them; they pass without a change."""
    within = path.removeprefix("src/hotbed/")
    (_, tests) = max((name, tests) for name, tests in TESTS.items() if within.startswith(name))
    return passing(tuple(f"tests/{test}" for test in tests.split()))


@functools.cache
def passing(tests: tuple[str, ...]) -> tuple[str, ...]:
    command = (sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests)
    if not survives(*command):
        raise SystemExit(f"They fail, or take {SECONDS} s, without any change: {' '.join(tests)}")
    return command


def survives(*command: str) -> bool:
    """Whether all tests pass; none of them may hang."""
    environment = {**os.environ, "PYTHONPATH": str(COPY / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command, cwd=COPY, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as tests:  # fmt: skip
        try:
            return tests.wait(SECONDS) == 0
        except subprocess.TimeoutExpired:
            os.killpg(tests.pid, 9)
            return False


def of_python(count: int, seed: int, only: list[str]) -> int:
    folders = {name.split("/")[0] for name in TESTS}
    files = [p for folder in folders for p in (ROOT / "src/hotbed" / folder).rglob("*.py")]
    paths = sorted(str(file.relative_to(ROOT)) for file in files)
    chosen = [path for path in paths if any(part in path for part in only)]
    found = [(path, mutant) for path in chosen for mutant in mutants((ROOT / path).read_text())]
    survivors = 0
    for path, (line, before, after, source) in random.Random(seed).sample(
        found, min(count, len(found))
    ):
        command = tests_of(path)
        (COPY / path).write_text(source)
        lives = survives(*command)
        (COPY / path).write_text((ROOT / path).read_text())
        survivors += lives
        print(
            f"{'SURVIVED' if lives else 'caught  '} {path}:{line}: {before}  ->  {after}",
            flush=True,
        )
    return survivors


def of_cpp() -> int:
    configure = ["cmake", "-S", ".", "-B", "build/tests", "-G", "Ninja", "-DHOTBED_TESTS=ON"]
    launcher = shutil.which("ccache")
    configure += [f"-DCMAKE_CXX_COMPILER_LAUNCHER={launcher}"] if launcher else []
    subprocess.run(configure, cwd=COPY, check=True, stdout=subprocess.DEVNULL)
    survivors = 0
    for path, before, after, tests in CPP:
        source = (ROOT / path).read_text()
        assert source.count(before) == 1, f"{path} has {before!r} {source.count(before)} times"
        (COPY / path).write_text(source.replace(before, after))
        build = ["cmake", "--build", "build/tests", "--target", *tests.split()]
        subprocess.run(build, cwd=COPY, check=True, stdout=subprocess.DEVNULL)
        names = f"^({'|'.join(tests.split())})$"
        lives = survives("ctest", "--timeout", "60", "--test-dir", "build/tests", "-R", names)
        (COPY / path).write_text(source)
        survivors += lives
        print(f"{'SURVIVED' if lives else 'caught  '} {path}: {before}  ->  {after}", flush=True)
    return survivors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60, help="changes in Python, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--only", default=["/"], nargs="+", help="folders or files of src/hotbed")
    parser.add_argument("--cpp", action="store_true", help="the list of changes in C++ instead")
    given = parser.parse_args()
    shutil.rmtree(COPY, ignore_errors=True)
    shutil.copytree(ROOT, COPY, ignore=shutil.ignore_patterns("build", ".*", "__pycache__"))
    survivors = of_cpp() if given.cpp else of_python(given.count, given.seed, given.only)
    print(f"{survivors} survived")
    raise SystemExit(survivors > 0)


if __name__ == "__main__":
    main()
