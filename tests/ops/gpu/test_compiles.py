"""Every kernel in every variant compiles without a GPU, keeps its values in registers, loads wide.

Compiled by `tools.gpu_variants` in a process of its own: in this one kernels are interpreted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton
from effort import SOAK

from hotbed.ops.gpu.variants import all_variants

ROOT = Path(__file__).resolve().parents[3]
MOST_VARIANTS = 200
# What a block may take on every card from sm_80 on.
MOST_SHARED_BYTES = 99 << 10
# Kernels whose work is reading rows: loads are 16 bytes wide where rows allow it.
WIDE_LOADS = (
    "cross_gate_kernel",
    "cross_matrix_kernel",
    "cross_vector_backward_kernel",
    "cross_vector_kernel",
    "decode_half_kernel",
    "decode_int8_kernel",
    "encode_half_kernel",
    "encode_int8_kernel",
    "finish_kernel",
    "interact_backward_kernel",
    "interact_kernel",
    "linear_kernel",
    "masked_kernel",
    "masked_product_kernel",
    "pool_bags_kernel",
    "pool_copy_kernel",
    "reduce_kernel",
    "update_kernel",
)


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    arguments = [] if SOAK else ["--arch", "90", "--first"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-m", "tools.gpu_variants", "--json", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("["), done.stderr
    return json.loads(done.stdout)


def test_there_are_not_too_many_variants():
    keys = [variant.key for variant in all_variants()]
    assert len(set(keys)) == len(keys)
    assert len(keys) <= MOST_VARIANTS


def test_a_variant_names_every_argument_of_its_kernel():
    for variant in all_variants():
        named = {*variant.types, *variant.constants}
        assert named == set(variant.kernel.arg_names), variant.key
        assert not set(variant.types) & set(variant.constants), variant.key
        assert set(variant.aligned) <= set(variant.types), variant.key


def test_integers_are_64_bits_wide():
    """So that rows x dim may exceed 2**31, and no value makes another binary."""
    for variant in all_variants():
        integers = {v for v in variant.types.values() if v[0] in "iu"}
        assert integers <= {"i64"}, variant.key


@pytest.mark.process
def test_every_variant_compiles(compiled):
    assert {one["kernel"] for one in compiled} == {variant.name for variant in all_variants()}
    failed = {(one["key"], one["arch"]): one["error"] for one in compiled if one["error"]}
    assert failed == {}


@pytest.mark.process
def test_no_variant_spills(compiled):
    spills = {(o["key"], o["arch"]): o["spills"] for o in compiled if o["spills"]}
    if triton.__version__.startswith(
        "3.7."
    ):  # the oldest: one layer with dropout has no room for all
        assert all("linear_kernel" in key and "DROP=True" in key for key, _ in spills), spills
        assert len(spills) <= 3 and all(bytes <= 64 for bytes in spills.values())
    else:
        assert spills == {}


def wide(constants: dict[str, str]) -> bool:
    """Whether the variant is for rows that can be loaded so."""
    if "VECTOR" in constants:
        return int(constants["VECTOR"]) * int(constants.get("WIDTH", 4)) >= 16
    return constants.get("WIDE") != "False"


@pytest.mark.process
def test_rows_are_loaded_16_bytes_at_a_time(compiled):
    narrow = [
        (one["key"], one["arch"], one["loads"])
        for one in compiled
        if one["kernel"] in WIDE_LOADS and wide(one["constants"])
        if not one["loads"].get("128")
    ]
    assert narrow == []


@pytest.mark.process
def test_shared_memory_fits_every_card(compiled):
    assert {o["key"]: o["shared"] for o in compiled if o["shared"] > MOST_SHARED_BYTES} == {}
