"""Children that are forked while others read, train and look ahead: they can read tables in RAM, and end."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks import history
from attacks.harness import Together, attack, in_forked_child, seeds
from attacks.history import TABLES, History, batches, collection, ids_of, numbers, step
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import hotbed as hb

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:The budget holds .* look-ahead is shorter now"),
]

STEPS = 300


def read(model: Any, known: History, chance: random.Random) -> None:
    """A fork waits for no step: what a child finds is, number by number, of before or after the step that
    was taken just then. For a thread, more steps may have been taken before it had read."""
    torch.set_num_threads(1)  # libgomp is no more there than the threads that it had
    for _ in range(5):
        read_once(model, known, numbers(chance))


def read_once(model: Any, known: History, part: Tensor) -> None:
    ids = {name: ids_of(name, part) for name in TABLES}
    with torch.no_grad():
        check(known, lambda: {name: (part, rows) for name, rows in model(ids).items()})
    check(known, lambda: {name: (part, model.lookup(name, ids[name])) for name in TABLES})
    check(known, lambda: {name: numbered(name, *model.rows(name)) for name in TABLES})
    saved = model.state_dict()
    assert torch.equal(saved["dynamic.ids"].unique(), saved["dynamic.ids"])


def numbered(name: str, ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    found = ids if name == "static" else (ids + 7) // 1_000_003
    assert len(ids) == len(rows) and torch.equal(ids_of(name, found), ids)
    trained = found < history.IDS
    return found[trained], rows[trained]


def check(known: History, look: Callable[[], dict[str, tuple[Tensor, Tensor]]]) -> None:
    first = known.done
    found = look()
    last = known.begun
    for name, (part, rows) in found.items():
        allowed = known.rows[name][first : last + 1, part]
        right = (rows == allowed).any(0)
        assert bool(right.all()), (name, first, last)


def test_a_child_reads_tables_in_memory(tmp_path: Path) -> None:
    for seed in seeds(0.07, usual=3):
        with attack(seed) as chance:
            data = batches(seed, STEPS)
            known = History.of(data, "adagrad", "plain")
            model = collection()
            optimizer = history.RULES["adagrad"](model.parameters())
            reader = random.Random(seed)
            with Together() as actors:
                train = partial(known.train, model, optimizer, iter(data), actors.over)
                actors.until_then(train)
                actors.until_then(partial(read, model, known, reader))
                for _ in range(chance.randint(1, 4)):
                    child = partial(read, model, known, chance)
                    actors.act(partial(in_forked_child, child))
            assert known.done > 0


def leave(model: Any, ahead: Any, chance: random.Random, on_ssd: bool) -> None:
    """What a child does with what is not its own."""
    if on_ssd:
        part = numbers(chance)
        with pytest.raises(hb.StorageError, match="from which this one was forked"):
            model({name: ids_of(name, part) for name in TABLES})
    if chance.random() < 0.5:
        ahead.close()
    del model, ahead
    gc.collect()


@pytest.mark.parametrize("on_ssd", [False, True])
def test_a_child_leaves_what_looks_ahead(tmp_path: Path, on_ssd: bool) -> None:
    for seed in seeds(0.04, usual=1):
        with attack(seed) as chance:
            folder = tmp_path / str(seed)
            storage = (
                hb.Storage(host="16MB", ssd=folder)
                if on_ssd
                else hb.Storage(device="200KB", host="16MB")
            )
            models = [collection(storage), collection()]
            optimizers = [history.RULES["adam"](model.parameters()) for model in models]
            ahead = iter(hb.lookahead(batches(seed, 20), models[0], 2, 16))
            for batch in ahead:
                for model, optimizer in zip(models, optimizers, strict=True):
                    step(model, optimizer, batch)
                if chance.random() < 0.2:
                    in_forked_child(partial(leave, models[0], ahead, chance, on_ssd))
            for name in TABLES:
                ids = ids_of(name, torch.arange(history.IDS))
                assert torch.equal(models[0].lookup(name, ids), models[1].lookup(name, ids))
            if on_ssd:
                models[0].flush()
                with pytest.raises(hb.StorageError, match="in use by this process"):
                    collection(hb.Storage(host="16MB", ssd=folder, reset=True))


class Batches(Dataset[Any]):
    def __init__(self, seed: int, count: int) -> None:
        self.data = batches(seed, count)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, at: int) -> Any:
        return self.data[at]


def test_workers_that_stay_beside_a_log(tmp_path: Path) -> None:
    for seed in seeds(0.05, usual=1):
        with attack(seed) as chance:
            folder = tmp_path / str(seed)
            made = [collection(hb.Storage(host="16MB", ssd=folder)), collection()]
            optimizers = [history.RULES["adam"](model.parameters()) for model in made]
            workers = chance.randint(1, 2)
            loader = DataLoader(
                Batches(seed, 12), batch_size=None, num_workers=workers, persistent_workers=True
            )
            for _ in range(2):
                for at, batch in enumerate(hb.lookahead(loader, made[0])):
                    for model, optimizer in zip(made, optimizers, strict=True):
                        step(model, optimizer, batch)
                    if at == chance.randrange(100):
                        break
            for name in TABLES:
                ids = ids_of(name, torch.arange(history.IDS))
                assert torch.equal(made[0].lookup(name, ids), made[1].lookup(name, ids))
            # The workers live, and the folder is free as soon as the collection is gone.
            del made, model, optimizer, optimizers
            gc.collect()
            collection(hb.Storage(host="16MB", ssd=folder, reset=True))
            del loader
