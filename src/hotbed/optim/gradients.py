"""Telling tables from dense parameters."""

from __future__ import annotations

from torch import nn

from hotbed.table.live import live_table

__all__ = ["split_parameters"]


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters of a model as (tables, dense), for two optimizers.

    >>> tables, dense = hb.split_parameters(model)
    >>> optimizers = hb.optim.Adagrad(tables, lr=0.02), torch.optim.AdamW(dense, lr=1e-3)
    """
    tables: list[nn.Parameter] = []
    dense: list[nn.Parameter] = []
    for parameter in model.parameters():
        (dense if live_table(parameter) is None else tables).append(parameter)
    return tables, dense
