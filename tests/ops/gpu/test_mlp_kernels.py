"""Layers with ReLU and dropout against float64, and dropout's bits against Philox written out."""

import copy

import numpy as np
import pytest
import torch
from devices import DEVICE
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hotbed.errors import InputError
from hotbed.nn import MLP
from hotbed.ops import mlp as either
from hotbed.ops.gpu import masks, mlp
from hotbed.ops.gpu.variants import launched

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
ON_CARD = 1 if DEVICE.type == "cpu" else 100  # TF32 has fewer bits than what interprets it


@pytest.fixture(autouse=True)
def tensor_cores(kernels_on_cpu):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def unpacked(bits, columns):
    places = torch.arange(8, device=bits.device)
    return ((bits[:, :, None] >> places) & 1).flatten(1)[:, :columns].bool()


def philox(counters, seed):
    """Four uint32 words for each 64-bit counter (Salmon et al., 2011, figure 2), 10 rounds."""
    low32 = np.uint64(0xFFFFFFFF)
    c = [
        counters & low32,
        counters >> np.uint64(32),
        np.zeros_like(counters),
        np.zeros_like(counters),
    ]
    key = [np.uint64(seed & 0xFFFFFFFF), np.uint64((seed >> 32) & 0xFFFFFFFF)]
    for _ in range(10):
        first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (second >> np.uint64(32)) ^ c[1] ^ key[0],
            second & low32,
            (first >> np.uint64(32)) ^ c[3] ^ key[1],
            first & low32,
        ]
        key = [(key[0] + np.uint64(0x9E3779B9)) & low32, (key[1] + np.uint64(0xBB67AE85)) & low32]
    return np.stack(c, -1)


def test_philox_written_out_gives_the_published_words():
    words = philox(np.zeros(1, np.uint64), 0)
    assert [hex(w) for w in words[0]] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]


def kept_by_philox(rows, columns, seed, dropout):
    groups = -(-columns // 4)
    counters = np.arange(rows * groups, dtype=np.uint64)
    words = philox(counters, seed % 2**64).reshape(rows, groups * 4)[:, :columns]
    return torch.from_numpy(words >= round(dropout * 2**32))


def assert_near(actual, expected, tolerance):
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    assert actual.shape == expected.shape
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    assert actual.numel() == 0 or (actual - expected).abs().max() <= tolerance * scale


# --- One kernel at a time. ---


@pytest.mark.parametrize("seed", [0, -1, 2**62 + 12345])
@pytest.mark.parametrize("columns", [1, 3, 10, 16, 130])
@pytest.mark.parametrize("dropout", [0.0, 0.3, 0.99])
def test_finish_keeps_what_philox_says(seed, columns, dropout):
    product = torch.randn(21, columns)
    expected = kept_by_philox(21, columns, seed, dropout) & (product > 0)
    values = product.to(DEVICE).clone()
    bits = masks.finish(values, torch.tensor([seed], device=DEVICE), dropout)
    assert torch.equal(unpacked(bits, columns).cpu(), expected)
    wanted = torch.where(expected, product / (1 - dropout), 0)
    torch.testing.assert_close(values.cpu(), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("rows", "columns"), [(0, 5), (1, 1), (17, 300), (33, 1025)])
def test_finish_and_masked(dtype, rows, columns):
    product = torch.randn(rows, columns).to(dtype).to(DEVICE)
    values = product.clone()
    bits = masks.finish(values, None, 0.0)
    assert torch.equal(values, product.relu())
    assert torch.equal(unpacked(bits, columns), product > 0)
    gradient = torch.randn(rows, columns).to(dtype).to(DEVICE)
    out, total = masks.masked(gradient, bits, 0.25)
    expected = torch.where(product > 0, gradient.double() / 0.75, 0)
    assert out.dtype == dtype and total.dtype == torch.float32
    assert_near(out, expected, TOLERANCES[dtype])
    assert_near(total, expected.sum(0), 1e-5)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("dropout", [None, 0.4])
@pytest.mark.parametrize(("rows", "inner", "columns"), [(5, 16, 16), (70, 80, 144), (130, 48, 208)])
def test_products_in_tiles(monkeypatch, large, dtype, dropout, rows, inner, columns):
    if large:
        monkeypatch.setattr("hotbed.ops.gpu.products._FULL", 1)
    x = torch.randn(rows, inner).to(dtype).to(DEVICE)
    weight = (torch.randn(columns, inner) / inner**0.5).to(dtype).to(DEVICE)
    bias = torch.randn(columns).to(dtype).to(DEVICE)
    seed = None if dropout is None else torch.tensor([7], device=DEVICE)
    with launched() as keys:
        out, bits = mlp.linear(x, weight, bias, seed, dropout or 0.0)
    assert all(("ROWS=128" in key) == (large and columns >= 128) for key in keys)
    exact = x.double() @ weight.double().T + bias.double()
    kept = unpacked(bits, columns)
    drawn = kept_by_philox(rows, columns, 7, dropout or 0.0).to(DEVICE)
    sure = exact.abs() > 1e-2
    assert torch.equal(kept & sure, (exact > 0) & drawn & sure)
    scale = 1 / (1 - (dropout or 0.0))
    assert_near(out, torch.where(kept, exact * scale, 0), TOLERANCES[dtype] * ON_CARD)

    gradient = torch.randn(rows, inner).to(dtype).to(DEVICE)
    back = (torch.randn(inner, columns) / inner**0.5).to(dtype).to(DEVICE)
    to_product, to_bias = mlp.masked_product(gradient, back, bits, dropout or 0.0)
    expected = torch.where(kept, gradient.double() @ back.double() * scale, 0)
    assert_near(to_product, expected, TOLERANCES[dtype] * ON_CARD)
    assert_near(to_bias, expected.sum(0), TOLERANCES[dtype] * ON_CARD)


# --- The module, which chooses the kernels by itself. ---


def rounded(values, dtype):
    """Rounded as the layers round, or a value near zero might pass ReLU in one of them only."""
    return values + (values.to(dtype).double() - values).detach()


def check(widths, final, dtype, rows, bias=True):
    layer = MLP(widths[0], widths[1:], final_activation=final, bias=bias)
    x = torch.randn(rows, widths[0])
    exact = copy.deepcopy(layer).double()
    exact_x = x.double().requires_grad_()
    expected = rounded(exact_x, dtype)
    for position, linear in enumerate(exact.layers):
        parameters = [
            None if p is None else rounded(p, dtype) for p in (linear.weight, linear.bias)
        ]
        expected = nn.functional.linear(expected, *parameters)
        if position < len(exact.layers) - 1 or final == "relu":
            expected = expected.relu()
        expected = rounded(expected, dtype)
    if final == "sigmoid":
        expected = expected.sigmoid()
    gradient = torch.randn(expected.shape)
    wanted = torch.autograd.grad(expected, (exact_x, *exact.parameters()), gradient.double())
    layer, x = layer.to(DEVICE), x.to(DEVICE).requires_grad_()
    with launched() as keys:
        with torch.autocast(DEVICE.type, dtype=dtype, enabled=dtype != torch.float32):
            out = layer(x)
        given_ = torch.autograd.grad(out.float(), (x, *layer.parameters()), gradient.to(DEVICE))
    tolerance = TOLERANCES[dtype] * ON_CARD * 2
    assert_near(out, expected, tolerance)
    for one, other in zip(given_, wanted, strict=True):
        assert one.dtype == torch.float32
        assert_near(one, other, tolerance * max(1, rows) ** 0.5)
    return {key.split("(")[0] for key in keys}


FUSED = {"linear_kernel", "masked_kernel", "masked_product_kernel"}
AFTER = {"finish_kernel", "masked_kernel"}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("final", [None, "relu", "sigmoid"])
def test_the_module_chooses_kernels(dtype, final):
    assert check([32, 48, 64, 16], final, dtype, 20) == FUSED
    assert check([16, 32, 1], final, dtype, 20) >= {"linear_kernel", "masked_kernel"}


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_inputs_of_odd_lengths_are_padded(dtype):
    assert check([13, 64, 32, 1], None, dtype, 20) == FUSED
    assert check([479 % 64, 32, 16], "relu", dtype, 20) == FUSED


def test_outputs_of_odd_lengths_are_multiplied_by_torch():
    assert check([13, 10, 7, 1], None, torch.float32, 20) == AFTER
    assert check([16, 32, 10, 48, 32, 1], None, torch.float16, 20) == AFTER | FUSED


def test_exact_products_are_torchs():
    torch.set_float32_matmul_precision("highest")
    assert check([16, 32, 16, 1], "relu", torch.float32, 20) == AFTER


@settings(max_examples=examples(15))
@given(
    widths=st.lists(st.sampled_from([1, 3, 10, 16, 48]), min_size=2, max_size=4),
    rows=st.integers(0, 20),
    final=st.sampled_from([None, "relu"]),
    dtype=st.sampled_from(list(TOLERANCES)),
    bias=st.booleans(),
)
def test_random_layers(widths, rows, final, dtype, bias):
    check(widths, final, dtype, rows, bias)


def test_the_gradient_of_an_odd_input_has_aligned_rows():
    x = torch.randn(5, 13).to(DEVICE).requires_grad_()
    (gradient,) = torch.autograd.grad(MLP(13, [16, 1]).to(DEVICE)(x).sum(), x)
    assert gradient.shape == (5, 13) and gradient.stride() == (16, 1)


def test_shapes_of_inputs():
    layer = MLP(16, [16, 3]).to(DEVICE)
    x = torch.randn(2, 5, 16).to(DEVICE)
    assert layer(x).shape == (2, 5, 3) and layer(x[0, 0]).shape == (3,)
    torch.testing.assert_close(layer(x)[1, 2], layer(x[1, 2]), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("widths", [(32, 32, 16, 16), (10, 10, 7, 5)])
def test_dropout(widths):
    layer = MLP(widths[0], widths[1:], final_activation="relu", dropout=0.5).to(DEVICE)
    x = torch.randn(64, widths[0]).to(DEVICE).requires_grad_()
    linears = list(layer.layers)
    torch.manual_seed(1)
    out = layer(x)
    torch.manual_seed(1)
    assert torch.equal(out, layer(x)) and not torch.equal(out, layer(x))
    # Written out with the masks that were drawn.
    torch.manual_seed(1)
    seeds = torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=DEVICE)
    expected = x.double()
    for position, linear in enumerate(linears):
        expected = nn.functional.linear(expected, linear.weight.double(), linear.bias.double())
        expected = expected.relu()
        if position < 2:
            drawn = kept_by_philox(64, linear.out_features, int(seeds[position]), 0.5)
            expected = expected * drawn.to(DEVICE) * 2
    assert_near(out, expected, 1e-5 * ON_CARD)
    inputs = (x, *layer.parameters())
    given_ = torch.autograd.grad((out**2).sum(), inputs)
    for one, other in zip(given_, torch.autograd.grad((expected**2).sum(), inputs), strict=True):
        assert_near(one, other, 1e-4 * ON_CARD)
    layer.eval()
    with launched() as keys:
        assert not torch.equal(layer(x), out)
    assert keys and not any("DROP=True" in key for key in keys)


def test_keeps_to_torch_where_no_kernel_fits():
    x = torch.randn(4, 16).to(DEVICE)
    hooked = MLP(16, [16, 16]).to(DEVICE)
    hooked.layers[0].register_forward_hook(lambda *_: None)
    others = [
        (MLP(16, [16, 16], activation="tanh").to(DEVICE), x),
        (MLP(16, [16]).to(DEVICE), x),
        (MLP(16, [16, 16]).to(DEVICE).double(), x.double()),
        (hooked, x),
    ]
    with launched() as keys:
        for layer, given_ in others:
            layer(given_).sum().backward()
    assert not keys


def test_is_the_same_from_run_to_run():
    layer = MLP(48, [64, 32, 1], final_activation=None).to(DEVICE)
    x = torch.randn(100, 48).to(DEVICE)
    one, other = (
        torch.autograd.grad((layer(x) ** 2).sum(), list(layer.parameters())) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("inputs", "dropout"), [(16, 0.0), (16, 0.5), (13, 0.0)])
def test_compiles_as_one_graph(inputs, dropout):
    torch._dynamo.reset()
    layer = MLP(inputs, [32, 16, 1], dropout=dropout).to(DEVICE)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(20, inputs).to(DEVICE).requires_grad_()
    torch.manual_seed(3)
    with launched() as keys:
        out = compiled(x)
        given_ = torch.autograd.grad((out**2).sum(), [x, *layer.parameters()])
    assert {key.split("(")[0] for key in keys} == FUSED
    torch.manual_seed(3)
    expected = layer(x)
    torch.testing.assert_close(out, expected)
    wanted = torch.autograd.grad((expected**2).sum(), [x, *layer.parameters()])
    torch.testing.assert_close(given_, wanted)


def test_operations_are_what_torch_expects():
    x = torch.randn(5, 16).to(DEVICE).requires_grad_()
    weights = [torch.randn(16, 16).to(DEVICE).requires_grad_() for _ in range(2)]
    biases = [torch.randn(16).to(DEVICE).requires_grad_() for _ in range(2)]
    seeds = torch.tensor([3], device=DEVICE)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(either.layers_op, (x, weights, biases, seeds, 0.5), test_utils=checks)


def test_training_goes_as_with_torch():
    """The losses of 30 steps with kernels and without stay together."""
    torch.manual_seed(0)
    with_kernels = MLP(16, [32, 32, 1]).to(DEVICE)
    without = copy.deepcopy(with_kernels)
    without.activation = nn.ReLU()
    x, y = torch.randn(64, 16).to(DEVICE), torch.randn(64, 1).to(DEVICE)
    losses = []
    for layer in (with_kernels, without):
        optimizer = torch.optim.Adam(layer.parameters(), 0.01)
        losses.append([])
        for _ in range(30):
            loss = nn.functional.mse_loss(layer(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0][-1] < 0.7 * losses[0][0]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3 * ON_CARD**0.5)


def test_cpu_tensors_need_the_interpreter(monkeypatch):
    monkeypatch.setattr("hotbed.ops.gpu.variants.interpreted", lambda: False)
    x, bits = torch.zeros(2, 16), torch.zeros(2, 2, dtype=torch.uint8)
    for call in (
        lambda: mlp.linear(x, x, x[0], None, 0.0),
        lambda: mlp.masked_product(x, x, bits, 0.0),
        lambda: masks.finish(x, None, 0.0),
        lambda: masks.masked(x, bits, 0.0),
    ):
        with pytest.raises(InputError, match="lie on cpu.*TRITON_INTERPRET"):
            call()
