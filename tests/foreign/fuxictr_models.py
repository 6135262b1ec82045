"""A model of FuxiCTR, as its users write theirs."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from fuxictr.features import FeatureMap
from fuxictr.pytorch.layers import FactorizationMachine, FeatureEmbedding, MLP_Block
from fuxictr.pytorch.models import BaseModel
from torch import Tensor

ROWS, DIM = 20_000, 8
COLUMNS = ["C0", "C1", "C2", "C3"]


def features() -> Any:
    """Four columns of ids, one of which shares the vectors of another, and a number."""
    found = FeatureMap("toy", "")
    for place, name in enumerate(COLUMNS):
        found.features[name] = {
            "source": "",
            "type": "categorical",
            "vocab_size": ROWS,
            "padding_idx": 0,
        } | ({"share_embedding": "C0"} if place == 3 else {})
    found.features["I1"] = {"source": "", "type": "numeric"}
    found.labels, found.num_fields = ["label"], len(COLUMNS) + 1
    return found


class DeepFM(BaseModel):
    def __init__(self) -> None:
        found = features()
        super().__init__(found, metrics=["AUC"], model_root="", verbose=0)
        self.embedding_layer = FeatureEmbedding(found, DIM)
        self.fm = FactorizationMachine(found)
        self.mlp = MLP_Block(input_dim=5 * DIM, output_dim=1, hidden_units=[16])
        self.reset_parameters()

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        given = self.get_inputs(inputs)
        vectors = self.embedding_layer(given)
        logits: Tensor = self.fm(given, vectors) + self.mlp(vectors.flatten(1))
        return logits


def deepfm() -> Any:
    return DeepFM()


def batch(number: int, samples: slice = slice(0, 32)) -> tuple[dict[str, Tensor], Tensor]:
    draw = torch.Generator().manual_seed(number)
    x = OrderedDict(
        (name, torch.randint(0, ROWS, (32,), generator=draw)[samples]) for name in COLUMNS
    )
    x["I1"] = torch.rand(32, generator=draw)[samples]
    return x, torch.randint(0, 2, (32, 1), generator=draw).float()[samples]


def loss(model: Any, given: tuple[dict[str, Tensor], Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(given[0]), given[1])
