"""Models of RecBole, over a stand-in for its data set."""

from __future__ import annotations

from typing import Any

import torch
from recbole.data.interaction import Interaction
from recbole.model.general_recommender import BPR, NeuMF
from recbole.model.sequential_recommender import SASRec
from torch import Tensor

USERS, ITEMS = 20_000, 30_000
SETTINGS: dict[str, Any] = {
    "USER_ID_FIELD": "user",
    "ITEM_ID_FIELD": "item",
    "NEG_PREFIX": "neg_",
    "LABEL_FIELD": "label",
    "LIST_SUFFIX": "_list",
    "ITEM_LIST_LENGTH_FIELD": "length",
    "MAX_ITEM_LIST_LENGTH": 6,
    "device": torch.device("cpu"),
    "embedding_size": 8,
    "mf_embedding_size": 8,
    "mlp_embedding_size": 8,
    "mlp_hidden_size": [16],
    "dropout_prob": 0.0,
    "mf_train": True,
    "mlp_train": True,
    "use_pretrain": False,
    "mf_pretrain_path": None,
    "mlp_pretrain_path": None,
    "n_layers": 1,
    "n_heads": 2,
    "hidden_size": 8,
    "inner_size": 16,
    "hidden_dropout_prob": 0.0,
    "attn_dropout_prob": 0.0,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "initializer_range": 0.02,
    "loss_type": "CE",
}


class Data:
    """The data set, as far as models ask it."""

    def num(self, field: str) -> int:
        return USERS if field == "user" else ITEMS


def bpr() -> Any:
    return BPR(SETTINGS, Data())


def neumf() -> Any:
    return NeuMF(SETTINGS, Data())


def sasrec() -> Any:
    return SASRec(SETTINGS, Data())


def batch(number: int, samples: slice = slice(0, 32)) -> Any:
    draw = torch.Generator().manual_seed(number)
    fields = {
        "user": torch.randint(1, USERS, (32,), generator=draw),
        "item": torch.randint(1, ITEMS, (32,), generator=draw),
        "neg_item": torch.randint(1, ITEMS, (32,), generator=draw),
        "item_list": torch.randint(1, ITEMS, (32, 6), generator=draw),
        "length": torch.randint(1, 7, (32,), generator=draw),
        "label": torch.randint(0, 2, (32,), generator=draw).float(),
    }
    return Interaction({name: value[samples] for name, value in fields.items()})


def loss(model: Any, given: Any) -> Tensor:
    found: Tensor = model.calculate_loss(given)
    return found
