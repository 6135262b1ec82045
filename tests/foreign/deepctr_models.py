"""Models of deepctr-torch, as its users make them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from deepctr_torch import models
from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat
from torch import Tensor

ROWS, DIM = 20_000, 8
PLAIN: dict[str, Any] = {"l2_reg_embedding": 0, "dnn_hidden_units": (16,)}
"""Without the penalty on all rows that they have by default."""


def columns() -> list[Any]:
    ids = [SparseFeat(f"C{i}", ROWS + i, embedding_dim=DIM) for i in range(4)]
    return [*ids, DenseFeat("I1", 1)]


def deepfm(**options: Any) -> Any:
    return models.DeepFM(columns(), columns(), **{**PLAIN, "l2_reg_linear": 0, **options})


def dcn() -> Any:
    return models.DCN(columns(), columns(), l2_reg_linear=0, **PLAIN)


def autoint() -> Any:
    return models.AutoInt(columns(), columns(), att_head_num=2, **PLAIN)


def xdeepfm() -> Any:
    return models.xDeepFM(columns(), columns(), l2_reg_linear=0, cin_layer_size=(8, 8), **PLAIN)


def din() -> Any:
    history = SparseFeat("hist_item", ROWS, DIM, embedding_name="item")
    features = [
        SparseFeat("user", ROWS, DIM),
        SparseFeat("item", ROWS, DIM),
        DenseFeat("I1", 1),
        VarLenSparseFeat(history, maxlen=4, length_name="length"),
    ]
    return models.DIN(features, ["item"], **PLAIN)


def batch(number: int, samples: slice = slice(0, 32)) -> tuple[Tensor, Tensor]:
    """Ids travel in one float32 matrix, as that library has it."""
    draw = torch.Generator().manual_seed(number)
    ids = torch.randint(1, ROWS, (32, 4), generator=draw).float()
    x = torch.cat([ids, torch.rand(32, 1, generator=draw)], 1)
    return x[samples], torch.randint(0, 2, (32, 1), generator=draw).float()[samples]


def sequences(number: int, samples: slice = slice(0, 32)) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    ids = torch.randint(1, ROWS, (32, 2), generator=draw).float()
    history = torch.randint(1, ROWS, (32, 4), generator=draw).float()
    lengths = torch.randint(1, 5, (32, 1), generator=draw).float()
    x = torch.cat([ids, torch.rand(32, 1, generator=draw), history, lengths], 1)
    return x[samples], torch.randint(0, 2, (32, 1), generator=draw).float()[samples]


def loss(model: Any, given: tuple[Tensor, Tensor]) -> Tensor:
    return F.binary_cross_entropy(model(given[0]), given[1])
