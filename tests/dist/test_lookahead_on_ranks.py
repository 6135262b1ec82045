"""Look-ahead on ranks: batches are passed on, and the first rank is told so."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from dist.worlds import run

import hotbed as hb
from hotbed.dist import Plan, RowWise


def passed_on(rank: int, world: int, folder: str, tiers: bool) -> None:
    storage = hb.Storage(host=20_000_000, ssd=folder) if tiers else None
    model = hb.EmbeddingCollection([hb.Table("user", 4, 50)], seed=1, storage=storage)
    hb.distribute(model, Plan([*model.tables.values()], world, {"user": RowWise()}))
    batches = [{"user": torch.tensor([n, n + rank])} for n in range(5)]
    ahead = hb.lookahead(batches, model, depth=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            given = [batch for batch in ahead]
            assert [id(one) for one in given] == [id(one) for one in batches]
        assert [*hb.lookahead(batches, model, depth=0)] == batches
    texts = [str(one.message) for one in caught if "Look-ahead" in str(one.message)]
    assert len(texts) == int(tiers and rank == 0)
    if texts:
        assert "does nothing yet for tables that ranks share" in texts[0]
        assert caught[0].filename == __file__


@pytest.mark.process
@pytest.mark.parametrize("tiers", [False, True])
def test_lookahead_says_once_that_it_does_nothing(tiers: bool, tmp_path: Path) -> None:
    run(2, passed_on, str(tmp_path), tiers)
