"""Optimizer steps on device planes: against the core's bits, and dense oracles in float64."""

import dataclasses

import pytest
import torch
from devices import DEVICE
from optim.rule_oracles import CASE_IDS, CASES, Case, CoreTable, LazyOracle

from hotbed import _core
from hotbed.errors import InputError
from hotbed.ops.duplicates import sum_duplicates
from hotbed.ops.gpu.rules import COLUMN_RULES, rule_of
from hotbed.ops.gpu.update import DevicePlanes, RowsToUpdate, update

ROWS, STEPS = 40, 6
EXTRA = [
    Case("adam_plain_eps", "adam", CASES[CASE_IDS.index("adam")].hyper, {"plain_eps": True}),
    Case(
        "rowwise_adam_l2",
        "rowwise_adam",
        {**CASES[CASE_IDS.index("adam")].hyper, "weight_decay": 0.03},
        {"maximize": True},
    ),
    Case(
        "rmsprop_centered_momentum_small_alpha",
        "rmsprop",
        {"lr": 0.01, "alpha": 0.3, "eps": 1e-6, "momentum": 0.5},
        {"centered": True, "momentum": True},
    ),
    Case("ftrl_no_power", "ftrl", {"lr": 0.05, "lr_power": 0.0, "l2": 0.1}),
]
TO_THE_LAST_BIT = ("ftrl_power",)  # whose logarithm is the card's


class DeviceTable:
    """Weights and states of one table, updated by the kernels. As rule_oracles.CoreTable."""

    def __init__(self, case: Case, weights: torch.Tensor, key: int = 7) -> None:
        self.case = case
        rows, dim = weights.shape
        self.options = case.core_options()
        self.states = {
            name: torch.full((rows, 1 if one else dim), first, device=DEVICE)
            for name, one, first in _core.state_planes(self.options, case.first)
        }
        self.last_step = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
        self.weights = weights.clone().to(DEVICE)
        self.planes = DevicePlanes(
            weights=self.weights,
            states=list(self.states.values()),
            last_step=self.last_step,
            key=key,
        )
        self.step_count = 0

    def share(self, ids: torch.Tensor, grads: torch.Tensor, **changes: float) -> RowsToUpdate:
        ids, grads = sum_duplicates(ids, grads.float())
        self.step_count += 1
        return RowsToUpdate(
            planes=self.planes,
            options=self.options,
            hyper=self.case.core_hyper(**changes),
            step=self.step_count,
            slots=ids.to(DEVICE),
            grads=grads.to(DEVICE),
        )

    def step(self, ids: torch.Tensor, grads: torch.Tensor, **changes: float) -> None:
        update([self.share(ids, grads, **changes)])


def batches(dim, seed, steps=STEPS):
    """Ids with duplicates and gaps, and gradients of mixed scale."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        count = int(torch.randint(1, 2 * ROWS, (1,), generator=generator))
        ids = torch.randint(0, ROWS, (count,), generator=generator)
        scale = 10 ** (2 * torch.rand(count, 1, generator=generator) - 1.5)
        yield ids, torch.randn(count, dim, generator=generator) * scale


def first_weights(dim, dtype=torch.float32, rows=ROWS):
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(3)).to(dtype)


def assert_same_planes(device, core):
    rule = rule_of(device.options, device.case.core_hyper())
    pairs = [(device.weights, core.weights)]
    pairs += [(state, core.states[name]) for name, state in device.states.items()]
    for mine, theirs in pairs:
        assert mine.dtype == theirs.dtype
        if rule in TO_THE_LAST_BIT:
            torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(mine.cpu(), theirs)
    assert torch.equal(device.last_step.cpu(), core.last_step)


@pytest.mark.parametrize("dim", [10, 16])
@pytest.mark.parametrize("case", CASES, ids=CASE_IDS)
def test_float32_rows_agree_with_the_dense_oracle_and_the_core(case, dim):
    weights = first_weights(dim)
    table, core = DeviceTable(case, weights), CoreTable(case, weights)
    exact = LazyOracle(case, weights.double())
    for ids, grads in batches(dim, seed=dim):
        table.step(ids, grads)
        core.step(ids, grads)
        exact.step(ids, grads)
    truth = exact.parameter.detach()
    assert not torch.equal(truth, weights.double())
    assert (table.weights.cpu().double() - truth).abs().max() <= 1e-6 * truth.abs().max()
    error = (table.weights.cpu() - core.weights).abs().max()
    assert error <= 1e-6 * core.weights.abs().max()
    assert_same_planes(table, core)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=CASE_IDS)
def test_half_rows_are_rounded_with_the_bits_of_the_core(case, dtype):
    weights = first_weights(12, dtype)
    table, core = DeviceTable(case, weights), CoreTable(case, weights)
    for ids, grads in batches(12, seed=1, steps=3):
        table.step(ids, grads)
        core.step(ids, grads)
    if rule_of(table.options, case.core_hyper()) in TO_THE_LAST_BIT:
        apart = table.weights.cpu() != core.weights
        assert apart.double().mean() < 0.01
    else:
        assert_same_planes(table, core)
    assert not torch.equal(table.weights.cpu(), weights)


OPTIONS = [
    {},
    {"maximize": True},
    {"weight_decay": 0.04},
    {"weight_decay": 0.04, "maximize": True},
    {"weight_decay": 0.04, "decoupled_weight_decay": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o) or "plain")
@pytest.mark.parametrize("rule", [*COLUMN_RULES, "sgd_nesterov", "rowwise_adam_amsgrad"])
def test_every_rule_with_every_common_option_has_the_bits_of_the_core(rule, options):
    case = _case(rule, options)
    weights = first_weights(9)
    table, core = DeviceTable(case, weights), CoreTable(case, weights)
    for step, (ids, grads) in enumerate(batches(9, seed=5, steps=2)):
        table.step(ids, grads, lr=0.1 / (step + 1))
        core.step(ids, grads, lr=0.1 / (step + 1))
    assert_same_planes(table, core)


def _case(rule, options):
    """A case whose column rule is `rule`."""
    numbers = {
        "lr": 0.1, "momentum": 0.8, "dampening": 0.2, "beta1": 0.9, "beta2": 0.99, "alpha": 0.9,
        "eps": 1e-7, "lr_decay": 0.1, "l1": 0.02, "l2": 0.03, "l2_shrinkage": 0.04, "beta": 0.1,
    }  # fmt: skip
    flags = {}
    name = rule
    for flag in ("amsgrad", "nesterov", "momentum", "centered"):
        if f"_{flag}" in name:
            name = name.replace(f"_{flag}", "")
            flags[flag] = True
    if "nesterov" in flags:
        flags["momentum"] = True
    if name == "ftrl_power":
        name = "ftrl"
        numbers["lr_power"] = -0.3
    numbers |= {k: v for k, v in options.items() if not isinstance(v, bool)}
    flags |= {k: v for k, v in options.items() if isinstance(v, bool)}
    return Case(rule, name, numbers, flags, first=0.1)


@pytest.mark.parametrize("case", EXTRA, ids=lambda case: case.name)
def test_options_that_the_oracles_lack_have_the_bits_of_the_core(case):
    weights = first_weights(10)
    table, core = DeviceTable(case, weights), CoreTable(case, weights)
    for ids, grads in batches(10, seed=6, steps=3):
        table.step(ids, grads)
        core.step(ids, grads)
    assert_same_planes(table, core)


@pytest.mark.parametrize("dim", [1, 3, 64, 1025])
@pytest.mark.parametrize("name", ["rowwise_adagrad", "adam", "rowwise_adam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_dim(name, dim, dtype):
    case = CASES[CASE_IDS.index(name)]
    weights = first_weights(dim, dtype, rows=5)
    table, core = DeviceTable(case, weights), CoreTable(case, weights)
    ids, grads = torch.tensor([4, 0, 4, 2]), torch.randn(4, dim)
    for _ in range(2):
        table.step(ids, grads)
        core.step(ids, grads)
    assert_same_planes(table, core)


def test_rounding_bits_follow_key_and_id_and_not_the_slot():
    case = CASES[CASE_IDS.index("sgd")]
    weights = first_weights(12, torch.bfloat16)
    grads = torch.randn(ROWS, 12)
    ids = torch.randperm(ROWS) + 2**40
    key = 2**64 - 12345

    def run(order, key):
        table = DeviceTable(case, weights[order], key)
        table.planes = dataclasses.replace(table.planes, ids=ids[order].to(DEVICE))
        table.step(torch.arange(ROWS), grads[order])
        return table.weights.cpu()

    same, shuffled = torch.arange(ROWS), torch.randperm(ROWS)
    assert torch.equal(run(same, key)[shuffled], run(shuffled, key))
    assert not torch.equal(run(same, key), run(same, 5))
    core = CoreTable(case, weights, key)
    core.update.set_planes(core.weights.data_ptr(), [], ids.data_ptr(), 0)
    core.step(torch.arange(ROWS), grads)
    assert torch.equal(run(same, key), core.weights)


def test_nothing_changes_where_the_step_is_refused():
    for name in ("adam", "rowwise_adagrad"):
        table = DeviceTable(CASES[CASE_IDS.index(name)], first_weights(8))
        planes = [table.weights, table.last_step, *table.states.values()]
        before = [p.clone() for p in planes]
        apply = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        share = table.share(torch.tensor([1, 5]), torch.ones(2, 8))
        update([share], apply=apply)
        assert all(torch.equal(a, b) for a, b in zip(planes, before, strict=True))
        apply.fill_(1)
        update([share], apply=apply)
        assert not any(torch.equal(a, b) for a, b in zip(planes, before, strict=True))


@pytest.mark.parametrize("name", ["sgd_momentum", "rowwise_adam"])
def test_bounds_of_the_device_say_which_slots_are_updated(name):
    case = CASES[CASE_IDS.index(name)]
    weights = first_weights(8)
    table, core = DeviceTable(case, weights), CoreTable(case, weights)
    slots, grads = torch.tensor([3, 9, 4, 7, 1]), torch.randn(5, 8)
    share = dataclasses.replace(
        table.share(slots, grads), bounds=torch.tensor([1, 4], device=DEVICE)
    )
    update([share])  # slots 9, 4, 7 with the first three gradient rows
    core.step(slots[1:4], grads[:3])
    assert_same_planes(table, core)


def test_tables_of_different_rules_widths_and_dtypes_in_one_call():
    names = ["adam", "rowwise_adagrad", "sgd", "adam", "adam"]
    dims = [8, 33, 1, 12, 5]
    dtypes = [torch.float32, torch.float32, torch.float32, torch.float16, torch.bfloat16]
    tables, cores = [], []
    for name, dim, dtype in zip(names, dims, dtypes, strict=True):
        case, weights = CASES[CASE_IDS.index(name)], first_weights(dim, dtype)
        tables.append(DeviceTable(case, weights))
        cores.append(CoreTable(case, weights))
    shares = []
    for table, core, dim in zip(tables, cores, dims, strict=True):
        ids, grads = next(batches(dim, seed=dim))
        shares.append(table.share(ids, grads))
        core.step(ids, grads)
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    shares.append(
        dataclasses.replace(shares[0], slots=none, grads=torch.zeros(0, 8, device=DEVICE))
    )
    update(shares)
    for table, core in zip(tables, cores, strict=True):
        assert_same_planes(table, core)
    update([])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grads": torch.zeros(2, 9)}, r"gradient are torch.float32 \(2, 9\)"),
        ({"grads": torch.zeros(2, 8, dtype=torch.float16)}, "gradient are torch.float16"),
        ({"grads": None}, "needs gradient rows"),
        ({"slots": torch.zeros(2, dtype=torch.int32)}, "slots are torch.int32"),
        ({"bounds": torch.zeros(1, dtype=torch.int64)}, "bounds are"),
        ({"planes": "weights"}, "weights are torch.float64"),
        ({"planes": "states"}, "states exp_avg, exp_avg_sq, and 1 were given"),
        ({"planes": "last_step"}, "last_step are torch.int32"),
    ],
)
def test_refuses(change, message):
    table = DeviceTable(CASES[CASE_IDS.index("adam")], first_weights(8))
    share = table.share(torch.tensor([1, 5]), torch.ones(2, 8))
    if "planes" in change:
        wrong = {
            "weights": table.weights.double(),
            "states": list(table.states.values())[:1],
            "last_step": table.last_step.int(),
        }
        change = {
            "planes": dataclasses.replace(
                table.planes, **{change["planes"]: wrong[change["planes"]]}
            )
        }
    change = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in change.items()}
    with pytest.raises(InputError, match=message):
        update([dataclasses.replace(share, **change)])
