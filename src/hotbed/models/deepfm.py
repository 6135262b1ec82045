"""DeepFM and xDeepFM: a linear part, products of vectors, and a deep part, over the same embeddings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor, nn

from hotbed.models.click import ClickModel
from hotbed.models.registry import register
from hotbed.models.settings import LinearSettings
from hotbed.nn import MLP, CompressedInteraction, FactorizationMachine

__all__ = ["DeepFM", "DeepFMSettings", "XDeepFM", "XDeepFMSettings"]


@dataclasses.dataclass(frozen=True)
class DeepFMSettings(LinearSettings):
    """Settings of `DeepFM`."""

    hidden: tuple[int, ...] = (256, 128)
    """Widths of the MLP's hidden layers."""
    dropout: float = 0.0
    """Share of the hidden values set to zero while training."""


@register("deepfm")
class DeepFM(ClickModel):
    """DeepFM (Guo et al., arXiv:1703.04247); arguments as of `ClickModel`.

    Logits are the sum of a linear part (a weight for each id and each dense column), the dot products of all
    pairs of vectors, and an MLP over the dense columns and the vectors side by side.
    """

    Settings = DeepFMSettings
    settings: DeepFMSettings

    def make_layers(self) -> None:
        settings = self.settings
        self.pairs = FactorizationMachine()
        self.deep = MLP(self.width, [*settings.hidden, 1], dropout=settings.dropout)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        vectors, linear = self.look_up(batch)
        deep = self.deep(self.side_by_side(batch, vectors))
        logits: Tensor = (linear + self.pairs(vectors) + deep).squeeze(1)
        return logits


@dataclasses.dataclass(frozen=True)
class XDeepFMSettings(DeepFMSettings):
    """Settings of `XDeepFM`."""

    maps: tuple[int, ...] = (16, 16, 16)
    """Maps of each layer of the compressed interaction network."""


@register("xdeepfm")
class XDeepFM(ClickModel):
    """xDeepFM (Lian et al., arXiv:1803.05170); arguments as of `ClickModel`.

    As `DeepFM`, with a compressed interaction network in place of the dot products.
    """

    Settings = XDeepFMSettings
    settings: XDeepFMSettings

    def make_layers(self) -> None:
        settings = self.settings
        self.interaction = CompressedInteraction(len(self.features), list(settings.maps))
        self.of_maps = nn.Linear(self.interaction.out_features, 1)
        self.deep = MLP(self.width, [*settings.hidden, 1], dropout=settings.dropout)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        vectors, linear = self.look_up(batch)
        deep = self.deep(self.side_by_side(batch, vectors))
        products = self.of_maps(self.interaction(vectors))
        logits: Tensor = (linear + products + deep).squeeze(1)
        return logits
