"""Changes a line at a time and runs the tests of it: make mutate, or python -m tools.mutate --help

A change that no test notices is printed as SURVIVED, with its line: it needs a test, or a reason. Works in
a copy of the tree under build/mutants.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import copy
import importlib
import multiprocessing
import os
import py_compile
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COPY = ROOT / "build" / "mutants"
LOG = ROOT / "build" / "mutants.log"
"""Output of the tests of the last change, with the stacks of a test that hangs."""
SECONDS = 600
"""For tests without a change."""

# Tests that are run for a change in a folder or file of src/hotbed, in this order, the longest name first.
TESTS = {
    "table": "test_embedding.py test_parameters.py test_collection.py test_collection_gradients.py "
    "test_gradients_in_use.py test_layers.py test_toy_place.py test_trace.py optim/test_clip.py "
    "optim/test_saving.py optim/test_fused.py checkpoint/test_single_tables.py resolve/test_lookup.py "
    "places/test_contains.py places/test_counts_in_memory.py test_group.py test_gradients.py "
    "test_table_owner.py optim/test_guards.py test_table_in_parts.py",
    **dict.fromkeys(
        ("table/copies", "table/locks"),
        "test_embedding.py test_parameters.py test_collection.py test_collection_in_torch.py "
        "test_table_owner.py test_threads_on_tables.py",
    ),
    "table/matrix": "conversion/test_weight_as_matrix.py test_weights_after_changes.py",
    "table/local": "dist/test_rows_by_id.py dist/test_local_changes.py",
    "ahead": "resolve/test_wait_counts.py resolve/test_refilled_batches.py "
    "resolve/test_lookahead_batches.py resolve/test_tier_counts.py resolve/test_lookahead_changes.py "
    "resolve/test_lookahead.py resolve/test_evaluation.py dist/test_lookahead_on_ranks.py",
    "group": "test_group.py test_embedding.py test_embedding_bag.py resolve/test_lookup.py "
    "test_collection.py test_collection_gradients.py test_gradients_in_use.py test_trace.py "
    "test_inputs.py test_layers.py test_toy_place.py resolve/test_hottest.py test_table_owner.py "
    "test_gradients.py test_threads_on_tables.py dist/test_sharded.py",
    "checkpoint": "checkpoint/test_files.py checkpoint/test_values.py checkpoint/test_single_tables.py "
    "checkpoint/test_names.py checkpoint/test_damage.py checkpoint/test_save_and_load.py "
    "checkpoint/test_half_loaded.py checkpoint/test_listing.py checkpoint/test_modes_of_torch.py "
    "checkpoint/test_made_again.py checkpoint/test_folders.py",
    **dict.fromkeys(
        ("checkpoint/deltas", "checkpoint/chain", "checkpoint/chain_rows", "checkpoint/merging"),
        "checkpoint/test_deltas.py checkpoint/test_bases.py checkpoint/test_damage.py "
        "checkpoint/test_folders.py cli/test_chains.py dist/test_deltas_together.py",
    ),
    **dict.fromkeys(
        ("checkpoint/ranks", "checkpoint/merge_columns"),
        "checkpoint/test_save_and_load.py checkpoint/test_listing.py checkpoint/test_shared_folders.py "
        "dist/test_saving_together.py",
    ),
    "checkpoint/new": "checkpoint/test_folders.py checkpoint/test_writers.py checkpoint/test_power_cuts.py "
    "checkpoint/test_no_room.py checkpoint/test_shared_folders.py",
    "checkpoint/stores": "checkpoint/test_object_storage.py checkpoint/test_leases.py "
    "checkpoint/test_folders.py checkpoint/test_no_room.py checkpoint/test_power_cuts.py",
    "checkpoint/inspect": "checkpoint/test_listing.py checkpoint/test_deltas.py cli/test_chains.py "
    "cli/test_cli.py",
    "checkpoint/models": "checkpoint/test_made_again.py checkpoint/test_save_and_load.py",
    "places": "test_placement.py test_embedding.py test_embedding_bag.py test_collection.py "
    "test_collection_gradients.py test_gradients_in_use.py test_trace.py resolve/test_lookup.py "
    "places/test_contains.py places/test_counts_in_memory.py optim/test_fused.py "
    "optim/test_optimizers.py optim/test_saving.py test_gradients.py optim/test_guards.py "
    "device/test_refused_steps.py",
    "places/tiered/folder": "resolve/test_folder.py dist/test_distribute.py",
    "places/tiered/linking": "checkpoint/test_linked.py",
    "places/tiered": "resolve/test_refilled_batches.py resolve/test_wait_counts.py resolve/test_hottest.py "
    "resolve/test_lookahead_batches.py resolve/test_tier_counts.py resolve/test_tiered_models.py "
    "resolve/test_extreme_sizes.py resolve/test_budget_advice.py resolve/test_tiered_gradients.py "
    "resolve/test_lookahead_changes.py resolve/test_small_budgets.py resolve/test_folder.py",
    **dict.fromkeys(
        ("places/device", "places/tiered_device", "places/by_kernels"),
        "device/test_side.py device/test_whole_tables.py device/test_refused_steps.py "
        "device/test_mixed_places.py device/test_in_torch.py device/test_device_tiers.py",
    ),
    "optim": "optim/test_arguments.py optim/test_clip.py optim/test_lazy_adam.py optim/test_untouched.py "
    "optim/test_fused.py optim/test_optimizers.py optim/test_saving.py optim/test_guards.py "
    "optim/test_options.py optim/test_rules.py",
    "modules": "test_embedding.py test_embedding_bag.py test_collection.py test_layers.py test_group.py "
    "test_table_owner.py checkpoint/test_names.py",
    "inputs": "test_inputs.py test_embedding_bag.py test_collection.py test_jagged.py",
    "dist": "dist/test_sharded.py dist/test_distribute.py dist/test_agreement.py dist/test_known_cases.py "
    "dist/test_uneven.py dist/test_rows_by_id.py dist/test_local_changes.py dist/test_saving_together.py "
    "dist/test_lookahead_on_ranks.py",
    **dict.fromkeys(
        (
            "dist/json_values",
            "dist/raw",
            "dist/wire",
            "dist/shared_memory",
            "dist/exchange",
            "dist/plan_arguments",
        ),
        "dist/test_values_between_ranks.py dist/test_wire.py dist/test_exchanged_messages.py "
        "dist/test_agreement.py dist/test_errors_of_codecs.py",
    ),
    **dict.fromkeys(
        ("dist/loaders", "dist/join"),
        "dist/test_uneven.py dist/test_loaders.py dist/test_out_of_step.py dist/test_habits.py "
        "dist/test_uneven_dense.py dist/test_join_errors.py",
    ),
    **dict.fromkeys(
        (
            "dist/costs",
            "dist/flows",
            "dist/grids",
            "dist/measured",
            "dist/measuring",
            "dist/rates",
            "dist/traffic",
        ),
        "dist/test_costs.py dist/test_flows.py dist/test_grids.py dist/test_measured.py dist/test_rates.py "
        "dist/test_traffic.py",
    ),
    "dist/row_codecs": "dist/test_new_codec.py dist/test_wire_forms.py dist/test_errors_of_codecs.py",
    "dist/participant": "dist/test_sharded.py dist/test_agreement.py dist/test_out_of_step.py "
    "dist/test_uneven.py dist/test_uneven_dense.py dist/test_alike_on_ranks.py dist/test_faults.py "
    "optim/test_guards.py",
    **dict.fromkeys(
        ("dist/declarations", "dist/handshake", "dist/long_work"),
        "dist/test_declarations.py dist/test_agreement.py dist/test_out_of_step.py "
        "dist/test_distribute.py",
    ),
    **dict.fromkeys(
        (
            "dist/plan_files",
            "dist/plan_table",
            "dist/planning",
            "dist/plans",
            "dist/strategies",
            "dist/sizes",
            "dist/remedies",
            "sharding",
        ),
        "dist/test_plans.py dist/test_strategies.py cli/test_plan.py",
    ),
    **dict.fromkeys(
        ("dist/gradients", "dist/clipping", "dist/merging", "dist/waiting", "dist/timeouts"),
        "dist/test_waiting.py dist/test_sharded.py dist/test_merging.py dist/test_uneven.py "
        "dist/test_scaling.py dist/test_out_of_step.py",
    ),
    **dict.fromkeys(
        ("dist/by_machine", "dist/machines", "dist/mixed_wire"),
        "dist/test_by_machine.py dist/test_exchanged_messages.py dist/test_rows_ahead_elsewhere.py",
    ),
    **dict.fromkeys(
        ("dist/hosts", "dist/hosts_ahead", "dist/served", "dist/serving"),
        "dist/test_memory_hosts.py dist/test_hosts_ahead.py dist/test_memory_host_errors.py "
        "dist/test_rows_ahead_elsewhere.py",
    ),
    **dict.fromkeys(
        ("dist/beside", "dist/prefetch", "dist/rounds", "dist/rows_ahead", "dist/rows_batch"),
        "dist/test_rows_ahead.py dist/test_rows_ahead_elsewhere.py dist/test_lookahead_on_ranks.py "
        "dist/test_owned_ahead.py dist/test_hosts_ahead.py dist/test_lookahead_attacks.py",
    ),
    **dict.fromkeys(
        ("dist/owned_ahead", "dist/whole_ahead", "dist/whole_batches"),
        "dist/test_owned.py dist/test_owned_ahead.py",
    ),
    **dict.fromkeys(
        ("dist/averaging", "dist/dense", "dist/distribute"),
        "dist/test_distribute.py dist/test_habits.py dist/test_alike_on_ranks.py",
    ),
    "serve": "serve/test_reading.py serve/test_bundles.py serve/test_what_is_not_served.py "
    "serve/test_standalone.py serve/test_quantized.py",
    **dict.fromkeys(
        (
            "serve/bundles/dense_weights",
            "serve/bundles/layers",
            "serve/bundles/manifests",
            "serve/bundles/versions",
            "serve/following",
        ),
        "serve/test_versions.py serve/test_following.py serve/test_following_server.py "
        "serve/test_bundles.py",
    ),
    **dict.fromkeys(
        (
            "serve/bundles/item_search",
            "serve/bundles/item_tower",
            "serve/exporting/item_vectors",
            "serve/http/topk",
        ),
        "serve/test_topk.py",
    ),
    "serve/following/followed_items": "serve/test_followed_items.py",
    "serve/http/paths": "serve/test_requests.py serve/test_record_requests.py serve/test_topk.py "
    "serve/test_openapi.py",
    "serve/http/server": "serve/test_requests.py serve/test_topk.py serve/test_following_server.py",
    "serve/http/rows": "serve/test_shards.py serve/test_batching.py serve/test_requests.py",
    "serve/grpc": "serve/test_grpc.py serve/test_grpc_server.py",
    "serve/http": "serve/test_batching.py serve/test_requests.py serve/test_record_requests.py "
    "serve/test_openapi.py serve/test_memory_group.py serve/test_server.py",
    "serve/shards": "serve/test_fetching.py serve/test_shards.py",
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
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    seen = set()
    for function in functions:
        # For readers and mypy, or to find a mistake of ours.
        idle = (
            n
            for n in ast.walk(function)
            if isinstance(n, ast.Assert) or isinstance(n, ast.keyword) and n.arg == "strict"
        )
        seen |= {id(part) for found in idle for part in ast.walk(found)}
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


def unknown() -> list[str]:
    """Return what TESTS and CPP name and the tree lacks."""
    names = {f"src/hotbed/{name}" for name in TESTS}
    names = {name for name in names if not any(files_of(name))}
    tests = {f"tests/{test}" for tests in TESTS.values() for test in tests.split()}
    tests |= {f"csrc/tests/{test}.cpp" for *_, tests_of_it in CPP for test in tests_of_it.split()}
    names |= {test for test in tests if not (ROOT / test).is_file()}
    return sorted(names) + [
        f"{before!r} once in {path}"
        for path, before, *_ in CPP
        if (ROOT / path).read_text().count(before) != 1
    ]


def files_of(name: str) -> list[Path]:
    """Return the Python files of a folder, or the one of a name without ending."""
    folder = ROOT / name
    return (
        sorted(folder.rglob("*.py"))
        if folder.is_dir()
        else [*folder.parent.glob(folder.name + ".py")]
    )


def tests_of(path: str) -> str:
    within = path.removeprefix("src/hotbed/").removesuffix(".py")
    return TESTS[max(name for name in TESTS if f"{within}/".startswith(f"{name}/"))]


class Tests:
    """Runs tests in processes that have imported torch when they begin."""

    def __init__(self) -> None:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # which Triton reads when torch imports it
        for module in ("torch.distributed", "torch._dynamo", "pytest"):
            importlib.import_module(module)
        # By their contents: a changed file may be as old, and as long, as the one before.
        mode = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(COPY / "src", quiet=1, invalidation_mode=mode)
        self._seconds: dict[str, float] = {}
        self._passed: dict[str, bool] = {}

    @property
    def failing(self) -> int:
        """How many of the lists of tests fail without a change."""
        return sum(not passed for passed in self._passed.values())

    def outcome(self, tests: str) -> str:
        """Return SURVIVED if all pass, "hung" if they take three times as long as without the change,
        "caught" otherwise."""
        passed = self._pass(tests, 15 + 3 * self._seconds[tests])
        return "hung    " if passed is None else "SURVIVED" if passed else "caught  "

    def pass_unchanged(self, tests: str) -> bool:
        """Return whether they pass without a change. Call before the first one."""
        if tests not in self._passed:
            began = time.monotonic()
            self._passed[tests] = bool(self._pass(tests, SECONDS))
            self._seconds[tests] = time.monotonic() - began
            if not self._passed[tests]:
                kept = LOG.with_name(f"unchanged-{len(self._passed)}.log")
                shutil.copy(LOG, kept)
                print(
                    f"FAILED, or took {SECONDS} s, without any change ({kept}): {tests}", flush=True
                )
        return self._passed[tests]

    def _pass(self, tests: str, seconds: float) -> bool | None:
        process = multiprocessing.get_context("fork").Process(target=_test, args=(tests.split(),))
        process.start()
        assert process.pid is not None
        process.join(seconds)
        hung = process.exitcode is None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)  # with what it has started
        process.join()
        return None if hung else process.exitcode == 0


def _test(tests: list[str]) -> None:
    os.setsid()
    log = os.open(LOG, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(log, number)
    os.chdir(COPY)
    os.environ.update(PYTHONPATH=str(COPY / "src"), PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    sys.path[:] = [str(COPY / "src"), *(path for path in sys.path if path != str(ROOT))]
    import pytest

    command = "-x -q -p no:cacheprovider -p no:xdist -o faulthandler_timeout=30".split()
    os._exit(pytest.main([*command, *(f"tests/{test}" for test in tests)]))


def of_python(count: int, seed: int, only: list[str]) -> int:
    files = sorted({file for name in TESTS for file in files_of(f"src/hotbed/{name}")})
    paths = [str(file.relative_to(ROOT)) for file in files]
    chosen = [path for path in paths if any(part in path for part in only)]
    found = [(path, mutant) for path in chosen for mutant in mutants((ROOT / path).read_text())]
    drawn = random.Random(seed).sample(found, min(count, len(found)))
    run = Tests()
    survivors = 0
    for path, (line, before, after, source) in sorted(drawn, key=lambda one: one[0]):
        tests = tests_of(path)
        if not run.pass_unchanged(tests):
            continue
        began = time.monotonic()
        (COPY / path).write_text(source)
        outcome = run.outcome(tests)
        (COPY / path).write_text((ROOT / path).read_text())
        survivors += outcome == "SURVIVED"
        told = f"{outcome} {time.monotonic() - began:4.0f} s {path}:{line}"
        print(f"{told}: {before}  ->  {after}", flush=True)
    return survivors + run.failing


def of_cpp() -> int:
    configure = ["cmake", "-S", ".", "-B", "build/tests", "-G", "Ninja", "-DHOTBED_TESTS=ON"]
    launcher = shutil.which("ccache")
    configure += [f"-DCMAKE_CXX_COMPILER_LAUNCHER={launcher}"] if launcher else []
    subprocess.run(configure, cwd=COPY, check=True, stdout=subprocess.DEVNULL)
    survivors = 0
    for path, before, after, tests in CPP:
        source = (ROOT / path).read_text()
        (COPY / path).write_text(source.replace(before, after))
        build = ["cmake", "--build", "build/tests", "--target", *tests.split()]
        subprocess.run(build, cwd=COPY, check=True, stdout=subprocess.DEVNULL)
        names = f"^({'|'.join(tests.split())})$"
        command = ["ctest", "--timeout", "60", "--test-dir", "build/tests", "-R", names]
        ran = subprocess.run(command, cwd=COPY, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        lives = ran.returncode == 0
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
    if gone := unknown():
        raise SystemExit(
            f"TESTS or CPP of tools/mutate.py name what is not there: {', '.join(gone)}"
        )
    shutil.rmtree(COPY, ignore_errors=True)
    shutil.copytree(ROOT, COPY, ignore=shutil.ignore_patterns("build", ".*", "__pycache__"))
    survivors = of_cpp() if given.cpp else of_python(given.count, given.seed, given.only)
    print(f"{survivors} survived, or could not be told")
    raise SystemExit(survivors > 0)


if __name__ == "__main__":
    main()
