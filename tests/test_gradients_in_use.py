"""What people do with a gradient that waits for its step, and who comes between."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from test_gradients import DIM, ROWS, dense, ids, layer
from torch import Tensor, nn

import hotbed as hb
from hotbed.ops.duplicates import sum_duplicates
from hotbed.table.sparse_gradient import plain_access, set_gradient


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
    for two in ([2, 1], [1, 2]):
        _backward(collection, two)
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


def test_a_gradient_that_no_backward_left_waits_too() -> None:
    collection, handle = _one()
    table = collection.table("a")
    assert not table.owes_step
    handle.grad = torch.zeros(handle.shape)
    assert table.owes_step


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


@pytest.mark.parametrize("untouched", ["lazy", "exact"])
def test_weights_put_in_place_before_a_step_are_stepped(untouched: str) -> None:
    layer = hb.Embedding(5, 2)
    optimizer = hb.optim.SGD(layer.parameters(), lr=0.5, untouched=untouched)
    layer(torch.tensor([1])).sum().backward()
    layer.weight.data = torch.ones(5, 2)
    optimizer.step()
    assert layer.weight.tolist() == [[1, 1], [0.5, 0.5], [1, 1], [1, 1], [1, 1]]
