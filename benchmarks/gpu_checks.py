"""Each dense GPU kernel against float64, before anything is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.gpu_roof import PRECISIONS, kept_precision

# The largest error over the largest value. Products of float32 are checked exact and by TF32.
LIMITS = {"float32": 1e-5, "tf32": 5e-3, "float16": 5e-3, "bfloat16": 4e-2}

Check = tuple[str, Tensor, Tensor]


def errors(device: str, small: bool, progress: Callable[[str], None]) -> dict[str, float]:
    """ "kernel, precision" → the largest error over the largest value.

    Raises:
        AssertionError: a kernel is off by more than its limit.
    """
    found: dict[str, float] = {}
    with kept_precision():
        for precision, (dtype, setting) in PRECISIONS.items():
            torch.set_float32_matmul_precision(setting)
            for name, actual, expected in _all(device, dtype, small):
                progress(f"checking {name}, {precision}")
                scale = max(1.0, float(expected.abs().max()))
                error = float((actual.double() - expected).abs().max()) / scale
                if not error <= LIMITS[precision]:
                    raise AssertionError(
                        f"{name} in {precision} is off by {error:.2g} of its largest value; "
                        f"{LIMITS[precision]:.0e} is allowed."
                    )
                key = f"{name}, {precision}"
                found[key] = max(found.get(key, 0.0), error)
    return found


def _all(device: str, dtype: torch.dtype, small: bool) -> Iterator[Check]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    yield from _interaction(drawn, small)
    yield from _layers(drawn, small)
    yield from _cross(drawn, small)
    yield from _codecs(drawn, small)


def _interaction(drawn: Callable[..., Tensor], small: bool) -> Iterator[Check]:
    from hotbed.ops.gpu import dot

    batch, count, dim = (3, 5, 16) if small else (513, 26, 128)
    dense, vectors = drawn(batch, dim), drawn(batch, count, dim)
    gradient = drawn(batch, dim + (count + 1) * count // 2)
    exact = [dense.double().requires_grad_(), vectors.double().requires_grad_()]
    joined = torch.cat([exact[0].unsqueeze(1), exact[1]], 1)
    i, j = torch.tril_indices(count + 1, count + 1, -1, device=dense.device)
    expected = torch.cat([exact[0], torch.bmm(joined, joined.transpose(1, 2))[:, i, j]], 1)
    wanted = torch.autograd.grad(expected, exact, gradient.double())
    yield "interaction", dot.interact(dense, vectors, False), expected.detach()
    for actual, other in zip(
        dot.interact_backward(gradient, dense, vectors, False), wanted, strict=True
    ):
        yield "interaction backward", actual, other


def _layers(drawn: Callable[..., Tensor], small: bool) -> Iterator[Check]:
    from hotbed.ops.gpu import masks, mlp, products

    rows, inner, columns = (5, 16, 32) if small else (1025, 512, 256)
    x, weight, bias = drawn(rows, inner), drawn(columns, inner) / inner**0.5, drawn(columns)
    weight = weight.to(x.dtype)
    exact = (x.double() @ weight.double().T + bias.double()).relu()
    if products.fits(x, weight):
        out, bits = mlp.linear(x, weight, bias, None, 0.0)
        yield "linear + ReLU", out, exact
        kept = _unpacked(bits, columns)
        gradient, back = drawn(rows, inner), weight.t().contiguous()
        actual, total = mlp.masked_product(gradient, back, bits, 0.5)
        expected = 2 * (gradient.double() @ back.double()) * kept
        yield "masked product", actual, expected
        yield "masked product, sums", total / rows, expected.sum(0) / rows
    product = drawn(rows, columns)
    before = product.clone()
    bits = masks.finish(product, None, 0.0)
    yield "ReLU", product, before.double().relu()
    gradient = drawn(rows, columns)
    actual, total = masks.masked(gradient, bits, 0.5)
    expected = 2 * gradient.double() * (before > 0)
    yield "mask", actual, expected
    yield "mask, sums", total / rows, expected.sum(0) / rows


def _unpacked(bits: Tensor, columns: int) -> Tensor:
    places = torch.arange(8, device=bits.device)
    return ((bits[:, :, None] >> places) & 1).flatten(1)[:, :columns]


def _cross(drawn: Callable[..., Tensor], small: bool) -> Iterator[Check]:
    from hotbed.ops.gpu import cross_matrix, cross_vector, products

    batch, dim = (5, 32) if small else (513, 448)
    x0, x, bias = drawn(batch, dim), drawn(batch, dim), drawn(dim)
    weight = (drawn(dim, dim) / dim**0.5).to(x.dtype)
    gate = x.double() @ weight.double().T + bias.double()
    if products.fits(x0, x, weight):
        actual = cross_matrix.cross_matrix(x0, x, x, weight, bias)
        yield "cross, matrix", actual[0], x0.double() * gate + x.double()
        to_gate, to_x0, _ = cross_matrix.cross_matrix_backward(x, x0, actual[1])
        yield "cross, matrix, backward", to_gate, x.double() * x0.double()
        yield "cross, matrix, backward", to_x0, x.double() * actual[1].double()
    weights, biases = drawn(3, dim).float() / dim**0.5, drawn(3, dim).float()
    expected = x0.double()
    for w, b in zip(weights.double(), biases.double(), strict=True):
        expected = x0.double() * (expected @ w)[:, None] + b + expected
    betas = torch.cat([torch.zeros_like(biases[:1]), biases.cumsum(0)])
    shift = (betas[:-1] * weights).sum(1)
    yield "cross, vector", cross_vector.cross_vector(x0, weights, shift, betas[-1])[0], expected


def _codecs(drawn: Callable[..., Tensor], small: bool) -> Iterator[Check]:
    from hotbed.ops.gpu import codec

    rows = drawn(*((7, 20) if small else (1025, 128))).float()
    for dtype in (torch.float16, torch.bfloat16):
        expected = rows.to(dtype).double()
        yield (
            f"codec {str(dtype).removeprefix('torch.')}",
            codec.decode_half(codec.encode_half(rows, dtype)),
            expected,
        )
    codes, scales = codec.encode_int8(rows)
    # Half a scale is what int8 may be off by; what is left is rounding.
    decoded = codec.decode_int8(codes, scales).double()
    error = (decoded - rows.double()).abs() - scales.double()[:, None] / 2
    yield "codec int8", error.clamp(min=0), torch.zeros_like(error)
