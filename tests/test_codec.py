"""float16 and bfloat16 rows: conversions against torch's own; stochastic rounding."""

import numpy as np
import pytest
import torch

from hotbed import _core

DTYPES = {torch.float16: 2, torch.bfloat16: 3}
ISAS = [isa for isa in ("base", "avx2", "avx512") if _core.use_isa(isa)]


@pytest.fixture(params=ISAS, autouse=True)
def isa(request):
    _core.use_isa(request.param)
    yield request.param
    _core.use_isa("best")


def encode(values, dtype):
    values = values.contiguous()
    out = torch.empty(values.shape, dtype=dtype)
    _core.encode_values(DTYPES[dtype], values.data_ptr(), values.numel(), out.data_ptr())
    return out


def encode_stochastic(values, words, dtype):
    values = values.contiguous()
    words = words.to(torch.int64).to(torch.int32).contiguous()  # keeps the low 32 bits
    out = torch.empty(values.shape, dtype=dtype)
    _core.encode_values_stochastic(
        DTYPES[dtype], values.data_ptr(), words.data_ptr(), values.numel(), out.data_ptr()
    )
    return out


def decode(values):
    out = torch.empty(values.shape)
    _core.decode_values(DTYPES[values.dtype], values.data_ptr(), values.numel(), out.data_ptr())
    return out


def every_value(dtype):
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


def assert_same(actual, expected):
    """Equal bits; any NaN equals any other."""
    assert torch.equal(actual.isnan(), expected.isnan())
    kept = ~expected.isnan()
    integer = torch.int32 if actual.dtype == torch.float32 else torch.int16
    assert torch.equal(actual[kept].view(integer), expected[kept].view(integer))


def float_bits(bits):
    return torch.from_numpy(np.asarray(bits, dtype=np.uint32).view(np.float32).copy())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("flush", [False, True])
def test_decodes_every_value(dtype, flush):
    values = every_value(dtype)
    expected = values.float()
    torch.set_flush_denormal(flush)
    try:
        actual = decode(values)
    finally:
        torch.set_flush_denormal(False)
    assert_same(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_encodes_what_it_decoded(dtype):
    values = every_value(dtype)
    assert_same(encode(decode(values), dtype), values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_encodes_to_nearest_even(dtype):
    """Random bits of every exponent, and around every tie between neighbours of the row's dtype."""
    random = np.random.default_rng(0).integers(0, 2**32, 500_000, dtype=np.uint32)
    lower = every_value(dtype)
    lower = lower[lower.isfinite()].float()
    upper = every_value(dtype).view(torch.int16) + 1
    upper = upper.view(dtype)[every_value(dtype).isfinite()].float()
    middle = ((lower.double() + upper.double()) / 2).float()
    around = torch.cat([middle, middle.nextafter(upper), middle.nextafter(lower)])
    odd = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 65504.0, 65519.996,
                        65520.0, 3.3895e38, 3.4028e38, 1e-45, -1e-45, 2.0**-25, 2.0**-24,
                        2.0**-14])  # fmt: skip
    for values in (float_bits(random), around, odd):
        assert_same(encode(values, dtype), values.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_stochastic_rounding_keeps_what_is_representable(dtype):
    values = every_value(dtype)
    for word in (0, 1, 0x1FFF, 0xFFFF, 2**31, 2**32 - 1):
        words = torch.full(values.shape, word)
        assert_same(encode_stochastic(values.float(), words, dtype), values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_stochastic_rounding_goes_to_a_neighbour(dtype):
    rng = np.random.default_rng(1)
    values = float_bits(rng.integers(0, 2**32, 300_000, dtype=np.uint32))
    values = values[values.isfinite() & (values.abs() < torch.finfo(dtype).max)]
    words = torch.from_numpy(rng.integers(0, 2**32, len(values)))
    rounded = encode_stochastic(values, words, dtype).double()
    assert rounded.isfinite().all()
    # The neighbours, from the table of all values.
    table = every_value(dtype).double()
    table = table[table.isfinite()].unique()
    at = torch.searchsorted(table, values.double())
    exact = table[at] == values.double()
    below = torch.where(exact, table[at], table[(at - 1).clamp(min=0)])
    assert ((rounded == below) | (rounded == table[at])).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "value",
    [1.0003, -1.0003, 0.1, 3.14159, 1234.567, 6.1e-5, -3.3e-6, 7.1e-8, 4.1e-8, 5.96e-8, 2.5e-9,
     -1e-10],
)  # fmt: skip
def test_stochastic_rounding_is_unbiased(dtype, value):
    n = 1 << 20
    words = torch.from_numpy(np.random.default_rng(2).integers(0, 2**32, n))
    rounded = encode_stochastic(torch.full((n,), value), words, dtype).double()
    exact = torch.tensor(value).double()
    spread = max(rounded.max() - rounded.min(), torch.tensor(0.0).double())
    share = ((exact - rounded.min()) / spread).item() if spread > 0 else 0.0
    deviation = spread * (max(share * (1 - share), 1 / n) / n) ** 0.5
    if spread == 0:  # so near a value of the dtype that no word moved it
        unit = (rounded[0].abs() * torch.finfo(dtype).eps).clamp(min=2.0**-24)
        assert (exact - rounded[0]).abs() < 20 / n * unit
    else:
        assert (rounded.mean() - exact).abs() <= 5 * deviation


@pytest.mark.parametrize("dtype", DTYPES)
def test_stochastic_rounding_has_the_exact_probability(dtype):
    """Every word that is looked at once: the count of those that round up is the cut-off part."""
    if dtype == torch.float16:
        value, words, low, high = 1 + 2**-10 * 0.3125, 1 << 13, 1.0, 1 + 2**-10
    else:
        value, words, low, high = 1 + 2**-7 * 0.3125, 1 << 16, 1.0, 1 + 2**-7
    rounded = encode_stochastic(torch.full((words,), value), torch.arange(words), dtype).double()
    assert set(rounded.tolist()) == {low, high}
    assert (rounded == high).sum() == 0.3125 * words


@pytest.mark.parametrize("dtype", DTYPES)
def test_stochastic_rounding_saturates(dtype):
    largest = torch.finfo(dtype).max
    values = torch.tensor([largest, -largest, 3.4e38, -3.4e38, torch.finfo(torch.float32).max])
    rounded = encode_stochastic(values, torch.full((5,), 2**32 - 1), dtype)
    assert rounded.abs().tolist() == [largest] * 5
    assert torch.equal(rounded.sign(), values.sign().to(dtype))
    special = torch.tensor([float("inf"), float("-inf"), float("nan")])
    assert_same(encode_stochastic(special, torch.full((3,), 2**32 - 1), dtype), special.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_stochastic_rounding_has_the_same_bits_on_every_instruction_set(dtype, isa):
    rng = np.random.default_rng(3)
    values = float_bits(rng.integers(0, 2**32, 100_003, dtype=np.uint32))
    words = torch.from_numpy(rng.integers(0, 2**32, len(values)))
    actual = encode_stochastic(values, words, dtype)
    _core.use_isa("base")
    assert torch.equal(
        actual.view(torch.int16), encode_stochastic(values, words, dtype).view(torch.int16)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_has_the_same_bits_on_every_instruction_set(dtype, isa):
    payloads = np.random.default_rng(4).integers(0x7F800001, 0x80000000, 1000, dtype=np.uint32)
    values = float_bits(np.concatenate([payloads, payloads | 0x80000000]))
    actual = encode(values, dtype)
    _core.use_isa("base")
    assert torch.equal(actual.view(torch.int16), encode(values, dtype).view(torch.int16))
