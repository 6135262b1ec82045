"""First values: their distributions, and that nothing but (table key, id, column) decides them."""

import math
from statistics import NormalDist

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotbed import _core
from hotbed.init import (
    Constant,
    Distribution,
    Initializer,
    Kind,
    Normal,
    Ones,
    TruncatedNormal,
    Uniform,
    XavierNormal,
    XavierUniform,
    Zeros,
    table_key,
)

DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
KEY = table_key(0, "item")
UNIT_SPECS = [
    Distribution(Kind.constant, 0.75),
    Distribution(Kind.uniform, -1.0, 2.0),
    Distribution(Kind.normal, 0.5, 2.0),
    Distribution(Kind.truncated_normal, 0.0, 1.0, -2.0, 1.5),
]


GOLDEN_KEY = 0x55A8CB809E985A50
GOLDEN = [
    (
        Kind.uniform,
        torch.float32,
        [0.9332714080810547, -0.6777728199958801, 0.4872274398803711, 0.3199152946472168],
    ),
    (
        Kind.uniform,
        torch.float64,
        [0.9332714103308573, -0.6777727415802028, 0.48722754475336805, 0.31991529766275617],
    ),
    (
        Kind.normal,
        torch.float32,
        [2.6213059425354004, -1.9808504581451416, 0.47865572571754456, 0.19791841506958008],
    ),
    (
        Kind.normal,
        torch.float64,
        [2.6213060876010235, -1.980850360308061, 0.47865572986943267, 0.1979184011336883],
    ),
    (
        Kind.truncated_normal,
        torch.float32,
        [0.2779146432876587, -1.172291874885559, -0.06497922539710999, -0.19340933859348297],
    ),
    (
        Kind.truncated_normal,
        torch.float64,
        [0.2779146420025958, -1.1722918725437856, -0.06497922852168643, -0.1934093421582116],
    ),
]


def rows_of(spec, ids, dim, dtype=torch.float32, key=KEY, padding_id=None):
    ids = torch.as_tensor(ids, dtype=torch.int64)
    out = torch.empty(len(ids), dim, dtype=dtype)
    _core.initial_rows(  # type: ignore[call-arg]
        *spec, key, ids.data_ptr(), len(ids), dim, DTYPES[dtype], out.data_ptr(),
        padding_id=padding_id,
    )  # fmt: skip
    return out


def sample(spec, n=200_000, dtype=torch.float32):
    return rows_of(spec, range(n // 20), 20, dtype).double().flatten().numpy()


def kolmogorov_distance(values, cdf):
    """sup |F_n - F|, which exceeds 1.95 / sqrt(n) with probability 0.001."""
    exact = cdf(np.sort(values))
    steps = np.arange(len(values) + 1) / len(values)
    return max(np.abs(exact - steps[1:]).max(), np.abs(exact - steps[:-1]).max())


def normal_cdf(values, mean=0.0, std=1.0):
    z = (torch.from_numpy(np.asarray(values)) - mean) / std
    return (0.5 * torch.erfc(-z / math.sqrt(2))).numpy()


@pytest.fixture(autouse=True)
def _best_isa():
    yield
    _core.use_isa("best")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("spec", "cdf"),
    [
        (Distribution(Kind.uniform, -3.0, 5.0), lambda x: (x + 3) / 8),
        (Distribution(Kind.normal, 2.0, 3.0), lambda x: normal_cdf(x, 2, 3)),
        (
            Distribution(Kind.truncated_normal, 1.0, 2.0, 0.0, 7.0),
            lambda x: (
                (normal_cdf(x, 1, 2) - normal_cdf(0.0, 1, 2))
                / (normal_cdf(7.0, 1, 2) - normal_cdf(0.0, 1, 2))
            ),
        ),
        (
            # Far in the upper tail, where erfc(x) is taken for its precision.
            Distribution(Kind.truncated_normal, 0.0, 1.0, 6.0, 7.0),
            lambda x: (normal_cdf(-6.0) - normal_cdf(-x)) / (normal_cdf(-6.0) - normal_cdf(-7.0)),
        ),
    ],
)
def test_distribution_is_the_stated_one(spec, cdf, dtype):
    values = sample(spec, dtype=dtype)
    # bfloat16 and float16 are rounded float32 values: another test.
    assert kolmogorov_distance(values, cdf) < 1.95 / math.sqrt(len(values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moments_of_the_normal(dtype):
    values = sample(Distribution(Kind.normal, 0.0, 1.0), n=2_000_000, dtype=dtype)
    n = len(values)
    for power, moment, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)]:
        assert abs((values**power).mean() - moment) < 4 * math.sqrt(variance / n), power


def test_tails_of_the_normal_have_their_share():
    values = np.abs(sample(Distribution(Kind.normal, 0.0, 1.0), n=4_000_000))
    for bound in (1.0, 2.0, 3.0, 4.0, 4.5):
        expected = len(values) * 2 * NormalDist().cdf(-bound)
        assert abs((values > bound).sum() - expected) < 4 * math.sqrt(expected), bound
    assert values.max() < 6.3


def test_columns_rows_and_tables_are_uncorrelated():
    spec = Distribution(Kind.normal, 0.0, 1.0)
    first = rows_of(spec, range(20_000), 16).double()
    other = rows_of(spec, range(20_000), 16, key=table_key(0, "user")).double()
    sixteen = torch.cat([first, first.roll(1, 0), other], 1)
    correlation = torch.corrcoef(sixteen.T) - torch.eye(48)
    assert correlation.abs().max() < 5 / math.sqrt(20_000)


@pytest.mark.parametrize("spec", UNIT_SPECS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 3, 64, 1025])
def test_same_bits_on_every_instruction_set(spec, dtype, dim):
    ids = [*range(-40, 40), 2**63 - 1, -(2**63)]
    results = []
    for isa in ("base", "avx2", "avx512"):
        if _core.use_isa(isa):
            results.append(rows_of(spec, ids, dim, dtype).view(torch.uint8))
    assert results
    for result in results[1:]:
        assert torch.equal(result, results[0])


@pytest.mark.parametrize("spec", UNIT_SPECS)
def test_same_bits_for_every_thread_count(spec):
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = rows_of(spec, range(5000), 33)
        for count in (2, 3, 7):
            torch.set_num_threads(count)
            assert torch.equal(rows_of(spec, range(5000), 33), one)
    finally:
        torch.set_num_threads(threads)


@given(
    ids=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=60),
    dim=st.sampled_from([1, 2, 3, 7, 10, 64, 511, 513, 1025]),
    spec=st.sampled_from(UNIT_SPECS),
    dtype=st.sampled_from(list(DTYPES)),
    cut=st.integers(0, 60),
)
def test_a_row_does_not_depend_on_its_company(ids, dim, spec, dtype, cut):
    together = rows_of(spec, ids, dim, dtype)
    apart = torch.cat([rows_of(spec, ids[:cut], dim, dtype), rows_of(spec, ids[cut:], dim, dtype)])
    assert torch.equal(together, apart)
    alone = rows_of(spec, [ids[-1]], dim, dtype)
    assert torch.equal(alone[0], together[-1])


def test_a_column_does_not_depend_on_the_width():
    wide = rows_of(UNIT_SPECS[2], range(50), 1025)
    assert torch.equal(rows_of(UNIT_SPECS[2], range(50), 10), wide[:, :10])


def test_a_range_of_ids_is_the_ids():
    out = torch.empty(100, 9)
    _core.initial_rows(*UNIT_SPECS[2], KEY, 0, 100, 9, 0, out.data_ptr(), first_id=-50)
    assert torch.equal(out, rows_of(UNIT_SPECS[2], range(-50, 50), 9))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padding_id", [0, -1, 7])
def test_the_padding_row_is_zeros(dtype, padding_id):
    ids = [7, 0, 5, -1, 7]
    plain = rows_of(UNIT_SPECS[2], ids, 5, dtype)
    padded = rows_of(UNIT_SPECS[2], ids, 5, dtype, padding_id=padding_id)
    is_padding = torch.tensor([i == padding_id for i in ids])
    assert (padded[is_padding] == 0).all()
    assert torch.equal(padded[~is_padding], plain[~is_padding])


@pytest.mark.parametrize("spec", UNIT_SPECS)
def test_dtypes_differ_by_rounding_only(spec):
    exact = rows_of(spec, range(2000), 16, torch.float64)
    single = rows_of(spec, range(2000), 16, torch.float32)
    # The normal draws 31 bits in float32 and 51 in float64: alike but deep in the tail.
    near = (exact - spec.a).abs() < 4 * spec.b if spec.kind == Kind.normal else exact == exact
    assert near.float().mean() > 0.999
    assert ((single.double() - exact)[near].abs() <= 2.5e-6).all()
    assert torch.equal(rows_of(spec, range(2000), 16, torch.float16), single.half())
    assert torch.equal(rows_of(spec, range(2000), 16, torch.bfloat16), single.bfloat16())


def splitmix_words(key, ids, dim):
    """The generator once more, in Python integers."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    for row in ids:
        stream = mix((key + golden * (row % 2**64 + 1)) & mask) ^ mix(golden)
        stream = mix(stream)
        yield [mix((stream + golden * (column + 1)) & mask) for column in range(dim)]


def test_values_are_the_inverse_distribution_function_of_the_generator():
    ids = [*range(200), -1, 2**63 - 1, -(2**63)]
    words = list(splitmix_words(KEY, ids, 8))
    steps = torch.tensor([[w >> 11 for w in row] for row in words])
    actual = rows_of(Distribution(Kind.uniform, 0.0, 1.0), ids, 8, torch.float64)
    assert torch.equal(actual, steps.double() * 2.0**-53)

    def normal(word):
        tail = (((word & (2**63 - 1)) >> 12) + 0.5) * 2.0**-52
        below = NormalDist().inv_cdf(tail)
        return -below if word >> 63 else below

    expected = torch.tensor([[normal(w) for w in row] for row in words], dtype=torch.float64)
    actual = rows_of(Distribution(Kind.normal, 0.0, 1.0), ids, 8, torch.float64)
    assert (actual - expected).abs().max() < 2e-15
    single = rows_of(Distribution(Kind.normal, 0.0, 1.0), ids, 8, torch.float32)
    assert (single.double() - expected).abs().max() < 2e-6


def test_far_truncations_match_the_exact_quantiles():
    """In the tail beyond 5 sigma, x solves erfc(x / sqrt 2) / 2 = p to full relative precision."""
    spec = Distribution(Kind.truncated_normal, 0.0, 1.0, -9.0, -8.0)
    values = rows_of(spec, range(20), 2, torch.float64).flatten().tolist()
    words = [w for row in splitmix_words(KEY, range(20), 2) for w in row]
    with mpmath.workdps(40):
        low, high = mpmath.ncdf(-9), mpmath.ncdf(-8)
        for word, value in zip(words, values, strict=True):
            p = low + (high - low) * ((word >> 11) * mpmath.mpf(2) ** -53)
            exact = mpmath.findroot(lambda x, p=p: mpmath.log(mpmath.ncdf(x) / p), value)
            assert abs(float(exact) - value) < 1e-13
    mirrored = rows_of(Distribution(Kind.truncated_normal, 0.0, 1.0, 8.0, 9.0), range(20), 2,
                       torch.float64).flatten().tolist()  # fmt: skip
    assert mirrored == [-x for x in values]


@pytest.mark.parametrize("dtype", DTYPES)
def test_truncated_values_stay_in_bounds(dtype):
    low, high = -0.02, 0.03125
    values = rows_of(TruncatedNormal(0.0, 0.02, low, high).resolve(None, 8), range(5000), 8, dtype)
    assert values.min() >= torch.tensor(low, dtype=dtype)
    assert values.max() <= torch.tensor(high, dtype=dtype)
    wide = rows_of(Distribution(Kind.truncated_normal, 0, 1, -50, 50), range(5000), 8, dtype)
    assert wide.isfinite().all() and wide.abs().max() < 8.3


def test_golden_values():
    """Frozen: a release that changes them changes every model that starts from a seed."""
    assert table_key(0, "item") == GOLDEN_KEY
    for kind, dtype, values in GOLDEN:
        assert rows_of(UNIT_SPECS[kind], [0, -7], 2, dtype).flatten().tolist() == values


# --- what the user says ---


def test_every_initializer_resolves():
    assert Zeros().resolve(None, 4) == (Kind.constant, 0, 0, 0, 0)
    assert Ones().resolve(10, 4) == (Kind.constant, 1, 0, 0, 0)
    assert Constant(-2).resolve(10, 4) == (Kind.constant, -2, 0, 0, 0)
    assert Uniform().resolve(None, 4) == (Kind.uniform, -0.05, 0.05, 0, 0)
    assert Normal().resolve(None, 4) == (Kind.normal, 0, 0.01, 0, 0)
    assert TruncatedNormal(1.0, 0.5).resolve(None, 4) == (Kind.truncated_normal, 1, 0.5, 0, 2)
    assert TruncatedNormal(1.0, 0.5, low=0.9).resolve(None, 4)[3:] == (0.9, 2.0)
    for initializer in (Zeros(), Uniform(), XavierNormal()):
        assert isinstance(initializer, Initializer)


def test_xavier_matches_torch():
    weight = torch.empty(30_000, 16)
    torch.manual_seed(0)
    _, low, high, *_ = XavierUniform(2.0).resolve(30_000, 16)
    bound = torch.nn.init.xavier_uniform_(weight, 2.0).abs().max().item()
    assert low == -high and bound == pytest.approx(high, rel=1e-4) and bound <= high
    _, mean, std, *_ = XavierNormal(2.0).resolve(30_000, 16)
    assert mean == 0
    assert torch.nn.init.xavier_normal_(weight, 2.0).std().item() == pytest.approx(std, rel=0.01)


@pytest.mark.parametrize("initializer", [XavierUniform(), XavierNormal()])
def test_xavier_refuses_a_dynamic_table(initializer):
    with pytest.raises(ValueError, match=rf"{type(initializer).__name__}.*rows=None.*rows=N"):
        initializer.resolve(None, 16)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Uniform(1.0, 0.5), ValueError, "low 1.0 is above high 0.5"),
        (lambda: Uniform(-1.7e308, 1.7e308), ValueError, "too wide"),
        (lambda: Uniform(low=math.nan), ValueError, "low is nan"),
        (lambda: Normal(std=-0.5), ValueError, "std is -0.5"),
        (lambda: Normal(mean=math.inf), ValueError, "mean is inf"),
        (lambda: Constant("1"), TypeError, "value is '1' of type str"),
        (lambda: Constant(True), TypeError, "value is True"),
        (lambda: TruncatedNormal(0, 1, 2, 1), ValueError, "between low 2 and high 1"),
        (lambda: TruncatedNormal(0, 1, 1, 1), ValueError, "between low 1 and high 1"),
        (lambda: TruncatedNormal(0, 1, 50, 60), ValueError, "from 50 to 60 holds none"),
        (lambda: TruncatedNormal(0, 0, 1, 2), ValueError, "outside its range from 1 to 2"),
        (lambda: XavierNormal(-1.0), ValueError, "gain is -1.0"),
    ],
)
def test_a_bad_value_is_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_deviation_of_zero_is_the_mean():
    for spec in (Normal(0.3, 0.0), TruncatedNormal(0.3, 0.0)):
        values = rows_of(spec.resolve(None, 4), range(9), 4, torch.float64)
        assert (values == 0.3).all()


def test_table_key_depends_on_seed_and_name_only():
    keys = {table_key(seed, name) for seed in (-1, 0, 1, 10) for name in ("", "0", "a", "ä", "a\0")}
    assert len(keys) == 20
    assert all(0 <= key < 2**64 for key in keys)
    assert table_key(3, "user") == table_key(3, "user")
