"""A live table: the core's planes, and the handle parameter through which torch sees them.

The handle is what ``model.parameters()`` yields and what carries the gradient: a sparse COO tensor
over slots, (slots (1, n), values (n, dim)). The handle of a static float32 or float64 table aliases
the weight plane, so it can be read, printed and initialised like any parameter. Every other handle
is a tensor of the right shape without memory of its own.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hotbed import _core
from hotbed.errors import HotbedError, IdError, TableError
from hotbed.init import table_key
from hotbed.states import caught_up_weights, copy_states, write_states
from hotbed.tables import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "CORE_DTYPES",
    "LiveTable",
    "copy_table",
    "derive_key",
    "live_table",
    "refuse_conversion",
]

CORE_DTYPES = {
    torch.float32: _core.DType.f32,
    torch.float64: _core.DType.f64,
    torch.float16: _core.DType.f16,
    torch.bfloat16: _core.DType.bf16,
}

# Rows that the handle of a dynamic table claims to have: more than can be, and few enough that the
# count of elements stays below 2**63 for any dim.
OPEN_ROWS = 1 << 40


_live_tables: weakref.WeakSet[LiveTable] = weakref.WeakSet()


class LiveTable:
    """One table with its memory. Made by the modules; users meet it through them.

    Attributes:
        spec: the description it was made from.
        key: 64-bit table key, the seed of first values and of stochastic rounding.
        core: the compiled table.
        parameter: the handle.
        optimizer: the Hotbed optimizer that drives the table, or None (a weak reference call).
        complaint: set where another optimizer stepped past a gradient of this table; the next
            training forward raises it.
        rule: the core's hold of the optimizer whose states the table has, or None.
        fused_update: set by an optimizer with ``fused=True``; called in backward with
            (slots, values) in place of leaving a gradient.
    """

    def __init__(self, spec: Table, key: int, *, requires_grad: bool = True) -> None:
        self.spec = spec
        self.key = key
        self.core = _core.Table.make(
            spec.name,
            -1 if spec.rows is None else spec.rows,
            spec.dim,
            CORE_DTYPES[spec.dtype],
            *spec.init.resolve(spec.rows, spec.dim),
            key,
            spec.padding_idx,
        )
        self.aliased = spec.rows is not None and spec.dtype in (torch.float32, torch.float64)
        self.parameter = nn.Parameter(self._handle(), requires_grad=requires_grad)
        self.parameter.hotbed_table = self  # type: ignore[attr-defined]
        self._optimizer: weakref.ref[Any] | None = None
        self.complaint: HotbedError | None = None
        self.fused_update: Any = None
        self.rule: Any = None
        _live_tables.add(self)

    def _handle(self) -> Tensor:
        if self.aliased:
            return _core.weights(self.core)
        rows = OPEN_ROWS if self.spec.rows is None else self.spec.rows
        return torch.zeros((), dtype=self.spec.compute_dtype).expand(rows, self.spec.dim)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def optimizer(self) -> Any:
        return None if self._optimizer is None else self._optimizer()

    @optimizer.setter
    def optimizer(self, value: Any) -> None:
        self._optimizer = None if value is None else weakref.ref(value)

    def __len__(self) -> int:
        return int(self.core.size)

    def check_handle(self) -> None:
        """Adopts weights that were put in place of an aliased handle's (``p.data = ...``)."""
        if not self.aliased or self.parameter.data_ptr() == self.core.weights_address:
            return
        data = self.parameter.data
        plane = _core.weights(self.core)
        if data.shape != plane.shape or data.dtype != plane.dtype:
            raise TableError(
                f"Table {self.name!r}: its parameter was replaced by a "
                f"{str(data.dtype).removeprefix('torch.')} tensor of shape {tuple(data.shape)}; the "
                f"table keeps {str(plane.dtype).removeprefix('torch.')} {tuple(plane.shape)}. "
                "Choose the row dtype with Table(dtype=...)."
            )
        self.settle(torch.arange(len(self)))
        plane.copy_(data)
        self.parameter.data = plane

    def weights(self) -> Tensor:
        """(rows, dim) the weight plane itself, by slot; valid until the table grows."""
        return _core.weights(self.core)  # type: ignore[no-any-return]

    def ids(self) -> Tensor:
        """(rows,) int64 the id of each slot."""
        if self.spec.rows is not None:
            return torch.arange(self.spec.rows)
        return _core.ids(self.core)  # type: ignore[no-any-return]

    def lookup(self, ids: Tensor) -> Tensor:
        """(n, dim) rows of the ids as they are; an id without a row reads its first value."""
        ids = self._check(ids)
        return _core.lookup(self.core, ids.data_ptr(), len(ids))  # type: ignore[no-any-return]

    def assign(self, ids: Tensor, values: Tensor) -> None:
        """Writes rows; ids of a dynamic table that have none get one. Later duplicates win."""
        ids = self._check(ids)
        if values.shape != (len(ids), self.spec.dim):
            raise TableError(
                f"Table {self.name!r}: {len(ids)} ids need values of shape "
                f"({len(ids)}, {self.spec.dim}), got {tuple(values.shape)}."
            )
        slots = torch.empty(len(ids), dtype=torch.int64)
        self.core.find_or_insert(ids.data_ptr(), len(ids), slots.data_ptr())
        self.settle(slots)
        with torch.no_grad():
            self.weights()[slots] = values.detach().to(self.spec.dtype)

    @property
    def follows(self) -> bool:
        """Whether rows that no batch touches follow a dense optimizer, and so may be behind it."""
        return self.rule is not None and bool(self.rule.exact)

    def settle(self, slots: Tensor) -> None:
        """Brings rows up to the last step before they are overwritten."""
        if self.follows:
            slots = torch.unique(slots)
            self.rule.catch_up(slots.data_ptr(), len(slots))

    def current_weights(self) -> Tensor:
        """(rows, dim) weights by slot: the plane, or a copy where rows may be behind."""
        if not self.follows:
            return self.weights()
        return caught_up_weights(self, torch.arange(len(self)))

    def _check(self, ids: Tensor) -> Tensor:
        ids = torch.as_tensor(ids)
        if ids.dtype not in (torch.int64, torch.int32) or ids.dim() != 1:
            raise TableError(
                f"Table {self.name!r}: ids must be a 1-D int64 tensor, got "
                f"{str(ids.dtype).removeprefix('torch.')} of shape {tuple(ids.shape)}."
            )
        ids = ids.to(torch.int64).contiguous()
        if self.spec.rows is not None and len(ids):
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.spec.rows:
                raise IdError(
                    f"Table {self.name!r}: id {low if low < 0 else high} is outside "
                    f"[0, {self.spec.rows}). Pass rows=None for open-ended ids."
                )
        return ids

    # -- state_dict ------------------------------------------------------------------------------

    def save(self, destination: dict[str, Any], prefix: str, weight: str, keep_vars: bool) -> None:
        """Writes ``prefix + weight`` (rows by rising id), ``..ids`` (dynamic) and ``..key``."""
        stem = f"{prefix}{weight}"
        if self.spec.rows is None:
            copy_bytes = len(self) * (self.spec.dim * self.spec.dtype.itemsize + 16)
            free = _core.available_memory()
            if copy_bytes > free:
                raise TableError(
                    f"Table {self.name!r}: a state_dict would copy {copy_bytes} bytes and {free} are "
                    "free; it is meant for tables that fit twice in memory."
                )
            ids = self.ids()
            order = torch.argsort(ids)
            destination[stem] = self.current_weights()[order]
            destination[f"{stem}_ids"] = ids[order]
        elif self.aliased and keep_vars and not self.follows:
            destination[stem] = self.parameter
        else:
            destination[stem] = self.current_weights()
        destination[f"{stem}_key"] = torch.tensor(_signed(self.key))

    def load(
        self,
        state: Mapping[str, Any],
        prefix: str,
        weight: str,
        missing: list[str],
        errors: list[str],
    ) -> None:
        """The inverse of save; loads what a static or a dynamic table saved into either kind."""
        stem = f"{prefix}{weight}"
        rows, ids, key = (state.get(stem + end) for end in ("", "_ids", "_key"))
        if rows is None:
            missing.append(stem)
            return
        if rows.dim() != 2 or rows.shape[1] != self.spec.dim:
            errors.append(
                f"Table {self.name!r}: {stem} has shape {tuple(rows.shape)}, the table dim "
                f"{self.spec.dim}."
            )
            return
        if ids is None:
            if self.spec.rows is not None and rows.shape[0] != self.spec.rows:
                errors.append(
                    f"Table {self.name!r}: {stem} has {rows.shape[0]} rows, the table {self.spec.rows}."
                )
                return
            ids = torch.arange(rows.shape[0])
        elif ids.shape != rows.shape[:1]:
            errors.append(
                f"Table {self.name!r}: {len(ids)} ids for {rows.shape[0]} rows in {stem}."
            )
            return
        # As in torch, loading weights leaves an optimizer's states as they are.
        held = copy_states(self) if self.rule is not None and self.spec.rows is None else None
        if self.spec.rows is None:
            self.core.clear()
        if key is not None:
            self.key = int(key) & 0xFFFFFFFFFFFFFFFF
            self.core.set_key(self.key)
        try:
            self.assign(ids, rows)
            if held is not None:
                write_states(self, held, insert=False)
        except HotbedError as error:
            errors.append(str(error))

    def memory(self) -> dict[str, int]:
        """Bytes of this table by what they hold."""
        rows = len(self)
        weights = rows * self.spec.dim * self.spec.dtype.itemsize
        planes, index = int(self.core.plane_bytes), int(self.core.index_bytes)
        return {
            "rows": rows,
            "weights": weights,
            "states": planes - weights,
            "index": index,
            "total": planes + index,
        }


def live_tables() -> Iterable[LiveTable]:
    """All tables there are."""
    return _live_tables


def live_table(parameter: Any) -> LiveTable | None:
    """The table behind a handle, or None for an ordinary parameter."""
    return getattr(parameter, "hotbed_table", None)


def derive_key(seed: int | None, name: str) -> int:
    """The key of a table: from (seed, name), or from torch's default generator if seed is None."""
    if seed is None:
        seed = int(torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64))
    return table_key(seed, name)


def _signed(key: int) -> int:
    return key - (1 << 64) if key >= 1 << 63 else key


def copy_table(table: LiveTable) -> LiveTable:
    """A second live table with the same rows and key, without optimizer states."""
    copied = LiveTable(table.spec, table.key, requires_grad=table.parameter.requires_grad)
    copied.assign(table.ids(), table.current_weights())
    return copied


def refuse_conversion(table: LiveTable, fn: Any) -> None:
    """Raises where ``module.to(...)``, ``.half()`` and the like would change a table."""
    probe = torch.zeros((), dtype=table.spec.dtype)
    changed = fn(probe)
    if changed.dtype != probe.dtype:
        raise TableError(
            f"Table {table.name!r} keeps its rows as {str(probe.dtype).removeprefix('torch.')}; it "
            f"cannot be cast to {str(changed.dtype).removeprefix('torch.')}. Choose the row dtype with "
            "Table(dtype=...), and cast only the dense part of the model."
        )
    if changed.device != probe.device:
        raise TableError(
            f"Table {table.name!r} lives in the memory of the CPU and cannot be moved to "
            f"{changed.device}; move only the dense part of the model."
        )
