"""Trains tables by ranks, and in one process on all their batches, and compares all bits."""

from __future__ import annotations

import random
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from dist.trainings import (
    BATCH,
    Training,
    bags_of,
    input_of,
    part_of,
    samples_of,
    values_of,
)

import hotbed as hb
from hotbed.dist import Plan

STEPS = 10
WAITING = (2, 7)
"""Batches after which no step is taken: the next adds to their gradients."""


class Group(NamedTuple):
    """Trainings in one collection."""

    trainings: Sequence[Training]
    seed: int

    @property
    def world(self) -> int:
        """Ranks with batches; memory hosts come beside them."""
        return int(self.trainings[0].case["world"])

    @property
    def ranks(self) -> tuple[int, int]:
        """(ranks with batches, memory hosts)."""
        return self.world, int(self.trainings[0].case["hosts"])

    @property
    def uneven(self) -> bool:
        return bool(self.trainings[0].case["input"] == "empty rank")

    @property
    def where(self) -> tuple[Any, ...]:
        """What all trainings of a group have in common."""
        return of_group(self.trainings[0].case)

    def collection(self, storage: hb.Storage | None) -> hb.EmbeddingCollection:
        features = {name: t.name for t in self.trainings for name in t.features}
        tables = [training.table for training in self.trainings]
        return hb.EmbeddingCollection(tables, features, seed=self.seed, storage=storage)

    def optimizers(self, model: hb.EmbeddingCollection) -> list[Any]:
        """One for each rule."""
        by_rule: dict[str, list[Training]] = {}
        for training in self.trainings:
            by_rule.setdefault(training.case["rule"], []).append(training)
        return [
            some[0].optimizer([model.parameter(training.name) for training in some])
            for some in by_rule.values()
        ]

    def storage(self, folder: Path) -> hb.Storage | None:
        each = max(3, len(self.trainings))  # buffers of each size of rows have their share
        match self.trainings[0].case["place"]:
            case "budget":
                return hb.Storage(host="8MB")
            case "ssd":
                return hb.Storage(host=each * 8_000_000, ssd=folder)
            case "three tiers":
                return hb.Storage(device=60_000 + each * 40_000, host=each * 8_000_000, ssd=folder)
        return None


def of_group(case: Any) -> tuple[Any, ...]:
    common = ("world", "hosts", "place", "depth")
    return *(case[name] for name in common), local_size_of(case), case["input"] == "empty rank"


def local_size_of(case: Any) -> int | None:
    """Ranks of each of two machines; None: there are not as many on each."""
    return 2 if case["local"] == 2 and case["world"] + case["hosts"] == 4 else None


def grouped(trainings: Sequence[Training], most: int, seed: int) -> list[Group]:
    by_kind: dict[Any, list[Training]] = {}
    for training in trainings:
        by_kind.setdefault(of_group(training.case), []).append(training)
    return [
        Group(some[begin : begin + most], seed)
        for some in by_kind.values()
        for begin in range(0, len(some), most)
    ]


class Batch(NamedTuple):
    """A batch of all ranks, and a rank's samples of it."""

    samples: slice
    bags: dict[str, Any]
    whole: dict[str, Any]
    own: dict[str, Any]


class Run:
    """One group on one rank."""

    def __init__(self, rank: int, group: Group, folder: Path) -> None:
        self.rank, self.world, self.group = rank, group.world, group
        self.whole, self.own = group.collection(None), group.collection(group.storage(folder))
        shardings = {training.name: training.sharding for training in group.trainings}
        plan = Plan([*self.own.tables.values()], sum(group.ranks), shardings)
        either = zlib.crc32(group.trainings[0].name.encode()) + group.seed
        self.is_host = rank >= self.world
        hb.distribute(
            self.own,
            plan,
            shared_memory=either % 2 == 0,
            memory_host=self.is_host,
            prefetch=int(either % 3 > 0),
            local_world_size=local_size_of(group.trainings[0].case),
        )
        self.optimizers = [*group.optimizers(self.whole), *group.optimizers(self.own)]
        self.features = {
            name: (training, kind)
            for training in group.trainings
            for name, kind in training.features.items()
        }

    def train(self) -> None:
        if self.is_host:
            hb.dist.serve_rows(self.own)
            return
        batches = [self.drawn(number) for number in range(STEPS + len(WAITING))]
        depth = self.group.trainings[0].case["depth"]
        ahead = hb.lookahead([batch.own for batch in batches], self.own, depth)
        for number, own in enumerate(ahead):
            self.batch(number, batches[number]._replace(own=own))
            if number == 5:
                for optimizer in self.optimizers:
                    optimizer.param_groups[0]["lr"] *= 0.5
            if number not in WAITING:
                for optimizer in self.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        self.compare_rows()
        self.compare_states()
        hb.dist.release_hosts(self.own)

    def drawn(self, number: int) -> Batch:
        samples = samples_of(self.rank, self.world, number, self.group.uneven)
        chance = random.Random(f"{self.group.seed} {number}")
        bags, whole, own = {}, {}, {}
        for name, (training, kind) in self.features.items():
            bags[name] = bags_of(training, kind, BATCH, chance)
            whole[name] = input_of(training, kind, bags[name], number)
            own[name] = input_of(training, kind, bags[name][samples], number)
        return Batch(samples, bags, whole, own)

    def batch(self, number: int, batch: Batch) -> None:
        """Forward and backward of one."""
        samples, bags, whole, own = batch
        if number == 4:  # an evaluation, which stores nothing
            self.compare(self.own.eval()(own), self.whole.eval()(whole), bags, samples)
            self.own.train()
            self.whole.train()
        expected, found = self.whole(whole), self.own(own)
        self.compare(found, expected, bags, samples)
        drawn = torch.Generator().manual_seed(hash((self.group.seed, number)) % 2**62)
        losses: list[list[torch.Tensor]] = [[], []]
        for name in self.features:
            values = values_of(expected[name])
            grad = torch.randint(-4, 5, values.shape, generator=drawn) / 4
            like = hb.Jagged(grad, expected[name].offsets) if values is not expected[name] else grad
            losses[0].append((values.float() * grad).sum())
            share = part_of(like, bags[name], samples)
            losses[1].append((values_of(found[name]).float() * share).sum())
        sum(losses[0]).backward()
        (sum(losses[1]) * self.world).backward()  # gradients are means over ranks
        self.compare_weights(whole, own, bags, samples)

    def compare(
        self, found: dict[str, Any], expected: dict[str, Any], bags: dict[str, Any], samples: slice
    ) -> None:
        for name, (training, kind) in self.features.items():
            vectors, values = part_of(expected[name], bags[name], samples), values_of(found[name])
            if training.sums_in_parts(kind):
                torch.testing.assert_close(
                    values, vectors, msg=lambda m, t=training: f"{m} {t.case}"
                )
            else:
                assert torch.equal(values, vectors), (name, training.case)

    def compare_weights(
        self, whole: dict[str, Any], own: dict[str, Any], bags: dict[str, Any], samples: slice
    ) -> None:
        """Gradients of weights, which stay on their rank, of the loss that is scaled."""
        if self.world == 3:  # which rounds
            return
        for name, (training, kind) in self.features.items():
            if kind == "weighted":
                grad = whole[name].weights.grad
                of_all = hb.Jagged(grad, whole[name].offsets)
                expected = part_of(of_all, bags[name], samples) * self.world
                assert torch.equal(own[name].weights.grad, expected), (name, training.case)

    def compare_rows(self) -> None:
        for training in self.group.trainings:
            name = training.name
            pairs = zip(self.own.rows(name), self.whole.rows(name), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), (name, training.case)
            ids = torch.tensor(training.pool)  # some of them have no row
            found, expected = (m.lookup(name, ids) for m in (self.own, self.whole))
            assert torch.equal(found, expected), (name, training.case)
            assert self.own.count(name) == self.whole.count(name), (name, training.case)

    def compare_states(self) -> None:
        """Those of optimizers, which rank 0 is told. Tiers tell of rows that are stored."""
        half = len(self.optimizers) // 2
        for whole, own in zip(self.optimizers[:half], self.optimizers[half:], strict=True):
            rule = own.param_groups[0]["params"]
            trainings = [t for t in self.group.trainings if self.own.parameter(t.name) in set(rule)]
            if any(t.fails_to_tell_states for t in trainings):
                continue
            expected, told = whole.state_dict()["state"], [own.state_dict()["state"]]
            if self.rank:  # rank 0 alone has them
                continue
            for number, training in enumerate(trainings):
                one, other = expected[number], told[0][number]
                assert one.keys() == other.keys(), training.case
                stored = torch.isin(one["ids"], other["ids"])
                assert bool(stored.all()) or training.tiered
                for name, value in one.items():
                    if name == "untouched":
                        continue  # see test_a_state_dict_knows_what_untouched_rows_missed
                    value = value[stored] if isinstance(value, torch.Tensor) else value
                    assert same(value, other[name]), (name, training.case)


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def train_groups(rank: int, world: int, groups: Sequence[Group], folder: str) -> None:
    warnings.filterwarnings("ignore", "Sparse", UserWarning)
    for at, group in enumerate(groups):
        try:
            Run(rank, group, Path(folder) / f"{world}-{at}").train()
        except BaseException as error:
            said = [dict(training.case) for training in group.trainings]
            raise AssertionError(f"Rank {rank}, group {at}, seed {group.seed}: {said}") from error
