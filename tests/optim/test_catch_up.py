"""untouched="exact": rows left alone for any number of steps against dense optimizers that step
every row with a zero gradient, under learning rate and momentum schedules."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optim.rule_oracles import CASE_IDS, CASES, DTYPES, Case, CoreTable

from hotbed import _core
from hotbed.ops.duplicates import sum_duplicates

ROWS = 40
STEPS = 400
SEED = 35
"""Of what is drawn: some rows are left alone for more steps than replay takes (237) and then met again."""


def refusal(case: Case) -> str:
    return str(_core.why_not_exact(case.core_options(), case.core_hyper()))


EXACT = [case for case in CASES if not refusal(case)]


def find(name: str) -> Case:
    return CASES[CASE_IDS.index(name)]


class ExactTable(CoreTable):
    """A table whose rows are caught up before they are used, and whose steps are recorded."""

    def __init__(self, case: Case, weights: torch.Tensor) -> None:
        super().__init__(case, weights)
        self.history = _core.History(case.core_options())
        self.longest_gap = 0

    def step(self, ids: torch.Tensor, grads: torch.Tensor, **changes: float) -> None:
        met = ids[self.last_step[ids] > 0]
        self.longest_gap = max(
            [self.longest_gap, *(self.step_count - self.last_step[met]).tolist()]
        )
        unique, _ = sum_duplicates(ids, grads.to(self.compute))
        self.update.set_gradient(unique.data_ptr(), 0, len(unique), 0)
        _core.catch_up(self.update, self.history)
        super().step(ids, grads, **changes)
        self.history.record(self.case.core_hyper(**changes))

    def caught_up_copy(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        weights = self.weights.clone()
        states = {name: state.clone() for name, state in self.states.items()}
        last_step = self.last_step.clone()
        rows = _core.RowUpdate()
        rows.options = self.case.core_options()
        rows.dim = weights.shape[1]
        rows.table_key = self.update.table_key
        rows.dtype = DTYPES[weights.dtype]
        rows.set_planes(
            weights.data_ptr(), [s.data_ptr() for s in states.values()], 0, last_step.data_ptr()
        )
        rows.set_gradient(0, 0, len(weights), 0)
        _core.catch_up(rows, self.history)
        assert last_step.tolist() == [self.history.steps] * len(weights)
        return weights, states


def schedule(kind: str, step: int, steps: int) -> float:
    if kind == "constant":
        return 1.0
    if kind == "warmup_cosine":
        warm = steps // 10
        if step < warm:
            return step / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))
    return 0.1 ** (step // (steps // 4))  # steps


def run(
    case: Case, steps: int, kind: str, dtype: torch.dtype, vary_momentum: bool = False
) -> tuple[ExactTable, torch.nn.Parameter, torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(SEED)
    weights = torch.randn(ROWS, 5, generator=generator).to(dtype)
    table = ExactTable(case, weights)
    parameter = torch.nn.Parameter(weights.clone())
    assert case.oracle is not None
    oracle = case.oracle([parameter], case.hyper["lr"])
    # Row r is met about every 1.3^r steps: some at each step, some once or never.
    chance = torch.tensor([1.3**-r for r in range(ROWS)])
    for step in range(steps):
        ids = torch.nonzero(torch.rand(ROWS, generator=generator) < chance)[:, 0]
        ids = torch.cat([ids, ids[: len(ids) // 3]])
        grads = torch.randn(len(ids), 5, generator=generator).to(dtype)
        grads[:, 2] *= 1e-7  # second moments near eps
        changes = {"lr": case.hyper["lr"] * schedule(kind, step, steps)}
        if case.rule == "ftrl":
            changes["lr"] += 1e-3
        for group in oracle.param_groups:
            group["lr"] = changes["lr"]
            if vary_momentum and "beta1" in case.hyper:
                changes["beta1"] = 0.85 + 0.1 * step / steps
                group["betas"] = (changes["beta1"], group["betas"][1])
            elif vary_momentum and "momentum" in case.hyper:
                changes["momentum"] = group["momentum"] = 0.7 + 0.2 * step / steps
        table.step(ids, grads, **changes)
        parameter.grad = torch.zeros_like(parameter).index_add_(0, ids, grads)
        oracle.step()
    return table, parameter, oracle


def planes_of(oracle: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> dict[str, Any]:
    return {
        k: v
        for k, v in oracle.state[parameter].items()
        if isinstance(v, torch.Tensor) and v.dim() == 2
    }


@pytest.mark.parametrize("kind", ["constant", "warmup_cosine", "steps"])
@pytest.mark.parametrize("case", EXACT, ids=[c.name for c in EXACT])
def test_float64_rows_follow_the_dense_optimizer(case: Case, kind: str) -> None:
    table, parameter, oracle = run(case, STEPS, kind, torch.float64)
    assert table.longest_gap > 237
    weights, states = table.caught_up_copy()
    # Replay leaves out less than 1e-9 of a learning rate a gap.
    tolerance = 1e-9 if case.rule in ("adam", "rowwise_adam", "adamax") else 1e-12
    torch.testing.assert_close(weights, parameter.detach(), rtol=0, atol=tolerance)
    for name, plane in planes_of(oracle, parameter).items():
        # The oracle of FTRL takes the difference of two powers.
        atol = 1e-11 if name == "linear" else 1e-18
        torch.testing.assert_close(states[name], plane, rtol=1e-9, atol=atol)


@pytest.mark.parametrize(
    "name", ["adam", "adamw", "adam_amsgrad", "adamax", "sgd_nesterov_l2", "rmsprop_momentum"]
)
def test_momentum_schedules(name: str) -> None:
    table, parameter, _ = run(find(name), STEPS, "warmup_cosine", torch.float64, vary_momentum=True)
    weights, _ = table.caught_up_copy()
    torch.testing.assert_close(weights, parameter.detach(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", EXACT, ids=[c.name for c in EXACT])
def test_float32_rows_follow_as_closely_as_the_dense_optimizer(case: Case) -> None:
    table, parameter32, _ = run(case, 300, "warmup_cosine", torch.float32)
    generator_twin = run_in_double(case, 300)
    weights, _ = table.caught_up_copy()
    ours = (weights.double() - generator_twin).abs().max()
    theirs = (parameter32.detach().double() - generator_twin).abs().max()
    assert ours <= 2 * theirs + 1e-6 * generator_twin.abs().max()


def run_in_double(case: Case, steps: int) -> torch.Tensor:
    """The dense optimizer in double on the float32 gradients that `run` draws."""
    generator = torch.Generator().manual_seed(SEED)
    parameter = torch.nn.Parameter(torch.randn(ROWS, 5, generator=generator).double())
    assert case.oracle is not None
    oracle = case.oracle([parameter], case.hyper["lr"])
    chance = torch.tensor([1.3**-r for r in range(ROWS)])
    for step in range(steps):
        ids = torch.nonzero(torch.rand(ROWS, generator=generator) < chance)[:, 0]
        ids = torch.cat([ids, ids[: len(ids) // 3]])
        grads = torch.randn(len(ids), 5, generator=generator)
        grads[:, 2] *= 1e-7
        for group in oracle.param_groups:
            group["lr"] = case.hyper["lr"] * schedule("warmup_cosine", step, steps)
            group["lr"] += 1e-3 if case.rule == "ftrl" else 0.0
        parameter.grad = torch.zeros_like(parameter).index_add_(0, ids, grads.double())
        oracle.step()
    return parameter.detach()


@pytest.mark.parametrize("case", EXACT, ids=[c.name for c in EXACT])
def test_reading_changes_nothing_and_agrees_with_writing(case: Case) -> None:
    for dtype in [torch.float32, torch.bfloat16]:
        table, _, _ = (
            run(case, 30, "constant", dtype)
            if dtype == torch.float32
            else (
                run_half(case),
                None,
                None,
            )
        )
        before = [p.clone() for p in [table.weights, *table.states.values(), table.last_step]]
        weights, states = table.caught_up_copy()
        after = [table.weights, *table.states.values(), table.last_step]
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        table.update.set_gradient(0, 0, ROWS, 0)
        _core.catch_up(table.update, table.history)
        assert torch.equal(table.weights, weights)
        for name, state in states.items():
            assert torch.equal(table.states[name], state)


def run_half(case: Case) -> ExactTable:
    generator = torch.Generator().manual_seed(5)
    table = ExactTable(case, torch.randn(ROWS, 5, generator=generator).bfloat16())
    for _ in range(6):
        ids = torch.randint(0, ROWS, (8,), generator=generator)
        table.step(ids, torch.randn(8, 5, generator=generator))
    return table


@pytest.mark.parametrize("name", ["adamw", "sgd_nesterov_l2", "rmsprop_momentum", "adamax"])
def test_same_bits_for_every_thread_count_and_instruction_set(name: str) -> None:
    results = []
    for isa in ["base", "avx2", "avx512"]:
        if not _core.use_isa(isa):
            continue
        for threads in [1, 4]:
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            try:
                generator = torch.Generator().manual_seed(1)
                table = ExactTable(find(name), torch.randn(400, 19, generator=generator))
                for _ in range(25):
                    ids = torch.randint(0, 400, (60,), generator=generator)
                    table.step(ids, torch.randn(60, 19, generator=generator))
                weights, states = table.caught_up_copy()
            finally:
                torch.set_num_threads(before)
            results.append(b"".join(p.numpy().tobytes() for p in [weights, *states.values()]))
    _core.use_isa("best")
    assert len(results) >= 2
    assert all(result == results[0] for result in results)


@settings(max_examples=40, deadline=None)
@given(
    runs=st.lists(st.tuples(st.integers(1, 5), st.floats(0.001, 0.5)), min_size=1, max_size=40),
    forget=st.integers(0, 60),
    data=st.data(),
)
def test_history_composes_any_gap(
    runs: list[tuple[int, float]], forget: int, data: st.DataObject
) -> None:
    case = find("sgd_dampening_l2_maximize")
    steps = [lr for count, lr in runs for _ in range(count)]
    touched = data.draw(st.integers(0, len(steps)))
    history = _core.History(case.core_options())
    weight, buffer = 0.75, 0.0
    momentum, dampening, l2 = (case.hyper[k] for k in ("momentum", "dampening", "weight_decay"))
    last = torch.zeros(1, dtype=torch.int64)
    planes = torch.tensor([[weight], [buffer]], dtype=torch.float64)
    for step, lr in enumerate(steps, start=1):
        if step - 1 == touched:
            planes[:, 0] = torch.tensor([weight, buffer], dtype=torch.float64)
            last[0] = touched
        history.record(case.core_hyper(lr=lr))
        buffer = momentum * buffer + (1 if step == 1 else 1 - dampening) * l2 * weight
        weight -= lr * buffer
    if touched == len(steps):
        planes[:, 0] = torch.tensor([weight, buffer], dtype=torch.float64)
        last[0] = touched
    history.forget(min(forget, touched))
    rows = _core.RowUpdate()
    rows.options = case.core_options()
    rows.dim = 1
    rows.dtype = DTYPES[torch.float64]
    rows.set_planes(planes.data_ptr(), [planes[1].data_ptr()], 0, last.data_ptr())
    rows.set_gradient(0, 0, 1, 0)
    _core.catch_up(rows, history)
    assert float(planes[0, 0]) == pytest.approx(weight, rel=1e-12)
    assert float(planes[1, 0]) == pytest.approx(buffer, rel=1e-11, abs=1e-15)


def test_equal_steps_take_one_run_of_the_history() -> None:
    case = find("adam")
    history = _core.History(case.core_options())
    for _ in range(1000):
        history.record(case.core_hyper())
    assert history.steps == 1000
    assert history.run_count == 1
    history.record(case.core_hyper(lr=0.5))
    assert history.run_count == 2
    history.forget(1000)
    assert history.run_count == 1


def test_what_is_refused_and_what_stays() -> None:
    assert "decoupled_weight_decay" in refusal(find("adam_l2_maximize"))
    assert "decoupled_weight_decay" in refusal(find("adagrad_options"))
    assert "l2_shrinkage" in refusal(find("ftrl_power_shrinkage"))
    adam = find("adam")
    slow = adam.core_hyper(beta1=0.99, beta2=0.9)
    assert "betas" in _core.why_not_exact(adam.core_options(), slow)
    stays = {c.name for c in EXACT if _core.untouched_rows_stay(c.core_options(), c.core_hyper())}
    assert stays == {"sgd", "sgd_maximize", "adagrad", "rowwise_adagrad"}
