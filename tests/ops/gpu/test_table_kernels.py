"""Forward, backward and step over device planes together, against a dense twin in float64."""

import device_batches as batches
import pytest
import torch
from devices import DEVICE
from optim.rule_oracles import CASE_IDS, CASES, Case

from hotbed import _core
from hotbed.errors import InputError
from hotbed.ops.gpu.pool import FeatureSlots
from hotbed.ops.gpu.table_kernels import Step, TableKernels
from hotbed.ops.gpu.transpose import on_device
from hotbed.ops.gpu.update import DevicePlanes

SPECS = [(40, 8, torch.float32), (25, 12, torch.float32), (30, 3, torch.float32)]


def planes_of(case: Case, weights: torch.Tensor) -> DevicePlanes:
    rows, dim = weights.shape
    states = [
        torch.full((rows, 1 if one else dim), first, device=DEVICE)
        for _, one, first in _core.state_planes(case.core_options(), case.first)
    ]
    return DevicePlanes(weights=weights.clone(), states=states, key=11)


def features_of(weights, seed=0):
    return [
        batches.random_feature(weights, 0, 30, "mean", hot=0.5, padding=True, seed=seed),
        batches.random_feature(weights, 1, 30, "sum", fixed=2, weighted=True, seed=seed + 1),
        batches.random_feature(weights, 0, 30, "none", fixed=1, seed=seed + 2),
        batches.random_feature(weights, 2, 30, "sqrtn", fixed=3, hot=0.6, seed=seed + 3),
    ]


def steps_of(cases, step):
    return [Step(options=case.core_options(), hyper=case.core_hyper(), step=step) for case in cases]


NAMES = [
    ["sgd", "sgd", "sgd"],
    ["adam", "rowwise_adagrad", "adagrad"],
    ["rowwise_adam", "ftrl", "sgd_nesterov"],
]


@pytest.mark.parametrize("names", NAMES, ids="-".join)
def test_steps_follow_a_dense_twin(names):
    cases = [CASES[CASE_IDS.index(name)] for name in names]
    first = batches.planes(SPECS)
    fused = TableKernels([planes_of(c, w) for c, w in zip(cases, first, strict=True)])
    apart = TableKernels([planes_of(c, w) for c, w in zip(cases, first, strict=True)])
    twins = [torch.nn.Parameter(w.double().cpu()) for w in first]
    optimizers = [c.oracle([p], c.hyper["lr"]) for c, p in zip(cases, twins, strict=True)]
    for step in (1, 2):
        features = features_of(first, seed=10 * step)
        grads = [torch.randn(f.bags, SPECS[f.table][1], device=DEVICE) for f in features]
        expected = batches.gradient_rows([t.data for t in twins], features, grads)
        for kernels in (fused, apart):
            batch = kernels.forward(features)
            for feature, out in zip(features, batch.outputs, strict=True):
                truth = batches.pooled([t.data for t in twins], feature)
                assert (out.double().cpu() - truth).abs().max() < 1e-5
            terms = kernels.backward(batch, grads)
            kernels.update(terms, steps_of(cases, step), fused=kernels is fused)
        for twin, optimizer, rows, case in zip(twins, optimizers, expected, cases, strict=True):
            _lazy_step(twin, optimizer, rows, case)
    for mine, other, twin in zip(fused.tables, apart.tables, twins, strict=True):
        assert torch.equal(mine.weights, other.weights)
        error = (mine.weights.double().cpu() - twin.data).abs().max()
        assert error <= 2e-6 * twin.data.abs().max()
        for a, b in zip(mine.states, other.states, strict=True):
            assert torch.equal(a, b)


def _lazy_step(twin, optimizer, rows, case):
    """A dense step after which rows without a gradient are put back."""
    twin.grad = torch.zeros_like(twin)
    touched = torch.zeros(len(twin), dtype=torch.bool)
    for slot, row in rows.items():
        twin.grad[slot] = row
        touched[slot] = True
    planes = {"w": twin.data, **_states(optimizer, twin)}
    before = {name: plane.clone() for name, plane in planes.items()}
    optimizer.step()
    for name, plane in {"w": twin.data, **_states(optimizer, twin)}.items():
        first = case.first if name in ("sum", "accumulator") else 0.0
        plane[~touched] = before[name][~touched] if name in before else first


def _states(optimizer, twin):
    state = optimizer.state[twin]
    return {k: v for k, v in state.items() if torch.is_tensor(v) and v.dim() == 2}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_changes_no_table(fused, bad):
    cases = [CASES[CASE_IDS.index(name)] for name in ("adam", "rowwise_adagrad", "sgd")]
    weights = batches.planes(SPECS)
    kernels = TableKernels([planes_of(c, w) for c, w in zip(cases, weights, strict=True)])
    features = features_of(weights)
    batch = kernels.forward(features)
    grads = [torch.randn_like(out) for out in batch.outputs]
    flag = torch.ones(1, dtype=torch.int32, device=DEVICE)
    grads[1][3, 5] = bad
    kernels.update(kernels.backward(batch, grads), steps_of(cases, 1), fused=fused, apply=flag)
    assert flag.item() == 0
    assert all(torch.equal(t.weights, w) for t, w in zip(kernels.tables, weights, strict=True))
    grads[1][3, 5] = 1.0
    flag.fill_(1)
    kernels.update(kernels.backward(batch, grads), steps_of(cases, 1), fused=fused, apply=flag)
    assert flag.item() == 1
    assert not any(torch.equal(t.weights, w) for t, w in zip(kernels.tables, weights, strict=True))


def test_an_index_built_before_gives_the_same():
    case = CASES[CASE_IDS.index("adam")]
    weights = batches.planes(SPECS[:1])
    features = [batches.random_feature(weights, 0, 50, "sum", fixed=1, hot=0.7)]
    grads = [torch.randn(50, 8, device=DEVICE)]
    results = []
    for way in ("inside", "before", "host"):
        kernels = TableKernels([planes_of(case, weights[0])])
        index = None
        if way == "before":
            index = kernels.transpose(features)
        if way == "host":
            slots = features[0].slots.tolist()
            unique = list(dict.fromkeys(slots))
            groups = [[p for p, s in enumerate(slots) if s == slot] for slot in unique]
            starts = torch.tensor([0, *map(len, groups)]).cumsum(0)
            order = torch.tensor(sum(groups, []))
            index = on_device([torch.tensor(unique)], [starts], [order], DEVICE)
        batch = kernels.forward(features)
        kernels.update(kernels.backward(batch, grads, index), steps_of([case], 1))
        results.append(kernels.tables[0].weights)
    assert torch.equal(results[0], results[1])
    # The host numbers slots by first appearance, so chunks begin elsewhere.
    torch.testing.assert_close(results[0], results[2], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_outputs_and_gradients_of_16_bits(dtype):
    """As under autocast: rows and states stay float32."""
    case = CASES[CASE_IDS.index("sgd")]
    weights = batches.planes(SPECS)
    kernels = TableKernels([planes_of(case, w) for w in weights])
    features = features_of(weights)
    batch = kernels.forward(features, dtype)
    assert {out.dtype for out in batch.outputs} == {dtype}
    grads = [torch.randn(f.bags, SPECS[f.table][1]).to(dtype).to(DEVICE) for f in features]
    kernels.update(kernels.backward(batch, grads), steps_of([case] * 3, 1))
    expected = batches.gradient_rows(weights, features, grads)
    for table, before, rows in zip(kernels.tables, weights, expected, strict=True):
        truth = before.double().cpu()
        for slot, row in rows.items():
            truth[slot] -= 0.1 * row
        assert (table.weights.double().cpu() - truth).abs().max() < 1e-5


def test_rows_of_16_bits_are_rounded_alike_fused_or_not():
    case = CASES[CASE_IDS.index("adam")]
    weights = batches.planes([(40, 8, torch.bfloat16), (25, 12, torch.float16)])
    features = [
        batches.random_feature(weights, t, 20, "sum", fixed=2, hot=0.4, seed=t) for t in (0, 1)
    ]
    results = []
    for fused in (True, False):
        kernels = TableKernels([planes_of(case, w) for w in weights])
        batch = kernels.forward(features)
        terms = kernels.backward(batch, [torch.ones_like(o) for o in batch.outputs])
        kernels.update(terms, steps_of([case] * 2, 1), fused=fused)
        results.append([t.weights for t in kernels.tables])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(results[0], weights, strict=True))


def test_tables_without_a_step_stay():
    case = CASES[CASE_IDS.index("sgd")]
    weights = batches.planes(SPECS)
    kernels = TableKernels([planes_of(case, w) for w in weights])
    batch = kernels.forward(features_of(weights))
    terms = kernels.backward(batch, [torch.ones_like(out) for out in batch.outputs])
    (step,) = steps_of([case], 1)
    kernels.update(terms, [None, step, None])
    changed = [not torch.equal(t.weights, w) for t, w in zip(kernels.tables, weights, strict=True)]
    assert changed == [False, True, False]
    with pytest.raises(InputError, match="2 steps for 3 tables"):
        kernels.update(terms, [step, step])


def test_gradients_of_weights():
    case = CASES[CASE_IDS.index("sgd")]
    weights = batches.planes(SPECS)
    kernels = TableKernels([planes_of(case, w) for w in weights])
    features = features_of(weights)
    batch = kernels.forward(features)
    found = kernels.weight_gradients(batch, [torch.ones_like(out) for out in batch.outputs])
    assert [f is not None for f in found] == [False, True, False, False]
    rows = weights[1][features[1].slots].sum(1)
    torch.testing.assert_close(found[1], rows, rtol=1e-5, atol=1e-5)


def test_no_positions_at_all():
    case = CASES[CASE_IDS.index("adam")]
    kernels = TableKernels([planes_of(case, w) for w in batches.planes(SPECS[:1])])
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    batch = kernels.forward([FeatureSlots(table=0, slots=none)])
    flag = torch.ones(1, dtype=torch.int32, device=DEVICE)
    for fused in (True, False):
        terms = kernels.backward(batch, [batch.outputs[0]])
        kernels.update(terms, steps_of([case], 1), fused=fused, apply=flag)
    assert flag.item() == 1


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="counts waits of a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_step_does_not_wait_for_the_device():
    case = CASES[CASE_IDS.index("adam")]
    weights = batches.planes(SPECS)
    kernels = TableKernels([planes_of(case, w) for w in weights])
    features = features_of(weights)
    flag = torch.ones(1, dtype=torch.int32, device=DEVICE)

    def step(number):
        batch = kernels.forward(features)
        terms = kernels.backward(batch, batch.outputs)
        kernels.update(terms, steps_of([case] * 3, number), apply=flag)

    step(1)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
