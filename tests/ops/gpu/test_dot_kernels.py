"""The interaction's kernels against one dot product at a time in float64."""

import pytest
import torch
from devices import DEVICE
from effort import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hotbed.errors import InputError
from hotbed.nn import DotInteraction
from hotbed.ops import dot as either
from hotbed.ops.gpu import dot
from hotbed.ops.gpu.variants import launched

TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def naive(dense, vectors, self_interaction):
    everything = [dense, *vectors.unbind(1)]
    columns = [dense]
    for i, left in enumerate(everything):
        for right in everything[: i + self_interaction]:
            columns.append((left * right).sum(1, keepdim=True))
    return torch.cat(columns, 1)


def drawn(batch, count, dim, dtype) -> tuple[torch.Tensor, torch.Tensor]:
    dense = torch.randn(batch, dim).to(dtype)
    vectors = torch.randn(batch, count, dim).to(dtype)
    return dense, vectors


def assert_close(actual, expected, dtype, terms):
    bound = TOLERANCES[dtype] * max(1.0, expected.abs().max().item() if expected.numel() else 1.0)
    error = (actual.cpu().double() - expected).abs()
    assert actual.dtype == dtype and actual.shape == expected.shape
    assert error.numel() == 0 or error.max() <= bound * terms**0.5


def check(dense, vectors, self_interaction):
    dtype, dim = dense.dtype, dense.shape[1]
    exact = dense.double().requires_grad_(), vectors.double().requires_grad_()
    expected = naive(*exact, self_interaction)
    gradient = torch.randn(expected.shape).to(dtype)
    wanted = torch.autograd.grad(
        expected, exact, gradient.double(), allow_unused=True, materialize_grads=True
    )
    place = dense.to(DEVICE), vectors.to(DEVICE)
    assert_close(dot.interact(*place, self_interaction), expected.detach(), dtype, dim)
    to_dense, to_vectors = dot.interact_backward(gradient.to(DEVICE), *place, self_interaction)
    assert_close(to_dense, wanted[0], dtype, vectors.shape[1] + 1)
    assert_close(to_vectors, wanted[1], dtype, vectors.shape[1] + 1)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("self_interaction", [False, True])
@pytest.mark.parametrize("dim", [1, 3, 10, 16, 64, 128, 1025])
def test_dims(dtype, self_interaction, dim):
    check(*drawn(2, 5, dim, dtype), self_interaction)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("count", [0, 1, 15, 16, 26, 63])
def test_counts(dtype, count):
    check(*drawn(2, count, 16, dtype), False)


@settings(max_examples=examples(25))
@given(
    batch=st.integers(0, 4),
    count=st.integers(0, 20),
    dim=st.integers(1, 140),
    self_interaction=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCES)),
)
@example(batch=0, count=26, dim=128, self_interaction=False, dtype=torch.float32)
def test_random_shapes(batch, count, dim, self_interaction, dtype):
    check(*drawn(batch, count, dim, dtype), self_interaction)


@pytest.mark.parametrize("dim", [16, 10])
def test_reads_columns_of_a_wider_buffer(dim):
    buffer = torch.randn(3, 7 * dim)
    dense, vectors = buffer[:, :dim], buffer[:, 2 * dim : 6 * dim].view(3, 4, dim)
    check(dense, vectors, False)
    check(dense.t().contiguous().t(), vectors.transpose(1, 2).contiguous().transpose(1, 2), True)


def test_is_the_same_from_run_to_run():
    dense, vectors = (x.to(DEVICE) for x in drawn(4, 26, 32, torch.float32))
    gradient = torch.randn(4, 32 + 27 * 13, device=DEVICE)
    one, other = (dot.interact_backward(gradient, dense, vectors, False) for _ in range(2))
    assert torch.equal(dot.interact(dense, vectors, False), dot.interact(dense, vectors, False))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_tf32_is_chosen_by_torchs_setting():
    dense, vectors = (x.to(DEVICE) for x in drawn(1, 2, 16, torch.float32))
    before = torch.get_float32_matmul_precision()
    try:
        for setting, precision in (("highest", "ieee"), ("high", "tf32")):
            torch.set_float32_matmul_precision(setting)
            with launched() as keys:
                dot.interact(dense, vectors, False)
            assert all(f"PRECISION={precision}" in key for key in keys) and len(keys) == 1
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("dense", "vectors", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 4, 5), r"\(2, 3\).*\(2, 4, 5\)"),
        (torch.zeros(2, 3), torch.zeros(2, 3), "Pass"),
        (torch.zeros(2, 3).double(), torch.zeros(2, 1, 3).double(), "float64"),
        (torch.zeros(2, 3), torch.zeros(2, 1, 3).half(), "float16"),
        (torch.zeros(2, 3), torch.zeros(2, 64, 3), "64 vectors.*at most 63"),
    ],
)
def test_refuses(dense, vectors, message):
    with pytest.raises(InputError, match=message):
        dot.interact(dense.to(DEVICE), vectors.to(DEVICE), False)
    with pytest.raises(InputError, match=message):
        dot.interact_backward(dense.to(DEVICE), dense.to(DEVICE), vectors.to(DEVICE), False)


def test_refuses_a_gradient_of_another_shape():
    dense, vectors = (x.to(DEVICE) for x in drawn(2, 3, 4, torch.float32))
    with pytest.raises(InputError, match=r"\(2, 9\).*Pass \(2, 10\)"):
        dot.interact_backward(torch.zeros(2, 9, device=DEVICE), dense, vectors, False)


# --- The module, which chooses the kernel by itself. ---


def module_inputs(count=5, dim=8, dtype=torch.float32):
    dense, vectors = (x.to(DEVICE) for x in drawn(3, count, dim, dtype))
    return dense.requires_grad_(), vectors.requires_grad_()


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize("self_interaction", [False, True])
def test_the_module_chooses_the_kernel(self_interaction):
    dense, vectors = module_inputs()
    with launched() as keys:
        out = DotInteraction(self_interaction)(dense, vectors)
        given = torch.autograd.grad((out**2).sum(), (dense, vectors))
    assert {key.split("(")[0] for key in keys} == {"interact_kernel", "interact_backward_kernel"}
    expected = naive(dense, vectors, self_interaction)
    wanted = torch.autograd.grad((expected**2).sum(), (dense, vectors))
    torch.testing.assert_close((out, *given), (expected, *wanted), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize(("count", "dtype"), [(64, torch.float32), (5, torch.float64)])
def test_the_module_keeps_to_torch_where_no_kernel_fits(count, dtype):
    dense, vectors = module_inputs(count, 4, dtype)
    with launched() as keys:
        out = DotInteraction()(dense, vectors)
        out.sum().backward()
    assert not keys
    torch.testing.assert_close(out, naive(dense, vectors, False), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("kernels_on_cpu")
def test_the_gradient_can_be_differentiated():
    dense, vectors = module_inputs()
    found = []
    for out in (DotInteraction()(dense, vectors), naive(dense, vectors, False)):
        first = torch.autograd.grad((out**2).sum(), (dense, vectors), create_graph=True)
        found.append(torch.autograd.grad(sum((g**2).sum() for g in first), (dense, vectors)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype):
    dense, vectors = module_inputs()
    with torch.autocast(DEVICE.type, dtype=dtype):
        out = DotInteraction()(dense, vectors)
    assert out.dtype == dtype
    given = torch.autograd.grad(out.float().sum(), (dense, vectors))
    assert {g.dtype for g in given} == {torch.float32}
    expected = naive(dense, vectors, False)
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.1)
    wanted = torch.autograd.grad(expected.sum(), (dense, vectors))
    torch.testing.assert_close(given, wanted, rtol=0.05, atol=0.1)


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiles_as_one_graph():
    torch._dynamo.reset()
    layer = DotInteraction()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    dense, vectors = module_inputs()
    with launched() as keys:
        out = compiled(dense, vectors)
        given = torch.autograd.grad((out**2).sum(), (dense, vectors))
    assert {key.split("(")[0] for key in keys} == {"interact_kernel", "interact_backward_kernel"}
    expected = layer(dense, vectors)
    torch.testing.assert_close(out, expected)
    wanted = torch.autograd.grad((expected**2).sum(), (dense, vectors))
    torch.testing.assert_close(given, wanted)


@pytest.mark.parametrize("self_interaction", [False, True])
def test_operations_are_what_torch_expects(self_interaction):
    dense, vectors = module_inputs(3, 4)
    torch.library.opcheck(either.interact_op, (dense, vectors, self_interaction))
