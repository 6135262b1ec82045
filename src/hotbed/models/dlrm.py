"""DLRM: dense features and embeddings that meet in dot products.

Shapes: B samples, d columns of a vector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from hotbed.collection import EmbeddingCollection
from hotbed.devices import Device
from hotbed.errors import TableError
from hotbed.init import Normal
from hotbed.models.dense_columns import check_num_dense, check_samples, dense_of
from hotbed.nn import MLP, DotInteraction
from hotbed.storage import Storage
from hotbed.tables import Table

__all__ = ["DLRM", "tables_of"]


class DLRM(nn.Module):
    """The deep learning recommendation model (Naumov et al., arXiv:1906.00091).

    ::

        dense (B, num_dense) ──► bottom MLP ──► (B, d) ──┐
                                                         ├──► products of all pairs,
        features, one bag each ──► tables ──► F × (B, d) ┘    beside the bottom's output
                                                              ──► top MLP ──► logits (B,)

    ReLU follows every layer but the top's last.

    Args:
        tables: names of dynamic tables, which start from Normal(0, 0.01), or `Table`s of width
            `dim`. Each is a feature of the batch.
        dim: width of the tables and of the bottom MLP's output.
        num_dense: columns of ``batch["dense"]``.
        bottom: widths of the bottom MLP; the last must be `dim`. Default: 64, `dim`.
        top: widths of the top MLP's hidden layers.
        seed: fixes the tables' first values; None draws it from torch's generator, which also
            gives the dense layers theirs.
        storage: budgets for the tiers that rows may lie in.
        device: where it is made, as ``to(device)`` would have it but without tables in RAM first.

    ``model(batch)`` takes a dict with ``"dense"``, float (B, num_dense), and every feature, and
    returns logits (B,).

    Raises:
        TableError: widths that do not fit together, or `num_dense` is not positive.
    """

    def __init__(
        self,
        tables: Sequence[str | Table],
        dim: int = 16,
        num_dense: int = 13,
        bottom: Sequence[int] | None = None,
        top: Sequence[int] = (256, 128),
        *,
        seed: int | None = None,
        storage: Storage | None = None,
        device: Device | None = None,
    ) -> None:
        super().__init__()
        check_num_dense(self, num_dense, 1)
        bottom = [64, dim] if bottom is None else list(bottom)
        if not bottom or bottom[-1] != dim:
            raise TableError(
                f"DLRM: bottom is {bottom}, and the tables have dim {dim}. Their vectors are "
                f"multiplied, so end bottom with {dim}."
            )
        made = tables_of(tables, dim)
        self.config: dict[str, object] = {
            "tables": made,
            "dim": dim,
            "num_dense": num_dense,
            "bottom": bottom,
            "top": list(top),
        }
        """Arguments that make a model of the same shape."""
        self.features = [table.name for table in made]
        self.num_dense = num_dense
        self.embeddings = EmbeddingCollection(made, seed=seed, storage=storage, device=device)
        self.bottom = MLP(num_dense, bottom, final_activation="relu")
        self.interaction = DotInteraction()
        self.top = MLP(self.interaction.out_features(len(made), dim), [*top, 1])
        if device is not None:
            self.to(device)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        dense = dense_of(self, batch, self.num_dense)
        dense_Bd = self.bottom(dense)
        vectors = self.embeddings({name: batch[name] for name in self.features})
        check_samples(self, dense, self.features[0], vectors[self.features[0]])
        logits: Tensor = self.top(self.interaction(dense_Bd, vectors)).squeeze(1)
        return logits


def tables_of(tables: Sequence[str | Table], dim: int) -> list[Table]:
    """`tables`, with a dynamic table that starts from Normal(0, 0.01) for every name.

    Raises:
        TableError: one is no table or name, or has another width than `dim`.
    """
    made = []
    for table in tables:
        if isinstance(table, str):
            table = Table(table, dim, init=Normal(0.0, 0.01))
        if not isinstance(table, Table):
            raise TableError(f"tables must be names or hotbed.Table objects, got {table!r}.")
        if table.dim != dim:
            raise TableError(
                f"Table {table.name!r} has dim {table.dim}, and the model {dim}. Make them equal."
            )
        made.append(table)
    return made
