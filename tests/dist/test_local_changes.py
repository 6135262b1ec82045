"""What one rank may change by itself, and what not."""

from __future__ import annotations

import pytest
import torch
from dist.test_sharded import batch_of, collection, plan_of
from dist.worlds import run

import hotbed as hb
from hotbed.dist import PeerError


def by_itself(rank: int, world: int) -> None:
    model = collection()
    hb.distribute(model, plan_of(model, "replicated", world))
    before = model.rows("item").values
    with pytest.raises(hb.TableError, match=r"'item' is replicated: assign\(\) with local=True"):
        model.assign("item", [1], torch.ones(1, 4), local=True)
    model.assign("user", [3], torch.ones(1, 7))
    with pytest.raises(hb.TableError, match=r"'user' is replicated: erase\(\) with local=True"):
        model.erase("user", [3], local=True)
    assert torch.equal(model.rows("item", local=True).values, before)
    assert model.count("user", local=True) == 1
    # Of shards each rank changes its own.
    model = collection()
    hb.distribute(model, plan_of(model, "row", world))
    model.assign("item", torch.arange(61), torch.full((61, 4), float(rank)), local=True)
    model.assign("user", torch.arange(8), torch.ones(8, 7), local=True)
    assert torch.equal(model.lookup("item", [0, 1])[:, 0], torch.arange(2).float())
    assert model.count("user") == 8
    kept = model.count("user", local=True)
    assert model.erase("user", torch.arange(8), local=True) == kept
    torch.distributed.barrier()
    assert model.count("user") == 0
    # Of shards by columns none has whole rows.
    model = collection()
    hb.distribute(model, plan_of(model, "column", world))
    with pytest.raises(hb.TableError, match="'item' is kept by columns; no rank has whole rows"):
        model.rows("item", local=True)


@pytest.mark.process
def test_copies_of_a_table_stay_alike() -> None:
    run(2, by_itself)


def loaded_apart(rank: int, world: int) -> None:
    for kind in ("replicated", "row"):
        model = collection()
        hb.distribute(model, plan_of(model, kind, world))
        before = model.rows("item").values
        own = collection().state_dict()
        model.load_state_dict(own)
        # Of a state_dict of ranks, which has tables on rank 0 alone.
        with pytest.raises(
            RuntimeError, match="'item': item is other on rank 1 than on rank 0.*broadcast it"
        ):
            model.load_state_dict(model.state_dict(), strict=False)
        own["item"] = own["item"] + rank
        with pytest.raises(RuntimeError, match="'item': item is other on rank 1 than on rank 0"):
            model.load_state_dict(own)
        assert torch.equal(model.rows("item").values, before)
        with pytest.raises(PeerError, match=r"load_state_dict\(\) is called by all ranks"):
            if rank == 0:
                model.load_state_dict(own)
            else:
                model({"item": [[1]], "more": [[1]], "user": [[1]], "word": [1]})


@pytest.mark.process
def test_a_state_dict_is_the_same_on_all_ranks() -> None:
    run(2, loaded_apart)


def alone(rank: int, world: int) -> None:
    model = collection()
    hb.distribute(model, plan_of(model, "replicated", world))
    model.assign("item", [1], torch.ones(1, 4), local=True)
    assert torch.equal(model.lookup("item", [1]), torch.ones(1, 4))


@pytest.mark.process
def test_one_rank_has_no_copies() -> None:
    run(1, alone)


def erased_between(rank: int, world: int) -> None:
    """A rank erases rows of its own that another one has looked up, and whose gradient is on its way."""
    model = collection()
    hb.distribute(model, plan_of(model, "row", world))
    model.assign("user", torch.arange(8), torch.ones(8, 7))
    optimizer = hb.optim.SGD(model.parameters(), lr=0.1)
    own = model.rows("user", local=True).ids
    batch = {**batch_of(0, slice(0, 1)), "user": torch.arange(8)[None]}
    found = model(batch)
    if rank == 1:
        found["user"].sum().backward()
        says = "could not go on: TableError: .*'user': rows were erased since"
    else:
        assert model.erase("user", own[:1], local=True) == 1
        says = "'user': rows were erased since a batch was looked up.*Erase between steps"
    before = model.rows("user", local=True).values
    with pytest.raises((hb.TableError, PeerError), match=says):
        optimizer.step()
    assert torch.equal(model.rows("user", local=True).values, before)
    del found
    optimizer.zero_grad()
    model(batch)["user"].sum().backward()
    optimizer.step()
    assert model.table("user").rule.steps == 1


@pytest.mark.process
def test_rows_erased_by_their_owner_before_their_gradient_comes() -> None:
    run(2, erased_between)
