"""DLRM: dense features and embeddings that meet in dot products.

Shapes: B samples, F features, d columns of a vector.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from hotbed.errors import TableError
from hotbed.models.click import ClickModel
from hotbed.models.dense_columns import check_samples, dense_of
from hotbed.models.registry import register
from hotbed.models.settings import ModelSettings
from hotbed.nn import MLP, DotInteraction

__all__ = ["DLRM", "DLRMSettings"]


@dataclasses.dataclass(frozen=True)
class DLRMSettings(ModelSettings):
    """Settings of `DLRM`."""

    bottom: tuple[int, ...] | None = None
    """Widths of the bottom MLP; the last must be `dim`. Default: 64, `dim`."""
    top: tuple[int, ...] = (256, 128)
    """Widths of the top MLP's hidden layers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        bottom = (64, self.dim) if self.bottom is None else self.bottom
        object.__setattr__(self, "bottom", bottom)
        if not bottom or bottom[-1] != self.dim:
            raise TableError(
                f"DLRM: bottom is {list(bottom)}, and the tables have dim {self.dim}. Their vectors are "
                f"multiplied, so end bottom with {self.dim}."
            )


@register("dlrm")
class DLRM(ClickModel):
    """The deep learning recommendation model (Naumov et al., arXiv:1906.00091); arguments as of `ClickModel`.

    ::

        dense (B, num_dense) ──► bottom MLP ──► (B, d) ──┐
                                                         ├──► products of all pairs,
        features, one bag each ──► tables ──► F × (B, d) ┘    beside the bottom's output
                                                              ──► top MLP ──► logits (B,)

    ReLU follows every layer but the top's last. There is at least one dense column.
    """

    Settings = DLRMSettings
    settings: DLRMSettings
    least_dense = 1

    def make_layers(self) -> None:
        bottom = self.settings.bottom or ()
        self.bottom = MLP(self.num_dense, bottom, final_activation="relu")
        self.interaction = DotInteraction()
        products = self.interaction.out_features(len(self.features), self.dim)
        self.top = MLP(products, [*self.settings.top, 1])

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        dense = dense_of(self, batch, self.num_dense)
        vectors = self.embeddings(self.embedding_inputs(batch))
        check_samples(self, dense, self.features[0], vectors[self.features[0]])
        logits: Tensor = self.top(self.interaction(self.bottom(dense), vectors)).squeeze(1)
        return logits
