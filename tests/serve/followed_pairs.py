"""A two-tower model in training whose checkpoints become versions of a bundle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hotbed as hb

USERS = 9
ITEMS = torch.cat([torch.arange(30), torch.tensor([-(2**63), -7, 2**53 + 1, 2**63 - 1])])
"""As hashes are: of both signs, and beyond what floats hold."""
LATER = torch.arange(100, 110)
"""Ids that are no items when the bundle is exported."""
TAGS = hb.Jagged(torch.arange(51) % 7, lengths=torch.tensor([1, 0, 3, 2, 1, 2] * 5 + [0, 3, 2, 1]))


class Pairs:
    """A training. Its bundle has ITEMS.

    Args:
        folder: of all that belongs to it.
        tags: whether an item has tags, too, of a static table, and none, one or more of them.
    """

    def __init__(self, folder: Path, *, tags: bool = False) -> None:
        torch.manual_seed(0)
        self.folder, self.root, self.tags, self.step = folder, folder / "run", tags, 0
        self.model = self._made()
        self.optimizer = hb.optim.Adam(self.model.parameters(), lr=0.05)
        self.train()

    def _made(self) -> hb.models.TwoTower:
        own = [hb.Table("tag", 4, rows=7, combiner="mean")] if self.tags else []
        tables = [hb.Table("user", 4), hb.Table("item", 4), *own]
        names = ("item", "tag") if self.tags else ("item",)
        options: dict[str, Any] = {"dim": 4, "num_dense": 2, "hidden": (8,), "out": 6, "seed": 1}
        return hb.models.TwoTower(tables, item=names, **options)

    def batch(self, items: Tensor = ITEMS) -> dict[str, Any]:
        count = len(items)
        batch = {"dense": torch.rand(count, 2), "user": torch.arange(count) % USERS, "item": items}
        return {**batch, **self.features(count)}

    def features(self, count: int = len(ITEMS)) -> dict[str, Any]:
        return {"tag": TAGS[:count]} if self.tags else {}

    def train(self, items: Tensor = ITEMS) -> None:
        self.model.train()
        for _ in range(3):
            self.step += 1
            self.model.loss(self.model(self.batch(items)), torch.ones(len(items))).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.model.eval()

    def change_rows(self) -> None:
        """Change rows of items, and nothing else; one goes."""
        self.step += 1
        rows = torch.randn(5, 4, generator=torch.Generator().manual_seed(self.step))
        self.model.embeddings.assign("item", ITEMS[:5], rows)
        hb.erase(self.model, {"item": ITEMS[5 + self.step % 25][None]})

    def change_weights(self) -> None:
        """Change weights of both towers, and nothing else."""
        self.step += 1
        with torch.no_grad():
            for tower in (self.model.user_tower, self.model.item_tower):
                for each in tower.parameters():
                    each.add_(0.3 * torch.randn(each.shape))

    def save(self, **how: Any) -> hb.checkpoint.Saved:
        saved: hb.checkpoint.Saved = hb.save(
            self.root, self.model, self.optimizer, step=self.step, **how
        )
        return saved

    def export(self, name: str = "bundle", **how: Any) -> Path:
        items = [{"item": ITEMS, **self.features()}]
        how = {"sample": self.batch(), "step": self.step, "items": items, **how}
        return hb.export(self.model, self.folder / name, **how)

    def exported_again(self, checkpoint: str, **how: Any) -> Path:
        """Return a bundle of a checkpoint, which has the same items."""
        model = self._made()
        hb.load(checkpoint, model)
        items = [{"item": ITEMS, **self.features()}]
        how = {"sample": self.batch(), "items": items, **how}
        return hb.export(model, self.folder / "again", **how)

    def vectors(self) -> Tensor:
        """Return the (N, w) vectors that the model has of ITEMS in the order of their ids, where all have a
        row."""
        with torch.no_grad():
            found = self.model.eval().item_vectors({"item": ITEMS, **self.features()})
        return found[ITEMS.argsort()]

    def scores(self) -> Tensor:
        """Return the (USERS, N) scores that the model has of ITEMS in the order of their ids, where all have
        a row."""
        asked = asked_of_users()
        batch: Mapping[str, Tensor] = {
            "user": torch.tensor([each["user"] for each in asked]),
            "dense": torch.tensor([each["dense"] for each in asked]),
        }
        with torch.no_grad():
            users = self.model.eval().user_vectors(batch)
        return users @ self.vectors().T / self.model.settings.temperature


def asked_of_users() -> list[dict[str, Any]]:
    return [{"user": n, "dense": [n / USERS, 0.5]} for n in range(USERS)]
