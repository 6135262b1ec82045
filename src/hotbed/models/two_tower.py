"""Two towers: a vector for each user and each item, whose product is the score.

Shapes: B samples, w columns of a tower's output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from hotbed.arrays import id_tensor
from hotbed.errors import InputError, TableError
from hotbed.jagged import Jagged
from hotbed.models.click import ClickModel
from hotbed.models.dense_columns import check_samples, dense_of
from hotbed.models.registry import register
from hotbed.models.settings import ModelSettings
from hotbed.nn import MLP, FrequencyEstimate, in_batch_logits, in_batch_softmax

__all__ = ["TwoTower", "TwoTowerSettings"]


@dataclasses.dataclass(frozen=True)
class TwoTowerSettings(ModelSettings):
    """Settings of `TwoTower`."""

    num_dense: int = 0
    """Columns of ``batch["dense"]``, which the user's tower sees."""
    user: tuple[str, ...] = ("user",)
    """Features of the user."""
    item: tuple[str, ...] = ("item",)
    """Features of the item. The first is its id, with a single id a sample."""
    hidden: tuple[int, ...] = (128,)
    """Widths of each tower's hidden layers."""
    out: int = 64
    """w: columns of a tower's output."""
    temperature: float = 0.05
    """Scores are cosines divided by it."""
    is_corrected: bool = True
    """True if the logits of training are corrected by how frequent items are; see
    `hotbed.nn.in_batch_logits`."""


@register("two-tower")
class TwoTower(ClickModel):
    """Two towers for retrieval (Yi et al., RecSys 2019).

    An MLP over the vectors of the user's features, and another over those of the item's, give vectors of
    length 1; the score is their product over the temperature. While training, ``model(batch)`` returns
    logits (B, B) of each user for the items of all samples, whose loss is `loss`, a softmax over the batch;
    in evaluation mode the score of each sample, (B,). Arguments are those of `ClickModel`.
    """

    Settings = TwoTowerSettings
    settings: TwoTowerSettings
    loss = staticmethod(in_batch_softmax)
    """The loss that `hotbed.train.fit` takes where it is given none: of logits (B, B) and labels (B,)."""

    def make_layers(self) -> None:
        settings = self.settings
        named = [*settings.user, *settings.item]
        if not settings.user or not settings.item or sorted(named) != sorted(self.features):
            raise TableError(
                f"TwoTower: user is {list(settings.user)} and item {list(settings.item)}; each feature must "
                f"be of one, and there are {', '.join(self.features)}."
            )
        if settings.temperature <= 0:
            raise TableError(
                f"TwoTower: temperature is {settings.temperature}. Pass a positive number."
            )
        self.user_tower, self.item_tower = (
            MLP(self.dim * len(features) + dense, [*settings.hidden, settings.out])
            for features, dense in ((settings.user, self.num_dense), (settings.item, 0))
        )
        self.frequency = FrequencyEstimate()

    def user_vectors(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the users' vectors, (B, w), of length 1."""
        dense = [dense_of(self, batch, self.num_dense)] if self.num_dense else []
        return self.users_of(self._looked_up(batch, self.settings.user), dense)

    def item_vectors(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the items' vectors, (B, w), of length 1."""
        return self.items_of(self._looked_up(batch, self.settings.item))

    def users_of(self, vectors: Sequence[Tensor], dense: Sequence[Tensor] = ()) -> Tensor:
        """Return the users' vectors, (B, w), of the looked-up vectors (B, d) of each feature of `user`.

        Args:
            dense: of one tensor (B, `num_dense`), if there are dense columns.
        """
        return normalize(self.user_tower(torch.cat([*dense, *vectors], 1)), dim=1)

    def items_of(self, vectors: Sequence[Tensor]) -> Tensor:
        """Return the items' vectors, (B, w), of the looked-up vectors (B, d) of each feature of `item`."""
        return normalize(self.item_tower(torch.cat([*vectors], 1)), dim=1)

    def item_ids(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the items' ids, int64 or int32 (B,).

        Raises:
            InputError: the first feature of `item` is missing, or is not one id a sample.
        """
        feature = self.settings.item[0]
        given = batch.get(feature)
        ids = None if isinstance(given, Jagged) else id_tensor(f"Feature {feature!r}", given)
        if ids is None or ids.dim() != 1:
            found = "Jagged" if ids is None else f"of shape {tuple(ids.shape)}"
            raise InputError(
                f"TwoTower: feature {feature!r} is {found}. It is the item's id: pass (B,)."
            )
        return ids

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        settings = self.settings
        dense = [dense_of(self, batch, self.num_dense)] if self.num_dense else []
        vectors = self._looked_up(batch, [*settings.user, *settings.item])  # one lookup of both
        if dense:
            check_samples(self, dense[0], settings.user[0], vectors[0])
        count = len(settings.user)
        users, items = self.users_of(vectors[:count], dense), self.items_of(vectors[count:])
        if not self.training:
            scores: Tensor = (users * items).sum(1) / settings.temperature
            return scores
        ids = self.item_ids(batch)
        probability = self.frequency(ids) if settings.is_corrected else None
        return in_batch_logits(users @ items.T / settings.temperature, ids, probability)

    def _looked_up(self, batch: Mapping[str, Tensor], features: Sequence[str]) -> list[Tensor]:
        for name in features:
            if name not in batch:
                raise InputError(f"Feature {name!r} is missing; the batch has {', '.join(batch)}.")
        wanted: dict[str, object] = {name: batch[name] for name in features}
        if len(wanted) < len(self.features):
            lengths = torch.zeros(len(batch[features[0]]), dtype=torch.int64)
            empty = Jagged(torch.empty(0, dtype=torch.int64), lengths=lengths)
            wanted = {name: wanted.get(name, empty) for name in self.features}
        vectors = self.embeddings(wanted)
        return [vectors[name] for name in features]
