"""`convert`: a model's embedding layers become layers over Hotbed's tables; `unconvert`: and back."""

from __future__ import annotations

import dataclasses
import gc
import io
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hotbed.conversion.fused import FusedLookups, InputsOf
from hotbed.conversion.layers import ConvertedLayer, become, plain_again
from hotbed.conversion.tracing import traced_inputs
from hotbed.errors import TableError
from hotbed.group.group import Group
from hotbed.init import Normal, derive_key
from hotbed.modules.one_table import OneTable
from hotbed.storage import Storage
from hotbed.table.alone import ALONE
from hotbed.table.converted_weight import ConvertedWeight
from hotbed.table.live import LiveTable
from hotbed.tables import DTYPES, Table

__all__ = ["Conversion", "convert", "unconvert"]

M = TypeVar("M", bound=nn.Module)
_KINDS = nn.Embedding, nn.EmbeddingBag
_Layer: TypeAlias = nn.Embedding | nn.EmbeddingBag


@dataclasses.dataclass(frozen=True)
class Conversion:
    """Result of `convert`; ``print`` shows it as a table.

    Attributes:
        model: the model, the same object.
        converted: the layers over tables, by path.
        skipped: why other embedding layers stayed, by path.
        stale: where a weight of before is still held, which torch refuses to use.
        group: the tables' group.
        inputs: what the model's forward takes → ids by path; None: each layer is looked up by itself.
    """

    model: nn.Module
    converted: dict[str, ConvertedLayer]
    skipped: dict[str, str]
    stale: list[str]
    group: Group | None
    inputs: InputsOf | None

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table as Shown

        shown = Shown("layer", "rows", "dim", "result")
        for path, layer in self.converted.items():
            shown.add_row(path, f"{layer.num_embeddings:,}", str(layer.embedding_dim), "converted")
        for path, reason in self.skipped.items():
            plain = self.model.get_submodule(path)
            assert isinstance(plain, _KINDS)
            shown.add_row(path, f"{plain.num_embeddings:,}", str(plain.embedding_dim), reason)
        out = io.StringIO()
        console = Console(file=out, width=110, highlight=False, markup=False, emoji=False)
        console.print(shown)
        for place in self.stale:
            console.print(f"Still holds a weight of before: {place}")
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def convert(
    model: nn.Module,
    *,
    min_rows: int = 10_000,
    storage: Storage | None = None,
    inputs: InputsOf | None = None,
    sample: object = None,
    skip: Collection[str] = (),
) -> Conversion:
    """Make every large embedding layer of a model a layer over a Hotbed table, in place and under its name.

    Layers keep their weights, ``isinstance``, attributes, hooks and ``state_dict`` keys. One group holds all
    tables, so one optimizer, one look-ahead and `distribute` serve them. Convert before an optimizer is
    made; `hotbed.optim.convert` takes one that was.

    >>> model = torch.nn.Sequential(torch.nn.Embedding(20_000, 16), torch.nn.Linear(16, 1))
    >>> conversion = hb.convert(model)
    >>> optimizer = hb.optim.Adam(model.parameters(), untouched="exact")

    Args:
        model: any module with ``nn.Embedding`` or ``nn.EmbeddingBag`` layers.
        min_rows: smaller layers stay as they are.
        storage: budgets for the tiers that rows may lie in. Default: all rows in the memory that computes.
        inputs: a function of what ``model`` is called with, which returns {path: ids} (of a layer that is
            called several times a list of ids; of an EmbeddingBag with offsets a tuple of its arguments). All
            lookups of a forward are then one call, and look-ahead sees them. Ids that turn out to be others
            are looked up again. Default: layer by layer, which is right and slower.
        sample: in place of `inputs`, what ``model`` is called with once (a tuple: its arguments), without
            gradients and in evaluation mode, to find out how ids come from it.
        skip: paths of layers to leave.

    Raises:
        TableError: nothing has changed then. A model that was wrapped for several processes already; a weight
            with a gradient; a path that is no embedding layer.
        StorageError: the budget is too small.
    """
    if not isinstance(model, nn.Module):
        raise TableError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    if isinstance(model, DistributedDataParallel):
        raise TableError(
            "Convert the model before it is distributed: hb.distribute(model) comes after."
        )
    if inputs is not None and sample is not None:
        raise TableError("Give inputs= or sample=, from which inputs are found, not both.")
    layers = {path: m for path, m in model.named_modules() if isinstance(m, _KINDS)}
    for path in skip:
        if path not in layers:
            raise TableError(f"skip names {path!r}, which is no embedding layer of the model.")
    skipped = _skipped(model, layers, min_rows, skip)
    chosen = {path: layer for path, layer in layers.items() if path not in skipped}
    if not chosen:
        return Conversion(model, {}, skipped, [], None, None)
    weights: dict[int, tuple[str, nn.Parameter]] = {}
    for path, weight in map(_weight, chosen.items()):
        weights.setdefault(id(weight), (path, weight))
    for path, weight in weights.values():
        if weight.grad is not None:
            raise TableError(f"{path!r} has a gradient: take the step, or call zero_grad(), first.")
    stale = list(_holders(model, dict(weights.values())))
    if sample is not None:
        inputs = traced_inputs(model, chosen, sample)
    group = Group(storage)
    tables = _tables_of(chosen, group)
    converted = {path: become(layer, tables[id(layer.weight)]) for path, layer in chosen.items()}
    for key, (path, weight) in weights.items():
        handle = tables[key].parameter
        handle.requires_grad_(weight.requires_grad)
        ConvertedWeight.adopt(weight, path, handle)
    if inputs is not None:
        fused = FusedLookups(converted, inputs)
        fused.hook(model)
    elif len(converted) > 1:
        warnings.warn(
            f"hotbed.convert: each of {len(converted)} layers is looked up by itself, which is right and "
            "slower than one lookup for all. inputs= or sample= makes it one, and look-ahead sees their ids.",
            stacklevel=2,
        )
    return Conversion(model, converted, skipped, stale, group, inputs)


def _weight(named: tuple[str, _Layer]) -> tuple[str, nn.Parameter]:
    path, layer = named
    weight = layer.weight
    assert isinstance(weight, nn.Parameter)
    return path, weight


def _skipped(
    model: nn.Module, layers: Mapping[str, _Layer], min_rows: int, skip: Collection[str]
) -> dict[str, str]:
    """Return why layers stay as they are, by path."""
    holders: dict[int, list[_Holder]] = {}
    for path, module in model.named_modules():
        for name, own in (
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ):
            if own.layout is torch.strided and own.numel():
                at = own.untyped_storage().data_ptr()
                holders.setdefault(at, []).append(
                    _Holder(f"{path}.{name}".lstrip("."), module, own)
                )
    skipped = {}
    for path, layer in layers.items():
        reason = "as skip= says" if path in skip else _reason(layer, min_rows)
        if reason is None:
            reason = _tied(layer, holders[layer.weight.untyped_storage().data_ptr()], layers)
        if reason is not None:
            skipped[path] = reason
    again = True
    while again:  # what is tied to a layer that stays, stays
        again = False
        kept = {
            id(layers[path].weight): path
            for path in skipped
            if "weight" in layers[path]._parameters
        }
        for path, layer in layers.items():
            if path not in skipped and (other := kept.get(id(layer.weight))) is not None:
                skipped[path], again = f"shares its weight with {other!r}, which stays", True
    return skipped


def _reason(layer: _Layer, min_rows: int) -> str | None:
    kind = nn.Embedding if isinstance(layer, nn.Embedding) else nn.EmbeddingBag
    if isinstance(layer, OneTable):
        return "is over a table already"
    if type(layer).forward is not kind.forward or "forward" in vars(layer):
        return f"has a forward of its own ({type(layer).__name__})"
    weight = layer._parameters.get("weight")
    if weight is None:
        return "its weight is computed: a parametrization"
    if layer.num_embeddings < min_rows:
        return f"fewer than {min_rows:,} rows"
    if layer.max_norm is not None:
        return "max_norm, which rewrites rows in a forward"
    if layer.scale_grad_by_freq:
        return "scale_grad_by_freq"
    if type(weight) is not nn.Parameter or weight.shape != (
        layer.num_embeddings,
        layer.embedding_dim,
    ):
        return f"its weight is {type(weight).__name__} of shape {tuple(weight.shape)}"
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return "its weight has hooks"
    if weight.is_meta:
        return "is on the meta device, and has no weights"
    if weight.dtype not in DTYPES:
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
    return None


class _Holder(NamedTuple):
    """A parameter or buffer of a module."""

    name: str
    module: nn.Module
    tensor: Tensor


def _tied(layer: _Layer, holders: list[_Holder], layers: Mapping[str, _Layer]) -> str | None:
    """Return who else has memory of a layer's weight, if the table could not serve both."""
    every = list(layers.values())
    for name, module, tensor in holders:
        if tensor is not layer.weight:
            return f"shares memory with {name!r}"
        if not any(module is one for one in every):
            return f"shares its weight with {name!r} ({type(module).__name__})"
        assert isinstance(module, _KINDS)
        if _shape_of(module) != _shape_of(layer):
            return f"shares its weight with {name!r}, of another mode or padding_idx"
    return None


def _shape_of(layer: _Layer) -> tuple[str, int | None]:
    return layer.mode if isinstance(layer, nn.EmbeddingBag) else "none", layer.padding_idx


def _tables_of(chosen: Mapping[str, _Layer], group: Group) -> dict[int, LiveTable]:
    """Return new tables with the weights of layers, by the identity of a weight."""
    live: dict[int, LiveTable] = {}
    for path, layer in chosen.items():
        weight = layer.weight
        if id(weight) in live:
            continue
        combiner, padding = _shape_of(layer)
        shape = layer.embedding_dim, layer.num_embeddings
        spec = Table(path or "weight", *shape, combiner, weight.dtype, Normal(0.0, 1.0), padding)
        there = None if weight.device.type == "cpu" else weight.device
        (table,) = group.make([(spec, derive_key(torch.initial_seed(), spec.name))], there)
        table.assign(table.ids(), weight.detach())
        if there is not None:
            group.place([table], there)
        live[id(weight)] = table
    return live


def _holders(model: nn.Module, weights: Mapping[str, nn.Parameter]) -> Iterator[str]:
    """Yield in words where weights are held, but for the parameters of modules."""
    path_of = {id(weight): path for path, weight in weights.items()}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in ("_parameters", "_modules", "_buffers"):
                for inside, weight in _inside(value, path_of, 4):
                    yield (
                        f"{name}.{attribute}{inside}".lstrip(".") + f" (of {path_of[id(weight)]!r})"
                    )
    lists = [found for found in gc.get_referrers(*weights.values()) if isinstance(found, list)]
    known = set(map(id, lists))
    for group in gc.get_referrers(*lists):
        if isinstance(group, dict) and "lr" in group and id(group.get("params")) in known:
            yield "an optimizer, which hotbed.optim.convert(optimizer) takes over"
            return


def _inside(value: object, weights: Mapping[int, str], depth: int) -> Iterator[tuple[str, object]]:
    """Yield where in nested containers weights are, and which."""
    if id(value) in weights:
        yield "", value
    elif depth and isinstance(value, (list, tuple, dict)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in pairs:
            for rest, weight in _inside(item, weights, depth - 1):
                yield f"[{key!r}]{rest}", weight


def unconvert(model: M, ids: Mapping[str, Tensor] | None = None) -> M:
    """Make all single layers over tables plain layers of torch's again, in place, and return the model.

    Args:
        model: with layers that `convert` has made, or `hotbed.Embedding` and `hotbed.EmbeddingBag`.
        ids: for layers over dynamic tables, by path: (n,) ids whose rows the layer gets; row i is that of
            ids[i].

    Raises:
        TableError: a dynamic table without `ids`; tables that ranks share; nothing has changed then.
    """
    ids = ids or {}
    layers = {path: m for path, m in model.named_modules() if isinstance(m, OneTable)}
    for path in ids:
        if path not in layers:
            raise TableError(f"ids= names {path!r}, which is no layer over a table.")
    for path, layer in layers.items():
        if layer.ranks is not ALONE:
            raise TableError(
                f"{path!r}: ranks share its table. Save the model, and load it into one that is not "
                "distributed."
            )
        if layer.num_embeddings is None and path not in ids:
            raise TableError(f"{path!r} is dynamic: say by ids= whose rows the plain layer gets.")
    weights: dict[tuple[int, int], nn.Parameter] = {}
    for path, layer in layers.items():
        table, own = layer.live_tables()["weight"], ids.get(path)
        if (id(table), id(own)) not in weights:
            wanted = torch.arange(layer.num_embeddings or 0, device="cpu") if own is None else own
            rows = layer.lookup(wanted).to(layer.device)
            weights[id(table), id(own)] = nn.Parameter(
                rows, requires_grad=table.parameter.requires_grad
            )
    for fused in {layer.looked_up_by for layer in layers.values()}:
        if isinstance(fused, FusedLookups):
            fused.unhook()
    for path, layer in layers.items():
        plain_again(layer, weights[id(layer.live_tables()["weight"]), id(ids.get(path))])
    return model
