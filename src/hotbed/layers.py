"""Taking over stock embedding layers."""

from __future__ import annotations

import dataclasses

from torch import nn

from hotbed import init as initializers
from hotbed.embedding import Embedding
from hotbed.embedding_bag import EmbeddingBag
from hotbed.errors import TableError
from hotbed.handles import LiveTable, derive_key
from hotbed.one_table import refuse_options
from hotbed.tables import Table

__all__ = ["adopt_layer"]


def adopt_layer(layer: nn.Module, name: str) -> LiveTable:
    """The live table for a layer in a collection, with the layer's weights.

    A Hotbed layer's own table is shared; a torch layer's weights are copied into a table called `name`.
    """
    if isinstance(layer, (Embedding, EmbeddingBag)):
        layer._live.spec = dataclasses.replace(layer._live.spec, name=name)
        return layer._live
    if not isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
        raise TableError(
            f"from_layers takes nn.Embedding, nn.EmbeddingBag and their Hotbed twins, "
            f"not {type(layer).__name__}."
        )
    refuse_options(type(layer).__name__, layer.max_norm, layer.scale_grad_by_freq)
    combiner = layer.mode if isinstance(layer, nn.EmbeddingBag) else "none"
    spec = Table(
        name,
        layer.embedding_dim,
        layer.num_embeddings,
        combiner,
        layer.weight.dtype,
        initializers.Zeros(),
        layer.padding_idx,
    )
    live = LiveTable(spec, derive_key(None, name), requires_grad=layer.weight.requires_grad)
    live.weights().copy_(layer.weight.detach())
    return live
