"""Ranks whose batches end at different times."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
from dist.test_distribute import Model, made
from dist.test_distribute import loss_of as loss_of_model
from dist.test_sharded import assert_same_rows, batch_of, collection, loss_of, plan_of
from dist.worlds import run
from torch.distributed.algorithms.join import Join

import hotbed as hb
from hotbed.dist import PeerError, exchange

BATCHES = [2, 5, 3]
"""That each rank has."""


def samples_of(rank: int) -> slice:
    return slice(4 * rank, 4 * rank + 4)


def tables_only(rank: int, world: int, deal: str, rule: str) -> None:
    whole, own = collection(), collection()
    hb.distribute(own, plan_of(own, deal, world))
    optimizers = [getattr(hb.optim, rule)(m.parameters(), lr=0.1) for m in (whole, own)]
    with Join(hb.dist.joinables(own)):
        for number in range(BATCHES[rank]):
            found = own(batch_of(number, samples_of(rank)))
            loss_of(found, world).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            optimizers[1].param_groups[0]["lr"] *= 0.5  # ranks that have ended are told
    for number in range(max(BATCHES[:world])):
        batch = batch_of(number, slice(None))
        active = [r for r in range(world) if number < BATCHES[r]]
        together = {
            name: torch.cat([ids[samples_of(r)] for r in active]) for name, ids in batch.items()
        }
        loss_of(whole(together), 1).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        optimizers[0].param_groups[0]["lr"] *= 0.5
    assert_same_rows(own, whole)
    assert own.table("item").rule.steps == max(BATCHES[:world])


@pytest.mark.process
@pytest.mark.parametrize("rule", ["SGD", "Adam"])
@pytest.mark.parametrize("deal", ["row", "mixed", "last", "replicated"])
def test_a_rank_that_has_ended_answers_for_its_shards(deal: str, rule: str) -> None:
    run(3, tables_only, deal, rule)


def with_dense(rank: int, world: int) -> None:
    model = made()
    model.norm.eval()
    hb.distribute(model, "basic")
    optimizer = hb.optim.SGD(model.parameters(), lr=0.1)
    with Join(hb.dist.joinables(model)):
        for number in range(BATCHES[rank]):
            loss_of_model(model, batch_of(number, samples_of(rank))).backward()
            hb.nn.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    whole = made()
    whole.norm.eval()
    other = hb.optim.SGD(whole.parameters(), lr=0.1)
    for number in range(max(BATCHES)):
        active = [r for r in range(world) if number < BATCHES[r]]
        for r in active:
            (loss_of_model(whole, batch_of(number, samples_of(r))) / world).backward()
        hb.nn.clip_grad_norm_(whole.parameters(), 0.05)
        other.step()
        other.zero_grad()
    ids = torch.arange(61)
    found, expected = (m.tables.lookup("item", ids) for m in (model, whole))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.dense.weight, whole.dense.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.process
def test_dense_layers_end_like_those_of_the_last() -> None:
    run(3, with_dense)


def left_alone(rank: int, world: int) -> None:
    whole, own = collection(), collection()
    hb.distribute(own, plan_of(own, "row", world))
    optimizers = [hb.optim.SGD(m.parameters(), lr=0.1) for m in (whole, own)]
    first, second = (batch_of(number, samples_of(1)) for number in range(2))
    with Join(hb.dist.joinables(own)):
        if rank == 1:
            idle, found = own(first), own(second)
            loss_of(found, world).backward()
            del idle  # which the ranks learn in the step itself
            optimizers[1].step()
    whole(first)
    loss_of(whole(second), 1).backward()
    optimizers[0].step()
    assert_same_rows(own, whole)


@pytest.mark.process
def test_a_batch_without_a_step_that_goes_when_another_is_stepped() -> None:
    run(2, left_alone)


def other_things(rank: int, world: int) -> None:
    own = collection()
    hb.distribute(own, plan_of(own, "row", world))
    optimizer = hb.optim.SGD(own.parameters(), lr=0.1)
    before = own.rows("item").values
    with Join(hb.dist.joinables(own)):
        for number in range(1 + 2 * rank):
            batch = batch_of(number, samples_of(rank))
            if number == 2:  # rank 0 waits by now
                with pytest.raises(PeerError, match="Rank 0 has no batches any more"):
                    own.count("user")
                assert own.lookup("item", torch.arange(3)).shape == (3, 4)
                with pytest.raises(hb.IdError, match="61 is outside"):
                    own({**batch, "item": torch.full((4, 2), 61)})
            loss_of(own(batch), float("nan") if number == 1 else 1).backward()
            if number == 1 and rank:
                with pytest.raises(hb.NotFiniteError):
                    optimizer.step()
            elif number != 1:
                optimizer.step()
            optimizer.zero_grad()
    assert not torch.equal(own.rows("item").values, before)
    with pytest.raises(hb.TableError, match="not distributed"):
        hb.dist.joinables(collection())


@pytest.mark.process
def test_what_a_rank_that_has_ended_takes_part_in() -> None:
    run(2, other_things)


def even(rank: int, world: int, end: str) -> None:
    batches = hb.dist.even([f"{rank}{n}" for n in range(BATCHES[rank])], end=end)
    expected = {
        "drop": [[f"{rank}{n}" for n in range(2)]] * 2,
        "pad": [[f"{rank}{min(n, BATCHES[rank] - 1)}" for n in range(5)]] * 2,
    }
    assert [list(batches), list(batches)] == expected[end]
    nothing: Any = hb.dist.even([] if rank == 1 else [1], end=end)
    if end == "drop":
        assert list(nothing) == []
    else:
        with pytest.raises(hb.InputError, match="1 of 3 ranks have no batch"):
            list(nothing)


@pytest.mark.process
@pytest.mark.parametrize("end", ["drop", "pad"])
def test_even_loaders(end: str) -> None:
    run(3, even, end)


def test_even_loaders_of_one_process() -> None:
    assert list(hb.dist.even([1, 2, 3])) == [1, 2, 3]
    assert list(hb.dist.even([1, 2, 3], end="pad")) == [1, 2, 3]
    with pytest.raises(hb.InputError, match='give "drop" or "pad"'):
        hb.dist.even([1], end="other")


def clipped(rank: int, world: int, deal: str, norm_type: float) -> None:
    whole, own = collection(), collection()
    hb.distribute(own, plan_of(own, deal, world))
    optimizers = [hb.optim.Adagrad(m.parameters(), lr=0.1) for m in (whole, own)]
    samples = slice(12 * rank // world, 12 * (rank + 1) // world)
    for number in range(4):
        for more in range(2):  # two batches a step
            loss_of(whole(batch_of(number + 9 * more, slice(None))), 1).backward()
            loss_of(own(batch_of(number + 9 * more, samples)), world).backward()
        found, expected = (
            hb.nn.clip_grad_norm_(m.parameters(), 2.0, norm_type) for m in (own, whole)
        )
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        if number == 2:
            for m in (whole, own):
                hb.nn.clip_grad_value_(m.parameters(), 0.1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name in whole.tables:
        (ids, rows), (other_ids, other) = own.rows(name), whole.rows(name)
        assert torch.equal(ids, other_ids)
        torch.testing.assert_close(rows, other, rtol=1e-5, atol=1e-6)
    loss_of(own(batch_of(1, samples)), 1).backward()
    hb.nn.clip_grad_norm_(own.parameters(), 1.0)
    optimizers[1].zero_grad()
    before = own.rows("item").values
    optimizers[1].step()  # nothing waits any more
    assert torch.equal(own.rows("item").values, before)


@pytest.mark.process
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("deal", ["row", "column", "mixed", "replicated"])
def test_clipping_by_the_norm_over_all_ranks(deal: str, norm_type: float) -> None:
    run(3, clipped, deal, norm_type)


def joined_twice(rank: int, world: int, dense: bool) -> None:
    model: Any = made() if dense else collection()
    hb.distribute(model, "basic" if dense else plan_of(model, "row", world), timeout=10)
    optimizer = hb.optim.SGD(model.parameters(), lr=0.1)
    joinables = hb.dist.joinables(model)
    for _ in range(3):
        with Join(joinables):
            for number in range(BATCHES[rank]):
                batch = batch_of(number, samples_of(rank))
                loss = loss_of_model(model, batch) if dense else loss_of(model(batch), world)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    steps = 3 * max(BATCHES[:world])
    assert (model.tables.table("item") if dense else model.table("item")).rule.steps == steps


@pytest.mark.process
@pytest.mark.parametrize("dense", [True, False])
def test_joinables_serve_every_epoch(dense: bool) -> None:
    run(2, joined_twice, dense)


def spoil(module: Any, inputs: Any, vectors: torch.Tensor) -> None:
    vectors.register_hook(lambda grad: grad + float("inf"))


def scaled(rank: int, world: int, unscale: bool) -> None:
    torch.manual_seed(0)
    model = hb.distribute(Model().eval(), "basic")
    optimizer = hb.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    scales = []
    for number in range(5):
        batch = batch_of(number, samples_of(rank))
        if number == 1 and rank == 1:  # of a table only: dense gradients are those of all ranks
            hook = model.word.register_forward_hook(spoil)
            loss = loss_of_model(model, batch)
            hook.remove()
        else:
            loss = loss_of_model(model, batch)
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        before = model.tables.lookup("item", torch.arange(61))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = model.tables.lookup("item", torch.arange(61))
        assert torch.equal(before, after) == (number == 1)
        scales.append(scaler.get_scale())
    assert scales == [64.0, 32.0, 32.0, 64.0, 64.0]


@pytest.mark.process
@pytest.mark.parametrize("unscale", [False, True])
def test_a_grad_scaler_skips_on_all_ranks_or_none(unscale: bool) -> None:
    run(2, scaled, unscale)


def failing_owner(rank: int, world: int) -> None:
    """The last rank has no batch, and a fault while it answers: the others hear of it, and go on."""
    failed = False

    def fails_once(*arguments: Any) -> Any:
        nonlocal failed
        if rank == world - 1 and not failed:
            failed = True
            raise MemoryError("no memory")
        return looked_up(*arguments)

    looked_up = exchange.looked_up  # type: ignore[attr-defined]
    model = collection()
    hb.distribute(model, plan_of(model, "row", world))
    optimizer = hb.optim.SGD(model.parameters(), lr=0.1)
    errors = []
    with pytest.MonkeyPatch.context() as patch, Join(hb.dist.joinables(model)):
        patch.setattr(exchange, "looked_up", fails_once)
        for number in range(0 if rank == world - 1 else 3):
            try:
                loss_of(model(batch_of(number, slice(rank, rank + 3))), 1).backward()
            except PeerError as error:
                errors.append(str(error))
                continue
            optimizer.step()
            optimizer.zero_grad()
    assert len(errors) == (rank != world - 1) and all("MemoryError: no memory" in e for e in errors)
    assert model.count("item") == 61


@pytest.mark.process
def test_a_fault_of_a_rank_that_has_ended() -> None:
    run(3, failing_owner)


def other_rates(rank: int, world: int) -> None:
    """Ranks with other learning rates refuse a step while one has ended, which goes on to answer."""
    whole, own = collection(), collection()
    hb.distribute(own, plan_of(own, "row", world))
    optimizers = [hb.optim.SGD(m.parameters(), lr=0.1) for m in (whole, own)]
    with Join(hb.dist.joinables(own)):
        if rank > 0:
            loss_of(own(batch_of(0, samples_of(rank))), world).backward()
            optimizers[1].param_groups[0]["lr"] = 0.1 * rank
            with pytest.raises(PeerError, match="Schedules must be alike"):
                optimizers[1].step()
            optimizers[1].param_groups[0]["lr"] = 0.1
            optimizers[1].step()
    parts = [batch_of(0, samples_of(r)) for r in range(1, world)]
    loss_of(whole({name: torch.cat([p[name] for p in parts]) for name in parts[0]}), 1).backward()
    optimizers[0].step()
    assert_same_rows(own, whole)


@pytest.mark.process
def test_ranks_that_have_ended_refuse_a_step_as_the_others_do() -> None:
    run(3, other_rates)


def infinite_elsewhere(rank: int, world: int) -> None:
    """Gradients lie at a rank that has ended when a GradScaler looks: all skip the step."""
    model = hb.EmbeddingCollection([hb.Table("item", 4, 61)])
    hb.distribute(model, plan_of(model, "row", world))
    optimizer = hb.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    ids = torch.tensor([1, 3, 3, 5])  # rows of rank 1 alone
    before = model.rows("item").values
    with Join(hb.dist.joinables(model)):
        if rank == 0:
            scaler.scale(model({"item": ids})["item"].sum() * float("inf")).backward()
            hb.nn.clip_grad_value_(model.parameters(), float("inf"))  # brings them to their owners
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 32.0
            optimizer.zero_grad()
            model({"item": ids})["item"].sum().backward()
            optimizer.step()
    assert model.table("item").rule.steps == 1
    after = model.rows("item").values
    changed = torch.nonzero((after != before).any(1)).flatten()
    assert changed.tolist() == [1, 3, 5] and bool(after.isfinite().all())


@pytest.mark.process
def test_infinities_at_a_rank_that_has_ended() -> None:
    run(2, infinite_elsewhere)


def without_optimizer(rank: int, world: int) -> None:
    """A rank that answers for its shards has let go of its optimizer: the others hear why."""
    model = collection()
    hb.distribute(model, plan_of(model, "row", world))
    optimizer: hb.optim.SGD | None = hb.optim.SGD(model.parameters(), lr=0.1)
    heard: list[str] = []
    if rank == world - 1:
        optimizer = None
        gc.collect()
    with contextlib.suppress(hb.OptimizerError), Join(hb.dist.joinables(model)):
        if optimizer is not None:
            loss_of(model(batch_of(0, samples_of(rank))), world).backward()
            with pytest.raises(PeerError) as error:
                optimizer.step()
            heard.append(str(error.value))
    assert rank == world - 1 or "has no optimizer, and answers" in heard[0]


@pytest.mark.process
def test_ranks_hear_why_one_that_has_ended_cannot_step() -> None:
    run(3, without_optimizer)
