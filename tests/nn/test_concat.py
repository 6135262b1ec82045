"""Joining vectors: torch.cat's results, without its copy where the vectors lie side by side."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotbed.errors import InputError
from hotbed.nn import concat
from hotbed.nn.concat import joined_view


def column_slices(buffer, dims):
    return list(buffer.split(dims, 1))


@given(
    batch=st.integers(0, 5),
    dims=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    left=st.integers(0, 2),
    right=st.integers(0, 2),
)
def test_neighbouring_columns_are_not_copied(batch, dims, left, right):
    buffer = torch.randn(batch, left + sum(dims) + right)
    vectors = column_slices(buffer, [left, *dims, right])[1:-1]
    joined = concat(vectors)
    assert torch.equal(joined, torch.cat(vectors, 1))
    if joined.numel():
        assert joined.storage_offset() == left
        assert joined.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


def test_anything_else_is_copied():
    buffer = torch.randn(4, 9)
    a, b, c = column_slices(buffer, [3, 3, 3])
    apart = [
        [a, c],
        [b, a],
        [a, a],
        [a, b.clone()],
        [a[:, ::2], b],
        [a[::2], b[:2]],
        [a, b.double()],
        [torch.randn(4, 3), torch.randn(4, 3)],
        [torch.zeros(1, 3).expand(4, 3), torch.zeros(4, 3)],
    ]
    for vectors in apart:
        assert joined_view(vectors) is None
        joined = concat(vectors)
        assert torch.equal(joined, torch.cat(vectors, 1))
        assert joined.data_ptr() not in {vector.data_ptr() for vector in vectors}


def test_takes_a_mapping_in_its_order():
    a, b = torch.randn(2, 3), torch.randn(2, 1)
    assert torch.equal(concat({"b": b, "a": a}), torch.cat([b, a], 1))


@pytest.mark.parametrize("shared", [True, False])
def test_gradients_are_column_slices(shared):
    leaf = torch.randn(4, 10, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 9, dtype=torch.float64)
    seen = []

    def vectors_of(x):
        parts = (x * 1.0).split([1, 3, 5, 1], 1)[:3]
        return parts if shared else [part.clone() for part in parts]

    vectors = vectors_of(leaf)
    for vector in vectors:
        vector.register_hook(seen.append)
    concat(vectors).mul(weight).sum().backward()
    assert torch.equal(leaf.grad[:, :9], weight) and (leaf.grad[:, 9] == 0).all()
    if shared:  # in the buffer of the incoming gradient, so their receiver can join them again
        assert joined_view(sorted(seen, key=lambda grad: grad.storage_offset())) is not None
    torch.autograd.gradcheck(lambda x: concat(vectors_of(x)), leaf)
    torch.autograd.gradgradcheck(lambda x: concat(vectors_of(x)) ** 2, leaf)


def test_some_vectors_need_no_gradient():
    buffer = torch.randn(4, 6)
    a, b = column_slices(buffer, [2, 4])
    assert not concat([a, b]).requires_grad
    b.requires_grad_()
    concat([a, b]).sum().backward()
    assert torch.equal(b.grad, torch.ones(4, 4)) and a.grad is None


def test_a_later_change_of_the_buffer_is_noticed_by_autograd():
    buffer = torch.randn(4, 6)
    a, b = (part.requires_grad_() for part in column_slices(buffer, [2, 4]))
    loss = (concat([a, b]) ** 2).sum()
    buffer.zero_()
    with pytest.raises(RuntimeError, match="has been modified inplace"):
        loss.backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_as_one_graph(backend):
    torch._dynamo.reset()
    leaf = torch.randn(4, 6, requires_grad=True)
    compiled = torch.compile(
        lambda x: concat(list(x.split([2, 4], 1))) * 2, fullgraph=True, backend=backend
    )
    out = compiled(leaf)
    out.sum().backward()
    assert torch.equal(out, leaf * 2)
    assert torch.equal(leaf.grad, torch.full((4, 6), 2.0))


def test_meta_tensors_have_shapes_only():
    assert concat([torch.empty(3, 2, device="meta"), torch.empty(3, 5, device="meta")]).shape == (
        3,
        7,
    )


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        ([], "no vectors"),
        ([torch.zeros(2, 3), torch.zeros(3, 3)], r"vector 1 has shape \(3, 3\).*B = 2"),
        ([torch.zeros(2, 3, 1)], r"vector 0 has shape \(2, 3, 1\)"),
        ([torch.zeros(())], r"vector 0 has shape \(\)"),
    ],
)
def test_refuses_shapes_that_do_not_fit(vectors, message):
    with pytest.raises(InputError, match=message):
        concat(vectors)
