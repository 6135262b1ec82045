"""Base of `Embedding` and `EmbeddingBag`: a module with one table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hotbed import init as initializers
from hotbed.arrays import real_tensor
from hotbed.devices import Device, named_device
from hotbed.errors import TableError
from hotbed.group.group import Group
from hotbed.init import derive_key
from hotbed.inputs.bags import Bags
from hotbed.modules.descriptions import group_for
from hotbed.modules.owner import TableOwner
from hotbed.table.checks import Missing
from hotbed.table.live import LiveTable
from hotbed.table.lookups import CallAhead, lookups_of
from hotbed.table.prefetch import BatchAhead
from hotbed.tables import Table

__all__ = ["OneTable", "refuse_options", "weights_of"]

# What torch's layers read anew at each forward, and a table does not.
_FIXED = {
    "embedding_dim",
    "max_norm",
    "mode",
    "num_embeddings",
    "padding_idx",
    "scale_grad_by_freq",
    "sparse",
}


class OneTable(TableOwner):
    """A module with one table, whose handle is its parameter ``weight``.

    Its ``state_dict`` is that of torch's layer where the table is static: just ``weight`` (the table
    key goes into the metadata). A dynamic table adds ``weight.ids`` and ``weight.key``.
    """

    _keys_in_state_dict = False
    _live: LiveTable
    _tables: tuple[LiveTable, ...]

    def _make(
        self,
        kind: str,
        shape: tuple[int | None, int],
        combiner: str,
        padding_idx: int | None,
        weight: object,
        device: Device | None,
        dtype: torch.dtype | None,
        init: initializers.Initializer | None,
        group: Group | None,
    ) -> None:
        there = named_device(device)
        if weight is not None:
            weight = real_tensor(f"hotbed.{kind}", "_weight", weight)
            if tuple(weight.shape) != shape:
                raise TableError(
                    f"hotbed.{kind}: _weight has shape {tuple(weight.shape)}, the arguments say {shape}."
                )
            dtype, init = weight.dtype if dtype is None else dtype, initializers.Zeros()
        spec = Table(
            kind.lower(),
            shape[1],
            shape[0],
            combiner,
            torch.get_default_dtype() if dtype is None else dtype,
            initializers.Normal(0.0, 1.0) if init is None else init,
            padding_idx,
        )
        group = group_for(group)
        key = derive_key(None, spec.name)
        spec = dataclasses.replace(spec, name=group.name_for(spec.name))
        (self._live,) = group.make([(spec, key)], there)
        self._tables = (self._live,)
        self._own({"weight": self._live})
        if weight is not None:
            self._assign_weight(weight.detach())
        if there is not None:
            group.place([self._live], there)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and "_live" in self.__dict__:
            self._assign_weight(value)
        elif name in _FIXED and "_live" in self.__dict__:
            self._check_fixed(name, value)
        else:
            super().__setattr__(name, value)

    def _check_fixed(self, name: str, value: object) -> None:
        """Raises TableError for an option of torch's layers that is given another value."""
        if name == "max_norm":
            refuse_options(type(self).__name__, max_norm=value)
        elif name == "scale_grad_by_freq":
            refuse_options(type(self).__name__, scale_grad_by_freq=value)
        elif value != getattr(self, name):
            raise TableError(
                f"Table {self._live.name!r}: {name} is {getattr(self, name)!r} and cannot become "
                f"{value!r}, as it is fixed when a layer is made. Make another layer, and load this "
                "one's state_dict into it."
            )

    def _assign_weight(self, value: object) -> None:
        live = self._live
        if live.spec.rows is None:
            raise TableError(
                f"Table {live.name!r}: the weight of a dynamic table cannot be assigned; it has a row "
                "for each id that was met. Use a state_dict."
            )
        shape = (live.spec.rows, live.spec.dim)
        if not isinstance(value, Tensor) or value.shape != shape:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise TableError(f"Table {live.name!r}: weight must have shape {shape}, got {got}.")
        live.check_handle()
        live.assign(live.ids(), value)
        if isinstance(value, nn.Parameter):
            live.parameter.requires_grad_(value.requires_grad)

    @property
    def num_embeddings(self) -> int | None:
        """Rows, or None for a dynamic table."""
        return self._live.spec.rows

    @property
    def embedding_dim(self) -> int:
        """Length of a row's vector."""
        return self._live.spec.dim

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of stored rows and of the vectors that come out."""
        return self._live.spec.dtype

    @property
    def padding_idx(self) -> int | None:
        """Id that stands for "nothing", or None."""
        return self._live.spec.padding_idx

    # -- look-ahead ------------------------------------------------------------------------------

    def features_of(self, name: str) -> dict[str, LiveTable]:
        return {name: self._live}

    def inputs_from(self, batch: Mapping[str, object], name: str) -> object:
        return batch.get(name)

    def prepare(self, inputs: object) -> BatchAhead:
        call = CallAhead(inputs, self._tables, (0,), ("input",), self._bags_of)
        return lookups_of(self._tables).prepare(call)

    def _bags_of(self, inputs: object) -> list[Bags]:
        """Return the one bag of each sample, as forward reads it."""
        raise NotImplementedError

    # --------------------------------------------------------------------------------------------

    def reset_parameters(self) -> None:
        """Give every row a new first value; a dynamic table forgets its rows."""
        self._live.draw_again(derive_key(None, self._live.name))

    # After hotbed.distribute these are called by all ranks.

    def count(self) -> int:
        """Rows that the table holds."""
        return self._live.place.count()

    def lookup(self, ids: object, *, missing: Missing = "initial") -> Tensor:
        """Return the (n, dim) rows of (n,) ids; see `EmbeddingCollection.lookup`."""
        return self._live.lookup(ids, missing)

    def contains(self, ids: object) -> Tensor:
        """Return (n,) bool: True for each id that has a row; see `EmbeddingCollection.contains`."""
        return self._live.contains(ids)

    def erase(self, ids: object) -> int:
        """Forget the rows of (n,) ids and return how many went; see `EmbeddingCollection.erase`."""
        return self._live.erase(ids)

    def _vectors(self, bags: Bags) -> Tensor:
        with self._live.place.lookups.without_autocast():
            out = self._look_up(self._tables, (0,), ("input",), [bags])[0]
        return out if out.dtype == self._live.spec.dtype else out.to(self._live.spec.dtype)


def refuse_options(kind: str, max_norm: object = None, scale_grad_by_freq: object = False) -> None:
    """Raises for the two options of torch's layers that rewrite rows or gradients."""
    if max_norm is not None:
        raise TableError(
            f"{kind}: max_norm={max_norm} cannot be honoured, it would rewrite rows during a forward. "
            "Clip after the step, or use weight_decay."
        )
    if scale_grad_by_freq:
        raise TableError(
            f"{kind}: scale_grad_by_freq=True cannot be honoured; duplicates always sum their gradients."
        )


def weights_of(given: object) -> Tensor:
    """(rows, dim) weights that a layer is made from: a tensor, an array or lists.

    Raises:
        TableError, InputError: they are none.
    """
    weights = real_tensor("from_pretrained", "weights", given)
    if weights.dim() != 2:
        raise TableError(
            f"from_pretrained needs (rows, dim) weights, got shape {tuple(weights.shape)}."
        )
    # Of Python's floats torch makes its default dtype, NumPy float64.
    return weights.to(torch.get_default_dtype()) if isinstance(given, (list, tuple)) else weights
