"""What waits for the step of a table: who may look at it, change it, and add to it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed.table.sparse_gradient import TableGradient

ids = torch.tensor
ROWS, DIM = 6, 2


def layer(rows: int | None = ROWS) -> hb.Embedding:
    torch.manual_seed(0)
    return hb.Embedding(rows, DIM)


def dense(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad.to_dense() if grad.is_sparse else grad


@pytest.mark.parametrize("look", [False, True])
def test_a_gradient_is_the_sum_of_what_backwards_left(look: bool) -> None:
    ours, torchs = layer(), nn.Embedding(ROWS, DIM)
    for picked in ([1, 1, 4], [4], [], [0, 1]):
        for module in (ours, torchs):
            (module(ids(picked, dtype=torch.long)) * (1 + len(picked))).sum().backward()
        if look:
            assert torch.equal(dense(ours.weight.grad), torchs.weight.grad)
    assert ours.weight.grad is ours.weight.grad
    assert torch.equal(dense(ours.weight.grad), torchs.weight.grad)
    assert ours.weight.grad._nnz() == 3  # each slot once


def test_a_loss_may_use_the_parameter_beside_its_vectors() -> None:
    for order in (0, 1):
        ours, torchs = layer(), nn.Embedding(ROWS, DIM)
        with torch.no_grad():
            torchs.weight.copy_(ours.weight)
        for module in (ours, torchs):
            losses = [module(ids([1, 1, 4])).sum(), module.weight.square().sum()]
            losses[order].backward()
            losses[1 - order].backward()
        assert torch.equal(dense(ours.weight.grad), torchs.weight.grad)


@pytest.mark.parametrize("how", ["together", "hook", "post hook", "grad", "inputs"])
def test_whoever_asks_torch_for_a_gradient_gets_it(how: str) -> None:
    ours = layer()
    seen: list[Tensor] = []
    if how == "hook":
        ours.weight.register_hook(lambda grad: seen.append(dense(grad).clone()))
    if how == "post hook":
        ours.weight.register_post_accumulate_grad_hook(lambda p: seen.append(dense(p.grad).clone()))
    for picked in ([1, 1, 4], [4, 5]):
        loss = ours(ids(picked)).sum()
        if how == "grad":
            seen += [dense(grad) for grad in torch.autograd.grad(loss, [ours.weight])]
        elif how == "inputs":
            loss.backward(inputs=[ours.weight])
        else:
            loss.backward()
    first, second = torch.zeros(ROWS, DIM), torch.zeros(ROWS, DIM)
    first[1], first[4], second[4:] = 2, 1, 1
    if how in ("hook", "grad"):
        assert torch.equal(seen[0], first) and torch.equal(seen[1], second)
    elif how == "post hook":
        assert torch.equal(seen[0], first) and torch.equal(seen[1], first + second)
    if how == "grad":
        assert ours.weight.grad is None
    else:
        assert torch.equal(dense(ours.weight.grad), first + second)


def test_a_hook_that_comes_between_finds_what_was_there_before() -> None:
    ours = layer()
    ours(ids([1])).sum().backward()
    ours.weight.register_hook(lambda grad: 10 * grad)
    ours(ids([1])).sum().backward()
    assert torch.equal(dense(ours.weight.grad)[1], torch.full((DIM,), 11.0))


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.grad.mul_(3),
        lambda p: p.grad._values().mul_(3),
        lambda p: setattr(p, "grad", p.grad * 3),
        lambda p: setattr(p, "grad", 3 * p.grad.coalesce()),
        lambda p: setattr(p, "grad", dense(p.grad) * 3),
    ],
)
def test_what_is_changed_in_a_gradient_counts(change: Callable[[nn.Parameter], None]) -> None:
    ours = layer()
    optimizer = hb.optim.SGD(ours.parameters(), lr=1.0)
    before = ours.weight.detach().clone()
    ours(ids([1, 1])).sum().backward()
    change(ours.weight)
    ours(ids([1, 2])).sum().backward()
    optimizer.step()
    moved = before - ours.weight.detach()
    torch.testing.assert_close(moved[:3, 0], ids([0.0, 7.0, 1.0]))


@pytest.mark.parametrize("rows", [ROWS, None])
@pytest.mark.parametrize("whose", ["optimizer", "module"])
@pytest.mark.parametrize("to_none", [True, False])
def test_zeroing(rows: int | None, whose: str, to_none: bool) -> None:
    ours = layer(rows)
    optimizer = hb.optim.Adagrad(ours.parameters(), lr=1.0)
    zeroing = optimizer if whose == "optimizer" else ours
    zeroing.zero_grad(set_to_none=to_none)
    assert ours.weight.grad is None
    ours(ids([1])).sum().backward()
    zeroing.zero_grad(set_to_none=to_none)
    assert (ours.weight.grad is None) == to_none
    assert to_none or ours.weight.grad._nnz() == 0  # type: ignore[attr-defined]
    ours(ids([2])).sum().backward()
    before = ours._live.lookup(ids([1, 2])).clone()
    optimizer.step()
    moved = before - ours._live.lookup(ids([1, 2]))
    assert torch.equal(moved[0], torch.zeros(DIM)) and float(moved[1, 0]) == pytest.approx(1.0)


def test_deleting() -> None:
    ours = layer()
    ours(ids([1])).sum().backward()
    del ours.weight.grad
    assert ours.weight.grad is None


def test_what_torch_makes_of_a_gradient_keeps_where_it_comes_from() -> None:
    ours = layer()
    ours(ids([1, 4])).sum().backward()
    grad = ours.weight.grad
    assert isinstance(grad, TableGradient)
    grad.sources = ["a batch"]
    for made in (grad * 2, grad.clone(), grad.coalesce(), grad.detach(), -grad, grad + grad):
        assert isinstance(made, TableGradient) and set(made.sources) == {"a batch"}
    assert type(grad.to_dense()) is Tensor and type(grad._values()) is Tensor
    grad.zero_()
    assert grad.sources == []


def test_backwards_at_once_lose_nothing() -> None:
    """As in torch, where they add up in whatever order they come."""
    ours = layer(None)
    optimizer = hb.optim.SGD(ours.parameters(), lr=1.0)
    threads, rounds = 4, 150
    for _ in range(rounds):
        losses = [ours(ids([7, 8])).sum() for _ in range(threads)]
        gate = threading.Barrier(threads)

        def run(loss: Tensor, gate: threading.Barrier = gate) -> None:
            gate.wait()
            loss.backward()

        started = [threading.Thread(target=run, args=(loss,)) for loss in losses]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
        assert torch.equal(ours.weight.grad._values(), torch.full((2, DIM), float(threads)))
        optimizer.zero_grad()


@pytest.mark.process
def test_looking_at_a_gradient_warns_of_nothing() -> None:
    """In a process of its own, as torch says some things once."""
    script = """
import warnings, torch, hotbed as hb
warnings.simplefilter("error")
layer = hb.Embedding(6, 2)
for _ in range(2):
    layer(torch.tensor([1, 4])).sum().backward()
torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0, foreach=False)
print(layer.weight.grad._nnz())
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (ran.stdout, ran.stderr) == ("2\n", "")
