"""The gradient of per-sample weights against autograd through the definition, in float64."""

import device_batches as batches
import pytest
import torch
from devices import DEVICE
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.errors import InputError
from hotbed.ops.gpu.pool import pool
from hotbed.ops.gpu.weight_gradients import weight_gradients


def expected(planes, feature, grad):
    """By autograd, of the definition."""
    weights = feature.weights.double().cpu().requires_grad_()
    loss = weights.sum() * 0
    for bag, positions in enumerate(batches.positions_of(feature)):
        if not positions:
            continue
        rows = torch.stack([batches.row_of(planes, feature, p) for p in positions])
        mine = weights[positions]
        total = (mine[:, None] * rows).sum(0)
        if feature.combiner == "mean":
            total = total / mine.sum()
        if feature.combiner == "sqrtn":
            total = total / (mine * mine).sum().sqrt()
        loss = loss + (total * grad[bag].double().cpu()).sum()
    (found,) = torch.autograd.grad(loss, weights)
    return found


@settings(max_examples=examples(25))
@given(
    dim=st.sampled_from([1, 3, 8, 12, 130]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    grad_dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    combiner=st.sampled_from(["sum", "mean", "sqrtn"]),
    fixed=st.integers(0, 2),
    padding=st.booleans(),
    scratch=st.integers(0, 2),
    bags=st.integers(0, 12),
    seed=st.integers(0, 2**31),
)
def test_is_what_it_is_defined_to_be(
    dim, dtype, grad_dtype, combiner, fixed, padding, scratch, bags, seed
):
    planes = batches.planes([(20, dim, dtype)], seed)
    feature = batches.random_feature(
        planes, 0, bags, combiner, fixed=fixed, weighted=True, padding=padding, scratch=scratch,
        seed=seed,
    )  # fmt: skip
    inverses = [torch.empty(bags, device=DEVICE)]
    outputs = pool(planes, [feature], inverses=inverses)
    grads = [torch.randn(bags, dim).to(grad_dtype).to(DEVICE)]
    (found,) = weight_gradients(planes, [feature], grads, outputs, inverses)
    assert found.dtype == torch.float32
    truth = expected(planes, feature, grads[0])
    torch.testing.assert_close(found.cpu().double(), truth, rtol=1e-4, atol=1e-4 * dim**0.5)


def test_features_without_weights_or_gradient():
    planes = batches.planes([(20, 8, torch.float32)])
    features = [
        batches.random_feature(planes, 0, 5, "sum", fixed=2),
        batches.random_feature(planes, 0, 5, "sum", fixed=2, weighted=True),
        batches.random_feature(planes, 0, 5, "none", fixed=2, weighted=True),
    ]
    outputs = pool(planes, features)
    found = weight_gradients(planes, features, [outputs[0], None, outputs[2]], outputs)
    assert found[0] is None and found[2] is None
    assert found[1].tolist() == [0.0] * 10


def test_refuses():
    planes = batches.planes([(20, 8, torch.float32)])
    features = [batches.random_feature(planes, 0, 5, "mean", fixed=2, weighted=True)]
    out = torch.zeros(5, 8, device=DEVICE)
    with pytest.raises(InputError, match="Pass the inverse"):
        weight_gradients(planes, features, [out], [out])
    with pytest.raises(InputError, match=r"gradient of feature 0 is torch.float32 \(4, 8\)"):
        weight_gradients(planes, features, [out[:4]], [out], [torch.zeros(5, device=DEVICE)])
