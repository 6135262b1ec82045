"""Threads on one model: each forward sees the rows of one step, whoever writes beside it."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from effort import examples
from torch import Tensor

import hotbed as hb
from hotbed.group.pool import pool
from hotbed.table.backward import leave
from hotbed.table.locks import alone, together

IDS = 40_000
STEPS = examples(12, soak=50)
"""Of a training beside which somebody reads, and as many writes."""


@pytest.fixture(params=[0.005, 1e-6], ids=["usual turns", "short turns"], autouse=True)
def turns(request: pytest.FixtureRequest) -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(request.param)
    yield
    sys.setswitchinterval(before)


PLACES = ["static", "dynamic", "both", "exact", "fused", "tiers", "exact tiers", "look-ahead"]


def _model(place: str) -> tuple[hb.EmbeddingCollection, Any]:
    """Tables of zeros. A step with the gradient of the sum of all rows adds 1 to each of them."""
    rows = {"static": [IDS, IDS], "dynamic": [None, None]}.get(place, [IDS, None])
    storage = (
        hb.Storage(device="20MB", host="40MB") if "tiers" in place or "look" in place else None
    )
    tables = [
        hb.Table(name, dim=8, rows=count, combiner="sum", init=hb.init.Constant(0.0))
        for name, count in zip("ab", rows, strict=True)
    ]
    model = hb.EmbeddingCollection(tables, seed=0, storage=storage)
    optimizer = hb.optim.SGD(
        model.parameters(),
        lr=1.0,
        momentum=0.0,
        maximize=True,
        untouched="exact" if "exact" in place else "lazy",
        fused=place == "fused",
    )
    return model, optimizer


def _everything() -> dict[str, Tensor]:
    return {name: torch.arange(IDS).view(-1, 4) for name in "ab"}


def _step(model: Any, optimizer: Any, batch: Any) -> None:
    sum(v.sum() for v in model(batch).values()).backward()
    optimizer.step()
    optimizer.zero_grad()


def _beside(count: int, work: Callable[[], None], until: Callable[[], None]) -> None:
    """Runs `work` again and again in `count` threads until `until` has returned."""
    ended, errors = threading.Event(), []

    def again() -> None:
        try:
            while not ended.is_set():
                work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=again) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        until()
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("place", PLACES)
def test_a_forward_beside_a_training_sees_one_step(place: str) -> None:
    model, optimizer = _model(place)
    twin = _twin_that_shares(model)
    seen: set[float] = set()

    def look() -> None:
        with torch.no_grad():
            vectors = torch.cat([v.reshape(-1) for v in twin(_everything()).values()])
        values = vectors.unique().tolist()
        assert len(values) == 1, values
        seen.add(values[0])

    def train() -> None:
        data = [_everything() for _ in range(STEPS)]
        for batch in hb.lookahead(data, model) if place == "look-ahead" else data:
            _step(model, optimizer, batch)

    _beside(2, look, train)
    look()
    assert max(seen) == STEPS * 4


def _twin_that_shares(model: hb.EmbeddingCollection) -> hb.EmbeddingCollection:
    """Another module over the same tables, for evaluation."""
    twin = hb.EmbeddingCollection.__new__(hb.EmbeddingCollection)
    torch.nn.Module.__init__(twin)
    twin._serve(dict(model._owned), model.features)
    return twin.eval()


@pytest.mark.parametrize("place", ["static", "dynamic", "both", "exact", "tiers"])
def test_threads_that_train_at_once_lose_no_update(place: str) -> None:
    model, optimizer = _model(place)
    turn = threading.Lock()
    left = iter(range(20))

    def train() -> None:
        while True:
            with turn:
                if next(left, None) is None:
                    return
            sum(v.sum() for v in model(_everything()).values()).backward()

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    optimizer.step()
    for name in "ab":
        rows = model.rows(name)
        assert torch.equal(rows.ids, torch.arange(IDS))
        assert torch.equal(rows.values, torch.full((IDS, 8), 20.0))


def test_new_ids_of_many_threads_get_one_row_each() -> None:
    model, optimizer = _model("dynamic")

    def grow(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(30):
            ids = torch.randint(0, 20_000, (300, 4), generator=generator)
            sum(v.sum() for v in model({"a": ids, "b": ids}).values()).backward()

    threads = [threading.Thread(target=grow, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    optimizer.step()
    expected = torch.zeros(20_000)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(30):
            ids = torch.randint(0, 20_000, (300, 4), generator=generator)
            expected.index_add_(0, ids.reshape(-1), torch.ones(ids.numel()))
    for name in "ab":
        rows = model.rows(name)
        assert torch.equal(rows.ids, expected.nonzero().view(-1))
        assert torch.equal(rows.values, expected[rows.ids].unsqueeze(1).expand(-1, 8))


@pytest.mark.parametrize("write", ["assign", "load", "reset"])
@pytest.mark.parametrize("place", ["static", "dynamic", "exact", "tiers"])
def test_a_forward_beside_a_write_sees_all_or_nothing_of_it(place: str, write: str) -> None:
    model, _ = _model(place)
    twin = _twin_that_shares(model)
    ids = torch.arange(IDS)
    states = []
    for value in (1.0, 2.0):
        model.assign("a", ids, torch.full((IDS, 8), value))
        states.append({k: v.clone() for k, v in model.state_dict().items() if k.startswith("a")})

    def look() -> None:
        with torch.no_grad():
            values = twin(_everything())["a"].unique().tolist()
        assert len(values) == 1, values

    def change() -> None:
        for at in range(STEPS):
            if write == "assign":
                model.assign("a", ids, torch.full((IDS, 8), float(at)))
            elif write == "load":
                model.load_state_dict({**model.state_dict(), **states[at % 2]})
            else:
                model.table("a").forget_rows()
                model.assign("a", ids, torch.full((IDS, 8), float(at)))

    _beside(2, look, change)


def test_rows_and_state_dicts_beside_a_training_are_of_one_step() -> None:
    model, optimizer = _model("both")
    _step(model, optimizer, _everything())

    def look() -> None:
        for name in "ab":
            assert len(model.rows(name).values.unique()) == 1
            assert len(model.lookup(name, torch.arange(IDS)).unique()) == 1
        assert len(model.state_dict()["b"].unique()) == 1

    def train() -> None:
        for _ in range(STEPS):
            _step(model, optimizer, _everything())

    _beside(1, look, train)


@pytest.mark.parametrize("place", ["static", "dynamic", "exact"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_beside_a_training_is_of_one_step(place: str, copied: Callable[[Any], Any]) -> None:
    model, optimizer = _model(place)
    _step(model, optimizer, _everything())
    optimizer.zero_grad()
    twin = _twin_that_shares(model)

    def look() -> None:
        made = copied(twin)
        for name in "ab":
            assert len(made.rows(name).values.unique()) == 1

    def train() -> None:
        for _ in range(STEPS):
            _step(model, optimizer, _everything())

    _beside(1, look, train)


@pytest.mark.parametrize("place", ["static", "dynamic", "exact"])
def test_a_pickle_has_the_rows_that_were_there_when_it_was_begun(place: str) -> None:
    model, optimizer = _model(place)
    _step(model, optimizer, _everything())
    make, given = model.table("a").__reduce__()
    _step(model, optimizer, _everything())
    ids, weights = make(*given).rows_of_all("rows", everywhere=True)
    assert torch.equal(ids, torch.arange(IDS)) and weights.unique().tolist() == [1.0]


def _reader(tables: list[Any]) -> threading.Thread:
    """A thread that ends when it may read rows of these tables."""

    def read() -> None:
        with together(tables):
            pass

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


def test_a_forward_that_pools_lets_others_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = _model("both")
    readers = []

    def pooled(*given: Any) -> Any:
        readers.append(_reader([model.table("a"), model.table("b")]))
        readers[0].join(30)
        assert not readers[0].is_alive()
        return pool(*given)

    monkeypatch.setattr("hotbed.group.lookup.pool", pooled)
    model(_everything())
    assert len(readers) == 1


@pytest.mark.parametrize("place", ["both", "fused"])
def test_a_backward_lets_others_read_unless_it_steps(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = _model(place)
    readers = []

    def left(*given: Any) -> Any:
        readers.append(_reader([model.table("a"), model.table("b")]))
        readers[0].join(0.2 if place == "fused" else 30)
        assert readers[0].is_alive() == (place == "fused")
        return leave(*given)

    monkeypatch.setattr("hotbed.group.pool.leave", left)
    sum(v.sum() for v in model(_everything()).values()).backward()
    readers[0].join(30)
    assert not readers[0].is_alive()


def test_whoever_reads_rows_must_not_write_them() -> None:
    table = _model("static")[0].table("a")
    with together([table]), together([table]):
        pass
    with alone([table]), together([table]), alone([table]):
        pass
    with together([table]), pytest.raises(RuntimeError, match="by a thread that reads them"):
        with alone([table]):
            raise AssertionError("not reached")
    with alone([table]):  # nothing is left behind
        pass
