"""What a forked child finds of tables whose rows come and go in the parent at that moment."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attacks.harness import in_forked_child
from effort import examples

import hotbed as hb

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

STEPS = examples(10, soak=20)
CHUNK = 50_000


def ids_of(step: int) -> torch.Tensor:
    """Of no other step."""
    return torch.arange(step * CHUNK, (step + 1) * CHUNK) * 7919


def collection(counting: bool) -> hb.EmbeddingCollection:
    """`counting`: how often ids are used, for hottest()."""
    table = hb.Table("user", 16, combiner="none", init=hb.init.Constant(3.0))
    storage = hb.Storage(host="1GB") if counting else None
    return hb.EmbeddingCollection([table], seed=0, storage=storage)


def forward(model: hb.EmbeddingCollection, ids: torch.Tensor) -> None:
    model({"user": ids})


def assign(model: hb.EmbeddingCollection, ids: torch.Tensor) -> None:
    model.assign("user", ids, torch.full((len(ids), 16), 3.0))


def come_and_go(model: hb.EmbeddingCollection, ids: torch.Tensor) -> None:
    model({"user": ids})
    model.erase("user", ids[::2])


@pytest.mark.parametrize("counting", [False, True])
@pytest.mark.parametrize("change", [forward, assign, come_and_go])
def test_a_child_finds_whole_rows(change: Callable[..., None], counting: bool) -> None:
    """Each that it finds is there with its values, and it can go on with the table."""
    model = collection(counting)
    optimizer = hb.optim.Adagrad(model.parameters(), lr=0.1)
    asked = threading.Semaphore(0)
    done = threading.Semaphore(0)

    def work() -> None:
        for step in range(STEPS):
            asked.acquire()
            change(model, ids_of(step))
            done.release()

    def child() -> None:
        torch.set_num_threads(1)
        found, rows = model.rows("user")
        assert len(found) == len(found.unique()) == len(rows)
        assert bool((rows == 3.0).all()), f"{int((rows != 3.0).any(1).sum())} of {len(rows)} rows"
        assert bool((model.lookup("user", found) == 3.0).all())
        some = ids_of(0)[:100]
        loss: Any = model({"user": some})["user"].sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert bool((model.lookup("user", some) != 3.0).all())
        assert model.erase("user", found) == len(found)
        if counting:
            model.hottest("user")

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for step in range(STEPS):
            asked.release()
            sum(range(step * 10_000))  # a while
            in_forked_child(child)
            done.acquire()
    finally:
        for _ in range(STEPS):
            asked.release()
        thread.join()
