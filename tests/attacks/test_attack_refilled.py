"""Loaders that fill their tensors again: refused, told of, or trained as a plain model does."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attacks.harness import Together, attack, seeds
from refills import FILLS
from torch import Tensor

import hotbed as hb
from hotbed.errors import InputError

ROWS, BATCH = 300, 16


Batch = dict[str, Any]


def collections(budget: str) -> tuple[hb.EmbeddingCollection, hb.EmbeddingCollection]:
    """With tiers and without, of rows that tell their id: (3 id, 3 id, ...), rows that nobody assigned
    zero, and a rule that leaves them."""
    made = []
    for storage in (hb.Storage(device=budget, host="16MB"), None):
        tables = [
            hb.Table("one", 4, ROWS, combiner="none"),
            hb.Table("many", 4, combiner="sum", init=hb.init.Zeros()),
            hb.Table("bags", 4, ROWS, combiner="none"),
        ]
        model = hb.EmbeddingCollection(tables, seed=0, storage=storage)
        hb.optim.SGD(model.parameters(), lr=0.0)
        every = torch.arange(ROWS)
        for name in model.tables:
            model.assign(name, every, 3.0 * every[:, None].expand(-1, 4))
        made.append(model)
    return made[0], made[1]


def drawn(chance: random.Random) -> dict[str, Tensor]:
    edges = sorted(chance.randrange(41) for _ in range(BATCH - 1))
    return {
        "one": torch.tensor([chance.randrange(ROWS) for _ in range(BATCH)]),
        "many": torch.tensor([chance.randrange(ROWS) for _ in range(BATCH * 3)]).view(BATCH, 3),
        "ids": torch.tensor([chance.randrange(ROWS) for _ in range(40)]),
        "edges": torch.tensor([0, *edges, 40]),
    }


def as_batch(buffer: dict[str, Tensor]) -> Batch:
    bags = hb.Jagged(buffer["ids"], buffer["edges"])
    return {"one": buffer["one"], "many": buffer["many"], "bags": bags}


def copied(batch: Batch) -> dict[str, Tensor]:
    bags = batch["bags"]
    parts = {"one": batch["one"], "many": batch["many"], "ids": bags.values, "edges": bags.offsets}
    return {name: part.clone() for name, part in parts.items()}


def same(left: Any, right: Any) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def flat(vectors: dict[str, Any]) -> dict[str, Tensor]:
    return {n: v.values if isinstance(v, hb.Jagged) else v for n, v in vectors.items()}


def are_rows(vectors: dict[str, Tensor]) -> None:
    for name, found in vectors.items():
        ids = found / 3
        most = 3 * ROWS if name == "many" else ROWS
        assert bool(((ids == ids.round()) & (ids >= 0) & (ids < most)).all()), name


class Refilling:
    """Gives `count` batches out of a ring of buffers."""

    def __init__(self, chance: random.Random, count: int, *, spoiled: bool = False) -> None:
        self.chance, self.count, self.spoiled = chance, count, spoiled
        self.ring = [drawn(chance) for _ in range(chance.randint(1, 6))]
        if chance.random() < 0.3:
            for buffer in self.ring:
                for part in buffer.values():
                    part.share_memory_()

    def __iter__(self) -> Iterator[Batch]:
        for at in range(self.count):
            buffer = self.ring[at % len(self.ring)]
            if at >= len(self.ring) or self.chance.random() < 0.5:
                self.refill(buffer)
            yield as_batch(buffer)

    def refill(self, buffer: dict[str, Tensor]) -> None:
        values = drawn(self.chance)
        names = self.chance.sample(sorted(values), self.chance.randint(0, 4))
        for name in names:
            if self.spoiled and self.chance.random() < 0.2:
                wrong = self.chance.choice((-1, ROWS, 2**40, -(2**62), 41))
                values[name].view(-1)[self.chance.randrange(values[name].numel())] = wrong
            self.chance.choice(FILLS)(buffer[name], values[name])


def use(tiered: Any, plain: Any, batch: Batch, *, quiet: bool) -> None:
    """A forward and a backward: of what it was given, if that stayed the same meanwhile."""
    before = copied(batch)
    try:
        vectors = flat(tiered(batch))
    except InputError:
        if quiet and same(before, copied(batch)):
            with pytest.raises(InputError):
                plain(as_batch(before))
        return
    if same(before, copied(batch)):
        assert same(vectors, flat(plain(as_batch(before))))
    else:
        are_rows({name: part.detach() for name, part in vectors.items()})
    sum(part.sum() for part in vectors.values()).backward()
    tiered.zero_grad()


@pytest.mark.parametrize("spoiled", [False, True])
def test_loaders_that_fill_their_tensors_again(spoiled: bool) -> None:
    for seed in seeds(0.06, usual=4):
        with attack(seed) as chance, warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*(changed after look-ahead|is shorter now)")
            tiered, plain = collections(chance.choice(("100KB", "1MB")))
            loader = Refilling(chance, 25, spoiled=spoiled)
            # The loop has a source of its own: the loader runs on another thread.
            own = random.Random(seed + 1)
            ahead = hb.lookahead(
                loader, tiered, own.randint(0, 3), own.randint(0, 8), inputs=lambda batch: batch
            )
            try:
                for batch in ahead:
                    if own.random() < 0.2:  # the loop changes its batch itself
                        values = drawn(own)
                        own.choice(FILLS)(batch["one"], values["one"])
                        own.choice(FILLS)(batch["bags"].values, values["ids"])
                    use(tiered, plain, batch, quiet=True)
            except InputError as error:
                assert "changed after look-ahead had read it" in str(error)
            del ahead
            tiered.group.tiers.close_window()
            assert sum(tiered.group.tiers.core.pinned()) == 0
            rows = tiered.rows("one").values
            assert torch.equal(rows, plain.rows("one").values[: len(rows)])


def test_tensors_that_others_fill_all_the_time() -> None:
    """Ids stay valid, as nobody can check what changes after it was checked."""
    for seed in seeds(0.06, usual=4):
        with attack(seed) as chance, warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*(changed after look-ahead|is shorter now)")
            tiered, plain = collections("1MB")
            loader = Refilling(chance, 40)
            writer = random.Random(seed + 1)

            def fill(loader: Any = loader, writer: Any = writer) -> None:
                buffer = writer.choice(loader.ring)
                values = drawn(writer)
                for name in ("one", "many", "ids"):
                    writer.choice(FILLS)(buffer[name], values[name])

            depth, horizon = chance.randint(0, 3), chance.randint(0, 8)
            ahead = hb.lookahead(loader, tiered, depth, horizon, inputs=lambda batch: batch)

            def train(tiered: Any = tiered, plain: Any = plain, ahead: Any = ahead) -> None:
                try:
                    for batch in ahead:
                        use(tiered, plain, batch, quiet=False)
                except InputError as error:
                    assert "changed after look-ahead had read it" in str(error)

            with Together() as actors:
                actors.act(train)
                actors.until_then(fill)
