"""The parameters that stand for tables, in the hands of somebody who takes them for tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed import _core
from hotbed.table.handles import FollowingHandle, Handle, OpenHandle

ids = torch.tensor
ROWS, DIM = 12, 3


def behind(dtype: torch.dtype = torch.float64) -> tuple[hb.Embedding, Any]:
    """A layer whose rows from 4 on are behind the momentum of its optimizer."""
    torch.manual_seed(0)
    layer = hb.Embedding(ROWS, DIM, dtype=dtype)
    optimizer = hb.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9, untouched="exact")
    for picked in (ids(range(ROWS)), ids([0, 1]), ids([2, 3])):
        layer(picked).double().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return layer, optimizer


def stored(layer: hb.Embedding) -> Tensor:
    return _core.weights(layer._live.core).clone()


def current(layer: hb.Embedding) -> Tensor:
    return layer._live.lookup(torch.arange(ROWS))


@pytest.mark.parametrize(
    "read",
    [
        lambda w: w.detach().clone(),
        lambda w: w.data,
        lambda w: w.clone(),
        lambda w: w + 0,
        lambda w: w[:],
        lambda w: w.view(-1).view(ROWS, DIM),
        lambda w: w.T.T,
        lambda w: torch.stack(list(w)),
        lambda w: torch.cat([w[:5], w[5:]]),
        lambda w: torch.stack([w, w])[0],
        lambda w: torch.from_numpy(w.detach().numpy()),
        lambda w: torch.tensor(w.tolist(), dtype=torch.float64),
        lambda w: torch.nn.utils.parameters_to_vector([w]).view(ROWS, DIM),
        lambda w: torch.einsum("ij->ij", w),
        lambda w: torch._foreach_add([w], 0.0)[0],
    ],
)
def test_a_handle_shows_rows_caught_up(read: Callable[[Tensor], Tensor]) -> None:
    layer, _ = behind()
    want = current(layer)
    assert not torch.equal(stored(layer), want)
    (held,) = layer.parameters()
    assert torch.equal(read(held), want)
    assert torch.equal(current(layer), want) and torch.equal(stored(layer), want)


@pytest.mark.parametrize("show", [repr, str, "{}".format])
def test_a_handle_prints_rows_caught_up(show: Callable[[Any], str]) -> None:
    layer, _ = behind()
    with torch.no_grad():
        want = repr(nn.Parameter(current(layer)))
    assert show(layer.weight) == want


def test_a_loss_over_the_handle_has_its_gradient() -> None:
    layer, optimizer = behind()
    want = current(layer)
    layer.weight.square().sum().backward()
    assert torch.equal(layer.weight.grad, 2 * want)
    optimizer.step()
    assert not torch.equal(current(layer), want)


@pytest.mark.parametrize(
    "write",
    [
        lambda w, v: w.copy_(v),
        lambda w, v: w.data.copy_(v),
        lambda w, v: w.__setitem__(slice(None), v),
        lambda w, v: w.detach().view(-1).copy_(v.view(-1)),
        lambda w, v: [row.copy_(u) for row, u in zip(w, v, strict=True)],
        lambda w, v: torch.add(v, 0, out=w.data),
        lambda w, v: torch._foreach_copy_([w], [v]),
    ],
)
@pytest.mark.parametrize("part", [slice(0, ROWS), slice(5, 7)])
def test_what_is_written_into_a_handle_counts_as_of_the_last_step(
    write: Callable[[Tensor, Tensor], None], part: slice
) -> None:
    layer, optimizer = behind()
    want = current(layer)
    want[part] = torch.arange(float(len(want[part]) * DIM), dtype=torch.float64).view(-1, DIM)
    with torch.no_grad():
        write(layer.weight, want)
    assert torch.equal(current(layer), want)
    # From there the buffers that the rows have move them on, as they would under dense torch.
    layer(ids([0])).sum().backward()
    optimizer.step()
    assert not torch.equal(current(layer)[part], want[part])


def test_reading_a_handle_changes_later_values_by_rounding_only() -> None:
    read, unread = behind()[0], behind()[0]
    optimizers = [
        hb.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, untouched="exact")
        for m in (read, unread)
    ]
    for step in range(6):
        float(read.weight.detach().norm())
        for layer, optimizer in zip((read, unread), optimizers, strict=True):
            layer(ids([step])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(current(read), current(unread), rtol=1e-13, atol=0)


def test_asking_about_a_handle_writes_nothing() -> None:
    layer, optimizer = behind()
    before, weight = stored(layer), layer.weight
    assert (weight.shape, weight.dtype, weight.dim()) == ((ROWS, DIM), torch.float64, 2)
    assert weight.requires_grad and weight.is_leaf and weight.grad is None and len(weight) == ROWS
    assert weight.device.type == "cpu" and weight.numel() == weight.nelement() == ROWS * DIM
    assert weight.is_floating_point() and torch.is_floating_point(weight) and {weight: 1}
    weight.register_hook(lambda g: g).remove()
    weight.requires_grad_(True)
    optimizer.zero_grad()
    optimizer.state_dict()
    layer.state_dict()
    layer.eval()(torch.arange(ROWS))
    assert torch.equal(stored(layer), before)


def test_the_kind_of_a_handle_follows_the_optimizer() -> None:
    layer = hb.Embedding(ROWS, DIM)
    weight = layer.weight
    assert type(weight) is Handle
    hb.optim.Adam(layer.parameters())
    assert type(weight) is Handle
    hb.optim.Adam(layer.parameters(), untouched="exact", replace_state=True)
    assert type(weight) is FollowingHandle and layer.weight is weight
    hb.optim.Adagrad(layer.parameters(), untouched="exact", replace_state=True)
    assert type(weight) is Handle  # rows stay where they are in this rule
    assert isinstance(hb.Embedding(None, DIM).weight, OpenHandle)


INITS = [
    nn.init.zeros_,
    nn.init.ones_,
    nn.init.normal_,
    nn.init.uniform_,
    nn.init.trunc_normal_,
    nn.init.xavier_uniform_,
    nn.init.kaiming_normal_,
    lambda w: nn.init.constant_(w, 7.0),
    lambda w: w.data.fill_(1.0),
    lambda w: w.detach().zero_(),
    lambda w: w.data.normal_(0, 1),
    lambda w: w.data.mul_(2),
    lambda w: torch.nn.init.orthogonal_(w),
]


@pytest.mark.parametrize("untouched", ["lazy", "exact"])
@pytest.mark.parametrize("init", INITS)
def test_static_tables_can_be_initialised_by_torch(init: Any, untouched: str) -> None:
    layer = hb.Embedding(ROWS, DIM)
    hb.optim.Adam(layer.parameters(), untouched=untouched)
    before = current(layer)
    init(layer.weight)
    assert not torch.equal(current(layer), before)
    assert torch.equal(layer(torch.arange(ROWS)), layer.weight)


MISUSES = [
    *INITS,
    lambda w: w.fill_(0.0),
    lambda w: w.__setitem__(3, 0.0),
    lambda w: w[3],
    lambda w: w.sum(),
    lambda w: w.data.norm(),
    lambda w: torch.linalg.vector_norm(w),
    lambda w: w + 1,
    lambda w: w.add_(1),
    lambda w: w.clone(),
    lambda w: w.cpu(),
    lambda w: w.isnan(),
    lambda w: w.T,
    lambda w: w.tolist(),
    lambda w: w.detach().numpy(),
    lambda w: torch.zeros_like(w),
    lambda w: setattr(w, "data", torch.zeros(3)),
    lambda w: nn.utils.parameters_to_vector([w]),
    lambda w: nn.functional.embedding(torch.tensor([1]), w),
    lambda w: torch.optim.swa_utils.get_ema_multi_avg_fn()([w], [w], 0),
]


@pytest.mark.parametrize("misuse", MISUSES)
def test_a_handle_without_rows_refuses_to_be_taken_for_them(misuse: Callable[[Any], Any]) -> None:
    collection = hb.EmbeddingCollection([hb.Table("user", DIM)], seed=0)
    collection({"user": ids([5, 9])})
    rows = collection.rows("user")
    with torch.no_grad():
        with pytest.raises(hb.TableError, match="'user': its parameter holds no rows.*init="):
            misuse(collection.parameter("user"))
    assert torch.equal(collection.rows("user").values, rows.values)
    assert torch.equal(collection({"user": ids([9])})["user"], rows.values[1:])


def test_a_handle_without_rows_tells_about_itself() -> None:
    collection = hb.EmbeddingCollection([hb.Table("user", DIM)], seed=0)
    weight = collection.parameter("user")
    collection({"user": ids([5, 9])})["user"].sum().backward()
    for tensor in (weight, weight.data, weight.detach()):
        assert tensor.shape[1] == DIM and len(tensor) > 2**36 and tensor.dim() == 2
        # Elements are those of rows that are stored: what summaries of models count.
        assert tensor.numel() == tensor.nelement() == torch.numel(tensor) == 2 * DIM
        assert tensor.nbytes == 2 * DIM * 4
        assert tensor.dtype == torch.float32 and tensor.device.type == "cpu"
        assert tensor.is_floating_point() and not tensor.is_sparse
        assert "user" in repr(tensor) and "user" in f"{tensor}"
    assert weight.requires_grad and not weight.detach().requires_grad
    assert weight.grad.shape == weight.shape and weight in {weight}
    seen = []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p is weight))
    collection({"user": ids([5])})["user"].sum().backward()
    assert seen == [True]


TIERS = hb.Storage(device=200_000, host="16MB")


@pytest.mark.parametrize("storage", [None, TIERS], ids=["in memory", "in tiers"])
@pytest.mark.parametrize("rows", [None, ROWS], ids=["dynamic", "static"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("untouched", [None, "lazy", "exact"])
def test_autograd_gives_gradients_by_hand(
    storage: hb.Storage | None, rows: int | None, dtype: torch.dtype, untouched: str | None
) -> None:
    """The gradient that backward would have left, and none in ``grad``."""
    tables = [hb.Table("item", DIM, rows, dtype=dtype), hb.Table("other", DIM, rows)]
    collection = hb.EmbeddingCollection(tables, seed=0, storage=storage)
    if untouched is not None:
        hb.optim.Adam(collection.parameters(), untouched=untouched)
    weight, other = collection.parameter("item"), collection.parameter("other")

    def loss() -> Tensor:
        vectors = collection({"item": ids([3, 7, 3]), "other": ids([1, 2, 3])})
        return vectors["item"].square().sum()

    loss().backward()
    wanted, weight.grad = weight.grad, None
    for grad in (
        *torch.autograd.grad(loss(), weight),
        *torch.autograd.grad([loss()], [weight]),
        torch.autograd.grad(loss(), [other, weight], allow_unused=True)[1],
    ):
        assert grad.is_sparse and grad.shape == weight.shape and grad.dtype == wanted.dtype
        assert torch.equal(grad._indices(), wanted._indices())
        assert torch.equal(grad._values(), wanted._values())
    assert weight.grad is None
    loss().backward(inputs=[weight])
    assert torch.equal(weight.grad._values(), wanted._values()) and other.grad is None  # type: ignore[attr-defined]
    zeros, _ = torch.autograd.grad(loss(), [other, weight], materialize_grads=True)
    assert zeros.shape == other.shape
    assert not (zeros._values() if zeros.is_sparse else zeros).any()


def test_gradients_by_hand_of_rows_that_are_behind_write_nothing() -> None:
    layer, _ = behind()
    before, vectors = stored(layer), layer(ids([5, 6]))
    caught_up = stored(layer)
    assert not torch.equal(before, caught_up)
    (grad,) = torch.autograd.grad(vectors.sum(), [layer.weight])
    assert grad.is_sparse and torch.equal(stored(layer), caught_up)


def test_a_handle_without_rows_says_what_its_shape_is() -> None:
    tables = [hb.Table("C1", 16), hb.Table("item", 4, 10)]
    plain = hb.EmbeddingCollection(tables)
    tiered = hb.EmbeddingCollection(tables, storage=hb.Storage(device="1MB", host="2MB"))
    for model in (plain, tiered):
        model({"C1": [1, 2, 1], "item": [3, 3, 3]})
        handle = model.parameter("C1")
        shape = tuple(handle.shape)
        assert shape == (2**37, 16) and handle.numel() == 2 * 16
        assert repr(handle) == (
            f"Handle of table 'C1': 2 rows × 16, kept by id. Its shape, {shape}, only says that there is "
            "room for any id."
        )
        assert repr(handle) in repr(dict(model.named_parameters()))
    assert "'item': 10 rows × 4, kept by id" in repr(tiered.parameter("item"))
    assert repr(plain.parameter("item")).startswith("Parameter containing")
