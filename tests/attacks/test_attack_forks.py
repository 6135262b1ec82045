"""Children that are forked while others read, train and look ahead: they can read tables in RAM, and end."""

from __future__ import annotations

import gc
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks import history
from attacks.harness import Together, attack, in_forked_child, seeds
from attacks.history import TABLES, batches, collection, forever, ids_of, numbers, step
from torch.utils.data import DataLoader, Dataset

import hotbed as hb

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:The budget holds .* look-ahead is shorter now"),
]


def read(model: Any, chance: random.Random) -> None:
    torch.set_num_threads(1)  # libgomp is no more there than the threads that it had
    for _ in range(5):
        part = numbers(chance)
        with torch.no_grad():
            vectors = model({name: ids_of(name, part) for name in TABLES})
        assert all(v.shape == (len(part), model.tables[n].dim) for n, v in vectors.items())
        for name in TABLES:
            model.lookup(name, ids_of(name, part))
            model.rows(name)
        model.state_dict()


def test_a_child_reads_tables_in_memory(tmp_path: Path) -> None:
    for seed in seeds(0.07, usual=3):
        with attack(seed) as chance:
            model = collection()
            optimizer = history.RULES["adagrad"](model.parameters())
            data = forever(batches(seed, 30))
            reader = random.Random(seed)

            def train(model: Any = model, optimizer: Any = optimizer, data: Any = data) -> None:
                step(model, optimizer, next(data))

            with Together() as actors:
                actors.until_then(train)
                actors.until_then(partial(read, model, reader))
                for _ in range(chance.randint(1, 4)):
                    actors.act(lambda m=model, c=chance: in_forked_child(partial(read, m, c)))


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
