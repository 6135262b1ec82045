"""GradScaler and clipping in any order: the rows of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dist.test_arguments_of_ranks import Model
from dist.test_sharded import assert_same_rows, batch_of, collection, loss_of, plan_of
from dist.worlds import run
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import hotbed as hb


def plain() -> Any:
    return torch.amp.GradScaler("cpu", init_scale=16.0)


def sharded() -> Any:
    """Scaler with its own way to unscale, of a class that is there when hotbed.distribute is called."""
    return ShardedGradScaler(device="cpu", init_scale=16.0)


def later() -> Any:
    """Scaler of a class that is made behind hotbed.distribute, and calls its base."""

    class Later(torch.amp.GradScaler):
        def _unscale_grads_(self, *arguments: Any) -> dict[torch.device, torch.Tensor]:
            return super()._unscale_grads_(*arguments)

    return Later("cpu", init_scale=16.0)


def train(model: Any, order: str, batches: list[slice], world: int, scaler_of: Any = plain) -> Any:
    """Returns the optimizer, which must be kept as long as other ranks may step."""
    optimizer = hb.optim.SGD(model.parameters(), lr=0.5)
    scaler = scaler_of()
    for number, samples in enumerate(batches):
        scaler.scale(loss_of(model(batch_of(number, samples)), world)).backward()
        for call in order:
            match call:
                case "u":
                    scaler.unscale_(optimizer)
                case "v":
                    hb.nn.clip_grad_value_(model.parameters(), 0.25)
                case "b":  # one more behind
                    loss = loss_of(model(batch_of(9, samples)), world)
                    scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return optimizer


def alike(rank: int, world: int, deal: str) -> None:
    samples = slice(4 * rank, 4 * rank + 4)
    for order in ("v", "vu", "uv", "vbu", "vb"):
        whole, own = collection(), collection()
        hb.distribute(own, plan_of(own, deal, world))
        train(whole, order, [slice(0, 8)] * 2, 1)
        train(own, order, [samples] * 2, world)
        assert_same_rows(own, whole, order)


@pytest.mark.process
@pytest.mark.parametrize("deal", ["row", "column", "replicated"])
def test_what_was_clipped_first_is_unscaled_too(deal: str) -> None:
    run(2, alike, deal)


def of_kind(rank: int, world: int, scaler_of: Any) -> None:
    for order in ("v", "vu", "uv"):
        whole, own = collection(), collection()
        hb.distribute(own, plan_of(own, "row", world))
        train(whole, order, [slice(0, 8)] * 2, 1)
        train(own, order, [slice(4 * rank, 4 * rank + 4)] * 2, world, scaler_of)
        assert_same_rows(own, whole, order)


@pytest.mark.process
@pytest.mark.parametrize("scaler_of", [sharded, later])
def test_kinds_of_scalers(scaler_of: Any) -> None:
    run(2, of_kind, scaler_of)


def infinite_in_dense(rank: int, world: int, is_outside: bool) -> None:
    """All skip where a dense gradient of one rank is infinite, which none of the others sees."""
    model, criterion = hb.distribute(Model()), torch.nn.Linear(1, 1)
    parameters = [*model.parameters(), *criterion.parameters()]
    optimizer = hb.optim.SGD(parameters, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    before = model.tables.rows("a").values
    for culprit in range(world):
        factor = float("inf") if rank == culprit and is_outside else 1.0
        loss = model(torch.tensor([1, 2])).sum() + (criterion(torch.ones(1, 1)) * factor).sum()
        scaler.scale(loss).backward()
        if rank == culprit and not is_outside:
            model.one.weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == 8.0 / 2**culprit
        assert torch.equal(model.tables.rows("a").values, before)


@pytest.mark.process
@pytest.mark.parametrize("is_outside", [False, True])
def test_an_infinity_in_a_dense_gradient_of_one_rank(is_outside: bool) -> None:
    run(2, infinite_in_dense, is_outside)


def ended(rank: int, world: int) -> None:
    whole, own = collection(), collection()
    hb.distribute(own, plan_of(own, "row", world))
    with Join(hb.dist.joinables(own)):
        kept = train(own, "vu", [slice(0, 8)] * (2 if rank else 0), world)
    del kept
    train(whole, "vu", [slice(0, 8)] * 2, world)
    assert_same_rows(own, whole)


@pytest.mark.process
def test_a_rank_that_has_ended_unscales_what_it_keeps() -> None:
    run(2, ended)


def infinite_elsewhere(rank: int, world: int) -> None:
    """All skip, and all scales fall, where one rank has an infinity that no other sees."""
    own = collection()
    hb.distribute(own, plan_of(own, "row", world))
    optimizer = hb.optim.SGD(own.parameters(), lr=0.5)
    before = own.rows("item")[1]
    for culprit in range(world):
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        vectors = next(iter(own({n: v[:2] for n, v in batch_of(0, slice(0, 4)).items()}).values()))
        loss = vectors.sum() * (float("inf") if rank == culprit else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == 8.0
        assert torch.equal(own.rows("item")[1], before)


@pytest.mark.process
def test_an_infinity_of_one_rank_is_one_of_all() -> None:
    run(2, infinite_elsewhere)


def heard_by_other_bases(rank: int, world: int) -> None:
    hb.distribute(collection())
    heard: list[str] = []

    class Registered:
        def __init_subclass__(cls, **options: str) -> None:
            heard.append(options["name"])

    class Own(torch.amp.GradScaler, Registered, name="own"):
        pass

    assert heard == ["own"] and Own("cpu", enabled=False).scale(torch.ones(())) == 1


@pytest.mark.process
def test_a_scaler_of_several_bases_is_made_as_ever() -> None:
    run(2, heard_by_other_bases)
