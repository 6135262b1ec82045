"""A server of a torch model as it is often written: FastAPI, pydantic and torch. It is run by uvicorn, with
the model's file and its sizes in the environment."""

from __future__ import annotations

import os

import torch
from fastapi import FastAPI
from pydantic import BaseModel
from torch import Tensor, nn


class TorchDlrm(nn.Module):
    """A DLRM of the sizes of `hotbed.models.DLRM`, on `nn.EmbeddingBag`."""

    def __init__(self, tables: int, rows: int, dim: int, bottom: list[int], top: list[int]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum") for _ in range(tables))
        self.bottom = layers([13, *bottom])
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(*layers([pairs + dim, *top])[:-1])
        self.register_buffer("at", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        low = self.bottom(dense)
        vectors = [table(ids[:, n, None]) for n, table in enumerate(self.tables)]
        all_of = torch.stack([low, *vectors], 1)
        products = torch.bmm(all_of, all_of.transpose(1, 2))[:, self.at[0], self.at[1]]
        return self.top(torch.cat([low, products], 1)).squeeze(1)


def layers(sizes: list[int]) -> nn.Sequential:
    both = zip(sizes, sizes[1:], strict=False)
    return nn.Sequential(*(each for a, b in both for each in (nn.Linear(a, b), nn.ReLU())))


class Asked(BaseModel):
    dense: list[list[float]]
    ids: list[list[int]]


def app() -> FastAPI:
    torch.set_num_threads(int(os.environ["THREADS"]))
    tables, rows, dim = map(int, os.environ["SIZES"].split(","))
    model = TorchDlrm(tables, rows, dim, [64, dim], [256, 128, 1]).eval()
    server = FastAPI()

    @server.post("/predict")
    def predict(asked: Asked) -> dict[str, list[float]]:
        with torch.inference_mode():
            scores = model(torch.tensor(asked.dense), torch.tensor(asked.ids)).sigmoid()
        return {"predictions": scores.tolist()}

    return server
