"""`erase`: rows of ids that are to be forgotten, in all tables of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from hotbed.errors import InputError, TableError
from hotbed.inputs.bags import read_bags
from hotbed.modules.owner import owners_of, tables_of
from hotbed.table.alone import ALONE
from hotbed.table.checks import checked_ids, refuse_to_erase
from hotbed.table.live import LiveTable
from hotbed.table.local import local_erase

__all__ = ["erase"]

_NO_IDS = torch.empty(0, dtype=torch.int64, device="cpu")


def erase(model: nn.Module, ids: Mapping[str, object], *, local: bool = False) -> dict[str, int]:
    """Forget all rows that a batch with these ids would look up, in every table of a model.

    Optimizer states go, too; `EmbeddingCollection.erase` says what is left.

    >>> wide = hb.models.WideDeep([hb.Table("user", 16, 2000), "item"])
    >>> hb.erase(wide, {"user": [1007]})      # {'embeddings.user': 1, 'embeddings.user.wide': 1}

    Args:
        ids: feature of the batch → ids, of any kind that a collection takes. Where the module that holds a
            collection has a method ``embedding_inputs(batch)``, as for `lookahead`, that says which tables
            a feature goes to; it is called with these features, and with no ids for the others. A single
            `Embedding` or `EmbeddingBag` goes by its name in the model.
        local: only rows that this rank keeps go. Otherwise all ranks of a distributed model call it with
            the same features, each with ids of its own.

    Returns:
        How many rows went from each table that ids were given for (on several ranks: from every table), by
        its name in the model's state_dict.

    Raises:
        IdError, InputError: a feature that the model has not, or ids that cannot be looked up;
        TableError: a model without tables, or a gradient that waits for its step: nothing has gone.
        StorageError: a tier could not be written; call it again.
    """
    if not isinstance(model, nn.Module):
        raise TableError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    tables = tables_of(model)
    if not tables:
        raise TableError("erase: the model has no tables.")
    ranks = ALONE if local else next(iter(tables.values())).place.ranks
    with ranks.reporting("a deletion of rows"):
        if not isinstance(ids, Mapping):
            raise InputError(
                f"erase: ids must be a dict feature → ids, got {type(ids).__name__}. Rows of one table go by "
                "EmbeddingCollection.erase(table, ids)."
            )
        found = {
            live: own
            for live, own in _by_table(model, _Batch(ids)).items()
            if len(own) or ranks.size > 1  # another rank may have some
        }
        for live in found:
            refuse_to_erase(live.spec, live.has_gradient)
            if local:
                live.place.refuse_local_change("erase()")
    forget = local_erase if local else LiveTable.erase
    return {name: forget(live, found[live]) for name, live in tables.items() if live in found}


class _Batch(Mapping[str, object]):
    """A batch of some features, in which any other one has no ids.

    Attributes:
        asked: the features that somebody has looked at.
    """

    def __init__(self, ids: Mapping[str, object]) -> None:
        self._ids = ids
        self.asked: set[str] = set()

    def __getitem__(self, feature: str) -> object:
        self.asked.add(feature)
        return self._ids[feature] if feature in self._ids else _NO_IDS

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)


def _by_table(model: nn.Module, batch: _Batch) -> dict[LiveTable, Tensor]:
    """(n,) int64 ids of each table, of all its features."""
    found: dict[LiveTable, list[Tensor]] = {}
    for name, module in owners_of(model).items():
        inputs: Mapping[str, object] = batch
        holder = model.get_submodule(name.rpartition(".")[0])
        if callable(given := getattr(holder, "embedding_inputs", None)):
            inputs = given(batch)
        for feature, live in module.features_of(name).items():
            spec = live.spec
            given_for = inputs[feature] if feature in inputs else batch[feature]
            bags = read_bags(feature, given_for, spec.compute_dtype, spec.combiner, live.device)
            found.setdefault(live, []).append(checked_ids(spec, bags.ids))
    unknown = [feature for feature in batch if feature not in batch.asked]
    if unknown:
        raise InputError(
            f"erase: the model has no feature {unknown[0]!r}; it has "
            f"{', '.join(map(repr, sorted(batch.asked)))}."
        )
    return {live: torch.cat(some) for live, some in found.items()}
