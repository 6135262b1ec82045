"""A model over TorchRec's EmbeddingBagCollection."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

ROWS, DIM = 20_000, 8
COLUMNS = ["C0", "C1", "C2"]


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # The first and the last column share a table.
        tables = {"t0": ["C0", "C2"], "t1": ["C1"]}
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=name, num_embeddings=ROWS, embedding_dim=DIM, feature_names=columns
                )
                for name, columns in tables.items()
            ]
        )
        self.mlp = nn.Sequential(nn.Linear(3 * DIM, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        logits: Tensor = self.mlp(self.bags(ids).values())
        return logits


def clicks() -> Any:
    return Clicks()


def batch(number: int, samples: slice = slice(0, 32)) -> tuple[KeyedJaggedTensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    lengths = torch.randint(0, 5, (3, 32), generator=draw)
    bags = torch.randint(0, ROWS, (int(lengths.sum()),), generator=draw).split(
        lengths.flatten().tolist()
    )
    own = [bags[32 * column + sample] for column in range(3) for sample in range(32)[samples]]
    ids = KeyedJaggedTensor(COLUMNS, torch.cat(own), lengths=lengths[:, samples].flatten())
    return ids, torch.randint(0, 2, (32, 1), generator=draw).float()[samples]


def loss(model: Any, given: tuple[KeyedJaggedTensor, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(given[0]), given[1])
