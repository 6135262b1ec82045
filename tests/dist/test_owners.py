"""Who keeps an id."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hotbed as hb
from hotbed import _core
from hotbed.dist import hashed_owner, modulo_owner

ids_ = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50)
MASK = 2**64 - 1


def murmur(key: int) -> int:
    """fmix64 of MurmurHash3."""
    key &= MASK
    key = (key ^ key >> 33) * 0xFF51AFD7ED558CCD & MASK
    key = (key ^ key >> 33) * 0xC4CEB9FE1A85EC53 & MASK
    return key ^ key >> 33


def index_hash(key: int) -> int:
    """csrc/base/random.hpp: mix."""
    key &= MASK
    key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & MASK
    key = (key ^ key >> 27) * 0x94D049BB133111EB & MASK
    return key ^ key >> 31


@given(ids_, st.integers(1, 2**20))
def test_the_hash_is_that_of_plain_integers(ids: list[int], world_size: int) -> None:
    expected = [(murmur(each) >> 32) * world_size >> 32 for each in ids]
    assert hashed_owner(torch.tensor(ids, dtype=torch.int64), world_size).tolist() == expected
    assert all(0 <= rank < world_size for rank in expected)


def test_the_hash_never_changes() -> None:
    ids = torch.tensor([0, 1, 2, -1, 10**12, -(2**63)])
    assert murmur(1) == 0xB456BCFC34C2CB2C  # published
    assert hashed_owner(ids, 1000).tolist() == [0, 704, 229, 393, 961, 560]


@given(ids_, st.integers(1, 2**20))
def test_modulo_is_never_negative(ids: list[int], world_size: int) -> None:
    ranks = modulo_owner(torch.tensor(ids, dtype=torch.int64), world_size)
    assert ranks.tolist() == [each % world_size for each in ids]


def chi_squared(counts: torch.Tensor) -> float:
    mean = counts.double().mean()
    return float(((counts - mean) ** 2 / mean).sum())


@pytest.mark.parametrize("stride", [1, 8, 4096, 2**40])
def test_ranks_keep_as_much_and_their_indices_are_even(stride: int) -> None:
    ids = torch.arange(64_000) * stride
    ranks = hashed_owner(ids, 8)
    assert chi_squared(torch.bincount(ranks, minlength=8)) < 30  # 7 degrees of freedom
    of_one = [index_hash(each) for each in ids[ranks == 3].tolist()]
    for bits in ([h >> 58 for h in of_one], [h & 63 for h in of_one]):  # segment and bucket
        counts = torch.bincount(torch.tensor(bits), minlength=64)
        assert chi_squared(counts) < 120  # 63 degrees of freedom


def test_who_owns_a_part_is_a_value() -> None:
    plan = hb.plan([hb.Table("user", 4)], 3)
    part = plan.part("user", 1)
    assert part == plan.part("user", 1) != plan.part("user", 2)
    again = pickle.loads(pickle.dumps(part))
    assert again == part
    owns = again.origin.owns
    assert owns is not None
    assert torch.equal(owns(torch.arange(9)), hashed_owner(torch.arange(9), 3) == 1)


@given(ids_, st.integers(1, 70), st.sampled_from(["hash", "modulo"]))
def test_ids_are_ordered_by_their_owners_as_they_come(ids: list[int], ranks: int, how: str) -> None:
    given_ids = torch.tensor(ids, dtype=torch.int64)
    ordered, place = torch.empty_like(given_ids), torch.empty_like(given_ids)
    to = ordered.data_ptr(), place.data_ptr()
    owner_rule = getattr(_core.OwnerRule, how)
    sizes = _core.order_by_owner(given_ids.data_ptr(), len(ids), ranks, owner_rule, *to)
    owners = (hashed_owner if how == "hash" else modulo_owner)(given_ids, ranks)
    assert sizes == torch.bincount(owners, minlength=ranks).tolist()
    assert ordered.tolist() == given_ids[owners.argsort(stable=True)].tolist()
    assert torch.equal(ordered[place], given_ids)


@pytest.mark.parametrize("owner", [hashed_owner, modulo_owner])
def test_ids_and_ranks_are_whole_numbers(owner: Any) -> None:
    assert owner([3, -4], np.int64(3)).tolist() == owner(torch.tensor([3, -4]), 3).tolist()
    for ids in (torch.tensor([1.5]), [1.5], torch.tensor([True]), "12"):
        with pytest.raises(hb.InputError):
            owner(ids, 3)
    for world_size in (0, -1, 1.0, True, 2**33):
        with pytest.raises(hb.dist.PlanError, match="world_size"):
            owner(torch.tensor([1]), world_size)


def test_a_plan_knows_the_owners_of_whole_numbers() -> None:
    plan = hb.dist.Plan([hb.Table("t", 8, 9)], np.int64(2), {"t": "row"})
    assert plan.owner_of("t", [3, 4]).tolist() == [1, 0]
    assert plan.part("t", np.int64(1)) == plan.part("t", 1)
    with pytest.raises(hb.InputError):
        plan.owner_of("t", torch.tensor([1.5]))
    for outside in (9, -1):
        with pytest.raises(hb.IdError, match=rf"'t': id {outside} is outside \[0, 9\)"):
            plan.owner_of("t", [0, outside])
    assert plan.owner_of("t", []).tolist() == []
    for more in ({"column": 1.5}, {"column": True}, {"requester": 2}, {"requester": -1}):
        with pytest.raises(hb.dist.PlanError, match="outside"):
            plan.owner_of("t", [1], **more)
    with pytest.raises(hb.dist.PlanError, match="outside"):
        plan.part("t", True)
