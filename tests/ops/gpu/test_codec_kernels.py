"""The codecs against the core's, bit for bit, and int8 against its definition in float64."""

import numpy as np
import pytest
import torch
from devices import DEVICE
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.errors import InputError
from hotbed.ops import codec as either
from hotbed.ops.gpu import codec

HALVES = [torch.float16, torch.bfloat16]
DIMS = [1, 3, 10, 16, 64, 255, 256, 1024, 1025, 2100]


def bits(tensor):
    return tensor.cpu().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def random_bits(count, seed=0):
    drawn = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    return torch.from_numpy(drawn.view(np.float32).copy())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("count", [0, 1, 15, 1024, 50_001])
def test_halves_have_the_bits_of_the_core(dtype, count):
    values = random_bits(count)
    actual = codec.encode_half(values.to(DEVICE), dtype)
    assert actual.dtype == dtype and actual.device.type == DEVICE.type
    assert torch.equal(bits(actual), bits(either.encode(values, dtype)[0]))


@pytest.mark.parametrize("dtype", HALVES)
def test_ties_and_extremes_have_the_bits_of_the_core(dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    lower = every[every.isfinite()].float()
    upper = (every.view(torch.int16) + 1).view(dtype)[every.isfinite()].float()
    middle = ((lower.double() + upper.double()) / 2).float()
    values = torch.cat([middle, middle.nextafter(upper), middle.nextafter(lower)])
    actual = codec.encode_half(values.to(DEVICE), dtype)
    assert torch.equal(bits(actual), bits(either.encode(values, dtype)[0]))
    decoded = codec.decode_half(every.to(DEVICE))
    assert torch.equal(bits(decoded), bits(either.decode(every)))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("count", [0, 1, 7, 130])
def test_int8_is_within_half_a_scale(dim, count):
    rows = torch.randn(count, dim) * torch.logspace(-30, 30, count)[:, None]
    codes, scales = codec.encode_int8(rows.to(DEVICE))
    assert codes.dtype == torch.int8 and codes.shape == (count, dim) and scales.shape == (count,)
    expected = rows.double().abs().amax(1) / 127
    torch.testing.assert_close(scales.cpu().double(), expected, rtol=1e-7, atol=0)
    decoded = codec.decode_int8(codes, scales).cpu()
    assert (codes.cpu().int().abs().amax(1) == 127).all()
    error = (decoded.double() - rows.double()).abs()
    assert (error <= scales.cpu().double()[:, None] * (0.5 + 1e-4)).all()


@settings(max_examples=examples(30))
@given(
    count=st.integers(0, 20), dim=st.integers(1, 70), seed=st.integers(0, 2**31), raw=st.booleans()
)
def test_int8_has_the_bits_of_the_cpu(count, dim, seed, raw):
    rows = random_bits(count * dim, seed).view(count, dim)
    if not raw:
        rows = rows.nan_to_num(1.0, 2.0, 3.0).clamp(-5, 5)
    codes, scales = codec.encode_int8(rows.to(DEVICE))
    expected_codes, expected_scales = either.encode(rows, torch.int8)
    assert torch.equal(codes.cpu(), expected_codes)
    assert torch.equal(bits(scales.nan_to_num(-1.0)), bits(expected_scales.nan_to_num(-1.0)))
    decoded = codec.decode_int8(codes, scales).nan_to_num(-1.0)
    assert torch.equal(
        bits(decoded), bits(either.decode(expected_codes, expected_scales).nan_to_num(-1.0))
    )


@pytest.mark.parametrize("module", ["cpu", "gpu"])
def test_int8_guards_zero_tiny_and_unfinite_rows(module):
    rows = torch.tensor([[0.0, -0.0], [1e-40, -1e-39], [float("inf"), 1.0], [float("nan"), 1.0],
                         [3.4028e38, -1.0]])  # fmt: skip
    if module == "cpu":
        codes, scales = either.encode(rows, torch.int8)
        decoded = either.decode(codes, scales)
    else:
        codes, scales = codec.encode_int8(rows.to(DEVICE))
        decoded = codec.decode_int8(codes, scales).cpu()
    assert codes.tolist() == [[0, 0], [0, 0], [0, 0], [0, 0], [127, 0]]
    assert scales[:2].tolist() == [0, 0] and scales[2:4].isnan().all() and scales[4].isfinite()
    assert decoded[:2].tolist() == [[0, 0], [0, 0]] and decoded[2:4].isnan().all()
    assert decoded[4].isfinite().all()


def test_strided_rows_are_read_right():
    rows = torch.randn(6, 40).to(DEVICE)[::2, 3:30]
    assert torch.equal(codec.encode_half(rows, torch.float16), rows.half())
    assert torch.equal(codec.encode_int8(rows)[0], codec.encode_int8(rows.clone())[0])
    codes = torch.randint(-127, 127, (6, 40), dtype=torch.int8).to(DEVICE)[:, ::2]
    scales = torch.rand(12).to(DEVICE)[::2]
    assert torch.equal(codec.decode_int8(codes, scales), codes.float() * scales[:, None])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.encode_half(torch.zeros(2, dtype=torch.float64), torch.float16), "float64"),
        (lambda c: c.encode_half(torch.zeros(2, device=DEVICE), torch.int8), "dtype is torch.int8"),
        (lambda c: c.decode_half(torch.zeros(2)), "Pass torch.float16 or torch.bfloat16"),
        (lambda c: c.encode_int8(torch.zeros(2)), "2 dimensions"),
        (
            lambda c: c.decode_int8(
                torch.zeros(2, 3, dtype=torch.int8, device=DEVICE), torch.zeros(3, device=DEVICE)
            ),
            "2 rows with 3 scales",
        ),
    ],
)
def test_refuses(call, message):
    with pytest.raises(InputError, match=message):
        call(codec)


def test_cpu_tensors_need_the_interpreter(monkeypatch):
    from hotbed.ops.gpu import variants

    monkeypatch.setattr(variants, "interpreted", lambda: False)
    with pytest.raises(InputError, match="lie on cpu.*TRITON_INTERPRET"):
        codec.encode_half(torch.zeros(2), torch.float16)
