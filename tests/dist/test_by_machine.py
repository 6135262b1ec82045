"""Machines of several ranks each, which bring their ids together before they ask another machine."""

from __future__ import annotations

import os
from typing import Any, cast

import pytest
import torch
from dist.test_new_codec import Flipped
from dist.test_new_sharding import Backwards
from dist.test_sharded import (
    DEALS,
    assert_same_rows,
    batch_of,
    collection,
    loss_of,
    plan_of,
)
from dist.trainings import values_of
from dist.worlds import run
from torch.distributed.algorithms.join import Join

import hotbed as hb
from hotbed import _core
from hotbed.dist import CODECS, PeerError, Plan, Replicated, RowWise, TableWise, by_machine
from hotbed.dist.by_machine import ByMachine
from hotbed.dist.errors import PeerLost
from hotbed.dist.exchange import Fetched

pytestmark = pytest.mark.process
WORLD, LOCAL = 4, 2


def shared(model: hb.EmbeddingCollection, plan: Plan, local: int | None, **options: Any) -> Any:
    """The ranks of a model that is distributed."""
    hb.distribute(model, plan, local_world_size=local, **options)
    name = next(iter(model.tables))
    place: Any = model.table(name).place
    return place.ranks


def one_hot(alike: bool, rank: int) -> dict[str, torch.Tensor]:
    """64 ids: those of both ranks of a machine are the same, or none is."""
    block = rank // LOCAL if alike else rank
    return {"item": torch.arange(64) + 64 * block}


def bytes_across(rank: int, world: int, deal: str) -> None:
    sent = {}
    for alike in (False, True):
        for local in (None, LOCAL):
            model = hb.EmbeddingCollection([hb.Table("item", 8, 1000)], seed=1)
            ranks = shared(model, plan_of(model, deal, world), local)
            before = dict(ranks.sent)
            model(one_hot(alike, rank))["item"].sum().backward()
            hb.optim.SGD(model.parameters(), lr=0.1).step()
            each = torch.tensor([ranks.sent.get(k, 0) - before.get(k, 0) for k in NAMES])
            torch.distributed.all_reduce(each)
            sent[alike, local] = each
    assert torch.equal(2 * sent[True, LOCAL][1:], sent[False, LOCAL][1:])
    assert (sent[True, LOCAL] <= sent[True, None]).all()


NAMES = "ids", "rows", "gradients"
"""Bytes that cross. Messages of ids have room for as many as the ranks of a machine ask for."""


@pytest.mark.parametrize("deal", ["row", "column"])
def test_an_id_crosses_once_for_all_ranks_of_a_machine(deal: str) -> None:
    run(WORLD, bytes_across, deal)


def by_codecs(rank: int, world: int, form: str) -> None:
    models = [collection() for _ in range(2)]
    optimizers = []
    for model, local in zip(models, (None, LOCAL), strict=True):
        plan = plan_of(model, "row", world)
        shared(model, plan, local, rows=form)
        optimizers.append(hb.optim.Adagrad(model.parameters(), lr=0.25))
    for number in range(3):
        batch = batch_of(number, slice(3 * rank, 3 * rank + 3))
        batch = {name: ids.view(3, -1)[:, 0] for name, ids in batch.items()}  # all come as rows
        found = [model(batch) for model in models]
        for name in batch:
            assert torch.equal(*(values_of(of[name]) for of in found)), name
        for of, optimizer in zip(found, optimizers, strict=True):
            loss_of(of, world).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_rows(*models)


@pytest.mark.parametrize("form", ["stored", "int8", "bfloat16"])
def test_rows_have_the_bits_of_one_level(form: str) -> None:
    run(WORLD, by_codecs, form)


def by_rounded_gradients(rank: int, world: int) -> None:
    """Each id is asked for by one rank, so that machines have nothing to sum."""
    models = [hb.EmbeddingCollection([hb.Table("item", 8, 90)], seed=1) for _ in range(2)]
    optimizers = []
    for model, local in zip(models, (None, LOCAL), strict=True):
        shared(model, plan_of(model, "row", world), local, gradients="int8")
        optimizers.append(hb.optim.SGD(model.parameters(), lr=0.25))
    weights = torch.randn(20, 8, generator=torch.Generator().manual_seed(rank))
    for _ in range(3):  # by whose number gradients are rounded
        for model, optimizer in zip(models, optimizers, strict=True):
            (model({"item": torch.arange(20) * world + rank})["item"] * weights).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_rows(*models)


def test_gradients_are_rounded_as_by_one_level() -> None:
    run(WORLD, by_rounded_gradients)


def mixed(rank: int, world: int) -> None:
    """Tables of which some go by machine, in one call; one takes no new rows."""
    tables = [
        hb.Table("row", 4, 61, "sum"),
        hb.Table("copy", 4, 61, "sum"),
        hb.Table("named", 4, 61, "sum"),
        hb.Table("frozen", 4, None, "sum"),
    ]
    whole, own = (hb.EmbeddingCollection(tables, seed=3) for _ in range(2))
    kinds = {"row": RowWise(), "copy": Replicated(), "named": Backwards(), "frozen": RowWise()}
    shared(own, Plan(tables, world, kinds), LOCAL)
    chosen = [cast(Any, own.table(name)).place.by_machine for name in own.tables]
    assert chosen == [True, False, False, True]
    for model in (whole, own):
        model.assign("frozen", [0, 1, 2], torch.ones(3, 4))
        model.parameter("frozen").requires_grad_(False)
    optimizers = [
        hb.optim.Adagrad([m.parameter(name) for name in kinds if name != "frozen"], lr=0.25)
        for m in (whole, own)
    ]
    for number in range(3):
        ids = batch_of(number, slice(None))["item"][:, :1]
        for model, optimizer, some, scale in zip(
            (whole, own), optimizers, (ids, ids[3 * rank : 3 * rank + 3]), (1, world), strict=True
        ):
            vectors = model(dict.fromkeys(kinds, some))
            (scale * torch.stack([v.sum() for v in vectors.values()]).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_rows(own, whole)
    assert own.count("frozen") == 3


def test_tables_of_one_call_go_by_different_routes() -> None:
    run(WORLD, mixed)


class Refused(Exception):
    """An error of a test."""


class Breaking(Flipped):
    broken = ""

    def encode_rows(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        if self.broken == "encode":
            raise Refused("encode")
        super().encode_rows(rows, out)

    def decode_rows(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        if self.broken == "decode":
            raise Refused("decode")
        super().decode_rows(encoded, out)


def refused(*given: object) -> None:
    raise Refused("here")


def one_table(rank: int, world: int) -> None:
    """The only table lies on rank 2, so ranks with odd numbers exchange no rows across, and hear of it."""
    CODECS["rows"] = codec = Breaking()
    model = hb.EmbeddingCollection([hb.Table("a", 4, 90)], seed=2)
    shared(model, Plan(model.tables.values(), world, {"a": TableWise(2)}), LOCAL, rows="rows")
    ids = {"a": torch.arange(5)}
    codec.broken = "decode" if rank == 0 else ""
    with pytest.raises(Refused if rank == 0 else PeerError, match="decode"):
        model(ids)
    codec.broken = ""
    assert model(ids)["a"].shape == (5, 4)


def test_a_fault_of_a_codec_is_raised_where_its_table_does_not_lie() -> None:
    run(WORLD, one_table)


FAULTS: dict[str, Any] = {
    **dict.fromkeys(["encode rows", "decode rows", "encode gradients", "decode gradients"]),
    "copy_out": Fetched,
    "write_given": _core.Exchange,
    "sums": ByMachine,
}
"""Methods that break, by the class; of codecs, what they break."""


def faults(rank: int, world: int, fault: str, memory: bool) -> None:
    """A fault of rank 2, after which all go on as if it had not been."""
    codecs = {"rows": Breaking(), "gradients": Breaking()}
    CODECS.update(codecs)
    models = [
        hb.EmbeddingCollection([hb.Table("a", 4, 90), hb.Table("b", 4, 90)], seed=2) for _ in "ab"
    ]
    optimizers = []
    for model in models:
        plan = Plan(model.tables.values(), world, {"a": RowWise(), "b": TableWise(2)})
        options = {"rows": "rows", "gradients": "gradients", "shared_memory": memory}
        shared(model, plan, LOCAL, **options)
        optimizers.append(hb.optim.Adagrad(model.parameters(), lr=0.25))

    def step(at: int, number: int) -> None:
        ids = torch.arange(20) * (number + 1) % 90 + rank % 2
        vectors = models[at]({"a": ids.clamp(max=89), "b": ids.clamp(max=89)})
        (world * sum(v.sum() for v in vectors.values())).backward()
        optimizers[at].step()
        optimizers[at].zero_grad()

    step(0, 1)
    step(1, 1)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Exception) as raised:
        if rank == 2:
            method, _, way = fault.partition(" ")
            if way:
                codecs[way].broken = method
            else:
                patch.setattr(FAULTS[fault], fault, refused)
        step(0, 2)
    assert raised.type is (Refused if rank == 2 else PeerError), raised.value
    if rank != 2:
        assert "Rank 2 could not go on: Refused" in str(raised.value)
    for codec in codecs.values():
        codec.broken = ""
    optimizers[0].zero_grad()
    for at in (0, 1):
        step(at, 3)
        step(at, 4)
    assert_same_rows(*models)


@pytest.mark.parametrize(
    ("fault", "memory"), [*[(fault, True) for fault in FAULTS], ("write_given", False)]
)
def test_a_fault_of_one_rank_is_raised_on_all(fault: str, memory: bool) -> None:
    run(WORLD, faults, fault, memory)


def lost(rank: int, world: int) -> None:
    """An error of rank 2 between exchanges inside and across, of which nobody hears."""
    model = hb.EmbeddingCollection([hb.Table("a", 4, 90)], seed=2)
    shared(model, plan_of(model, "row", world), LOCAL, timeout=2.0)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Exception) as raised:
        if rank == 2:
            patch.setattr(by_machine, "order_by_owner", refused)
        model({"a": torch.arange(5)})
    assert raised.type is (Refused if rank == 2 else PeerLost), raised.value


def test_ranks_do_not_wait_for_one_that_could_not_go_on_in_the_middle() -> None:
    run(WORLD, lost)


def uneven(rank: int, world: int, deal: str) -> None:
    whole, own = collection(), collection()
    shared(own, plan_of(own, deal, world), LOCAL)
    optimizers = [hb.optim.Adagrad(m.parameters(), lr=0.25) for m in (whole, own)]
    counts = [2, 5, 1, 3]

    def samples(of: int) -> slice:
        return slice(3 * of, 3 * of + 3)

    with Join(hb.dist.joinables(own)):
        for number in range(counts[rank]):
            loss_of(own(batch_of(number, samples(rank))), world).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
    for number in range(max(counts)):
        batch, active = (
            batch_of(number, slice(None)),
            [r for r in range(world) if number < counts[r]],
        )
        together = {n: torch.cat([ids[samples(r)] for r in active]) for n, ids in batch.items()}
        loss_of(whole(together), 1).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    assert_same_rows(own, whole)


@pytest.mark.parametrize("deal", ["row", "mixed", "last"])
def test_ranks_that_have_ended_answer_for_their_machine(deal: str) -> None:
    assert deal in DEALS
    run(WORLD, uneven, deal)


def many_backwards(rank: int, world: int) -> None:
    whole, own = collection(), collection()
    shared(own, plan_of(own, "row", world), LOCAL)
    optimizers = [hb.optim.SGD(m.parameters(), lr=0.25) for m in (whole, own)]
    for number in range(70):
        loss_of(whole(batch_of(number, slice(None))), 1).backward()
        loss_of(own(batch_of(number, slice(3 * rank, 3 * rank + 3))), world).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert_same_rows(own, whole)


def test_gradients_of_many_batches_are_merged() -> None:
    run(WORLD, many_backwards)


def too_many(rank: int, world: int) -> None:
    """Rank 0 tells the rank of its local rank on the other machine that it asks for more ids than it said."""
    model = hb.EmbeddingCollection([hb.Table("item", 8, 1000)], seed=1)
    ranks = shared(model, Plan(model.tables.values(), world, {"item": RowWise()}), LOCAL, timeout=5)
    reserve, send = ranks.reserve, ranks.send
    kept: list[torch.Tensor] = []

    def kept_reserve(sizes: Any) -> list[torch.Tensor]:
        kept[:] = reserve(sizes)
        return list(kept)

    def lying_send(what: str, *arguments: Any) -> Any:
        if what == "ids":
            kept[2][:8].view(torch.int64)[:] = 1000
        return send(what, *arguments)

    if rank == 0:
        ranks.reserve, ranks.send = kept_reserve, lying_send
    says = "more ids than its ranks have announced" if rank == 2 else ""
    with pytest.raises(PeerError, match=says):
        model(one_hot(False, rank))


def test_more_ids_than_announced_are_not_read() -> None:
    run(WORLD, too_many)


def unseen_on_one(rank: int, world: int) -> None:
    """Ranks of the second machine do not see each other's memory: those of the first use Gloo with them."""
    models = [hb.EmbeddingCollection([hb.Table("item", 8, 1000)], seed=1) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        if rank >= LOCAL:
            patch.delattr(os, "memfd_create")
        for model, local in zip(models, (None, LOCAL), strict=True):
            shared(
                model, Plan(model.tables.values(), world, {"item": RowWise()}), local, timeout=10
            )
    for model in models:
        optimizer = hb.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(2):
            model(one_hot(True, rank))["item"].sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_rows(models[1], models[0])


def test_machines_whose_ranks_do_not_see_each_other() -> None:
    run(WORLD, unseen_on_one)
