"""Models of torch-rechub, as its users make them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_rechub.basic.features import DenseFeature, SequenceFeature, SparseFeature
from torch_rechub.models.matching import DSSM
from torch_rechub.models.multi_task import MMOE
from torch_rechub.models.ranking import DIN, DeepFM

ROWS, DIM = 20_000, 8
MLP = {"dims": [16], "dropout": 0.0, "activation": "relu"}


def ids() -> list[Any]:
    return [SparseFeature(f"C{i}", vocab_size=ROWS + i, embed_dim=DIM) for i in range(4)]


def deepfm() -> Any:
    return DeepFM([*ids(), DenseFeature("I1")], ids(), MLP)


def mmoe() -> Any:
    features = [*ids(), DenseFeature("I1")]
    tower = {"dims": [8], "activation": "relu"}
    return MMOE(features, ["classification"] * 2, 3, MLP, [tower, tower])


def din() -> Any:
    item = SparseFeature("C1", vocab_size=ROWS, embed_dim=DIM)
    history = SequenceFeature(
        "history", vocab_size=ROWS, embed_dim=DIM, pooling="concat", shared_with="C1"
    )
    mlp = {"dims": [16], "dropout": 0.0}
    return DIN([ids()[0]], [history], [item], mlp, {"dims": [8], "activation": "dice"})


def dssm() -> Any:
    return DSSM(ids()[:2], ids()[2:], MLP, MLP)


def batch(number: int, samples: slice = slice(0, 32)) -> tuple[dict[str, Tensor], Tensor]:
    draw = torch.Generator().manual_seed(number)
    x = {f"C{i}": torch.randint(1, ROWS, (32,), generator=draw)[samples] for i in range(4)}
    x["history"] = torch.randint(1, ROWS, (32, 5), generator=draw)[samples]
    x["I1"] = torch.rand(32, generator=draw)[samples]
    return x, torch.randint(0, 2, (32, 2), generator=draw).float()[samples]


def loss(model: Any, given: tuple[dict[str, Tensor], Tensor]) -> Tensor:
    scores = model(given[0])
    return F.binary_cross_entropy(scores, given[1] if scores.dim() == 2 else given[1][:, 0])
