"""Layers that `hotbed.convert` makes of torch's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hotbed.embedding import Embedding
from hotbed.embedding_bag import EmbeddingBag
from hotbed.errors import InputError, TableError
from hotbed.inputs.bags import Bags
from hotbed.jagged import Jagged
from hotbed.modules.one_table import OneTable
from hotbed.modules.owner import TableOwner
from hotbed.table.live import LiveTable
from hotbed.table.matrix import MatrixOfRows

__all__ = [
    "ConvertedBag",
    "ConvertedEmbedding",
    "ConvertedLayer",
    "OneLookup",
    "become",
    "plain_again",
]

_OF_TABLE = ("num_embeddings", "embedding_dim", "padding_idx")
"""Attributes of torch's layers that a layer over a table computes."""


class OneLookup(TableOwner):
    """Looks the tables of several layers up in one call."""

    def pop(self, layer: ConvertedLayer, inputs: tuple[object, ...]) -> Tensor | None:
        """Return the vectors of a layer for these inputs, once; None: they were not looked up."""
        raise NotImplementedError


class ConvertedLayer(OneTable):
    """A layer of torch's whose rows are those of a table."""

    fused: OneLookup | None = None
    path = ""
    """In the model, as `fused` knows it."""

    @property
    def weight(self) -> nn.Parameter:
        """(num_embeddings, embedding_dim): the rows where they lie in one piece, else a `MatrixOfRows`."""
        live = self._live
        handle: nn.Parameter = live.parameter
        return handle if live.place.aliased or live.spec.rows is None else MatrixOfRows.of(live)

    def adopt(self, live: LiveTable) -> None:
        """Take a table for the layer's rows; called once."""
        self.__dict__.update(_live=live, _tables=(live,))
        self._own({"weight": live})

    @property
    def looked_up_by(self) -> TableOwner:
        return self.fused or self

    def bags_of(self, inputs: tuple[object, ...]) -> Bags:
        """Return what forward reads of its arguments, so that vectors come out in memory of their own."""
        (bags,) = self._bags_of(inputs)
        return bags

    def shaped(self, vectors: Tensor, inputs: tuple[object, ...]) -> Tensor:
        """Return the vectors of `bags_of` as forward returns them."""
        return vectors

    def _fused_vectors(self, *inputs: object) -> Tensor | None:
        return None if self.fused is None else self.fused.pop(self, inputs)


class ConvertedEmbedding(ConvertedLayer, Embedding, nn.Embedding):  # type: ignore[misc, override]
    """``nn.Embedding`` over a table, which `hotbed.convert` has made."""

    def bags_of(self, inputs: tuple[object, ...]) -> Bags:
        ids = self._ids(inputs)
        (bags,) = self._bags_of(ids if ids.dim() > 1 else ids.reshape(-1, 1))
        return bags

    def shaped(self, vectors: Tensor, inputs: tuple[object, ...]) -> Tensor:
        return vectors.view(*self._ids(inputs).shape, self.embedding_dim)

    def _ids(self, inputs: tuple[object, ...]) -> Tensor:
        if len(inputs) == 1 and isinstance(inputs[0], Tensor) and inputs[0].layout is torch.strided:
            return inputs[0]
        raise InputError(
            f"Table {self._live.name!r}: inputs= must have a tensor of ids for an nn.Embedding; got "
            f"{', '.join(type(one).__name__ for one in inputs)}."
        )

    def forward(self, input: object) -> Tensor | Jagged:  # type: ignore[override]
        found = self._fused_vectors(input)
        return Embedding.forward(self, input) if found is None else found


class ConvertedBag(ConvertedLayer, EmbeddingBag, nn.EmbeddingBag):  # type: ignore[misc, override]
    """``nn.EmbeddingBag`` over a table, which `hotbed.convert` has made."""

    def forward(
        self, input: object, offsets: object = None, per_sample_weights: object = None
    ) -> Tensor:
        found = self._fused_vectors(input, offsets, per_sample_weights)
        if found is not None:
            return found
        return EmbeddingBag.forward(self, input, offsets, per_sample_weights)


_CLASSES: dict[type[nn.Module], type[ConvertedLayer]] = {
    nn.Embedding: ConvertedEmbedding,
    nn.EmbeddingBag: ConvertedBag,
}
"""Layers of torch, and what becomes of them."""

_made: dict[type[nn.Module], type[ConvertedLayer]] = {}


def _class_for(kind: type[nn.Module]) -> type[ConvertedLayer]:
    """Return the class of a converted layer; of a subclass of torch's it keeps the methods."""
    base = next(made for torchs, made in _CLASSES.items() if issubclass(kind, torchs))
    if kind in _CLASSES:
        return base
    if kind not in _made:
        _made[kind] = type(kind.__name__, (base, kind), {"__module__": kind.__module__})
    return _made[kind]


def _set_class(layer: nn.Module, kind: type[nn.Module]) -> None:
    layer.__class__ = kind


def become(layer: nn.Embedding | nn.EmbeddingBag, live: LiveTable) -> ConvertedLayer:
    """Make a layer of torch's a layer over a table, in place, so that whoever holds it sees that."""
    for name in _OF_TABLE:
        layer.__dict__.pop(name, None)
    _set_class(layer, _class_for(type(layer)))
    assert isinstance(layer, ConvertedLayer)
    layer.adopt(live)
    return layer


def plain_again(layer: OneTable, weight: nn.Parameter) -> None:
    """Make a layer over a table one of torch's, in place, with these weights.

    Raises:
        TableError: torch has no such layer.
    """
    bag = isinstance(layer, EmbeddingBag)
    if isinstance(layer, EmbeddingBag) and layer.mode == "sqrtn":
        name = layer.live_tables()["weight"].name
        raise TableError(f"Table {name!r}: torch has no EmbeddingBag of mode 'sqrtn'.")
    kept = {
        "num_embeddings": len(weight),
        "embedding_dim": weight.shape[1],
        "padding_idx": layer.padding_idx if layer.num_embeddings is not None else None,
    }
    for name in ("_live", "_tables", "_owned", "fused", "path"):
        layer.__dict__.pop(name, None)
    plain = next((k for k, made in _made.items() if made is type(layer)), None)
    _set_class(layer, plain or (nn.EmbeddingBag if bag else nn.Embedding))
    layer.__dict__.update(kept)
    layer._parameters["weight"] = weight  # where it was among others
