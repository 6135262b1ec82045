"""The row rules of the core against dense oracles in float64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from optim.rule_oracles import CASE_IDS, CASES, Case, CoreTable, LazyOracle

from hotbed import _core
from hotbed.ops.duplicates import sum_duplicates

ROWS, STEPS = 120, 20


def batches(rows: int, dim: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Ids with duplicates and gaps (a third of the rows is rare), and gradients of mixed scale."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        count = int(torch.randint(1, 2 * rows, (1,), generator=generator))
        ids = torch.randint(0, rows, (count,), generator=generator)
        rare = torch.rand(count, generator=generator) < 0.9
        ids = torch.where(rare, ids % (2 * rows // 3), ids)
        scale = 10 ** (2 * torch.rand(count, 1, generator=generator) - 1.5)
        yield ids, torch.randn(count, dim, generator=generator) * scale


def first_weights(rows: int, dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, dim, generator=generator).to(dtype)


@pytest.mark.parametrize("dim", [1, 10, 64])
@pytest.mark.parametrize("case", CASES, ids=CASE_IDS)
def test_float32_rows_agree_with_the_dense_oracle(case: Case, dim: int) -> None:
    weights = first_weights(ROWS, dim)
    table = CoreTable(case, weights)
    exact = LazyOracle(case, weights.double())
    torchs = LazyOracle(case, weights)
    for ids, grads in batches(ROWS, dim, seed=dim):
        table.step(ids, grads)
        exact.step(ids, grads)
        torchs.step(ids, grads)
    truth = exact.parameter.detach()
    ours = (table.weights.double() - truth).abs().max()
    theirs = (torchs.parameter.detach().double() - truth).abs().max()
    assert not torch.equal(truth, weights.double())
    assert ours <= 1e-6 * truth.abs().max()
    assert ours <= 2 * theirs


@pytest.mark.parametrize("case", CASES, ids=CASE_IDS)
def test_float64_rows_agree_with_the_dense_oracle(case: Case) -> None:
    weights = first_weights(ROWS, 17, torch.float64)
    table = CoreTable(case, weights)
    exact = LazyOracle(case, weights)
    for ids, grads in batches(ROWS, 17, seed=1):
        table.step(ids, grads.double())
        exact.step(ids, grads.double())
    torch.testing.assert_close(table.weights, exact.parameter.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("case", CASES, ids=CASE_IDS)
def test_same_bits_for_every_instruction_set_and_thread_count(
    case: Case, dtype: torch.dtype
) -> None:
    results = []
    for isa in ["base", "avx2", "avx512"]:
        if not _core.use_isa(isa):
            continue
        for threads in [1, 2, 5]:
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            try:
                table = CoreTable(case, first_weights(500, 37, dtype))
                for ids, grads in batches(500, 37, seed=2):
                    table.step(ids, grads)
            finally:
                torch.set_num_threads(before)
            planes = [table.weights, *table.states.values()]
            results.append(b"".join(p.contiguous().view(torch.uint8).numpy() for p in planes))
    _core.use_isa("best")
    assert len(results) >= 3
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("dim", [1, 3, 10, 16, 17, 64, 1025])
@pytest.mark.parametrize("name", ["rowwise_adagrad", "adam", "rowwise_adam"])
def test_any_dim(name: str, dim: int) -> None:
    case = CASES[CASE_IDS.index(name)]
    weights = first_weights(9, dim)
    table, exact = CoreTable(case, weights), LazyOracle(case, weights.double())
    for ids, grads in batches(9, dim, seed=dim):
        table.step(ids, grads)
        exact.step(ids, grads)
    truth = exact.parameter.detach()
    assert (table.weights.double() - truth).abs().max() <= 1e-6 * truth.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=CASE_IDS)
def test_half_rows_are_rounded_to_a_neighbour_without_bias(case: Case, dtype: torch.dtype) -> None:
    rows, dim = 300, 64
    weights = first_weights(rows, dim, dtype)
    half, full = CoreTable(case, weights), CoreTable(case, weights.float())
    ids = torch.randperm(rows, generator=torch.Generator().manual_seed(0))[: rows // 2]
    grads = torch.randn(len(ids), dim, generator=torch.Generator().manual_seed(1))
    half.step(ids, grads)
    full.step(ids, grads)
    for name, state in half.states.items():
        torch.testing.assert_close(state, full.states[name], rtol=0, atol=0)
    untouched = torch.ones(rows, dtype=torch.bool)
    untouched[ids] = False
    assert torch.equal(half.weights[untouched], weights[untouched])
    target = full.weights[ids].double()
    got = half.weights[ids]
    nearest = target.to(dtype)
    infinity = torch.full_like(nearest, float("inf"))
    below = torch.where(nearest.double() <= target, nearest, torch.nextafter(nearest, -infinity))
    above = torch.where(nearest.double() >= target, nearest, torch.nextafter(nearest, infinity))
    assert bool(((got == below) | (got == above)).all())
    unit = (above.double() - below.double()).clamp_min(1e-30)
    error = torch.where(above == below, 0.0, (got.double() - target) / unit)
    # A uniform error of one unit has a standard deviation below 0.5.
    assert abs(float(error.mean())) < 5 * 0.5 / error.numel() ** 0.5
    if case.rule != "ftrl":  # which may set whole rows to values that are representable
        assert float((got != nearest).double().mean()) > 0.05


def test_rounding_bits_depend_on_key_id_and_step_only() -> None:
    case = CASES[CASE_IDS.index("sgd")]
    weights = first_weights(64, 32, torch.bfloat16)
    grads = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))

    def run(order: torch.Tensor, slot_of_id: torch.Tensor, key: int = 7) -> torch.Tensor:
        table = CoreTable(case, weights[torch.argsort(slot_of_id)], key)
        ids = torch.argsort(slot_of_id)
        table.update.set_planes(table.weights.data_ptr(), [], ids.data_ptr(), 0)
        table.step(slot_of_id[order], grads[order])
        return table.weights[slot_of_id]

    same, shuffled = (
        torch.arange(64),
        torch.randperm(64, generator=torch.Generator().manual_seed(5)),
    )
    reference = run(same, same)
    assert torch.equal(run(shuffled, same), reference)
    assert torch.equal(run(same, shuffled), reference)
    assert not torch.equal(run(same, same, key=8), reference)


def test_last_step_is_written_for_touched_rows_only() -> None:
    case = CASES[CASE_IDS.index("adagrad")]
    table = CoreTable(case, first_weights(10, 4))
    table.step(torch.tensor([1, 3]), torch.ones(2, 4))
    table.step(torch.tensor([3, 7, 7]), torch.ones(3, 4))
    assert table.last_step.tolist() == [0, 1, 0, 2, 0, 0, 0, 2, 0, 0]


def test_several_tables_of_different_rules_and_widths_in_one_call() -> None:
    cases = [CASES[CASE_IDS.index(n)] for n in ["adam", "rowwise_adagrad", "sgd"]]
    dims = [8, 33, 1]
    together = [CoreTable(c, first_weights(50, d)) for c, d in zip(cases, dims, strict=True)]
    apart = [CoreTable(c, first_weights(50, d)) for c, d in zip(cases, dims, strict=True)]
    kept = []
    for alone, shared, case, dim in zip(apart, together, cases, dims, strict=True):
        ids, grads = next(batches(50, dim, seed=4))
        alone.step(ids, grads)
        ids, grads = sum_duplicates(ids, grads)
        kept.append((ids, grads))
        shared.update.hyper = case.core_hyper()
        shared.update.set_gradient(ids.data_ptr(), grads.data_ptr(), len(ids), 1)
    empty = CoreTable(cases[0], first_weights(5, 8))
    _core.update([empty.update, *[t.update for t in together]])
    for alone, shared in zip(apart, together, strict=True):
        assert torch.equal(alone.weights, shared.weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_first_non_finite_value_is_found(dtype: torch.dtype, bad: float) -> None:
    arrays = [torch.randn(n, dtype=dtype) for n in [10, 0, 70001, 5]]
    arrays[0][3] = torch.finfo(dtype).max

    def find() -> tuple[int, int]:
        return _core.find_non_finite(
            [(a.data_ptr(), a.numel(), dtype == torch.float64) for a in arrays]
        )

    assert find() == (-1, -1)
    arrays[3][4] = bad
    assert find() == (3, 4)
    arrays[2][70000] = bad
    arrays[2][33333] = bad
    assert find() == (2, 33333)
    arrays[0][0] = bad
    assert find() == (0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_duplicates_are_summed_in_order(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 2**40, (300,), generator=generator)[
        torch.randint(0, 300, (5000,), generator=generator)
    ]
    grads = torch.randn(5000, 7, dtype=dtype, generator=generator)
    unique, sums = sum_duplicates(ids, grads)
    order = list(dict.fromkeys(ids.tolist()))
    assert unique.tolist() == order
    expected = np.zeros((len(order), 7), dtype=grads.numpy().dtype)
    np.add.at(expected, [order.index(i) for i in ids.tolist()], grads.numpy())
    assert np.array_equal(sums.numpy(), expected)
    assert _core.has_duplicates(ids.data_ptr(), len(ids))
    assert not _core.has_duplicates(unique.data_ptr(), len(unique))
