"""Models that read rows as a bundle stores them, to be evaluated before they are exported."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from hotbed.conversion.layers import ConvertedLayer
from hotbed.errors import InputError, TableError
from hotbed.inputs.bags import Bags
from hotbed.modules.owner import TableOwner, owners_of, tables_of
from hotbed.serve.bundles.reading import BundleTable, Ids, MappedRows, looked_up
from hotbed.serve.bundles.row_formats import ROW_FORMATS
from hotbed.serve.bundles.table_files import check_forms, write_table
from hotbed.serve.exporting.lookups import copied
from hotbed.table.live import LiveTable

__all__ = ["quantized"]


def quantized(model: nn.Module, rows: str = "int8", *, default: str = "zeros") -> nn.Module:
    """Return a model for evaluation that reads rows as they would be in a bundle.

    Its vectors are those of ``hotbed.export(model, ..., rows=rows)``, so its metrics are those of the bundle.
    Rows are written to temporary files, as they are now: later steps do not change them. All else is
    shared with `model`, which stays as it is.

    Args:
        rows: "float32", "float16", "int8" or "int4".
        default: the vector of ids of dynamic tables that have no row, as of `hotbed.export`.

    Raises:
        ExportError: there is no such kind of rows or default, or a row has a number that is not finite.
        TableError: from forward: the model is in training mode.
        IdError: from forward: an id is outside of a static table.
        InputError: from forward: a lookup has weights, which a bundle does not take.
        PlanError: ranks share a table.
        OSError, StorageError: as of files.
    """
    check_forms(rows, default)
    served: dict[LiveTable, BundleTable] = {}
    # Mapped files stay after their folder.
    with tempfile.TemporaryDirectory(prefix="hotbed-rows-") as folder:
        for number, table in enumerate(tables_of(model).values()):
            about = write_table(folder, str(number), table, ROW_FORMATS[rows], None, default)
            served[table] = BundleTable([MappedRows(folder, about)], table.name)
    others: dict[nn.Module, nn.Module] = {}
    for owner in owners_of(model).values():
        others[owner] = _reading(owner, served)
    return copied(model, others).eval()


def _reading(owner: TableOwner, served: Mapping[LiveTable, BundleTable]) -> TableOwner:
    """Return a copy of a module whose lookups are of served rows."""
    own = copy.copy(owner)
    if isinstance(own, ConvertedLayer):
        own.fused = None  # that one reads the rows of training
    tables = {table.name: served[table] for table in own.live_tables().values()}
    own.__dict__["_look_up"] = _ServedLookup(own, tables)
    return own


class _ServedLookup:
    """The lookup of a module, in served rows.

    Args:
        owner: the module.
        tables: by their names in it.
    """

    def __init__(self, owner: TableOwner, tables: Mapping[str, BundleTable]) -> None:
        self._owner, self._tables = owner, tables

    def __call__(
        self,
        live: Sequence[LiveTable],
        table_of: Sequence[int],
        features: Sequence[str],
        bags: Sequence[Bags],
    ) -> list[Tensor]:
        if self._owner.training:
            raise TableError(
                "Rows in few bits are for evaluation. Call eval(), or train the model."
            )
        for feature, bag in zip(features, bags, strict=True):
            if bag.weights is not None:
                raise InputError(
                    f"Feature {feature!r} has weights, which a bundle does not take. Pass ids alone."
                )
        tables = [live[t] for t in table_of]
        asked = [
            _ids(self._tables[table.name], table, bag)
            for table, bag in zip(tables, bags, strict=True)
        ]
        return [
            _as_tensor(vectors, table, bag)
            for vectors, table, bag in zip(looked_up(asked), tables, bags, strict=True)
        ]


def _ids(rows: BundleTable, table: LiveTable, bag: Bags) -> Ids:
    ids, offsets = bag.ids.to("cpu", torch.int64).numpy(), None
    combiner = table.spec.combiner or "none"
    if combiner != "none":
        offsets = np.arange(bag.bags + 1) * bag.fixed
        if bag.offsets is not None:
            offsets = bag.offsets.to("cpu", torch.int64).numpy()
    return Ids(rows, ids, offsets, combiner, table.spec.padding_idx)


def _as_tensor(vectors: np.ndarray, table: LiveTable, bag: Bags) -> Tensor:
    found = torch.from_numpy(vectors).to(table.device, table.compute_dtype)
    return found if bag.shape is None else found.view(*bag.shape, table.spec.dim)
