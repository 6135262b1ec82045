"""Threads that read, write, save and load beside one that trains: they see the rows of one step."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from attacks import history
from attacks.harness import Together, attack, seeds
from attacks.history import IDS, TABLES, History, batches, collection, ids_of, numbers
from torch import Tensor

import hotbed as hb
from hotbed.table.live import LiveTable

pytestmark = pytest.mark.filterwarnings("ignore:The budget holds .* look-ahead is shorter now")

STEPS = 30
PLACES = ("memory", "tiers", "ssd", "device")


def storage(place: str, folder: Any) -> hb.Storage | None:
    """With room for the batches that are under way, and not for all rows."""
    if place == "memory":
        return None
    if place == "ssd":
        return hb.Storage(host="16MB", ssd=folder)
    return hb.Storage(device=60_000 if place == "tiers" else 400_000, host="16MB")


class Readers:
    """What a server does beside a training."""

    def __init__(self, model: Any, known: History, chance: random.Random, place: str) -> None:
        self.model, self.known, self.place = model, known, place
        self.chance = chance

    def read(self) -> None:
        getattr(self, self.chance.choice(("forward", "forward", "lookup", "rows", "state_dict")))()

    def forward(self) -> None:
        drawn = {name: numbers(self.chance) for name in TABLES}
        if self.chance.random() < 0.3:  # all features alike
            drawn = dict.fromkeys(TABLES, torch.arange(IDS))
        size = min(map(len, drawn.values()))
        drawn = {name: part[:size] for name, part in drawn.items()}

        def look() -> dict[str, tuple[Tensor, Tensor]]:
            with torch.no_grad():
                vectors = self.model({n: ids_of(n, part) for n, part in drawn.items()})
            return {name: (drawn[name], vectors[name]) for name in TABLES}

        self.known.check(look)

    def lookup(self) -> None:
        name, drawn = self.chance.choice(TABLES), numbers(self.chance)
        self.known.check(lambda: {name: (drawn, self.model.lookup(name, ids_of(name, drawn)))})

    def rows(self) -> None:
        name = self.chance.choice(TABLES)
        self.known.check(lambda: {name: self._numbered(name, *self.model.rows(name))})

    def state_dict(self) -> None:
        def look() -> dict[str, tuple[Tensor, Tensor]]:
            saved = self.model.state_dict()
            return {
                name: self._numbered(
                    name, saved.get(f"{name}.ids", torch.arange(history.ALL_IDS)), saved[name]
                )
                # as in torch, that of a static table in memory is the table itself
                for name in TABLES
                if self.place != "memory" or name != "static"
            }

        self.known.check(look)

    def _numbered(self, name: str, ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        found = ids if name == "static" else (ids + 7) // 1_000_003
        assert len(ids) == len(rows) and torch.equal(ids_of(name, found), ids)
        assert torch.equal(ids, ids.unique())
        trained = found < IDS
        return found[trained], rows[trained]


class Owner:
    """Somebody who writes rows that training leaves alone, and finds them as they were written."""

    def __init__(self, model: Any, chance: random.Random, of: int, owners: int) -> None:
        self.model, self.chance = model, chance
        self.numbers = torch.arange(IDS + of, history.ALL_IDS, owners)
        self.written: dict[str, Tensor] = {}

    def write(self) -> None:
        name = self.chance.choice(TABLES)
        ids = ids_of(name, self.numbers)
        if name in self.written:
            assert torch.equal(self.model.lookup(name, ids), self.written[name]), name
        width = self.model.tables[name].dim
        self.written[name] = torch.full((len(ids), width), float(self.chance.randrange(1000)))
        self.model.assign(name, ids, self.written[name])
        assert torch.equal(self.model.lookup(name, ids), self.written[name]), name


@pytest.mark.parametrize("options", history.OPTIONS)
@pytest.mark.parametrize("place", PLACES)
def test_a_server_beside_a_training_sees_the_rows_of_one_step(
    tmp_path: Any, place: str, options: str
) -> None:
    for seed in seeds(0.3 / 12, usual=1):
        with attack(seed) as chance:
            rule = chance.choice(sorted(history.RULES))
            data = batches(seed, STEPS)
            known = History.of(data, rule, options)
            model = collection(storage(place, tmp_path / str(seed)))
            depth, horizon = chance.choice([(0, 0), (1, 1), (2, 4), (2, 32)])
            optimizer = history.RULES[rule](model.parameters(), **history.OPTIONS[options])
            ahead = hb.lookahead(data, model, depth, horizon)
            with Together() as actors:
                actors.act(partial(known.train, model, optimizer, ahead, actors.over))
                for _ in range(chance.randint(1, 3)):
                    readers = Readers(model, known, random.Random(chance.random()), place)
                    actors.until_then(readers.read)
                owners = chance.randint(0, 2)
                for of in range(owners):
                    owner = Owner(model, random.Random(chance.random()), of, owners)
                    actors.until_then(owner.write)
            assert known.done == STEPS
            readers.rows()


@pytest.mark.parametrize("read", ["rows", "state_dict"])
def test_an_optimizer_that_is_made_while_rows_are_read(
    monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    """It gives the rows other places, here between the look whether they have one and the reading."""
    model = collection(hb.Storage(device="1MB", host="16MB"))
    ids, values = ids_of("dynamic", torch.arange(9)), torch.ones(9, 4)
    model.assign("dynamic", ids, values)
    before, made = LiveTable.ready, []
    last = {"rows": "dynamic", "state_dict": "wide"}[read]

    def then_another_thread(table: LiveTable) -> None:
        before(table)
        if not made and table.name == last:
            made.append(history.RULES["adam"](model.parameters()))

    monkeypatch.setattr(LiveTable, "ready", then_another_thread)
    found = model.rows("dynamic").values if read == "rows" else model.state_dict()["dynamic"]
    assert torch.equal(found, values)


class Trainers:
    """Several who train one model; whoever looks meanwhile sees the rows of before."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.before = {name: self.now(name) for name in TABLES}
        self.kept: list[Tensor] = []

    def now(self, name: str) -> Tensor:
        rows: Tensor = self.model.lookup(name, ids_of(name, torch.arange(IDS)))
        return rows

    def train(self, parts: list[Tensor], at_once: bool) -> None:
        losses: list[Any] = []
        for part in parts:
            vectors = self.model({name: ids_of(name, part) for name in TABLES})
            losses.append(-sum(v.sum() for v in vectors.values()))
            if not at_once:
                losses.pop().backward()
        if losses:
            self.kept.append(sum(losses))
            self.kept[-1].backward()

    def look(self, chance: random.Random) -> None:
        part = numbers(chance)
        with torch.no_grad():
            vectors = self.model({name: ids_of(name, part) for name in TABLES})
        for name in TABLES:
            assert torch.equal(vectors[name], self.before[name][part]), name


@pytest.mark.parametrize("place", PLACES)
def test_threads_that_train_at_once_lose_no_update(tmp_path: Any, place: str) -> None:
    """Gradients are whole numbers, so that their sum is the same in any order."""
    for seed in seeds(0.08 / 4, usual=2):
        with attack(seed) as chance:
            roomy = hb.Storage(device="1MB", host="16MB")
            model = collection(roomy if place == "tiers" else storage(place, tmp_path / str(seed)))
            optimizer = hb.optim.SGD(model.parameters(), lr=1.0)
            trainers = Trainers(model)
            count = chance.randint(2, 4)
            for _ in range(chance.randint(1, 3)):
                drawn = [[numbers(chance) for _ in range(8)] for _ in range(count)]
                with Together() as actors:
                    for parts in drawn:
                        actors.act(partial(trainers.train, parts, chance.random() < 0.5))
                    actors.until_then(partial(trainers.look, random.Random(chance.random())))
                optimizer.step()
                optimizer.zero_grad()
                trainers.kept.clear()
                every = torch.cat([part for parts in drawn for part in parts])
                used = torch.bincount(every, minlength=IDS)[:, None]
                for name in TABLES:
                    found = trainers.now(name)
                    assert torch.equal(found, trainers.before[name] + used), name
                    trainers.before[name] = found
