"""The forward over slots against its definition in float64, and against the core."""

import device_batches as batches
import pytest
import torch
from devices import DEVICE
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import hotbed as hb
from hotbed.errors import InputError
from hotbed.ops.gpu import pool as gpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
UNIT = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def assert_pooled(planes, features, outputs):
    for feature, out in zip(features, outputs, strict=True):
        expected = batches.pooled(planes, feature)
        assert out.shape == expected.shape
        error = (out.double().cpu() - expected).abs()
        scale = expected.abs() + (1e-7 if out.dtype == torch.float16 else 0)
        assert (error <= UNIT[out.dtype] * scale + 2e-6).all()


@settings(max_examples=examples(40))
@given(
    dims=st.lists(st.sampled_from([1, 3, 4, 8, 10, 12, 16, 33]), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    out=st.sampled_from(DTYPES),
    combiner=st.sampled_from(["sum", "mean", "sqrtn", "none"]),
    fixed=st.integers(0, 3),
    weighted=st.booleans(),
    padding=st.booleans(),
    scratch=st.integers(0, 2),
    bags=st.integers(0, 9),
    seed=st.integers(0, 2**31),
)
def test_bags_are_what_they_are_defined_to_be(
    dims, dtype, out, combiner, fixed, weighted, padding, scratch, bags, seed
):
    planes = batches.planes([(20, dim, dtype) for dim in dims], seed)
    features = [
        batches.random_feature(
            planes, t, bags, combiner, fixed=fixed, weighted=weighted, padding=padding,
            scratch=scratch, seed=seed + t,
        )
        for t in range(len(dims))
    ]  # fmt: skip
    assert_pooled(planes, features, gpu.pool(planes, features, out))


@pytest.mark.parametrize("dim", [1, 3, 10, 64, 128, 1025, 2052])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fixed", [1, 2])
def test_any_dim(dim, dtype, fixed):
    planes = batches.planes([(11, dim, dtype)])
    feature = batches.random_feature(planes, 0, 7, "sum", fixed=fixed)
    assert_pooled(planes, [feature], gpu.pool(planes, [feature], dtype))


def test_one_launch_serves_features_of_any_dim_combiner_and_bags():
    planes = batches.planes([(30, 8, torch.float32), (9, 128, torch.float32)])
    features = [
        batches.random_feature(planes, 0, 12, "mean", weighted=True),
        batches.random_feature(planes, 1, 12, "sqrtn", fixed=3, seed=1),
        batches.random_feature(planes, 1, 5, "sum", padding=True, seed=2),
        batches.random_feature(planes, 0, 12, "mean", fixed=4, scratch=3, seed=3),
    ]
    from hotbed.ops.gpu.variants import launched

    with launched() as keys:
        outputs = gpu.pool(planes, features)
    assert len(keys) == 1
    assert_pooled(planes, features, outputs)
    shared = [outputs[f] for f in (0, 1, 3)]
    assert {o.untyped_storage().data_ptr() for o in shared} == {shared[0].data_ptr()}
    assert [o.storage_offset() for o in shared] == [0, 8, 8 + 128]
    assert {o.stride(0) for o in shared} == {8 + 128 + 8}


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
def test_has_the_bits_of_the_core(combiner, weighted):
    planes = batches.planes([(50, 24, torch.float32)])
    feature = batches.random_feature(planes, 0, 40, combiner, weighted=weighted)
    tables = [hb.Table("t", dim=24, rows=50, combiner=combiner)]
    embeddings = hb.EmbeddingCollection(tables)
    embeddings.assign("t", torch.arange(50), planes[0].cpu())
    bags = hb.Jagged(
        feature.slots.cpu(),
        offsets=feature.offsets.cpu(),
        weights=feature.weights.cpu() if weighted else None,
    )
    with torch.no_grad():
        expected = embeddings({"t": bags})["t"]
    assert torch.equal(gpu.pool(planes, [feature])[0].cpu(), expected)


def test_inverses_are_what_bags_were_divided_by():
    planes = batches.planes([(20, 8, torch.float32)])
    features = [
        batches.random_feature(planes, 0, 15, "mean", weighted=True, padding=True),
        batches.random_feature(planes, 0, 15, "sqrtn", fixed=2, seed=1),
    ]
    inverses = [torch.full((15,), -1.0, device=DEVICE) for _ in features]
    gpu.pool(planes, features, inverses=inverses)
    for feature, inverse in zip(features, inverses, strict=True):
        divisors = [batches.divisor_of(feature, p) for p in batches.positions_of(feature)]
        expected = torch.tensor([1 / d if d else 0.0 for d in divisors])
        torch.testing.assert_close(inverse.cpu(), expected, rtol=1e-6, atol=0)
    assert features[0].divided and not features[0].single


def test_rows_beyond_2_to_the_31_values_are_addressed():
    """A plane whose address lies as far before its rows as those slots are from slot 0."""
    real = torch.randn(4, 64, device=DEVICE)
    far = 2**31 // 64 * 5 + 3  # slot * dim exceeds 2^31, and 2^32
    plane = _ShiftedPlane(real, far)
    slots = torch.tensor([far, far + 3, far + 1], device=DEVICE)
    out = torch.empty(3, 64, device=DEVICE)
    feature = gpu.FeatureSlots(table=0, slots=slots)
    line = gpu._line(plane, feature, out, None, 4)
    lines = torch.tensor([line], device=DEVICE)
    gpu.launch(gpu._variant(True, 4, 4, 4), (1, 1), features=lines)  # type: ignore[attr-defined]
    assert torch.equal(out, real[[0, 3, 1]])


class _ShiftedPlane:
    """Rows [first, first + len(real)) of a plane of which no others exist."""

    def __init__(self, real, first):
        self.real, self.first = real, first
        self.shape, self.dtype = (first + len(real), real.shape[1]), real.dtype

    def data_ptr(self):
        return self.real.data_ptr() - self.first * self.real.shape[1] * self.real.itemsize


def test_empty_inputs():
    planes = batches.planes([(0, 8, torch.float32), (3, 8, torch.float32)])
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    offsets = torch.zeros(5, dtype=torch.int64, device=DEVICE)
    features = [
        gpu.FeatureSlots(table=0, slots=none),
        gpu.FeatureSlots(table=0, slots=none, offsets=offsets, combiner="mean"),
        gpu.FeatureSlots(table=1, slots=none, offsets=offsets[:1]),
    ]
    outputs = gpu.pool(planes, features)
    assert [tuple(o.shape) for o in outputs] == [(0, 8), (4, 8), (0, 8)]
    assert not outputs[1].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": torch.zeros(3, dtype=torch.int32)}, "slots are torch.int32"),
        (
            {"slots": torch.zeros(6, dtype=torch.int64, device=DEVICE)[::2]},
            "slots are torch.int64.*stride",
        ),
        ({"weights": torch.zeros(2)}, "weights are torch.float32"),
        ({"combiner": "max"}, "combiner 'max'"),
        ({"fixed": 0}, "bags of 0 positions"),
    ],
)
def test_refuses(change, message):
    planes = batches.planes([(4, 8, torch.float32)])
    given = {"slots": torch.zeros(3, dtype=torch.int64), **change}
    given = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    with pytest.raises(InputError, match=message):
        gpu.pool(planes, [gpu.FeatureSlots(table=0, **given)])


def test_refuses_planes_and_outputs():
    slots = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    feature = gpu.FeatureSlots(table=0, slots=slots)
    with pytest.raises(InputError, match="plane 0 is torch.float64"):
        gpu.pool([torch.zeros(3, 4, dtype=torch.float64, device=DEVICE)], [feature])
    with pytest.raises(InputError, match="plane 0 is .*stride"):
        gpu.pool([torch.zeros(4, 3, device=DEVICE).t()], [feature])
    plane = torch.zeros(3, 4, device=DEVICE)
    with pytest.raises(InputError, match="output 0 is"):
        gpu.pool_into([plane], [feature], [torch.empty(2, 3, device=DEVICE)])
