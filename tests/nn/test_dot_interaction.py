"""The interaction against one dot product at a time in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.errors import InputError
from hotbed.nn import DotInteraction
from hotbed.ops import dot as module


def naive(dense, vectors, self_interaction=False):
    everything = [dense, *vectors]
    columns = [dense]
    for i, left in enumerate(everything):
        for right in everything[: i + self_interaction]:
            columns.append((left * right).sum(1, keepdim=True))
    return torch.cat(columns, 1)


def inputs(batch, count, dim, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(batch, dim, dtype=dtype, generator=generator)
    buffer = torch.randn(batch, count * dim, dtype=dtype, generator=generator)
    return dense.requires_grad_(), buffer.requires_grad_()


def as_kind(buffer, count, dim, kind):
    if kind == "stacked":
        return buffer.view(buffer.shape[0], count, dim)
    columns = [buffer[:, i * dim : (i + 1) * dim] for i in range(count)]
    if kind == "copies":
        return [column.clone() for column in columns]
    return columns if kind == "columns" else {f"f{i}": c for i, c in enumerate(columns)}


@settings(deadline=None)
@given(
    batch=st.integers(0, 7),
    count=st.integers(0, 6),
    dim=st.integers(1, 9),
    self_interaction=st.booleans(),
    kind=st.sampled_from(["stacked", "columns", "copies", "mapping"]),
    chunk=st.sampled_from([1, 3, 512]),
)
def test_equals_the_naive_products(batch, count, dim, self_interaction, kind, chunk):
    layer = DotInteraction(self_interaction)
    dense, buffer = inputs(batch, count, dim)
    columns = [buffer[:, i * dim : (i + 1) * dim] for i in range(count)]
    expected = naive(dense, columns, self_interaction)
    weight = torch.randn(expected.shape, dtype=expected.dtype)
    wanted = torch.autograd.grad((expected * weight).sum(), (dense, buffer), allow_unused=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK", chunk)
        actual = layer(dense, as_kind(buffer, count, dim, kind))
        given_ = torch.autograd.grad((actual * weight).sum(), (dense, buffer), allow_unused=True)
    assert actual.shape == (batch, layer.out_features(count, dim))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    for one, other in zip(given_, wanted, strict=True):
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    if count:
        assert all(gradient is not None for gradient in given_)


def test_order_is_the_lower_triangle_row_by_row():
    dense = torch.tensor([[1.0, 0, 0]])
    vectors = [torch.tensor([[2.0, 3, 0]]), torch.tensor([[5.0, 7, 11]])]
    assert DotInteraction()(dense, vectors).tolist() == [[1, 0, 0, 2, 5, 31]]
    assert DotInteraction(True)(dense, vectors).tolist() == [[1, 0, 0, 1, 2, 13, 5, 31, 195]]


@pytest.mark.parametrize("self_interaction", [False, True])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_gradients_and_their_gradients(self_interaction, count):
    layer = DotInteraction(self_interaction)
    dense, buffer = inputs(3, count, 2)

    def function(dense, buffer):
        return layer(dense, buffer.view(3, count, 2))

    torch.autograd.gradcheck(function, (dense, buffer))
    torch.autograd.gradgradcheck(function, (dense, buffer))


@pytest.mark.parametrize(("batch", "count", "dim"), [(512, 26, 16), (1030, 13, 33)])
def test_float32_is_as_exact_as_the_naive_sum(batch, count, dim):
    dense, buffer = inputs(batch, count, dim, torch.float32)
    vectors = as_kind(buffer, count, dim, "columns")
    expected = naive(dense.double(), [vector.double() for vector in vectors])
    assert (DotInteraction()(dense, vectors) - expected).abs().max() < 1e-4


def test_reads_neighbouring_columns_where_they_are(monkeypatch):
    dense, buffer = inputs(4, 3, 2)
    seen = []

    def apply(dense, vectors, self_interaction):
        seen.append(vectors)
        return dense

    monkeypatch.setattr(module._Interact, "apply", apply)
    DotInteraction()(dense, as_kind(buffer, 3, 2, "columns"))
    assert seen[0].data_ptr() == buffer.data_ptr()


def test_only_one_side_needs_a_gradient():
    dense, buffer = inputs(4, 3, 2)
    vectors = as_kind(buffer, 3, 2, "columns")
    DotInteraction()(dense.detach(), vectors).sum().backward()
    expected = torch.autograd.grad(naive(dense, vectors).sum(), buffer)[0]
    torch.testing.assert_close(buffer.grad, expected)
    frozen = [vector.detach() for vector in vectors]
    DotInteraction()(dense, frozen).sum().backward()
    torch.testing.assert_close(
        dense.grad, torch.autograd.grad(naive(dense, frozen).sum(), dense)[0]
    )


def test_mixed_dtypes_and_autocast():
    dense, buffer = inputs(5, 3, 4, torch.float32)
    vectors = as_kind(buffer, 3, 4, "columns")
    expected = naive(dense, vectors)
    assert DotInteraction()(dense.double(), vectors).dtype == torch.float64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = DotInteraction()(dense.bfloat16(), vectors)
    out.float().sum().backward()
    assert (out.float() - expected).abs().max() < 0.2
    assert buffer.grad.isfinite().all() and buffer.grad.dtype == torch.float32


def test_inference_mode_first_then_training():
    layer = DotInteraction()
    dense, buffer = inputs(2, 11, 3)
    module._kept_pairs.cache_clear()
    module._kept_matrix.cache_clear()
    vectors = as_kind(buffer, 11, 3, "columns")
    with torch.inference_mode():
        layer(dense, vectors)
    gradient = torch.autograd.grad(layer(dense, vectors).sum(), dense, create_graph=True)[0]
    gradient.sum().backward()


# The compiler looks at .grad of inputs that are not leaves and hides the warning, which pytest
# has made an error by then.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", ["stacked", "columns"])
def test_compiles_as_one_graph(backend, kind):
    torch._dynamo.reset()
    layer = DotInteraction()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    dense, buffer = inputs(4, 3, 5)
    out = compiled(dense, as_kind(buffer, 3, 5, kind))
    expected = layer(dense, as_kind(buffer, 3, 5, kind))
    torch.testing.assert_close(out, expected)
    one = torch.autograd.grad((out**2).sum(), (dense, buffer))
    other = torch.autograd.grad((expected**2).sum(), (dense, buffer))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("dense", "vectors", "message"),
    [
        (torch.zeros(4), [], r"dense vector has shape \(4,\)"),
        (torch.zeros(4, 2), [torch.zeros(4, 2), torch.zeros(4, 3)], r"vector 1 .*\(4, 3\).*dim 2"),
        (torch.zeros(4, 2), {"item": torch.zeros(3, 2)}, r"vector 'item' .*\(3, 2\)"),
        (torch.zeros(4, 2), torch.zeros(4, 3, 5), r"\(4, 3, 5\).*Pass \(4, F, 2\)"),
    ],
)
def test_refuses_shapes_that_do_not_fit(dense, vectors, message):
    with pytest.raises(InputError, match=message):
        DotInteraction()(dense, vectors)
