"""The segment sum against its definition: in float64, and in float32 to the bit."""

import device_batches as batches
import pytest
import torch
from devices import DEVICE
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.errors import InputError
from hotbed.ops.gpu import reduce as gpu
from hotbed.ops.gpu.chunks import CHUNK
from hotbed.ops.gpu.pool import FeatureSlots, pool
from hotbed.ops.gpu.terms import gradient_terms
from hotbed.ops.gpu.transpose import on_device, transpose


def backward(planes, features, grads, apply=None, index=None):
    """(terms, the gradient rows of each table) by the kernels."""
    inverses = [torch.empty(f.bags, device=DEVICE) if f.divided else None for f in features]
    pool(planes, features, inverses=inverses)
    index = index or transpose(features, [p.shape[0] for p in planes])
    terms = gradient_terms(index, features, grads, [p.shape[1] for p in planes], inverses)
    for sums in (terms.chunk_sums, terms.group_sums):
        sums.fill_(float("nan"))  # so that none is read which was not written
    gpu.sum_chunks(terms)
    return terms, gpu.reduce(terms, apply)


def assert_rows(index, rows, expected, tolerance=2e-6):
    starts = index.table_starts.tolist()
    for t, group in enumerate(expected):
        slots = index.slots[starts[t] : starts[t + 1]].tolist()
        assert sorted(slots) == sorted(group)
        for u, slot in enumerate(slots):
            error = (rows[t][u].double().cpu() - group[slot]).abs().max()
            assert error <= tolerance * max(1.0, float(group[slot].abs().max()))


@settings(max_examples=examples(20))
@given(
    dims=st.lists(st.sampled_from([1, 3, 4, 8, 10, 16, 33]), min_size=1, max_size=3),
    kinds=st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from(["sum", "mean", "sqrtn", "none"]),
            st.integers(0, 3),  # fixed
            st.booleans(),  # weighted
            st.booleans(),  # padding
            st.booleans(),  # takes part
        ),
        min_size=1,
        max_size=3,
    ),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    bags=st.integers(0, 40),
    hot=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 2**31),
)
def test_rows_are_what_they_are_defined_to_be(dims, kinds, dtype, bags, hot, seed):
    planes = batches.planes([(30, dim, torch.float32) for dim in dims], seed)
    features = [
        batches.random_feature(
            planes, table % len(dims), bags, combiner, fixed=fixed, weighted=weighted,
            padding=padding, hot=hot, seed=seed + f,
        )
        for f, (table, combiner, fixed, weighted, padding, _) in enumerate(kinds)
    ]  # fmt: skip
    grads = [
        torch.randn(f.bags, dims[f.table]).to(dtype).to(DEVICE) if kind[-1] else None
        for f, kind in zip(features, kinds, strict=True)
    ]
    terms, rows = backward(planes, features, grads)
    assert_rows(terms.index, rows, batches.gradient_rows(planes, features, grads), 1e-5)


@pytest.mark.parametrize("dim", [1, 3, 64, 130, 1028])
@pytest.mark.parametrize("uses", [31, 32, 33, 63, 64, 95, 1100])
def test_a_slot_that_many_positions_use(dim, uses):
    """With and without whole chunks, and groups of chunks."""
    uses = uses if dim < 100 else min(uses, 95)
    slots = torch.cat([torch.arange(7), torch.full((uses,), 9), torch.arange(10, 15)])
    slots = slots[torch.randperm(len(slots))].to(DEVICE)
    planes = batches.planes([(20, dim, torch.float32)])
    features = [FeatureSlots(table=0, slots=slots)]
    grads = [torch.randn(len(slots), dim, device=DEVICE)]
    terms, rows = backward(planes, features, grads)
    assert (terms.index.chunk_slots >= 0).sum() == uses // CHUNK
    assert_rows(terms.index, rows, batches.gradient_rows(planes, features, grads), 1e-5)


def running_sum(rows):
    total = torch.zeros_like(rows[0])
    for row in rows:
        total = total + row
    return total


def defined_sum(rows):
    """What the docstring of `reduce` says, in float32."""
    rows = list(rows)
    chunks = [running_sum(rows[k : k + CHUNK]) for k in range(0, len(rows) - CHUNK + 1, CHUNK)]
    whole = range(0, len(chunks) - CHUNK + 1, CHUNK)
    groups = [running_sum(chunks[k : k + CHUNK]) for k in whole]
    behind = chunks[len(groups) * CHUNK :] + rows[len(chunks) * CHUNK :]
    return running_sum(groups + behind)


def of_mixed_scale(n, dim):
    """Gradients whose sum tells in which order they were added."""
    return torch.randn(n, dim) * 10 ** (4 * torch.rand(n, 1))


@settings(max_examples=examples(6))
@given(
    counts=st.lists(
        st.sampled_from([1, 5, 31, 32, 33, 63, 64, 100, 1023, 1024, 1055, 1056, 2100, 3200]),
        min_size=1,
        max_size=4,
    ),
    dim=st.sampled_from([3, 4]),
    share=st.sampled_from([0.0, 0.3]),  # of other positions in the batch
    seed=st.integers(0, 2**31),
)
def test_bits_depend_on_nothing_but_the_slots_own_positions(counts, dim, share, seed):
    """However slots are numbered, and whatever lies beside them in the batch."""
    torch.manual_seed(seed)
    rows, tables = 20, 2
    users = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    users = users[torch.randperm(len(users))]
    own = of_mixed_scale(len(users), dim)
    parts = [own[users == user] for user in range(len(counts))]
    expected = [defined_sum(part) for part in parts]
    for part, row in zip(parts, expected, strict=True):
        exact = part.double()
        assert ((row - exact.sum(0)).abs() <= 1e-5 * exact.abs().sum(0)).all()
    planes = batches.planes([(rows, dim, torch.float32)] * tables)
    for _ in range(2):
        names = torch.randperm(rows)
        mine = torch.rand(int(len(users) * (1 + share))).argsort()[: len(users)].sort().values
        n = int(mine[-1]) + 1
        slots = names[torch.randint(len(counts), rows, (n,))]
        slots[torch.rand(n) < 0.3] = -1
        slots[mine] = names[users]
        grads = torch.randn(n, dim)
        grads[mine] = own
        beside = torch.randint(0, rows, (int(torch.randint(0, 100, ())),))
        features = [
            FeatureSlots(table=t, slots=s.to(DEVICE)) for t, s in enumerate((beside, slots))
        ]
        given_grads = [torch.randn(len(beside), dim).to(DEVICE), grads.to(DEVICE)]
        terms, found = backward(planes, features, given_grads)
        first, last = terms.index.table_starts.tolist()[1:]
        places = {slot: u for u, slot in enumerate(terms.index.slots[first:last].tolist())}
        for user, row in enumerate(expected):
            assert torch.equal(found[1][places[int(names[user])]].cpu(), row)


@pytest.mark.parametrize(
    "counts",
    [(0, 1024, 0), (1, 1024, 0), (33, 1023, 33), (993, 1024, 0), (1024, 1056, 1), (32, 2048, 0)],
)
def test_groups_at_either_end_of_the_order(counts):
    """The last group may have the number n // CHUNK²."""
    planes = batches.planes([(3, 4, torch.float32)])
    slots = torch.arange(3).repeat_interleave(torch.tensor(counts))
    grads = of_mixed_scale(len(slots), 4)
    features = [FeatureSlots(table=0, slots=slots.to(DEVICE))]
    _, rows = backward(planes, features, [grads.to(DEVICE)])
    for u, part in enumerate(part for part in grads.split(counts) if len(part)):
        assert torch.equal(rows[0][u].cpu(), defined_sum(part))


def test_groups_of_chunks_are_summed_once():
    """Long enough for whole groups, with neighbours on either side, in two tables."""
    slots = [
        torch.cat([torch.arange(40), torch.full((2500,), 40), torch.arange(41, 60)]),
        torch.cat([torch.full((2200,), 1), torch.arange(2, 9)]),
    ]
    planes = batches.planes([(60, 4, torch.float32), (9, 8, torch.float32)])
    features = [FeatureSlots(table=t, slots=s.to(DEVICE)) for t, s in enumerate(slots)]
    grads = [torch.ones(len(s), 4 * (t + 1), device=DEVICE) for t, s in enumerate(slots)]
    terms, rows = backward(planes, features, grads)
    starts = terms.index.table_starts.tolist()
    assert rows[0][:60, 0].tolist() == [1.0] * 40 + [2500.0] + [1.0] * 19
    assert rows[1][: starts[2] - starts[1], 7].tolist() == [2200.0] + [1.0] * 7


def test_few_uses_are_added_in_the_order_of_the_batch():
    """The same bits as a sum one after another in float32, which is the core's."""
    counts = torch.tensor([*range(1, 9), 31, 32, 33, 62, 63, 63, 32, 40])
    slots = torch.arange(len(counts)).repeat_interleave(counts)
    slots = slots[torch.randperm(len(slots))]
    planes = batches.planes([(40, 16, torch.float32)])
    grads = [of_mixed_scale(len(slots), 16).to(DEVICE)]
    terms, rows = backward(planes, [FeatureSlots(table=0, slots=slots.to(DEVICE))], grads)
    used = int(terms.index.table_starts[-1])
    for u, slot in enumerate(terms.index.slots[:used].tolist()):
        assert torch.equal(rows[0][u].cpu(), running_sum(grads[0].cpu()[slots == slot]))


def test_columns_of_a_wider_buffer_and_gradients_of_no_part():
    planes = batches.planes([(20, 8, torch.float32), (20, 12, torch.float32)])
    features = [
        batches.random_feature(planes, 0, 9, "sum", fixed=2),
        batches.random_feature(planes, 1, 9, "mean", seed=1),
        batches.random_feature(planes, 1, 9, "sum", seed=2),
    ]
    buffer = torch.randn(9, 8 + 12 + 12, device=DEVICE)
    first, second, _ = buffer.split([8, 12, 12], 1)
    grads = [first, second, None]
    terms, rows = backward(planes, features, grads)
    assert terms.vectors == (4, 4)
    assert_rows(terms.index, rows, batches.gradient_rows(planes, features, grads))


def test_gradients_that_lie_askew():
    planes = batches.planes([(20, 8, torch.float32)])
    features = [batches.random_feature(planes, 0, 9, "sum", fixed=2)]
    grads = [torch.randn(9, 13, device=DEVICE)[:, 3:11]]
    terms, rows = backward(planes, features, grads)
    assert terms.vectors == (1,)
    assert_rows(terms.index, rows, batches.gradient_rows(planes, features, grads))


def test_an_index_of_the_host_in_order_of_appearance():
    planes = batches.planes([(20, 8, torch.float32)])
    features = [batches.random_feature(planes, 0, 60, "mean", hot=0.6)]
    slots = features[0].slots.tolist()
    unique = list(dict.fromkeys(slots))
    groups = [[p for p, s in enumerate(slots) if s == slot] for slot in unique]
    starts = torch.tensor([0, *map(len, groups)]).cumsum(0)
    index = on_device(
        [torch.tensor(unique)], [starts], [torch.tensor(sum(groups, []))], torch.device(DEVICE)
    )
    grads = [torch.randn(60, 8, device=DEVICE)]
    terms, rows = backward(planes, features, grads, index=index)
    assert_rows(terms.index, rows, batches.gradient_rows(planes, features, grads), 1e-5)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_rows_that_are_not_finite_clear_the_flag(bad):
    planes = batches.planes([(20, 8, torch.float32), (20, 3, torch.float32)])
    features = [
        batches.random_feature(planes, t, 30, "sum", fixed=2, hot=0.7, seed=t) for t in (0, 1)
    ]
    grads = [torch.randn(30, d, device=DEVICE) for d in (8, 3)]
    apply = torch.ones(1, dtype=torch.int32, device=DEVICE)
    backward(planes, features, grads, apply)
    assert apply.item() == 1
    grads[1][17, 2] = bad
    backward(planes, features, grads, apply)
    assert apply.item() == 0
    backward(planes, features, [grads[0], grads[1] * 0 + 1], apply)
    assert apply.item() == 0  # stays until the owner sets it


def test_empty_batches():
    planes = batches.planes([(20, 8, torch.float32)])
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    _, rows = backward(
        planes, [FeatureSlots(table=0, slots=none)], [torch.zeros(0, 8, device=DEVICE)]
    )
    assert rows[0].shape == (0, 8)
    padding = torch.full((40,), -1, device=DEVICE)
    terms, _ = backward(
        planes, [FeatureSlots(table=0, slots=padding)], [torch.zeros(40, 8, device=DEVICE)]
    )
    assert terms.index.table_starts.tolist() == [0, 0]


def test_runs_give_the_same_bits():
    planes = batches.planes([(50, 16, torch.float32)])
    features = [batches.random_feature(planes, 0, 400, "mean", hot=0.4, weighted=True)]
    grads = [torch.randn(400, 16, device=DEVICE)]
    terms, first = backward(planes, features, grads)
    _, second = backward(planes, features, grads)
    used = int(terms.index.table_starts[-1])
    assert torch.equal(first[0][:used], second[0][:used])


@pytest.mark.parametrize(
    ("grad", "combiner", "message"),
    [
        (torch.zeros(3, 9), "sum", r"gradient of feature 0 is torch.float32 \(3, 9\)"),
        (torch.zeros(3, 8, dtype=torch.float64), "sum", "is torch.float64"),
        (torch.zeros(8, 3).t(), "sum", "columns lie side by side"),
        (torch.zeros(3, 8), "mean", "Pass the inverse"),
    ],
)
def test_refuses(grad, combiner, message):
    planes = batches.planes([(20, 8, torch.float32)])
    features = [batches.random_feature(planes, 0, 3, combiner, fixed=2)]
    index = transpose(features, [20])
    with pytest.raises(InputError, match=message):
        gradient_terms(index, features, [grad.to(DEVICE)], [8])


def test_refuses_mixed_dtypes():
    planes = batches.planes([(20, 8, torch.float32)])
    features = [batches.random_feature(planes, 0, 3, "sum", fixed=2, seed=s) for s in (0, 1)]
    grads = [torch.zeros(3, 8, device=DEVICE), torch.zeros(3, 8, device=DEVICE).half()]
    with pytest.raises(InputError, match="several dtypes"):
        gradient_terms(transpose(features, [20]), features, grads, [8])
