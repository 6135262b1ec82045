"""Pool as an operation: the layout of its outputs and of the gradients it leaves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import hotbed as hb

ids = torch.tensor


def make(dims: list[int], rows: int | None = 50) -> hb.EmbeddingCollection:
    return hb.EmbeddingCollection([hb.Table(f"t{d}", d, rows) for d in dims], seed=0)


def test_outputs_are_columns_of_one_buffer() -> None:
    out = list(make([3, 1, 4])({f"t{d}": torch.arange(6) for d in (3, 1, 4)}).values())
    assert [v.stride() for v in out] == [(8, 1), (8, 1), (8, 1)]
    assert [v.storage_offset() for v in out] == [0, 3, 4]
    assert len({v.untyped_storage().data_ptr() for v in out}) == 1


def test_a_gradient_is_sparse_over_slots_in_order_of_appearance() -> None:
    collection = make([2], None)
    collection({"t2": ids([9, -4, 9])})
    collection({"t2": ids([5, 9, 5, -4])})["t2"].sum().backward()
    grad = collection.parameter("t2").grad
    assert grad is not None and grad.layout is torch.sparse_coo
    assert grad._indices().tolist() == [[2, 0, 1]]
    assert grad._values().tolist() == [[2, 2], [1, 1], [1, 1]]
    assert grad._values().dtype == torch.float32 and grad.shape == collection.parameter("t2").shape


@settings(max_examples=examples(40))
@given(
    dim=st.sampled_from((1, 3, 16, 17, 33, 64, 1025)),
    dtype=st.sampled_from((torch.float32, torch.float64, torch.float16, torch.bfloat16)),
    combiner=st.sampled_from(("sum", "mean", "sqrtn", "max")),
    threads=st.sampled_from((1, 2)),
    seed=st.integers(0, 1000),
)
def test_long_bags_of_few_rows(
    dim: int, dtype: torch.dtype, combiner: str, threads: int, seed: int
) -> None:
    """Many positions to a slot: what the random batches, which are short, do not reach."""
    torch.manual_seed(seed)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        collection = hb.EmbeddingCollection(
            [hb.Table("t", dim, 7, combiner, dtype, hb.init.Normal(0, 1))], seed=seed
        )
        lengths = torch.randint(0, 60, (20,))
        bags = hb.Jagged(torch.randint(0, 7, (int(lengths.sum()),)), lengths=lengths)
        out = collection({"t": bags})["t"]
        gradient = torch.randn_like(out)
        out.backward(gradient)
    finally:
        torch.set_num_threads(before)
    rows = collection.rows("t").values.double().requires_grad_()
    want = []
    for bag in bags:
        if not len(bag):
            want.append(torch.zeros(dim).double())
        elif combiner == "max":
            want.append(
                rows[bag].gather(0, torch.from_numpy(rows[bag].detach().numpy().argmax(0))[None])[0]
            )
        else:
            power = {"sum": 0.0, "mean": 1.0, "sqrtn": 0.5}[combiner]
            want.append(rows[bag].sum(0) / len(bag) ** power)
    expected = torch.stack(want)
    expected.backward(gradient.double())
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    grad = collection.parameter("t").grad
    assert grad is not None and rows.grad is not None
    torch.testing.assert_close(
        grad.coalesce().to_dense().double(), rows.grad, rtol=tolerance, atol=20 * tolerance
    )


@pytest.mark.parametrize("features", [1, 2])
def test_a_hot_id_is_summed_in_the_order_of_the_batch(
    features: int, set_threads: Callable[[int], None]
) -> None:
    """Half of a large batch is one id: the same bits as adding one after the other."""
    count, dim = 4000, 8
    names = {f"f{k}": "t" for k in range(features)}
    index = torch.where(torch.rand(count) < 0.5, 3, torch.randint(0, 1000, (count,)))
    gradients = [torch.randn(count, dim) for _ in names]
    want = torch.zeros(dim)
    for gradient in gradients:
        for row in gradient[index == 3]:
            want += row
    for threads in (1, 2):
        set_threads(threads)
        collection = hb.EmbeddingCollection([hb.Table("t", dim, 1000)], names, seed=0)
        out = collection(dict.fromkeys(names, index))
        torch.autograd.backward(list(out.values()), gradients)
        grad = collection.parameter("t").grad
        assert grad is not None
        at = grad._indices()[0].tolist().index(3)
        assert torch.equal(grad._values()[at], want)
