"""Models with tables and dense layers, trained some steps, for tests of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from kept_in import storage_of
from torch import Tensor, nn

import hotbed as hb

ROWS = 60


class Model(nn.Module):
    """A static and a dynamic table, a dense layer with dropout, and a buffer."""

    def __init__(self, place: str, folder: Path, **options: Any) -> None:
        super().__init__()
        dtype = options.pop("dtype", torch.float32)
        dims: tuple[int, int] = options.pop("dims", (4, 3))
        tables = [
            hb.Table("item", dims[0], rows=ROWS, dtype=dtype),
            hb.Table("user", dims[1], dtype=dtype, padding_idx=-1),
        ]
        storage = storage_of(place, folder)
        self.embeddings = hb.EmbeddingCollection(tables, seed=0, storage=storage)
        self.top = nn.Linear(sum(dims), 1)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        vectors = self.embeddings({name: batch[name] for name in ("item", "user")})
        self.seen += 1
        inputs = torch.cat([*vectors.values()], 1).float()
        return self.top(self.dropout(inputs)).squeeze(1)


def with_bias(value: float) -> nn.Module:
    """A dynamic table with three rows and a dense layer, all of one value."""
    model = nn.ModuleDict(
        {"a": hb.EmbeddingCollection([hb.Table("t", 2)], seed=0), "b": nn.Linear(1, 1)}
    )
    model["a"].assign("t", [1, 2, 3], torch.full((3, 2), value))
    with torch.no_grad():
        model["b"].bias.fill_(value)
    return model


def batch_of(step: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    users = torch.randint(0, 40, (8, 3), generator=drawn) * 2**40 - 1
    return {"item": torch.randint(0, ROWS, (8, 2), generator=drawn), "user": users}


def optimizer_of(model: Model, rule: str, **options: Any) -> Any:
    return getattr(hb.optim, rule)(model.parameters(), **{"lr": 0.05, **options})


def train(model: Model, optimizer: Any, steps: range, scheduler: Any = None) -> list[float]:
    losses = []
    for step in steps:
        loss = model(batch_of(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(loss.detach()))
    return losses


def made(place: str, folder: Path, rule: str = "Adagrad", **options: Any) -> tuple[Model, Any]:
    torch.manual_seed(3)
    of_model = {name: options.pop(name) for name in ("dtype", "dims") if name in options}
    model = Model(place, folder, **of_model)
    return model, optimizer_of(model, rule, **options)


def everything(model: Model, optimizer: Any = None) -> dict[str, Any]:
    """All numbers of a model, and of the states of its optimizer."""
    found: dict[str, Any] = {
        name: value.clone() for name, value in model.state_dict().items() if "embed" not in name
    }
    for name in model.embeddings.tables:
        rows = model.embeddings.rows(name)
        found[f"{name}.ids"], found[name] = rows.ids, rows.values
    if optimizer is not None:
        for number, state in optimizer.state_dict()["state"].items():
            order = state["ids"].argsort() if "ids" in state else slice(None)
            for name, value in state.items():
                of_rows = isinstance(value, Tensor) and value.dim() and "ids" in state
                found[f"{number}.{name}"] = value[order] if of_rows else value
    return found


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    assert left.keys() == right.keys(), left.keys() ^ right.keys()
    for name, value in left.items():
        other = right[name]
        equal = torch.equal(value, other) if isinstance(value, Tensor) else value == other
        assert equal, (name, value, other)
    return True
