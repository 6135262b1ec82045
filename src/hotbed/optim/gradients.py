"""Telling tables from dense parameters."""

from __future__ import annotations

from typing import Any

import torch

from hotbed.table.live import live_table

__all__ = ["split_parameters"]


def split_parameters(model: torch.nn.Module) -> tuple[list[Any], list[Any]]:
    """The parameters of a model as (tables, dense), for two optimizers.

    >>> tables, dense = hb.split_parameters(model)
    >>> optimizers = hb.optim.Adagrad(tables, lr=0.02), torch.optim.AdamW(dense, lr=1e-3)
    """
    tables: list[Any] = []
    dense: list[Any] = []
    for parameter in model.parameters():
        (dense if live_table(parameter) is None else tables).append(parameter)
    return tables, dense
