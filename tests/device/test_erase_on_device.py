"""Ids that go from tables on a device: as if no batch had had them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device.placed import to_device
from forgotten import check_forgotten

import hotbed as hb

RULES: dict[str, Any] = {
    "RowwiseAdagrad": {"initial_accumulator_value": 0.5},
    "Adam": {"amsgrad": True},
    "FTRL": {"initial_accumulator_value": 0.25},
}


@pytest.mark.parametrize("tiered", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_an_id_is_as_if_no_batch_had_had_it(rule: str, tiered: bool) -> None:
    normal = hb.init.Normal(0.0, 1.0)
    tables = [hb.Table("item", 4, 100, "none", init=normal, padding_idx=98)]
    if tiered:
        tables.append(hb.Table("user", 4, None, "none", init=normal))
    else:
        tables.append(hb.Table("half", 4, 100, "none", torch.bfloat16, normal))
    models = [
        to_device(
            hb.EmbeddingCollection(
                tables, seed=1, storage=hb.Storage(device=60_000, host="4MB") if tiered else None
            )
        )
        for _ in range(2)
    ]
    check_forgotten(
        models[0],
        models[1],
        lambda one: getattr(hb.optim, rule)(one.parameters(), lr=0.1, **RULES[rule]),
    )
    assert models[0].contains("item", [0, 99, 100]).tolist() == [True, True, False]
    if tiered:
        absent = 10**12
        assert models[0].contains("user", [97, absent]).tolist() == [True, False]
        with pytest.raises(hb.IdError, match=f"1 of 2 ids have no row, such as {absent}"):
            models[0].lookup("user", [97, absent], missing="error")
