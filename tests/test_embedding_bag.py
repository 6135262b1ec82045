"""`hotbed.EmbeddingBag` beside `torch.nn.EmbeddingBag`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_twins import dense_grad

import hotbed as hb

ROWS, DIM = 9, 5
MODES = ("sum", "mean", "max")


def twins(**options: Any) -> tuple[nn.EmbeddingBag, hb.EmbeddingBag]:
    """The two layers with the same weights."""
    theirs = nn.EmbeddingBag(ROWS, DIM, **options)
    ours = hb.EmbeddingBag(ROWS, DIM, _weight=theirs.weight.detach(), **options)
    return theirs, ours


def assert_agree(
    theirs: nn.EmbeddingBag,
    ours: hb.EmbeddingBag,
    input: Tensor,
    offsets: Tensor | None = None,
    weights: Tensor | None = None,
    tolerance: float = 1e-5,
) -> None:
    """Forward, gradient of the table and gradient of the weights."""
    mine = None if weights is None else weights.clone().requires_grad_()
    yours = None if weights is None else weights.clone().requires_grad_()
    a = theirs(input, offsets, yours)
    b = ours(input, offsets, mine)
    assert a.dtype == b.dtype
    torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)
    gradient = torch.randn_like(a)
    a.backward(gradient)
    b.backward(gradient)
    assert theirs.weight.grad is not None
    gradient = dense_grad(ours.weight).to(a.dtype)  # float32 for 16-bit rows
    torch.testing.assert_close(gradient, theirs.weight.grad, rtol=tolerance, atol=tolerance)
    if weights is not None:
        assert mine is not None and yours is not None
        torch.testing.assert_close(mine.grad, yours.grad, rtol=tolerance, atol=tolerance)


def loses_a_bag() -> bool:
    """Whether torch leaves the last row of a matrix out where include_last_offset is set, as 2.5.1 does
    (which crashes if it is the only one, and mode "max")."""
    bag = nn.EmbeddingBag(1, 1, mode="sum", include_last_offset=True)
    return len(bag(torch.zeros((1, 1), dtype=torch.int64))) == 0


@settings(max_examples=examples(150))
@given(st.data())
def test_random_calls_agree(data: st.DataObject) -> None:
    mode = data.draw(st.sampled_from(MODES))
    dtype = data.draw(st.sampled_from((torch.float32, torch.float64)))
    matrix = data.draw(st.booleans())
    last = data.draw(st.booleans()) and not (matrix and loses_a_bag())
    padding = data.draw(st.sampled_from((None, 0, 4, -1)))
    theirs, ours = twins(mode=mode, dtype=dtype, include_last_offset=last, padding_idx=padding)
    assert ours.padding_idx == theirs.padding_idx
    kind = data.draw(st.sampled_from((torch.int64, torch.int32)))
    batch = data.draw(st.integers(1, 5))
    if matrix:
        input = torch.randint(0, ROWS, (batch, data.draw(st.integers(1, 4))), dtype=kind)
        offsets = None
    else:
        lengths = data.draw(st.lists(st.integers(0, 4), min_size=batch, max_size=batch))
        ends = torch.tensor([0, *lengths]).cumsum(0).to(kind)
        input = torch.randint(0, ROWS, (int(ends[-1]),), dtype=kind)
        offsets = ends if last else ends[:-1]
    weights = None
    if mode == "sum" and data.draw(st.booleans()):
        weights = torch.randn(input.shape, dtype=dtype)
    assert_agree(theirs, ours, input, offsets, weights, 1e-12 if dtype == torch.float64 else 1e-5)


def test_weights_for_other_modes() -> None:
    """torch has them for sum only; ours are the weighted mean and Σwv / √Σw²."""
    input = torch.randint(0, ROWS, (4, 3))
    for mode in ("mean", "sqrtn"):
        ours = hb.EmbeddingBag(ROWS, DIM, mode=mode, dtype=torch.float64)
        weights = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)
        leaf = ours.weight.detach().clone().requires_grad_()
        w = weights.detach().clone().requires_grad_()
        divisor = w.sum(1) if mode == "mean" else (w * w).sum(1).sqrt()
        want = (leaf[input] * w[..., None]).sum(1) / divisor[:, None]
        got = ours(input, per_sample_weights=weights)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        gradient = torch.randn_like(want)
        got.backward(gradient)
        want.backward(gradient)
        torch.testing.assert_close(weights.grad, w.grad, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(dense_grad(ours.weight), leaf.grad, rtol=1e-11, atol=1e-12)


def test_weights_used_twice_sum_their_gradients() -> None:
    theirs, ours = twins(mode="sum")
    input = torch.randint(0, ROWS, (4, 3))
    mine = torch.rand(4, 3, requires_grad=True)
    yours = mine.detach().clone().requires_grad_()
    for layer, w in ((theirs, yours), (ours, mine)):
        (
            layer(input, per_sample_weights=w) * layer(input + 0, per_sample_weights=w * 2)
        ).sum().backward()
    torch.testing.assert_close(mine.grad, yours.grad)
    assert theirs.weight.grad is not None
    torch.testing.assert_close(dense_grad(ours.weight), theirs.weight.grad)


def test_frozen_rows_still_pass_gradients_to_weights() -> None:
    for rows in (ROWS, None):
        ours = hb.EmbeddingBag(rows, DIM, mode="sum")
        ours.weight.requires_grad_(False)
        w = torch.rand(2, 3, requires_grad=True)
        input = torch.randint(0, ROWS, (2, 3))
        ours(input, per_sample_weights=w).sum().backward()
        table = ours._live.lookup(torch.arange(ROWS))
        torch.testing.assert_close(w.grad, table[input].sum(-1))
        assert ours.weight.grad is None and len(ours._live) == (rows or 0)


def test_ties_of_the_maximum_go_to_the_first() -> None:
    weight = torch.tensor([[1.0, 5.0], [1.0, 2.0], [0.0, 5.0]])
    theirs = nn.EmbeddingBag(3, 2, mode="max", _weight=weight.clone())
    ours = hb.EmbeddingBag(3, 2, mode="max", _weight=weight)
    input, offsets = torch.tensor([2, 1, 0, 0, 1]), torch.tensor([0, 0, 3])
    a, b = theirs(input, offsets), ours(input, offsets)
    assert torch.equal(a, b) and not b[0].any()
    gradient = torch.arange(1.0, 7.0).view(3, 2)
    a.backward(gradient)
    b.backward(gradient)
    assert theirs.weight.grad is not None
    assert torch.equal(dense_grad(ours.weight), theirs.weight.grad)


@pytest.mark.parametrize("mode", MODES)
def test_empty_bags_and_empty_batches(mode: str) -> None:
    theirs, ours = twins(mode=mode)
    nothing = torch.zeros(0, dtype=torch.int64)
    out = ours(nothing, torch.tensor([0, 0, 0]))
    assert torch.equal(out, theirs(nothing, torch.tensor([0, 0, 0]))) and not out.any()
    out.sum().backward()
    assert not dense_grad(ours.weight).any()
    assert ours(nothing, nothing).shape == theirs(nothing, nothing).shape == (0, DIM)
    assert ours(nothing.view(0, 3)).shape == (0, DIM)
    assert torch.equal(ours(nothing.view(3, 0)), torch.zeros(3, DIM))
    last = hb.EmbeddingBag(ROWS, DIM, mode=mode, include_last_offset=True)
    assert last(nothing, torch.tensor([0])).shape == (0, DIM)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((torch.tensor([1, 2]),), "needs offsets"),
        ((torch.tensor([1, 2]), "0"), "offsets must be integers, got the string"),
        ((torch.tensor([1, 2]), [0.0]), "offsets must be int64 or int32, got float64"),
        ((torch.tensor([1, 2]), {0}), "needs offsets"),
        ((torch.tensor([1, 2]), torch.tensor([0.0])), "needs offsets"),
        ((torch.tensor([1, 2]), torch.tensor([1, 2])), "start at 1"),
        ((torch.tensor([1, 2]), torch.tensor([0, 3])), "rise"),
        ((torch.tensor([1, 2]), torch.tensor([0, 2, 1])), "rise"),
        ((torch.tensor([[1, 2]]), torch.tensor([0])), "offsets go with a 1-D input"),
        ((torch.zeros(1, 2, 3).long(),), "1-D or 2-D"),
        ((torch.tensor(1),), "1-D or 2-D"),
        ((torch.tensor([[1, 2]]), None, torch.ones(2)), "shape of input"),
        ((torch.tensor([[1, 2]]), None, [1.0, 1.0]), "shape of input"),
        ((torch.tensor([[1, 2]]), None, torch.ones(1, 2) * 1j), "must be real numbers"),
        ((hb.Jagged(torch.tensor([1]), torch.tensor([0, 1])), torch.tensor([0])), "offsets go"),
        (
            (hb.Jagged(torch.tensor([1]), torch.tensor([0, 1])), None, torch.ones(1)),
            "per_sample_weights go",
        ),
        ((torch.tensor([[1.0, 2.0]]),), "int64 or int32, got float32"),
    ],
)
def test_wrong_calls_are_refused(arguments: Any, says: str) -> None:
    ours = hb.EmbeddingBag(ROWS, DIM, mode="sum")
    before = ours.weight.detach().clone()
    with pytest.raises(hb.InputError, match=says):
        ours(*arguments)
    assert torch.equal(ours.weight, before)


def test_offsets_must_be_followed_to_the_end() -> None:
    ours = hb.EmbeddingBag(ROWS, DIM, include_last_offset=True)
    with pytest.raises(hb.InputError, match="end at 4 .* 3 values"):
        ours(torch.tensor([1, 2, 3]), torch.tensor([0, 4]))
    with pytest.raises(hb.InputError, match="at least one offset"):
        ours(torch.zeros(0).long(), torch.zeros(0).long())
    with pytest.raises(hb.InputError, match="not max"):
        hb.EmbeddingBag(ROWS, DIM, mode="max")(
            torch.tensor([[1]]), per_sample_weights=torch.ones(1, 1)
        )
    with pytest.raises(hb.IdError, match=r"sample 1: id 9 is outside \[0, 9\)"):
        ours(torch.tensor([1, 2, 9]), torch.tensor([0, 2, 3]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padding", [None, 4])
@pytest.mark.parametrize("offsets", [[0, 2, 3], [0, 3, 3], [0, 0], [0]], ids=str)
def test_ids_behind_the_last_offset_are_torchs_or_refused(
    mode: str, dtype: torch.dtype, padding: int | None, offsets: list[int]
) -> None:
    theirs, ours = twins(mode=mode, dtype=dtype, padding_idx=padding, include_last_offset=True)
    input = torch.tensor([1, 2, 3, 4, 5])
    given, end = torch.tensor(offsets), offsets[-1]
    # Where torch's devices and dtypes differ, its gradient is another forward's, or it crashes.
    if (mode != "max" and dtype != torch.float64 and padding is None) or len(offsets) == 1:
        with pytest.raises(
            hb.InputError, match=rf"end at {end}, and .* 5 ids.*give input\[:{end}\]"
        ):
            ours(input, given)
        return
    tolerance = 1e-2 if dtype.itemsize == 2 else 1e-6
    assert_agree(theirs, ours, input, given, tolerance=tolerance)
    if mode == "sum":
        assert_agree(theirs, ours, input, given, torch.rand(5, dtype=dtype), tolerance)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"max_norm": 1.0}, "max_norm=1.0"),
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq"),
        ({"mode": "median"}, "mode must be"),
        ({"device": "mps"}, "device='mps'"),
        ({"padding_idx": ROWS}, "outside"),
        ({"_weight": torch.zeros(2, 2)}, "_weight has shape"),
    ],
)
def test_what_cannot_be_honoured_is_refused(arguments: Any, says: str) -> None:
    with pytest.raises(hb.TableError, match=says):
        hb.EmbeddingBag(ROWS, DIM, **arguments)


def test_from_pretrained_and_state_dict() -> None:
    weight = torch.randn(ROWS, DIM)
    theirs = nn.EmbeddingBag.from_pretrained(weight, mode="sum", padding_idx=2)
    ours = hb.EmbeddingBag.from_pretrained(weight, mode="sum", padding_idx=2)
    assert not ours.weight.requires_grad
    input = torch.randint(0, ROWS, (4, 3))
    torch.testing.assert_close(ours(input), theirs(input))
    assert hb.EmbeddingBag.from_pretrained(weight, freeze=False).weight.requires_grad
    fresh = hb.EmbeddingBag(ROWS, DIM, mode="sum")
    fresh.load_state_dict(theirs.state_dict())
    assert torch.equal(fresh.weight, weight)
    nn.EmbeddingBag(ROWS, DIM).load_state_dict(ours.state_dict())
    ours.weight = nn.Parameter(torch.ones(ROWS, DIM))
    assert ours.weight.requires_grad and torch.equal(ours.weight, torch.ones(ROWS, DIM))


def test_bags_of_other_kinds() -> None:
    _, ours = twins(mode="sum")
    bags = hb.Jagged(torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 0, 1]))
    want = ours(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 2]))
    assert torch.equal(ours(bags), want)
    nested = torch.nested.nested_tensor_from_jagged(bags.values, bags.offsets)
    assert torch.equal(ours(nested), want)


@pytest.mark.parametrize(
    ("name", "same", "other", "says"),
    [
        ("max_norm", None, 1.0, "EmbeddingBag: max_norm=1.0 cannot be honoured"),
        ("scale_grad_by_freq", False, True, "EmbeddingBag: scale_grad_by_freq=True cannot"),
        ("sparse", True, False, "sparse is True and cannot become False"),
        ("padding_idx", 4, 3, "padding_idx is 4 and cannot become 3, .* Make another layer"),
        ("padding_idx", 4, None, "padding_idx is 4 and cannot become None"),
        ("mode", "sum", "max", "mode is 'sum' and cannot become 'max'"),
        ("num_embeddings", ROWS, 100, "num_embeddings is 9 and cannot become 100"),
        ("embedding_dim", DIM, 6, "embedding_dim is 5 and cannot become 6"),
    ],
)
def test_options_stay_as_they_were_made(name: str, same: Any, other: Any, says: str) -> None:
    for kind in (hb.EmbeddingBag, hb.Embedding):
        layer = kind(ROWS, DIM, padding_idx=4, **({} if kind is hb.Embedding else {"mode": "sum"}))
        if not hasattr(layer, name):
            continue
        setattr(layer, name, same)
        with pytest.raises(hb.TableError, match=says.replace("EmbeddingBag", kind.__name__)):
            setattr(layer, name, other)
        assert getattr(layer, name) == same
    layer.norm_type = 1.0  # of no account without max_norm, as in the constructor


def test_the_last_offset_may_be_told_later() -> None:
    theirs, ours = twins(mode="sum")
    theirs.include_last_offset = ours.include_last_offset = True
    assert_agree(theirs, ours, torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3]))


def test_torch_attributes_are_there() -> None:
    theirs, ours = twins(mode="sum", padding_idx=2, include_last_offset=True)
    names = ("num_embeddings", "embedding_dim", "padding_idx", "max_norm", "norm_type", "mode")
    for name in (*names, "scale_grad_by_freq", "include_last_offset"):
        assert getattr(theirs, name) == getattr(ours, name)
    assert repr(theirs) == repr(ours)
