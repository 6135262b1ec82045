"""Taking over stock embedding layers."""

from __future__ import annotations

import torch
from torch import nn

from hotbed import init as initializers
from hotbed.embedding import Embedding
from hotbed.embedding_bag import EmbeddingBag
from hotbed.errors import TableError
from hotbed.init import derive_key
from hotbed.modules.one_table import OneTable, refuse_options
from hotbed.places.moves import home_of
from hotbed.table.live import LiveTable
from hotbed.tables import Table

__all__ = ["check_twin", "live_of", "weights_of"]


def weights_of(layer: nn.Module) -> object:
    """What two layers have in common when they share their weights.

    Raises:
        TableError: a layer of another kind, or of a class of its own.
    """
    if isinstance(layer, OneTable):
        return layer._live
    for kind in (nn.Embedding, nn.EmbeddingBag):
        if isinstance(layer, kind):
            if type(layer).forward is not kind.forward:
                raise TableError(
                    f"from_layers cannot serve {type(layer).__name__}: it has a forward of its own."
                )
            if (
                layer._forward_hooks
                or layer._forward_pre_hooks
                or "weight" not in layer._parameters
            ):
                raise TableError(
                    f"from_layers cannot serve this {type(layer).__name__}: it has hooks or a "
                    "parametrization, which would be lost. Remove them first."
                )
            return layer.weight
    raise TableError(
        f"from_layers takes nn.Embedding, nn.EmbeddingBag and their Hotbed twins, "
        f"not {type(layer).__name__}."
    )


def live_of(layer: nn.Module, name: str) -> LiveTable:
    """The live table for a layer in a collection, with the layer's weights.

    A Hotbed layer's own table is shared; a torch layer's weights are copied into a table `name`.

    Raises:
        TableError: an option that has no counterpart.
    """
    if isinstance(layer, (Embedding, EmbeddingBag)):
        return layer._live
    assert isinstance(layer, (nn.Embedding, nn.EmbeddingBag))
    spec = _describe(layer, name)
    if layer.weight.is_meta:
        raise TableError(f"from_layers: layer {name!r} is on the meta device and has no weights.")
    live = LiveTable(
        spec, derive_key(None, name), home_of(spec), requires_grad=layer.weight.requires_grad
    )
    with torch.no_grad():
        live.weights().copy_(layer.weight)
    return live


def check_twin(layer: nn.Module, table: LiveTable) -> None:
    """Raises where a layer shares its weight with another, but is another table."""
    if isinstance(layer, OneTable):
        return
    assert isinstance(layer, (nn.Embedding, nn.EmbeddingBag))
    if _describe(layer, table.name) != table.spec:
        raise TableError(
            f"Layer {table.name!r} shares its weight with a layer of another mode or padding_idx; "
            "one table has one of each. Give the layers weights of their own."
        )


def _describe(layer: nn.Embedding | nn.EmbeddingBag, name: str) -> Table:
    refuse_options(type(layer).__name__, layer.max_norm, layer.scale_grad_by_freq)
    return Table(
        name,
        layer.embedding_dim,
        layer.num_embeddings,
        layer.mode if isinstance(layer, nn.EmbeddingBag) else "none",
        layer.weight.dtype,
        initializers.Zeros(),
        layer.padding_idx,
    )
