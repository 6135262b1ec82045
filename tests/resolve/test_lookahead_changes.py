"""`lookahead`: a forward gets the vectors of what it asks for, whatever the loader and the loop do."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from resolve.tiered_models import (
    Model,
    Once,
    adagrad,
    batches,
    pinned,
    prepared,
    step,
    storage,
)
from torch import Tensor

import hotbed as hb
from hotbed.errors import InputError

ROWS, BATCH = 200, 6


def _ids(seed: int, *shape: int) -> Tensor:
    return torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(seed))


def _offsets(seed: int) -> Tensor:
    inner = torch.randint(0, 13, (BATCH - 1,), generator=torch.Generator().manual_seed(seed))
    return torch.cat([torch.tensor([0]), inner.sort().values, torch.tensor([12])])


class Keyed:
    """As torchrec's KeyedJaggedTensor, of one feature."""

    def __init__(self, seed: int) -> None:
        self.ids, self.edges = _ids(seed, 12), _offsets(seed)

    def keys(self) -> list[str]:
        return ["a"]

    def values(self) -> Tensor:
        return self.ids

    def offsets(self) -> Tensor:
        return self.edges

    def weights_or_none(self) -> None:
        return None


def _csr(seed: int) -> Tensor:
    weights = torch.rand(12, generator=torch.Generator().manual_seed(seed))
    return torch.sparse_csr_tensor(
        _offsets(seed), _ids(seed, BATCH, 2).sort().values.view(-1), weights, (BATCH, ROWS)
    )


def _coo(seed: int) -> Tensor:
    samples = torch.arange(12) // 2
    weights = torch.rand(12, generator=torch.Generator().manual_seed(seed))
    return torch.sparse_coo_tensor(torch.stack([samples, _ids(seed, 12)]), weights, (BATCH, ROWS))


def _in_inference_mode(seed: int) -> Tensor:
    with torch.inference_mode():
        return _ids(seed, BATCH) + 0


KINDS: dict[str, Callable[[int], Any]] = {
    "one-hot": lambda seed: _ids(seed, BATCH),
    "int32": lambda seed: _ids(seed, BATCH).int(),
    "bags": lambda seed: _ids(seed, BATCH, 3),
    "a column": lambda seed: _ids(seed, BATCH, 3)[:, 1],
    "jagged": lambda seed: hb.Jagged(_ids(seed, 12), _offsets(seed)),
    "weighted": lambda seed: hb.Jagged(_ids(seed, 12), _offsets(seed), weights=torch.rand(12)),
    "nested": lambda seed: torch.nested.nested_tensor_from_jagged(_ids(seed, 12), _offsets(seed)),
    "keyed": Keyed,
    "csr": _csr,
    "coo": _coo,
    "inference": _in_inference_mode,
}

PADDINGS = [None, 3]


def _models(padding: int | None = None) -> tuple[hb.EmbeddingCollection, hb.EmbeddingCollection]:
    """With tiers and without, of the same rows, and a rule that leaves them as they are."""
    made = []
    for tiers in (hb.Storage(device="20MB", host="40MB"), None):
        table = hb.Table("a", dim=4, rows=ROWS, combiner="sum", padding_idx=padding)
        model = hb.EmbeddingCollection([table], seed=1, storage=tiers)
        hb.optim.SGD(model.parameters(), lr=0.0)
        made.append(model)
    return made[0], made[1]


pytestmark = pytest.mark.filterwarnings("ignore:Sparse (invariant|CSR).*:UserWarning")


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_with_another_batch_gets_its_vectors(kind: str, padding: int | None) -> None:
    tiered, plain = _models(padding)
    data = [KINDS[kind](seed) for seed in range(4)]
    others = [KINDS[kind](seed) for seed in range(10, 14)]
    ahead = hb.lookahead(data, tiered, inputs=lambda batch: {"a": batch})
    for _, other in zip(ahead, others, strict=True):
        assert torch.equal(tiered({"a": other})["a"], plain({"a": other})["a"])
    assert prepared(tiered.stats()) == 0


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_with_the_batch_or_a_copy_takes_what_was_prepared(
    kind: str, padding: int | None
) -> None:
    tiered, plain = _models(padding)
    data = [KINDS[kind](seed) for seed in range(4)]
    ahead = hb.lookahead(data, tiered, inputs=lambda batch: {"a": batch})
    for seed, batch in enumerate(ahead):
        given = KINDS[kind](seed) if seed % 2 and kind != "weighted" else batch
        assert torch.equal(tiered({"a": given})["a"], plain({"a": given})["a"])
    assert prepared(tiered.stats()) == 4


def test_the_same_ids_in_other_bags_are_another_batch() -> None:
    tiered, plain = _models()
    ids = _ids(0, 12)
    offsets = [torch.tensor(edges) for edges in ([0, 4, 4, 12], [0, 4, 5, 12], [0, 0, 4, 12])]
    for given in offsets:
        for _ in hb.lookahead([hb.Jagged(ids, offsets[0])], tiered, inputs=lambda b: {"a": b}):
            other = {"a": hb.Jagged(ids, given)}
            assert torch.equal(tiered(other)["a"], plain(other)["a"])
    assert prepared(tiered.stats()) == 1


@pytest.mark.parametrize(
    "edges", [[1, 4, 12], [0, 13, 12], [0, 9, 8, 12], [0, 4, 11], [0, -5, 12], [0, 2**62, 12]]
)
def test_bad_offsets_are_refused_though_the_ids_were_prepared(edges: list[int]) -> None:
    tiered, _ = _models()
    ids = _ids(0, 12)
    good = torch.linspace(0, 12, len(edges)).long()
    for _ in hb.lookahead([hb.Jagged(ids, good)], tiered, inputs=lambda b: {"a": b}):
        with pytest.raises(InputError, match="offset"):
            tiered({"a": hb.Jagged(ids, torch.tensor(edges))})


def test_a_frozen_table_is_read_as_the_forward_asks() -> None:
    tables = [hb.Table("a", dim=4, rows=ROWS), hb.Table("b", dim=4, rows=ROWS)]
    models = [
        hb.EmbeddingCollection(tables, seed=1, storage=s)
        for s in (hb.Storage(device="20MB", host="40MB"), None)
    ]
    for model in models:
        hb.optim.SGD(model.parameters(), lr=0.0)
        model.parameter("b").requires_grad_(False)
    data = [{"a": _ids(seed, BATCH), "b": _ids(seed, BATCH)} for seed in range(4)]
    for at, batch in enumerate(hb.lookahead(data, models[0])):
        given = {"a": batch["a"], "b": _ids(at + 20, BATCH) if at % 2 else batch["b"].clone()}
        found = [model(given) for model in models]
        assert all(torch.equal(found[0][name], found[1][name]) for name in "ab")
        with pytest.raises(hb.IdError, match="outside"):
            models[0]({"a": batch["a"], "b": torch.full((BATCH,), ROWS)})
    assert prepared(models[0].stats()) == 2


def test_offsets_that_are_filled_again_lead_nowhere() -> None:
    tiered, _ = _models()
    ids, offsets = _ids(0, 12), _offsets(0)
    filled = threading.Event()

    def loader() -> Iterator[Any]:
        yield hb.Jagged(ids, offsets)
        offsets.fill_(2**40)
        filled.set()
        yield hb.Jagged(ids, _offsets(0))

    def inputs(batch: hb.Jagged) -> Any:
        if threading.current_thread() is threading.main_thread():  # which compares what it takes
            assert filled.wait(60)
        return {"a": batch}

    with pytest.raises(InputError, match="changed after look-ahead had read it"):
        for batch in hb.lookahead(loader(), tiered, inputs=inputs):
            tiered({"a": batch})


def test_a_function_that_looks_rows_up_while_a_window_is_closed() -> None:
    tiered, _ = _models()

    def inputs(batch: Any) -> Any:
        tiered.lookup("a", [1, 2, 3])
        return {"a": batch}

    data = [_ids(seed, BATCH) for seed in range(30)]
    for at, batch in enumerate(hb.lookahead(data, tiered, inputs=inputs)):
        if at % 7 == 3:
            tiered.load_state_dict(tiered.state_dict())
        tiered({"a": batch})


# -- ends of threads -----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, RuntimeError])
@pytest.mark.parametrize("place", ["loader", "inputs"])
def test_any_end_of_a_thread_reaches_the_loop(error: type[BaseException], place: str) -> None:
    model = Model(storage())
    seen = []

    class Failing(Once):
        def __next__(self) -> Any:
            if self.read == 2 and place == "loader":
                raise error("the third")
            return super().__next__()

    def inputs(batch: Any) -> Any:
        if place == "inputs" and batch is data[2]:
            raise error("the third")
        return {name: batch[name] for name in ("item", "user")}

    data = batches(5)
    with pytest.raises(error, match="the third"):
        for batch in hb.lookahead(Failing(data), model, inputs=inputs):
            seen.append(batch)
    assert all(a is b for a, b in zip(seen, data[:2], strict=True))


@pytest.mark.parametrize("task", ["_fetch", "_admit"])
def test_a_thread_that_dies_of_itself_is_an_error_of_the_loop(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hotbed.ahead.window import Window

    def die(*_: Any) -> None:
        raise MemoryError("none is left")

    monkeypatch.setattr(Window, task, die)
    with pytest.raises(MemoryError, match="none is left"):
        list(hb.lookahead(batches(3), Model(storage())))


class Blocking:
    """An endless loader that blocks from the third batch on until it is let go."""

    def __init__(self, data: list[Any]) -> None:
        self.data, self.read = data, 0
        self.blocks, self.go = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.read == 2:
            self.blocks.set()
            assert self.go.wait(60)
        if self.read == len(self.data):
            raise StopIteration
        self.read += 1
        return self.data[self.read - 1]


def _threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("hotbed-lookahead")]


@pytest.mark.parametrize("then", ["leave", "again"])
def test_a_loop_that_is_left_does_not_wait_for_a_loader_that_blocks(then: str) -> None:
    data = batches(8)
    loader, model = Blocking(data), Model(storage())
    ahead = hb.lookahead(loader, model)
    seen = []
    for batch in ahead:
        seen.append(batch)
        assert loader.blocks.wait(60)
        break
    assert pinned(model) == 0
    (reader,) = _threads()  # or the loop would not have ended
    if then == "again":
        release = threading.Timer(0.05, loader.go.set)
        release.start()
        seen.extend(ahead)
        release.join()
        assert all(a is b for a, b in zip(seen, data, strict=True))
    loader.go.set()
    reader.join(60)
    assert not reader.is_alive()


def test_an_endless_stream_with_threads_that_take_turns_all_the_time() -> None:
    data = batches(4)
    model, plain = Model(storage()), Model()
    optimizers = adagrad(model), adagrad(plain)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for at, batch in enumerate(hb.lookahead(itertools.cycle(data), model, depth=2, horizon=8)):
            assert step(model, optimizers[0], batch) == step(plain, optimizers[1], batch)
            if at == 300:
                break
    finally:
        sys.setswitchinterval(before)
