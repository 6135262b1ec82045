"""Clipping gradients, which count tables and dense parameters alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from optim.models import Model, Twin, backward
from torch import Tensor, nn

import hotbed as hb
from hotbed.table.sparse_gradient import norm_of_rows


@pytest.mark.parametrize("clip", [hb.nn.clip_grad_norm_, nn.utils.clip_grad_norm_])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("max_norm", [0.05, 100.0])
def test_clipping_counts_tables_and_dense_alike(
    clip: Callable[..., Tensor], norm_type: float, max_norm: float
) -> None:
    model = Model()
    twin = Twin(model)
    for m in (model, twin):
        backward(m, 0)
        backward(m, 1)  # accumulated: rows repeat in the handle's gradient
    norm = clip(model.parameters(), max_norm, norm_type)
    expected = nn.utils.clip_grad_norm_(twin.parameters(), max_norm, norm_type)
    assert float(norm) == pytest.approx(float(expected), rel=1e-12)
    for name in ("item", "user"):
        grad = model.embeddings.parameter(name).grad.to_dense()
        torch.testing.assert_close(grad, getattr(twin, name).weight.grad, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(model.top.weight.grad, twin.top.weight.grad, rtol=1e-12, atol=0)


def test_clipping_odd_cases() -> None:
    assert float(hb.nn.clip_grad_norm_([], 1.0)) == 0.0
    nothing = nn.Parameter(torch.empty(0, device="meta"))
    nothing.grad = torch.empty(0, device="meta")
    assert hb.nn.clip_grad_norm_([nothing], 1.0).device.type == "meta"
    model = Model()
    assert float(hb.nn.clip_grad_norm_(model.parameters(), 1.0)) == 0.0
    backward(model)
    layer = nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([1, 1, 2])).sum().backward()
    assert float(hb.nn.clip_grad_norm_(layer.weight, 1.0)) == pytest.approx(10**0.5, rel=1e-6)
    model.top.weight.grad[0, 0] = float("nan")
    before = model.embeddings.parameter("item").grad._values().clone()
    with pytest.raises(RuntimeError, match="norm of nan"):
        hb.nn.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert torch.equal(model.embeddings.parameter("item").grad._values(), before)


@pytest.mark.parametrize("clip", [hb.nn.clip_grad_value_, nn.utils.clip_grad_value_])
def test_clipping_values_counts_tables_and_dense_alike(clip: Callable[..., None]) -> None:
    model = Model()
    twin = Twin(model)
    for m in (model, twin):
        backward(m, 0)
        backward(m, 1)
    clip(parameters=model.parameters(), clip_value=0.01)
    nn.utils.clip_grad_value_(twin.parameters(), 0.01)
    for name in ("item", "user"):
        grad = model.embeddings.parameter(name).grad.to_dense()
        torch.testing.assert_close(grad, getattr(twin, name).weight.grad, rtol=1e-12, atol=1e-15)


def test_clipping_by_torch_where_torch_has_added_gradients_up() -> None:
    model = Model()
    twin = Twin(model)
    parameter = model.embeddings.parameter("item")
    parameter.register_hook(lambda grad: None)  # torch must see each gradient, and so adds them
    for m in (model, twin):
        backward(m, 0)
        backward(m, 1)
    assert len(parameter.grad._indices()[0].unique()) < parameter.grad._nnz()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    expected = nn.utils.clip_grad_norm_(twin.parameters(), 1e-3)
    assert float(norm) == pytest.approx(float(expected), rel=1e-12)
    torch.testing.assert_close(parameter.grad.to_dense(), twin.item.weight.grad)


def test_a_foreach_function_names_what_to_use() -> None:
    model = Model()
    backward(model)
    with pytest.raises(hb.TableError, match="hotbed.nn.clip_grad_norm_"):
        torch._foreach_norm([model.embeddings.parameter("item").grad])


@pytest.mark.parametrize("norm_type", [0.0, 0.5, 1.0, 2.0, 3.0, float("inf"), -float("inf")])
def test_a_norm_of_rows_is_that_of_their_elements_in_any_order(norm_type: float) -> None:
    rows = torch.randn(999, 3, dtype=torch.float64).exp()
    rows[5, 1] = 0.0
    norm = norm_of_rows(rows, norm_type)
    torch.testing.assert_close(norm, torch.linalg.vector_norm(rows, norm_type), rtol=1e-12, atol=0)
    for _ in range(5):
        assert torch.equal(norm_of_rows(rows[torch.randperm(999)], norm_type), norm)
