"""Gradients that clipping has brought to the owners: given up, read and stepped as those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dist.test_sharded import assert_same_rows, batch_of, collection, loss_of, plan_of
from dist.worlds import run
from torch.distributed.algorithms.join import Join

import hotbed as hb


def by_hand(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = None


def replaced(model: Any, optimizer: Any) -> None:
    """Puts an empty gradient in the place of each."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            layout = {"layout": torch.sparse_coo, "dtype": parameter.grad.dtype}
            parameter.grad = torch.zeros(parameter.grad.shape, **layout)


GIVEN_UP: dict[str, Callable[[Any, Any], None]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "model": lambda model, optimizer: model.zero_grad(),
    "model, zeros": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "by hand": by_hand,
    "replaced": replaced,
}


def given_up(rank: int, world: int, how: str, more: bool) -> None:
    """`more`: a backward comes after clipping."""
    whole, own = collection(), collection()
    hb.distribute(own, plan_of(own, "mixed", world))
    samples = slice(12 * rank // world, 12 * (rank + 1) // world)
    for model, of_rank, scale in ((whole, slice(None), 1), (own, samples, world)):
        optimizer = hb.optim.SGD(model.parameters(), lr=0.1)
        for number in range(3):
            loss_of(model(batch_of(number, of_rank)), scale).backward()
            hb.nn.clip_grad_value_(model.parameters(), 2.0)
            if more:
                loss_of(model(batch_of(number + 9, of_rank)), scale).backward()
            optimizer.step()
            GIVEN_UP[how](model, optimizer)
    assert_same_rows(own, whole)


@pytest.mark.process
@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("how", GIVEN_UP)
def test_clipped_gradients_are_given_up_as_in_one_process(how: str, more: bool) -> None:
    run(2, given_up, how, more)


def read(rank: int, world: int) -> None:
    own = collection()
    hb.distribute(own, plan_of(own, "row", world))
    handle = own.parameter("item")
    loss_of(own(batch_of(0, slice(rank, rank + 2))), 1).backward()
    hb.nn.clip_grad_norm_(own.parameters(), 1.0)
    grad = handle.grad
    assert grad is not None and grad.is_sparse and grad.shape == handle.shape
    assert grad.dtype == torch.float32 and len(grad._values()) == 0 and "size=" in repr(grad)
    for change in (lambda g: g.mul_(2), lambda g: g.abs(), lambda g: g.coalesce()):
        with pytest.raises(hb.TableError, match="of table 'item': clipping has brought it"):
            change(grad)
    handle.grad = grad  # which changes nothing
    loss_of(own(batch_of(1, slice(rank, rank + 2))), 1).backward()
    assert handle.grad is not None and len(handle.grad.coalesce()._values())
    with pytest.raises(hb.TableError, match="of table 'item': clipping has brought it"):
        handle.grad.mul_(2)


@pytest.mark.process
def test_what_shows_of_a_clipped_gradient() -> None:
    run(2, read)


def on_one_rank(rank: int, world: int) -> None:
    whole, own = collection(), collection()
    hb.distribute(own, plan_of(own, "row", world))
    optimizer, other = (hb.optim.SGD(m.parameters(), lr=0.1) for m in (own, whole))
    loss_of(own(batch_of(0, slice(rank, rank + 2))), 1).backward()
    hb.nn.clip_grad_norm_(own.parameters(), 1.0)
    if rank:
        own.zero_grad()
    with pytest.raises(hb.dist.PeerError, match="Rank 1 has given up the clipped gradient of"):
        optimizer.step()
    own.zero_grad()
    loss_of(own(batch_of(0, slice(6 * rank, 6 * rank + 6))), world).backward()
    optimizer.step()
    loss_of(whole(batch_of(0, slice(None))), 1).backward()
    other.step()
    assert_same_rows(own, whole)


@pytest.mark.process
def test_a_clipped_gradient_that_one_rank_has_given_up() -> None:
    run(2, on_one_rank)


def after_join(rank: int, world: int, how: str, deal: str) -> None:
    """A rank that has ended gives up what it keeps for the others as they do; a second epoch shows it."""
    whole, own = collection(), collection()
    hb.distribute(own, plan_of(own, deal, world))
    optimizer, other = (hb.optim.SGD(m.parameters(), lr=0.1) for m in (own, whole))
    batches = [1, 3]
    for epoch in range(2):
        with Join(hb.dist.joinables(own)):
            for number in range(4 * epoch, 4 * epoch + batches[rank]):
                if how == "before":
                    optimizer.zero_grad()
                loss_of(own(batch_of(number, slice(6 * rank, 6 * rank + 6))), world).backward()
                hb.nn.clip_grad_value_(own.parameters(), 0.5)
                optimizer.step()
                if how == "behind":
                    optimizer.zero_grad()
        for step in range(max(batches)):
            samples = slice(6 * min(r for r in range(world) if step < batches[r]), None)
            loss_of(whole(batch_of(4 * epoch + step, samples)), 1).backward()
            hb.nn.clip_grad_value_(whole.parameters(), 0.5)
            other.step()
            other.zero_grad()
    assert_same_rows(own, whole)


@pytest.mark.process
@pytest.mark.parametrize("how", ["before", "behind"])
@pytest.mark.parametrize("deal", ["row", "replicated"])
def test_clipped_gradients_when_ranks_have_ended(deal: str, how: str) -> None:
    run(2, after_join, how, deal)
