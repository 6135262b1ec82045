"""The kernels of the cross interactions against the papers' formulas in float64."""

import copy

import pytest
import torch
from devices import DEVICE
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.errors import InputError
from hotbed.nn import CrossInteraction
from hotbed.ops import cross as either
from hotbed.ops.gpu.cross_matrix import cross_matrix, cross_matrix_backward
from hotbed.ops.gpu.cross_vector import cross_vector
from hotbed.ops.gpu.variants import MOST_LAYERS, launched

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
VECTOR_KERNELS = {"cross_vector_kernel", "cross_vector_backward_kernel"}
MATRIX_KERNELS = {"cross_matrix_kernel", "cross_gate_kernel"}


@pytest.fixture(autouse=True)
def tensor_cores(kernels_on_cpu):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def naive(layer, x0):
    x = x0
    for position in range(layer.layers):
        weight, bias = layer.weight[position], layer.bias[position]
        if layer.form == "vector":
            x = x0 * (x @ weight).unsqueeze(-1) + bias + x
        else:
            inner = x if layer.inner is None else x @ layer.inner[position].T
            x = x0 * (inner @ weight.T + bias) + x
    return x


def assert_near(actual, expected, tolerance):
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    assert actual.shape == expected.shape
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    assert actual.numel() == 0 or (actual - expected).abs().max() <= tolerance * scale


def check(batch, dim, layers, form, rank, dtype, kernels):
    layer = CrossInteraction(dim, layers, form, rank=rank)
    torch.nn.init.normal_(layer.bias)
    with torch.no_grad():  # so that all layers count
        layer.weight.mul_(0.5)
    x = torch.randn(batch, dim).to(dtype)
    exact = copy.deepcopy(layer).double()
    exact_x = x.double().requires_grad_()
    expected = naive(exact, exact_x)
    gradient = torch.randn(batch, dim).to(dtype)
    wanted = torch.autograd.grad(expected, (exact_x, *exact.parameters()), gradient.double())
    layer = layer.to(DEVICE)
    x = x.to(DEVICE).requires_grad_()
    tolerance = TOLERANCES[dtype] * (3 if DEVICE.type == "cuda" else 1)  # TF32
    with launched() as keys:
        with torch.autocast(DEVICE.type, dtype=dtype, enabled=dtype != torch.float32):
            out = layer(x)
        given_ = torch.autograd.grad(out, (x, *layer.parameters()), gradient.to(DEVICE))
    assert {key.split("(")[0] for key in keys} == kernels
    assert out.dtype == dtype
    assert_near(out, expected, tolerance)
    for one, other in zip(given_, wanted, strict=True):
        assert_near(one, other, tolerance * max(1, batch) ** 0.5)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("dim", [1, 3, 10, 64, 1025])
def test_vector_form_dims(dtype, dim):
    check(5, dim, 3, "vector", None, dtype, VECTOR_KERNELS)


@settings(max_examples=examples(20))
@given(
    batch=st.integers(0, 9),
    dim=st.integers(1, 40),
    layers=st.integers(1, MOST_LAYERS),
    dtype=st.sampled_from(list(TOLERANCES)),
)
def test_vector_form(batch, dim, layers, dtype):
    check(batch, dim, layers, "vector", None, dtype, VECTOR_KERNELS)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("batch", "dim", "rank"), [(3, 16, None), (70, 80, None), (9, 144, 32)])
def test_matrix_form(dtype, batch, dim, rank):
    check(batch, dim, 2, "matrix", rank, dtype, MATRIX_KERNELS)


def test_large_tiles():
    """The tile that large batches take, on a small batch."""
    x0, x, factor = torch.randn(3, 130, 144).to(DEVICE)
    weight, bias = torch.randn(144, 144).to(DEVICE) / 12, torch.randn(144).to(DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hotbed.ops.gpu.products._FULL", 1)
        with launched() as keys:
            out, gate = cross_matrix(x0, x, factor, weight, bias)
    assert all("ROWS=128" in key for key in keys)
    expected = factor.double() @ weight.double().T + bias.double()
    assert_near(gate, expected, 1e-5 if DEVICE.type == "cpu" else 1e-3)
    assert_near(out, x0.double() * expected + x.double(), 1e-5 if DEVICE.type == "cpu" else 1e-3)


@pytest.mark.parametrize(
    ("dim", "layers", "form", "kernels"),
    [
        (16, MOST_LAYERS + 1, "vector", set()),
        (10, 2, "matrix", set()),  # rows that begin anywhere: cuBLAS
    ],
)
def test_keeps_to_torch_where_no_kernel_fits(dim, layers, form, kernels):
    check(4, dim, layers, form, None, torch.float32, kernels)


def test_exact_products_are_torchs():
    torch.set_float32_matmul_precision("highest")
    check(4, 16, 2, "matrix", None, torch.float32, {"cross_gate_kernel"})


def test_empty_batches():
    check(0, 16, 2, "matrix", None, torch.float32, MATRIX_KERNELS)


@pytest.mark.parametrize("form", ["vector", "matrix"])
def test_is_the_same_from_run_to_run(form):
    layer = CrossInteraction(32, 3, form).to(DEVICE)
    x = torch.randn(70, 32).to(DEVICE).requires_grad_()
    one, other = (
        torch.autograd.grad((layer(x) ** 2).sum(), (x, *layer.parameters())) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("form", ["vector", "matrix"])
def test_the_gradient_can_be_differentiated(form):
    layer = CrossInteraction(16, 2, form).to(DEVICE)
    x = torch.randn(4, 16).to(DEVICE).requires_grad_()
    found = []
    for out in (layer(x), naive(layer, x)):
        first = torch.autograd.grad((out**2).sum(), x, create_graph=True)[0]
        found.append(torch.autograd.grad((first**2).sum(), (x, layer.weight)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("form", ["vector", "matrix"])
def test_compiles_as_one_graph(form):
    torch._dynamo.reset()
    layer = CrossInteraction(16, 2, form).to(DEVICE)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 16).to(DEVICE)
    with launched() as keys:
        out = compiled(x)
        given_ = torch.autograd.grad((out**2).sum(), list(layer.parameters()))
    kernels = VECTOR_KERNELS if form == "vector" else MATRIX_KERNELS
    assert {key.split("(")[0] for key in keys} == kernels
    torch.testing.assert_close(out, layer(x))
    wanted = torch.autograd.grad((layer(x) ** 2).sum(), list(layer.parameters()))
    torch.testing.assert_close(given_, wanted)


def test_operations_are_what_torch_expects():
    x0, x = torch.randn(2, 5, 16).to(DEVICE).requires_grad_().unbind()
    weight, bias = torch.randn(16, 16).to(DEVICE), torch.randn(16).to(DEVICE)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    arguments = (x0, x, x, weight.requires_grad_(), bias.requires_grad_())
    torch.library.opcheck(either.matrix_op, arguments, test_utils=checks)
    weight = torch.randn(2, 16).to(DEVICE).requires_grad_()
    arguments = (x0, weight, torch.randn(2).to(DEVICE).requires_grad_(), bias)
    torch.library.opcheck(either.vector_op, arguments, test_utils=checks)


def test_cpu_tensors_need_the_interpreter(monkeypatch):
    monkeypatch.setattr("hotbed.ops.gpu.variants.interpreted", lambda: False)
    x = torch.zeros(2, 16)
    for call in (
        lambda: cross_vector(x, x, x[0], x[0]),
        lambda: cross_matrix(x, x, x, x, x[0]),
        lambda: cross_matrix_backward(x, x, x),
    ):
        with pytest.raises(InputError, match="lie on cpu.*TRITON_INTERPRET"):
            call()
