"""`hotbed.Embedding` beside `torch.nn.Embedding`."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch_twins import dense_grad

import hotbed as hb

ROWS, DIM = 12, 5


def twins(**options: Any) -> tuple[nn.Embedding, hb.Embedding]:
    """The two layers with the same weights."""
    theirs = nn.Embedding(ROWS, DIM, **options)
    options.pop("sparse", None)
    ours = hb.Embedding(ROWS, DIM, _weight=theirs.weight.detach(), **options)
    return theirs, ours


def assert_agree(
    theirs: nn.Embedding, ours: hb.Embedding, input: torch.Tensor, tolerance: float = 0.0
) -> None:
    a, b = theirs(input), ours(input)
    assert a.dtype == b.dtype and a.shape == b.shape
    torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)
    gradient = torch.randn_like(a)
    a.backward(gradient)
    b.backward(gradient)
    assert theirs.weight.grad is not None
    want = theirs.weight.grad.to_dense() if theirs.sparse else theirs.weight.grad
    torch.testing.assert_close(
        dense_grad(ours.weight), want, rtol=tolerance or 1e-5, atol=tolerance or 1e-6
    )


@pytest.mark.parametrize(
    "shape", [(), (4,), (3, 4), (2, 3, 4), (2, 1, 3, 2), (0,), (3, 0), (0, 3)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("padding_idx", [None, 0, -2])
def test_forward_and_gradient_agree(
    shape: tuple[int, ...], dtype: torch.dtype, padding_idx: int | None
) -> None:
    theirs, ours = twins(padding_idx=padding_idx)
    assert ours.padding_idx == theirs.padding_idx
    assert_agree(theirs, ours, torch.randint(0, ROWS, shape, dtype=dtype))


def test_float64_agrees_to_1e_12() -> None:
    theirs, ours = twins(dtype=torch.float64)
    assert_agree(theirs, ours, torch.randint(0, ROWS, (50, 3)), 1e-12)


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"),
    reason="this torch has no float32 gradients of half-precision parameters",
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_agrees(dtype: torch.dtype) -> None:
    theirs, ours = twins(dtype=dtype)
    ids = torch.randperm(ROWS)
    assert torch.equal(theirs(ids), ours(ids))
    assert ours.weight.dtype == dtype and torch.equal(ours.weight, theirs.weight)
    theirs(ids).sum().backward()
    ours(ids).sum().backward()
    assert theirs.weight.grad is not None
    assert torch.equal(dense_grad(ours.weight).to(dtype), theirs.weight.grad)
    assert dense_grad(ours.weight).dtype == torch.float32


def test_non_contiguous_input() -> None:
    theirs, ours = twins()
    assert_agree(theirs, ours, torch.randint(0, ROWS, (6, 4)).T[::2])


def test_the_weight_reads_and_can_be_assigned() -> None:
    theirs, ours = twins()
    ids = torch.arange(ROWS)
    assert torch.equal(ours.weight, theirs.weight)
    other = torch.randn(ROWS, DIM)

    ours.weight = nn.Parameter(other.clone())
    assert torch.equal(ours(ids), other)
    ours.weight.data = other * 2
    assert torch.equal(ours.state_dict()["weight"], other * 2)
    assert torch.equal(ours(ids), other * 2)
    ours.weight.data.copy_(other * 3)
    assert torch.equal(ours(ids), other * 3)
    with torch.no_grad():
        ours.weight[2] = 7.0
        ours.weight.mul_(2)
    assert torch.equal(ours(torch.tensor(2)), torch.full((DIM,), 14.0))
    nn.init.constant_(ours.weight, 0.25)
    assert torch.equal(ours(ids), torch.full((ROWS, DIM), 0.25))
    ours.weight.data = other
    ours.weight.data.zero_()  # adopted or not, what is read is what is looked up
    assert torch.equal(ours(ids), ours.weight)


def test_a_weight_that_does_not_fit_is_refused() -> None:
    _, ours = twins()
    before = ours.weight.detach().clone()
    with pytest.raises(hb.TableError, match=r"shape \(12, 5\), got \(5, 12\)"):
        ours.weight = nn.Parameter(torch.zeros(DIM, ROWS))
    with pytest.raises(hb.TableError, match="got NoneType"):
        ours.weight = None
    for data in (torch.zeros(3, DIM), torch.zeros(ROWS, DIM, dtype=torch.float64)):
        ours.weight.data = data
        with pytest.raises(hb.TableError, match="were replaced"):
            ours(torch.tensor([0]))
        assert torch.equal(ours.weight, before)
    with pytest.raises(hb.TableError, match="_weight has shape"):
        hb.Embedding(3, 4, _weight=torch.zeros(4, 3))


def test_a_dynamic_weight_is_no_tensor_of_rows() -> None:
    ours = hb.Embedding(None, DIM)
    with pytest.raises(hb.TableError, match="dynamic table cannot be assigned"):
        ours.weight = nn.Parameter(torch.zeros(3, DIM))
    ours(torch.tensor([3, 4]))
    assert "2 rows × 5" in repr(ours.weight)
    with pytest.raises(hb.TableError, match="'embedding': its parameter holds no rows"):
        ours.weight[12345]
    with pytest.raises(hb.TableError, match="so 'normal' has nothing to work on"):
        nn.init.normal_(ours.weight)
    with pytest.raises(hb.TableError, match="so 'setting data' has nothing to work on"):
        ours.weight.data = torch.zeros(3, DIM)
    assert ours(torch.tensor([3])).isfinite().all()


def test_from_pretrained() -> None:
    weight = torch.randn(ROWS, DIM, dtype=torch.float64)
    frozen = hb.Embedding.from_pretrained(weight, padding_idx=-1)
    theirs = nn.Embedding.from_pretrained(weight, padding_idx=-1)
    assert not frozen.weight.requires_grad and not theirs.weight.requires_grad
    assert frozen.padding_idx == theirs.padding_idx == ROWS - 1
    ids = torch.tensor([0, ROWS - 1])
    out = frozen(ids)
    assert not out.requires_grad and torch.equal(out, theirs(ids))
    assert hb.Embedding.from_pretrained(weight, freeze=False)(ids).requires_grad
    with pytest.raises(hb.TableError, match="from_pretrained needs"):
        hb.Embedding.from_pretrained(torch.zeros(3))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"max_norm": 1.0}, "max_norm=1.0 cannot be honoured"),
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq"),
        ({"device": "mps"}, "device='mps' cannot be honoured"),
        ({"dtype": torch.int64}, "dtype must be one of"),
        ({"padding_idx": ROWS}, r"padding_idx 12 is outside \[-12, 12\)"),
        ({"padding_idx": -ROWS - 1}, "outside"),
    ],
)
def test_what_cannot_be_honoured_is_refused(arguments: Any, says: str) -> None:
    with pytest.raises(hb.TableError, match=says):
        hb.Embedding(ROWS, DIM, **arguments)
    with pytest.raises(TypeError):
        hb.Embedding(ROWS, DIM, unknown=1)  # type: ignore[call-arg]


def test_torch_and_hotbed_load_each_other() -> None:
    theirs, ours = twins()
    fresh = hb.Embedding(ROWS, DIM)
    assert not torch.equal(fresh.weight, theirs.weight)
    assert str(fresh.load_state_dict(theirs.state_dict())) == "<All keys matched successfully>"
    assert torch.equal(fresh.weight, theirs.weight)
    other = nn.Embedding(ROWS, DIM)
    assert str(other.load_state_dict(ours.state_dict())) == "<All keys matched successfully>"
    assert torch.equal(other.weight, ours.weight)


def test_a_state_dict_keeps_the_key() -> None:
    ours = hb.Embedding(ROWS, DIM)
    buffer = io.BytesIO()
    torch.save(nn.Sequential(ours).state_dict(), buffer)
    buffer.seek(0)
    dynamic = nn.Sequential(hb.Embedding(None, DIM))
    dynamic.load_state_dict(torch.load(buffer, weights_only=True))
    # Ids beyond the static rows read first values of the same key.
    torch.manual_seed(0)
    larger = hb.Embedding(3 * ROWS, DIM)
    torch.manual_seed(0)
    assert torch.equal(hb.Embedding(ROWS, DIM).weight, larger.weight[:ROWS])
    ours._live.draw_again(larger._live.key)
    dynamic.load_state_dict(nn.Sequential(ours).state_dict())
    assert torch.equal(dynamic.eval()(torch.arange(3 * ROWS)), larger.weight)


def test_reset_and_seed() -> None:
    torch.manual_seed(3)
    a, b = hb.Embedding(ROWS, DIM, padding_idx=1), hb.Embedding(ROWS, DIM)
    assert not torch.equal(a.weight[2:], b.weight[2:]), "two modules never start equal"
    torch.manual_seed(3)
    again = hb.Embedding(ROWS, DIM, padding_idx=1)
    assert torch.equal(a.weight, again.weight) and not a.weight[1].any()
    first = a.weight.detach().clone()
    a.reset_parameters()
    assert not torch.equal(a.weight, first) and not a.weight[1].any()
    large = hb.Embedding(20_000, 8).weight.detach()
    assert abs(float(large.mean())) < 0.02 and abs(float(large.std()) - 1) < 0.02


def test_dynamic_behaves_as_static() -> None:
    torch.manual_seed(5)
    static = hb.Embedding(ROWS, DIM, padding_idx=3)
    torch.manual_seed(5)
    dynamic = hb.Embedding(None, DIM, padding_idx=3)
    ids = torch.randint(0, ROWS, (7, 2))
    a, b = static(ids), dynamic(ids)
    assert torch.equal(a, b)
    gradient = torch.randn_like(a)
    a.backward(gradient)
    b.backward(gradient)
    assert dynamic.weight.grad is not None
    grad = dynamic.weight.grad.coalesce()
    met = dynamic._live.ids()[grad.indices()[0]]
    assert torch.equal(dense_grad(static.weight)[met], grad.values())
    assert 3 not in met.tolist()


def test_jagged_in_jagged_out() -> None:
    _, ours = twins()
    bags = hb.Jagged(torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 0, 1]))
    out = ours(bags)
    assert isinstance(out, hb.Jagged) and torch.equal(out.values, ours(bags.values))
    assert out.lengths.tolist() == [2, 0, 1]


def test_torch_attributes_are_there() -> None:
    theirs, ours = twins(padding_idx=2)
    for name in ("num_embeddings", "embedding_dim", "padding_idx", "max_norm", "norm_type"):
        assert getattr(theirs, name) == getattr(ours, name)
    assert not ours.scale_grad_by_freq
    assert repr(ours) == repr(theirs)


def test_device_and_dtype_are_told() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        layer = hb.Embedding(None, DIM, dtype=dtype)
        assert layer.dtype == dtype and layer.device == torch.device("cpu")
        assert layer(torch.tensor([1])).dtype == dtype


def test_a_gradient_with_its_signs_still_to_be_turned() -> None:
    """The imaginary part of a conjugate is kept as its opposite, with a mark."""
    for dim in (1, 2):
        theirs = nn.Embedding(4, dim)
        ours = hb.Embedding(4, dim, _weight=theirs.weight.detach())
        for layer in (theirs, ours):
            vectors = layer(torch.tensor([1, 2]))
            values = torch.complex(torch.zeros_like(vectors), vectors).conj()
            (values * (1 + 2j)).imag.sum().backward()
        assert theirs.weight.grad is not None
        assert torch.equal(dense_grad(ours.weight), theirs.weight.grad)


def test_tied_to_a_linear_layer() -> None:
    _, ours = twins()
    output = nn.Linear(DIM, ROWS, bias=False)
    output.weight = ours.weight
    model = nn.ModuleList([ours, output])
    assert len(list(model.parameters())) == 1
    output(ours(torch.tensor([1, 2]))).sum().backward()
    assert ours.weight.grad is not None and not ours.weight.grad.is_sparse
    copied = copy.deepcopy(model)
    assert copied[0].weight is copied[1].weight
