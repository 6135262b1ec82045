"""What waits for the step of a table: who may look at it, change it, and add to it."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed.ops.duplicates import sum_duplicates
from hotbed.table.gradients import TableGradient, plain_access, set_gradient

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
    grad.origins = ["a batch"]
    for made in (grad * 2, grad.clone(), grad.coalesce(), grad.detach(), -grad, grad + grad):
        assert isinstance(made, TableGradient) and set(made.origins) == {"a batch"}
    assert type(grad.to_dense()) is Tensor and type(grad._values()) is Tensor
    grad.zero_()
    assert grad.origins == []


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


# -- what people do with a gradient ------------------------------------------------------------------


def _one() -> tuple[hb.EmbeddingCollection, nn.Parameter]:
    collection = hb.EmbeddingCollection([hb.Table("a", dim=2, rows=10)], seed=1)
    return collection, collection.parameter("a")


def _backward(collection: hb.EmbeddingCollection, ids: list[int]) -> None:
    collection({"a": torch.tensor(ids)})["a"].sum().backward()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_gradient_of_single_elements_is_one_of_rows() -> None:
    collection, handle = _one()
    optimizer = hb.optim.SGD([handle], lr=1.0)
    before = collection.rows("a").values
    handle.grad = torch.sparse_coo_tensor([[3, 3, 5], [1, 1, 0]], [5.0, 1.0, 2.0], (10, 2))
    _backward(collection, [3])
    optimizer.step()
    moved = torch.zeros(10, 2)
    moved[3], moved[5] = torch.tensor([1.0, 7.0]), torch.tensor([2.0, 0.0])
    torch.testing.assert_close(before - collection.rows("a").values, moved)


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")  # torch 2.15
def test_a_gradient_copies_and_saves_as_a_tensor(tmp_path: Path) -> None:
    collection, handle = _one()
    _backward(collection, [1, 2, 1])
    expected = handle.grad.to_dense()
    torch.save(handle.grad, tmp_path / "gradient.pt")
    for again in (
        copy.deepcopy(handle.grad),
        pickle.loads(pickle.dumps(handle.grad)),
        torch.load(tmp_path / "gradient.pt", weights_only=True),
    ):
        assert torch.equal(again.to_dense(), expected)


@pytest.mark.parametrize("wrong", [torch.zeros(3), 3, "itself"])
def test_an_assignment_that_is_refused_leaves_the_gradient(wrong: Any) -> None:
    collection, handle = _one()
    _backward(collection, [1, 2])
    with pytest.raises((RuntimeError, TypeError)):
        handle.grad = handle if wrong == "itself" else wrong
    assert handle.grad is not None and handle.grad._nnz() == 2


def test_a_table_that_was_frozen_before_backward_gets_no_gradient() -> None:
    collection, handle = _one()
    loss = collection({"a": torch.tensor([1])})["a"].sum()
    handle.requires_grad_(False)
    loss.backward()
    assert handle.grad is None


def test_a_gradient_times_a_matrix_is_torch_s() -> None:
    collection, handle = _one()
    twin = nn.Embedding(10, 2, sparse=True)
    factor = torch.arange(20.0).view(10, 2)
    _backward(collection, [2, 0, 1])
    twin(torch.tensor([2, 0, 1])).sum().backward()
    for grad in (handle.grad, twin.weight.grad):
        grad.mul_(factor)
    assert torch.equal(handle.grad.to_dense(), twin.weight.grad.to_dense())


def test_a_norm_counts_what_torch_has_added_in_place() -> None:
    collection, handle = _one()
    handle.register_hook(lambda grad: grad)
    norms = []
    for ids in ([2, 1], [1, 2]):
        _backward(collection, ids)
        norms.append(float(hb.nn.clip_grad_norm_([handle], 1e9)))
    assert norms == [2.0, 4.0]


@pytest.mark.parametrize("how", ["zero_grad", "zero_", "zeros_like"])
def test_a_gradient_that_was_zeroed_beside_a_hook_holds_no_rows(how: str) -> None:
    model = hb.EmbeddingCollection(
        [hb.Table("a", dim=64)], seed=0, storage=hb.Storage(device="600KB", host="20MB")
    )
    handle = model.parameter("a")
    handle.register_hook(lambda grad: None)
    optimizer = hb.optim.SGD([handle], lr=0.1)
    for at in range(60):  # all batches together need five times the budget
        _backward(model, list(range(100 * at, 100 * at + 100)))
        optimizer.step()
        if how == "zero_grad":
            model.zero_grad(set_to_none=False)
        elif how == "zero_":
            handle.grad.zero_()
        else:
            handle.grad = torch.zeros_like(handle.grad)
    assert model.count("a") == 6000


def test_tables_may_be_made_while_another_thread_steps() -> None:
    collection, handle = _one()
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    made, ended = [], threading.Event()

    def make() -> None:
        while not ended.is_set():
            made.append(_one())
            del made[:-5]

    thread = threading.Thread(target=make)
    thread.start()
    try:
        for _ in range(300):
            optimizer.step()
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(before)
    assert handle.grad is None and collection.count("a") == 10


def one_row(slot: int, value: float) -> Tensor:
    return torch.sparse_coo_tensor(ids([[slot]]), torch.full((1, DIM), value), (ROWS, DIM))


@pytest.mark.parametrize("assigned", [one_row(3, 5.0), torch.eye(ROWS, DIM), None])
def test_an_assigned_gradient_takes_the_place_of_what_nobody_has_looked_at(
    assigned: Tensor | None,
) -> None:
    ours = layer()
    optimizer = hb.optim.SGD(ours.parameters(), lr=1.0)
    before = ours.weight.detach().clone()
    for picked in ([1, 1], [4]):
        ours(ids(picked)).sum().backward()
    ours.weight.grad = None if assigned is None else assigned.clone()
    expected = torch.zeros(ROWS, DIM) if assigned is None else dense(assigned)
    if assigned is not None:
        assert torch.equal(dense(ours.weight.grad), expected)
    optimizer.step()
    torch.testing.assert_close(before - ours.weight.detach(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("hooked", [False, True])
def test_a_gradient_that_comes_after_a_step_waits_for_the_next(hooked: bool) -> None:
    collection, handle = _one()
    if hooked:
        handle.register_hook(lambda grad: grad)
    optimizer = hb.optim.SGD([handle], lr=0.1)
    table = collection.table("a")
    for _ in range(2):
        _backward(collection, [1])  # nobody calls zero_grad()
        assert table.owes_step
        optimizer.step()
        assert table.has_gradient and not table.owes_step


class AnnouncedLock:
    """A lock that says when a thread other than the one that made it is about to take it."""

    def __init__(self, lock: Any, arrived: threading.Event) -> None:
        self.lock, self.arrived, self.maker = lock, arrived, threading.current_thread()

    def __enter__(self) -> None:
        if threading.current_thread() is not self.maker:
            self.arrived.set()
        self.lock.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self.lock.__exit__(*raised)


@pytest.mark.parametrize("hooked", [False, True], ids=["", "hooked"])
@pytest.mark.parametrize(
    ("meanwhile", "expected"),
    [
        ("backward", [2.0, 3.0]),
        ("zero_grad", None),
        ("assign", [0.0, 5.0]),
        ("look", [2.0, 0.0]),
    ],
)
def test_whoever_comes_while_a_gradient_is_summed_comes_after(
    meanwhile: str, expected: list[float] | None, hooked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread is in the middle of summing when the other comes, and goes on once the other waits
    for it, or is through."""
    ours = layer(2)
    if hooked:
        ours.weight.register_hook(lambda grad: grad)
    handle = ours.weight
    for _ in range(2):
        ours(ids([0])).sum().backward()
    arrived = threading.Event()
    waiting = handle.waiting
    waiting._lock = AnnouncedLock(waiting._lock, arrived)
    if hooked:  # torch has summed: a look sums what may repeat
        with plain_access():
            set_gradient(
                handle, torch.sparse_coo_tensor(ids([[0, 0]]), torch.ones(2, DIM), (2, DIM))
            )
    seen: list[Any] = []

    def other() -> None:
        try:
            match meanwhile:
                case "backward":
                    (3 * ours(ids([1]))).sum().backward()
                case "zero_grad":
                    handle.grad = None
                case "assign":
                    handle.grad = torch.sparse_coo_tensor(
                        ids([[1]]), torch.full((1, DIM), 5.0), (2, DIM)
                    )
                case "look":
                    seen.append(handle.grad)
        finally:
            arrived.set()

    def interrupted(slots: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        monkeypatch.undo()
        thread.start()
        assert arrived.wait(60)
        return sum_duplicates(slots, rows)

    monkeypatch.setattr("hotbed.table.gradients.sum_duplicates", interrupted)
    thread = threading.Thread(target=other)
    looked = waiting.look(handle, each_once=True)
    thread.join(60)
    assert not thread.is_alive()
    if expected is None:
        assert handle.grad is None
    else:
        assert dense(handle.grad)[:, 0].tolist() == expected
    assert all(grad is looked for grad in seen)


def test_a_handler_of_a_signal_may_look_while_a_gradient_is_summed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It runs on the thread that sums."""
    ours = layer(2)
    for _ in range(2):
        ours(ids([0])).sum().backward()
    seen: list[Any] = []

    def handled(slots: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        monkeypatch.undo()
        seen.append(ours.weight.grad)
        return sum_duplicates(slots, rows)

    monkeypatch.setattr("hotbed.table.gradients.sum_duplicates", handled)
    thread = threading.Thread(target=lambda: seen.append(ours.weight.grad), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the lock is not taken twice by one thread"
    assert [dense(grad)[:, 0].tolist() for grad in seen] == [[2.0, 0.0]] * 2
    assert dense(ours.weight.grad)[:, 0].tolist() == [2.0, 0.0]


def test_an_assigned_gradient_lets_the_one_before_go() -> None:
    ours = layer()
    ours(ids([1])).sum().backward()
    before = weakref.ref(ours.weight.grad)
    ours.weight.grad = one_row(3, 5.0)
    assert before() is None
