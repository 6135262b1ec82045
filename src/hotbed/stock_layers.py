"""Taking over stock embedding layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from hotbed import init as initializers
from hotbed.arrays import iterated
from hotbed.embedding import Embedding
from hotbed.embedding_bag import EmbeddingBag
from hotbed.errors import TableError
from hotbed.group.group import Group
from hotbed.init import derive_key
from hotbed.modules.one_table import OneTable, refuse_options
from hotbed.places.moves import factory_for
from hotbed.table.live import LiveTable, live_table
from hotbed.table.lookups import lookups_of
from hotbed.table.state_dict import refuse_ambiguous_names
from hotbed.tables import Table

__all__ = ["tables_of_layers"]


def tables_of_layers(
    layers: Sequence[nn.Module], names: Sequence[str] | None
) -> tuple[dict[str, LiveTable], dict[str, str]]:
    """Tables by name, and which of them serves each feature; see `EmbeddingCollection.from_layers`."""
    each = iterated(layers)
    if each is None or isinstance(layers, (Mapping, nn.ModuleDict)):
        raise TableError("from_layers takes a list of layers; pass their names as names=[...].")
    layers, named = list(each), iterated(names)
    if not layers:
        raise TableError("from_layers needs at least one layer.")
    labels = [str(i) for i in range(len(layers))] if names is None else list(named or ())
    for label in labels:
        if not isinstance(label, str) or not label:
            raise TableError(f"from_layers: a name must be a non-empty string, not {label!r}.")
    if len(labels) != len(layers) or len(set(labels)) != len(labels):
        raise TableError(
            f"from_layers needs one distinct name a layer: {len(layers)} layers, "
            f"{len(set(labels))} distinct names."
        )
    refuse_ambiguous_names(set(labels))
    live: dict[str, LiveTable] = {}
    features: dict[str, str] = {}
    served: dict[int, str] = {}  # what holds the weights → table
    for label, layer in zip(labels, layers, strict=True):
        source = weights_of(layer)
        if id(source) in served:
            check_twin(layer, live[served[id(source)]])
        else:
            served[id(source)] = label
            live[label] = live_of(layer, label)
        features[label] = served[id(source)]
    lookups_of(list(live.values()), list(live))
    Group.of(list(live.values()))
    for label, table in live.items():  # only now that nothing can be refused any more
        if table.name != label:
            table.rename(label)
    return live, features


def weights_of(layer: nn.Module) -> object:
    """Return the object that two layers have in common when they share their weights.

    Raises:
        TableError: a layer of another kind, or of a class of its own.
    """
    if isinstance(layer, OneTable):
        return live_table(layer.weight)
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
        live = live_table(layer.weight)
        assert live is not None
        return live
    assert isinstance(layer, (nn.Embedding, nn.EmbeddingBag))
    spec = _describe(layer, name)
    if layer.weight.is_meta:
        raise TableError(f"from_layers: layer {name!r} is on the meta device and has no weights.")
    live = LiveTable(
        spec, derive_key(None, name), factory_for(spec), requires_grad=layer.weight.requires_grad
    )
    live.assign(live.ids(), layer.weight.detach())
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
