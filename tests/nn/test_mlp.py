"""The MLP against its layers written out."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hotbed.errors import TableError
from hotbed.nn import MLP, FeatureGate, TargetAttention

MODULES = {
    "relu": nn.ReLU(),
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
    "gelu": nn.GELU(),
    "silu": nn.SiLU(),
    "leaky_relu": nn.LeakyReLU(),
    None: nn.Identity(),
}


@settings(deadline=None)
@given(
    widths=st.lists(st.integers(1, 6), min_size=2, max_size=5),
    activation=st.sampled_from(list(MODULES)),
    final=st.sampled_from(list(MODULES)),
    bias=st.booleans(),
    shape=st.lists(st.integers(0, 4), max_size=2),
)
def test_equals_a_sequence_of_torch_modules(widths, activation, final, bias, shape):
    mlp = MLP(widths[0], widths[1:], activation, final, bias=bias).double()
    parts = []
    for layer in mlp.layers:
        parts += [layer, MODULES[activation]]
    plain = nn.Sequential(*parts[:-1], MODULES[final])
    x = torch.randn(*shape, widths[0], dtype=torch.float64, requires_grad=True)
    before = x.detach().clone()
    out, expected = mlp(x), plain(x)
    assert torch.equal(x, before)
    assert out.shape == (*shape, widths[-1]) and mlp.out_features == widths[-1]
    assert mlp.in_features == widths[0]
    torch.testing.assert_close(out, expected)
    inputs = (x, *mlp.parameters())
    torch.testing.assert_close(
        torch.autograd.grad((out**2).sum(), inputs),
        torch.autograd.grad((expected**2).sum(), inputs),
    )
    assert all((layer.bias is not None) == bias for layer in mlp.layers)


@pytest.mark.parametrize("activation", list(MODULES))
def test_gradcheck(activation):
    mlp = MLP(3, [4, 2], activation, activation).double()
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(mlp, x)


def test_dropout_is_for_training_and_inner_layers():
    torch.manual_seed(0)
    mlp = MLP(4, [1000, 1000], dropout=0.5, activation=None)
    x = torch.randn(3, 4)
    mlp.eval()
    assert torch.equal(mlp(x), mlp.layers[1](mlp.layers[0](x)))
    mlp.train()
    assert (mlp(x) != 0).all()  # the last layer's output is not dropped
    seen = []
    mlp.layers[1].register_forward_hook(lambda layer, args, out: seen.append(args[0]))
    mlp(x)
    assert 0.45 < (seen[0] == 0).float().mean() < 0.55


def test_a_module_may_be_the_activation():
    mlp = MLP(3, [4, 4, 1], nn.PReLU())
    assert "activation.weight" in mlp.state_dict()
    mlp(torch.randn(2, 3)).sum().backward()
    assert mlp.activation.weight.grad is not None


def test_copies_and_pickles():
    mlp = MLP(3, [4, 1], "relu", "sigmoid")
    x = torch.randn(2, 3)
    for other in (copy.deepcopy(mlp), pickle.loads(pickle.dumps(mlp))):
        assert torch.equal(other(x), mlp(x))
    other = MLP(3, [4, 1], "relu", "sigmoid")
    other.load_state_dict(mlp.state_dict())
    assert torch.equal(other(x), mlp(x))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_as_one_graph(backend):
    torch._dynamo.reset()
    mlp = MLP(3, [4, 4, 1], "relu", "sigmoid", dropout=0.5).eval()
    x = torch.randn(5, 3)
    compiled = torch.compile(mlp, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x), mlp(x))
    one = torch.autograd.grad(compiled(x).sum(), list(mlp.parameters()))
    other = torch.autograd.grad(mlp(x).sum(), list(mlp.parameters()))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": []}, r"layers is \[\]"),
        ({"layers": [4, 0]}, r"layers is \[4, 0\]"),
        ({"in_features": -1}, "in_features is -1"),
        ({"layers": [2.0]}, r"layers is \[2.0\]"),
        ({"layers": None}, "layers is None. Pass a positive integer for each layer"),
        ({"layers": [2**70]}, "layers is"),
        ({"in_features": 2**31}, "in_features is 2147483648"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"activation": "relo"}, "'relo' is unknown.*relu"),
        ({"final_activation": "x"}, "'x' is unknown"),
    ],
)
def test_refuses_bad_settings(arguments, message):
    with pytest.raises(TableError, match=message):
        MLP(**{"in_features": 3, **arguments})


@pytest.mark.parametrize("hidden", [None, 5, "ab", [2.5], [0], [2**40]])
@pytest.mark.parametrize("layer", [TargetAttention, FeatureGate])
def test_layers_with_an_mlp_refuse_bad_hidden_widths(layer, hidden):
    with pytest.raises(TableError, match=f"{layer.__name__}: hidden is .*Pass a positive integer"):
        layer(4, hidden=hidden)


def test_an_mlp_inside_may_have_no_hidden_layers():
    x = torch.randn(2, 4)
    assert FeatureGate(4, hidden=())(x).shape == (2, 4)
    attention = TargetAttention(4, hidden=[])
    assert attention(x, x[:, None], torch.ones(2, 1, dtype=torch.bool)).shape == (2, 4)
