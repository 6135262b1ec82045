"""`TableOwner`: what `EmbeddingCollection`, `Embedding` and `EmbeddingBag` have in common."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Self

from hotbed.errors import OptimizerError, TableError
from hotbed.group.group import Group
from hotbed.group.lookup import lookup
from hotbed.inputs.bags import Bags
from hotbed.places.moves import move, refuse_move
from hotbed.table.alone import Processes
from hotbed.table.checks import not_for_graphs, refuse_tracing
from hotbed.table.live import LiveTable, live_table
from hotbed.table.locks import alone, reading
from hotbed.table.prefetch import BatchAhead, Prefetcher
from hotbed.table.sparse_gradient import plain_access
from hotbed.table.state_dict import ENDINGS, load_table, save_table, signed_key

__all__ = [
    "TableOwner",
    "are_tables_left_out",
    "groups_of",
    "owners_of",
    "tables_left_out",
    "tables_of",
]

_left_out = contextvars.ContextVar("tables left out of state_dicts", default=False)


@contextlib.contextmanager
def tables_left_out() -> Iterator[None]:
    """Inside, state_dicts of modules are without tables, as rows travel by themselves."""
    before = _left_out.set(True)
    try:
        yield
    finally:
        _left_out.reset(before)


def are_tables_left_out() -> bool:
    """Return True inside of `tables_left_out`."""
    return _left_out.get()


def tables_of(model: nn.Module) -> dict[str, LiveTable]:
    """All tables of a model by their names in its state_dict; one that several modules share by the
    first."""
    found: dict[LiveTable, str] = {}
    for prefix, module in owners_of(model).items():
        for name, table in module.live_tables().items():
            found.setdefault(table, f"{prefix}.{name}" if prefix else name)
    return {stem: table for table, stem in found.items()}


def owners_of(model: nn.Module) -> dict[str, TableOwner]:
    """Return all modules of a model that have tables, by their names."""
    return {name: m for name, m in model.named_modules() if isinstance(m, TableOwner)}


def groups_of(model: nn.Module) -> list[Group]:
    """Return the groups of a model's tables, each once."""
    return list(dict.fromkeys(module.group for module in owners_of(model).values()))


class TableOwner(nn.Module):
    """A module with tables, whose handles are its parameters.

    It does what ``nn.Module`` does with parameters, but by table: saving and loading, and refusing
    to be cast or moved. Copies and pickles made by Python's own means hold copies of the tables.
    """

    _owned: dict[str, LiveTable]
    """Parameter name → table."""
    _keys_in_state_dict = True

    @property
    def device(self) -> torch.device:
        """Where the tables compute and vectors come out."""
        return next(iter(self._owned.values())).device

    @property
    def group(self) -> Group:
        """The `hotbed.Group` that its tables belong to."""
        group = next(iter(self._owned.values())).group
        assert isinstance(group, Group)
        return group

    @property
    def ranks(self) -> Processes:
        """The processes that share the tables (`hotbed.table.alone.ALONE` or `hotbed.dist.ranks.Ranks`)."""
        return next(iter(self._owned.values())).place.ranks

    @property
    def prefetcher(self) -> Prefetcher | None:
        """The part that brings rows of later batches up; None where rows stay where they are computed."""
        return next(iter(self._owned.values())).place.lookups.prefetcher

    @property
    def has_tiers(self) -> bool:
        """True if rows in this process lie in tiers; of a distributed module, rows of its shards here."""
        return any(
            own.place.tiers is not None
            for table in self._owned.values()
            for own in table.place.tables_here(table)
        )

    def live_tables(self) -> dict[str, LiveTable]:
        """Return parameter name → live table."""
        return self._owned

    def __prepare_scriptable__(self) -> NoReturn:
        """Raise TableError: torch.jit.script asks modules for this."""
        raise not_for_graphs(next(iter(self._owned.values())).name, "torch.jit.script")

    # -- look-ahead ------------------------------------------------------------------------------

    @property
    def looked_up_by(self) -> TableOwner:
        """The module that looks its tables up, and prepares batches for look-ahead."""
        return self

    def features_of(self, name: str) -> dict[str, LiveTable]:
        """Return feature of a batch → table, of a module that has this name in its model."""
        raise NotImplementedError

    def inputs_from(self, batch: Mapping[str, object], name: str) -> object:
        """Return what forward takes, of a mapping that has all features of `features_of`."""
        raise NotImplementedError

    def prepare(self, inputs: object) -> BatchAhead:
        """Read and group a batch that a training forward will come with. Changes nothing."""
        raise NotImplementedError

    def _own(self, tables: dict[str, LiveTable]) -> None:
        self._owned = tables
        for name in tables:
            if name in self.__dict__:
                raise TableError(
                    f"A table cannot be called {name!r}, which modules have for something else; "
                    "rename it."
                )
        for name, table in tables.items():
            self._parameters[name] = table.parameter

    def _refuse_transforms(self) -> None:
        """Raises TableError where torch transforms or records functions; before a batch is read."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise TableError(
                "torch.func cannot go through tables, as a lookup may give ids their rows. Look vectors "
                "up outside of vmap, grad and the like, and hand them in."
            )
        if torch._C._is_tracing() or torch._C._len_torch_dispatch_stack():
            refuse_tracing(next(iter(self._owned.values())).name)

    def _look_up(
        self,
        live: Sequence[LiveTable],
        table_of: Sequence[int],
        features: Sequence[str],
        bags: Sequence[Bags],
    ) -> list[Tensor]:
        """`live`: the module's own, in their order; look-ahead knows a batch by them."""
        handles = []
        for name, table in self._owned.items():
            handle = self._parameters.get(name)
            if handle is None or getattr(handle, "hotbed_table", None) is not table:
                raise TableError(
                    f"Table {table.name!r}: the module's parameter {name!r} was replaced by another. "
                    "Rows are not kept in it: load a state_dict, or use assign(), instead."
                )
            handles.append(handle)
        with plain_access():
            return lookup(live, handles, table_of, features, bags, self.training)

    def _without_handles(self) -> Self:
        """Stands in for this module where nn.Module's own methods are to see no table. The module stays
        as it is, as others may look a batch up meanwhile."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        kept = {k: p for k, p in self._parameters.items() if k not in self._owned}
        other.__dict__["_parameters"] = kept
        return other

    @contextlib.contextmanager
    def _changed_without_handles(self) -> Iterator[Self]:
        """The same, and takes over what was changed in it."""
        other = self._without_handles()
        yield other
        for name, value in other.__dict__.items():
            if name == "_parameters":
                self._parameters.update(value)
            elif self.__dict__.get(name, self) is not value:
                self.__dict__[name] = value

    def _save_to_state_dict(
        self, destination: dict[str, Tensor], prefix: str, keep_vars: bool
    ) -> None:
        nn.Module._save_to_state_dict(self._without_handles(), destination, prefix, keep_vars)
        if _left_out.get():
            return
        with reading(self._owned.values()):
            self._save_tables(destination, prefix, keep_vars)

    def _save_tables(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        for name, table in self._owned.items():
            in_metadata = not self._keys_in_state_dict and table.spec.rows is not None
            save_table(table, destination, prefix + name, keep_vars, not in_metadata)
            if in_metadata and hasattr(destination, "_metadata"):
                metadata = destination._metadata.setdefault(prefix[:-1], {})
                metadata[f"{name}.key"] = signed_key(table.key)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, object],
        prefix: str,
        local_metadata: dict[str, int],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own = {prefix + name + ending for name in self._owned for ending in ENDINGS}
        with self._changed_without_handles() as other:
            nn.Module._load_from_state_dict(
                other,
                {k: v for k, v in state_dict.items() if k not in own},
                prefix,
                local_metadata,
                strict,
                missing_keys,
                unexpected_keys,
                error_msgs,
            )
        if _left_out.get():
            return
        for table in self._owned.values():
            table.allocate()
        with alone(self._owned.values()):
            for name, table in self._owned.items():
                key = local_metadata.get(f"{name}.key")
                load_table(table, state_dict, prefix + name, key, missing_keys, error_msgs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        wanted = {name: _device_after(table, fn) for name, table in self._owned.items()}
        for name, table in self._owned.items():
            if wanted[name] != table.device:
                refuse_move(table, wanted[name])
        with alone(self._owned.values()):
            for name, table in self._owned.items():
                if wanted[name] != table.device:
                    move(table, wanted[name])
        with self._changed_without_handles() as other:
            nn.Module._apply(other, fn, recurse)  # type: ignore[no-untyped-call]
        return self


def _device_after(table: LiveTable, fn: Callable[[Tensor], Tensor]) -> torch.device:
    """Where ``module.to(...)`` and the like want a table. Raises where they would cast it."""
    probe = torch.zeros((), dtype=table.spec.dtype, device=table.device)
    changed = fn(probe)
    if changed.dtype != probe.dtype:
        raise TableError(
            f"Table {table.name!r} keeps its rows as {str(probe.dtype).removeprefix('torch.')}; it "
            f"cannot be cast to {str(changed.dtype).removeprefix('torch.')}. Choose the row dtype with "
            "Table(dtype=...), and cast only the dense part of the model."
        )
    if changed.device.type not in ("cpu", "cuda"):
        raise TableError(
            f"Table {table.name!r} cannot be moved to {changed.device}: tables lie on the CPU or on a "
            "CUDA device. Move only the dense part of the model."
        )
    if changed.device.type == "cpu" and changed.untyped_storage().is_shared():
        raise TableError(
            f"Table {table.name!r} belongs to one process; share_memory() cannot be honoured."
        )
    return changed.device


def _refuse_plain_ddp(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Raises where DistributedDataParallel takes a model in, before it sends anything."""
    if not isinstance(parent, DistributedDataParallel) or module is None:
        return
    for parameter_name, parameter in module.named_parameters():
        table = live_table(parameter)
        if table is not None and parameter_name not in parent.parameters_to_ignore:
            raise OptimizerError(
                f"Table {table.name!r} is inside DistributedDataParallel, which would copy whole "
                "tables to every rank and average their gradients. Give the bare model to "
                "hotbed.distribute(model), which puts its dense layers into DistributedDataParallel."
            )


register_module_module_registration_hook(_refuse_plain_ddp)
