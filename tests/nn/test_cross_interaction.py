"""The cross network against its layers written out."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.errors import InputError, TableError
from hotbed.nn import CrossInteraction

FORMS = [("vector", None), ("matrix", None), ("matrix", 2)]


def naive(layer, x0):
    """One layer after the other, as the papers write them."""
    x = x0
    for position in range(layer.layers):
        weight = layer.weight[position]
        bias = 0 if layer.bias is None else layer.bias[position]
        if layer.form == "vector":
            x = x0 * (x @ weight).unsqueeze(-1) + bias + x
        else:
            inner = x if layer.inner is None else x @ layer.inner[position].T
            x = x0 * (inner @ weight.T + bias) + x
    return x


def made(dim, layers, form, rank, bias=True, dtype=torch.float64):
    layer = CrossInteraction(dim, layers, form, rank=rank, bias=bias, dtype=dtype)
    if layer.bias is not None:
        torch.nn.init.normal_(layer.bias)
    return layer


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), max_size=2),
    dim=st.integers(1, 7),
    layers=st.integers(1, 4),
    kind=st.sampled_from(FORMS),
    bias=st.booleans(),
)
def test_equals_the_layers_written_out(shape, dim, layers, kind, bias):
    layer = made(dim, layers, *kind, bias=bias)
    x = torch.randn(*shape, dim, dtype=torch.float64, requires_grad=True)
    out, expected = layer(x), naive(layer, x)
    assert out.shape == x.shape
    torch.testing.assert_close(out, expected)
    inputs = (x, *layer.parameters())
    given_ = torch.autograd.grad((out**2).sum(), inputs)
    torch.testing.assert_close(given_, torch.autograd.grad((expected**2).sum(), inputs))


@pytest.mark.parametrize("kind", FORMS)
def test_gradients_and_their_gradients(kind):
    layer = made(3, 2, *kind)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in layer.named_parameters()]

    def function(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), x)

    inputs = (x, *layer.parameters())
    torch.autograd.gradcheck(function, inputs)
    torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("kind", FORMS)
def test_float32_is_near_float64(kind):
    layer = made(200, 3, *kind, dtype=torch.float32)
    x = torch.randn(300, 200)
    expected = naive(copy.deepcopy(layer).double(), x.double())
    assert (layer(x) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("kind", FORMS)
def test_autocast_computes_in_its_dtype(kind):
    layer = made(16, 2, *kind, dtype=torch.float32)
    x = torch.randn(5, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
        again = layer(x.bfloat16())
    assert out.dtype == torch.bfloat16 and torch.equal(out, again)
    torch.testing.assert_close(out.float(), layer(x), rtol=0.1, atol=0.3)
    out.float().sum().backward()
    assert x.grad.dtype == torch.float32 and layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", FORMS)
def test_smaller_dtypes(kind, dtype):
    layer = made(16, 2, *kind, dtype=torch.float32)
    x = torch.randn(5, 16)
    out = copy.deepcopy(layer).to(dtype)(x.to(dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), layer(x), rtol=0.1, atol=0.3)


@pytest.mark.parametrize("kind", FORMS)
def test_state_dict(kind):
    layer, other = made(4, 2, *kind), made(4, 2, *kind)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(3, 4, dtype=torch.float64)
    assert torch.equal(layer(x), other(x))
    names = {"weight", "bias"} | ({"inner"} if kind[1] else set())
    assert set(layer.state_dict()) == names


def test_first_values():
    layer = CrossInteraction(10, 500, "matrix")
    bound = (6 / 20) ** 0.5
    assert 0.99 * bound < layer.weight.abs().max() <= bound and not layer.bias.any()
    vector = CrossInteraction(10, 500, "vector", bias=False)
    assert vector.weight.abs().max() <= (6 / 11) ** 0.5 and vector.bias is None
    before = layer.weight.clone()
    layer.reset_parameters()
    assert not torch.equal(layer.weight, before)
    assert "10, layers=500, form='matrix', bias=True" in repr(layer)


@pytest.mark.parametrize("kind", FORMS)
def test_compiles_as_one_graph(kind):
    torch._dynamo.reset()
    layer = made(5, 3, *kind, dtype=torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 5)
    torch.testing.assert_close(compiled(x), layer(x))
    one = torch.autograd.grad(compiled(x).sum(), list(layer.parameters()))
    other = torch.autograd.grad(layer(x).sum(), list(layer.parameters()))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 3), r"\(2, 3\).*\(…, 4\)"),
        (torch.tensor(1.0), r"\(\).*\(…, 4\)"),
        (torch.zeros(2, 4, dtype=torch.float64), "float64.*float32.*Cast"),
    ],
)
@pytest.mark.parametrize("kind", FORMS)
def test_refuses_inputs_that_do_not_fit(kind, x, message):
    with pytest.raises(InputError, match=message):
        made(4, 2, *kind, dtype=torch.float32)(x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 0}, "dim is 0"),
        ({"dim": None}, "dim is None"),
        ({"layers": True}, "layers is True"),
        ({"rank": -1}, "rank is -1"),
        ({"form": "tensor"}, "'tensor'.*'matrix' or 'vector'"),
        ({"form": "vector", "rank": 2}, "only matrices have a rank"),
    ],
)
def test_refuses_bad_settings(arguments, message):
    with pytest.raises(TableError, match=message):
        CrossInteraction(**{"dim": 4, **arguments})
