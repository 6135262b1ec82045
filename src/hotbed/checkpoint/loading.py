"""Reading checkpoints."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotbed import _core
from hotbed.checkpoint.behind import RowsBehind
from hotbed.checkpoint.entries import Manifest
from hotbed.checkpoint.files import CheckpointError, DamagedError
from hotbed.checkpoint.folder import MANIFEST, opened
from hotbed.checkpoint.half_loaded import Changes
from hotbed.checkpoint.manifest import dense_file, fault_of_files, read_manifest
from hotbed.checkpoint.merge_columns import whole_rows
from hotbed.checkpoint.models import made_again, refuse_other_order
from hotbed.checkpoint.randomness import give_random_states
from hotbed.checkpoint.ranks import KIND, ranks_of, refuse_other_arguments, tables_here
from hotbed.checkpoint.renaming import Renaming, hint
from hotbed.checkpoint.rules import forget_steps, give_history, refuse_other_rule
from hotbed.checkpoint.saving import kinds_of, several
from hotbed.checkpoint.tables import differences, key_in
from hotbed.checkpoint.tensors import read_tensors
from hotbed.checkpoint.values import Stateful, decoded
from hotbed.devices import Device
from hotbed.errors import HotbedError, OptimizerError
from hotbed.modules.owner import tables_left_out, tables_of
from hotbed.storage import Storage
from hotbed.table.live import LiveTable
from hotbed.table.locks import alone
from hotbed.table.records import Records
from hotbed.table.states import replacing_rows, reset_states

__all__ = ["Restored", "load", "load_model"]


class Restored(NamedTuple):
    """Result of `load`."""

    path: str
    """Folder of the checkpoint."""
    step: int
    missing: list[str]
    """Tables, tensors and others that the model has and the checkpoint has not: as they were, but states of
    rows start anew."""
    unexpected: list[str]
    """Tables, tensors and others that the checkpoint has and the model has not, or that were not given.
    They are not read."""


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    scheduler: Stateful | Sequence[Stateful] | None = None,
    loader: Stateful | Sequence[Stateful] | None = None,
    strict: bool = True,
    rename: Mapping[str, str] | None = None,
) -> Restored:
    """Read a checkpoint into a model of the same tables, wherever rows lay and will lie.

    Rows come into static and dynamic tables, tiers, devices and parts alike; but those that are behind
    their optimizer (``untouched="exact"``) not to a device. Rows of another dtype are rounded to the nearest;
    one that was not saved is its first value. With an optimizer, training goes on bit by bit as it would
    have: states, also of random numbers, come back; without one, rows are as the last step left them.

    Args:
        path: a checkpoint, or a folder of them, of which the latest is read.
        optimizer, scheduler, loader: as they were given to `save`.
        strict: names must be those that were saved. Else what only one side has is left alone; a warning says
            so where no table, or no tensor, is in common.
        rename: prefixes of names of tables and tensors, as saved → in the model, of which the longest that
            fits counts. ``{"_orig_mod.": ""}`` loads what a model that torch.compile has wrapped has saved,
            ``{"": "_orig_mod."}`` loads into one.

    Raises:
        CheckpointError: there is no complete checkpoint; a file is missing, damaged or of a later version;
            or it does not fit, or has nothing in common with the model. The message names file or table.
            Where something was read before, the model is half loaded: tables refuse use until a load works.
        OutOfMemory, StorageError: rows have no room; likewise.
    """
    tables = tables_of(model)
    ranks = ranks_of(tables, model)
    with contextlib.ExitStack() as stack:
        # States that are made here are trained with later, where inference tensors could not be.
        stack.enter_context(torch.inference_mode(False))
        with ranks.reporting(KIND):
            kinds = kinds_of("load_state_dict", optimizer, scheduler, loader)
            renaming, root = Renaming(rename), os.fsdecode(path)
            found = stack.enter_context(opened(root)) if ranks.rank == 0 else ""
        arguments = {"path": os.path.normpath(root), "strict": strict, "rename": renaming.given}
        refuse_other_arguments("load", {**arguments, **kinds}, ranks)
        folder = ranks.values_of_all(KIND, found)[0]
        changes = Changes(folder, tables.values())
        stack.enter_context(changes.kept_from_use_if_failed(ranks))
        stack.enter_context(ranks.working(KIND))
        # Also where it was opened before: errors inside name other checkpoints, for all ranks.
        stack.enter_context(opened(folder))
        manifest = read_manifest(folder)
        try:
            given = [several(one, "load_state_dict") for one in (optimizer, scheduler, loader)]
            loading = _Loading(folder, manifest, model, given[0], strict, renaming, changes)
            loading.load_values(*given[1:])
            loading.load_rows()
            if optimizer is not None and "random" in loading.values:
                give_random_states(loading.of_rank("random"))
        except OptimizerError as error:
            raise OptimizerError(f"{os.path.join(folder, MANIFEST)}: {error}") from error
        except HotbedError:
            raise
        except Exception as error:  # whatever files can make others raise
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise CheckpointError(f"{loading_from(folder)} cannot be loaded: {text}") from error
        return Restored(folder, manifest["step"], loading.missing, loading.unexpected)


def load_model(
    path: str | os.PathLike[str], *, storage: Storage | None = None, device: Device | None = None
) -> nn.Module:
    """Make the model of a checkpoint, one of `hotbed.models`, and read it; in evaluation mode.

    Args:
        path: a checkpoint, or a folder of them, of which the latest is read.
        storage: for the tiers that its rows are to lie in. Default: in memory.
        device: where it computes. Default: on the CPU.

    Raises:
        CheckpointError: there is no complete checkpoint, or it is damaged, or of another model; the
            message names the file.
        OutOfMemory, StorageError: rows have no room.
    """
    with opened(os.fsdecode(path)) as folder:
        model = made_again(folder, read_manifest(folder), storage, device)
        load(folder, model)
    return model.eval()


def loading_from(folder: str) -> str:
    return f"The checkpoint {folder}"


class _Loading:
    def __init__(
        self,
        folder: str,
        manifest: Manifest,
        model: nn.Module,
        optimizers: list[Optimizer],
        strict: bool,
        renaming: Renaming,
        changes: Changes,
    ) -> None:
        self.folder, self.manifest, self.strict = folder, manifest, strict
        self.changes = changes
        self.model, self.optimizers = model, optimizers
        self.tables = tables_of(model)
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.none_in_common: list[str] = []
        self.behind: dict[LiveTable, RowsBehind] = {}
        dense = dense_file(manifest)
        tensors = read_tensors(os.path.join(folder, dense["name"]), dense)
        self.values = {name: decoded(v, tensors) for name, v in manifest["values"].items()}
        renaming.refuse_unused([*manifest["tables"], *self.values["model"]])
        self.renaming = renaming
        saved_as = renaming.of_all(manifest["tables"])
        self._match("tables", [*self.tables], [*saved_as])
        refuse_other_order(folder, manifest, model, strict)
        self.tables = {saved_as[s]: t for s, t in self.tables.items() if s in saved_as}
        for stem, table in self.tables.items():
            if fault := differences(table, manifest["tables"][stem], strict):
                raise CheckpointError(f"Table {stem!r} {fault}.")
            if table.owes_step:
                raise CheckpointError(
                    f"Table {stem!r}: a gradient waits for its step, and would reach other rows. Load after "
                    "step(), or call zero_grad() to give it up."
                )
        self.with_states = self._with_states()
        self._refuse_rows_that_stay_behind()
        wanted = [
            file for file in manifest["files"] if not self.tables.keys().isdisjoint(file["rows"])
        ]
        if fault := fault_of_files(folder, wanted):  # before anything has changed
            raise DamagedError(fault)
        self.ranks = ranks_of(self.tables, model)
        self.own = tables_here(self.tables)
        changes.are_of(self.tables.values())

    def of_rank(self, name: str) -> Any:
        """Return what this rank has saved, or the first one where there were fewer."""
        of_ranks = self.values.get("ranks", [])
        same = len(of_ranks) == self.ranks.size
        return of_ranks[self.ranks.rank][name] if same else self.values[name]

    def _match(self, what: str, own: list[str], saved: list[str]) -> None:
        in_common = {*own} & {*saved}
        missing = [name for name in own if name not in in_common]
        unexpected = [name for name in saved if name not in in_common]
        if self.strict and (missing or unexpected):
            raise CheckpointError(
                f"{loading_from(self.folder)} has other {what} than the model. Only in the model: "
                f"{', '.join(missing) or 'none'}. Only in the checkpoint: {', '.join(unexpected) or 'none'}. "
                f"strict=False loads what both have.{hint(missing, unexpected)}"
            )
        if own and saved and not in_common:
            self.none_in_common.append(f"no {what} in common.{hint(missing, unexpected)}")
        self.missing += missing
        self.unexpected += unexpected

    def _with_states(self) -> set[str]:
        """Tables whose states are to come along: those of the optimizers that were given."""
        found = set()
        for stem, table in self.tables.items():
            saved = self.manifest["tables"][stem]["rule"]
            if table.rule is None or not any(table.optimizer is one for one in self.optimizers):
                continue
            if saved is None:
                if self.strict:
                    raise CheckpointError(
                        f"{loading_from(self.folder)}: table {stem!r} was saved without optimizer states."
                    )
                self.missing.append(f"states of {stem}")
                continue
            try:
                refuse_other_rule(stem, table, saved)
            except CheckpointError as error:
                raise CheckpointError(f"{loading_from(self.folder)}: {error}") from None
            found.add(stem)
        return found

    def _is_behind(self, stem: str) -> bool:
        """Return True if rows lag behind an optimizer that is not loaded, and so must catch up."""
        rule = self.manifest["tables"][stem]["rule"]
        return stem not in self.with_states and rule is not None and rule["untouched"] == "exact"

    def _refuse_rows_that_stay_behind(self) -> None:
        for stem, table in self.tables.items():
            if not self._is_behind(stem):
                continue
            if table.rule is not None:
                raise CheckpointError(
                    f"Table {stem!r} was saved with rows that are behind its optimizer. Give "
                    "load its optimizer, or load before one is made."
                )
            try:
                table.place.refuse_exact("hotbed.load")
            except OptimizerError as error:
                raise CheckpointError(
                    f"Table {stem!r} was saved with rows that are behind its optimizer, which only "
                    f"the CPU makes up for. Load the model there, then move it to {table.device}."
                ) from error

    def load_values(self, schedulers: list[Stateful], loaders: list[Stateful]) -> None:
        """All but rows. It is checked first that there is as much as was given."""
        states: list[tuple[Stateful, dict[str, object]]] = []
        for what, own in (
            ("optimizers", self.optimizers),
            ("schedulers", schedulers),
            ("loaders", loaders),
        ):
            saved = self.of_rank(what) if what == "loaders" else self.values[what]
            if own and not saved and not self.strict:
                self.missing.append(what)
                continue
            if saved and not own and self.optimizers:
                self.unexpected.append(what)
            if own and len(own) != len(saved):
                raise CheckpointError(
                    f"{loading_from(self.folder)} has {len(saved)} {what}, and {len(own)} were given."
                )
            states += zip(own, saved, strict=False)
        saved_as = self.renaming.of_all(self.values["model"])
        dense = {name: self.values["model"][saved] for name, saved in saved_as.items()}
        with tables_left_out(), replacing_rows(self.tables[s] for s in self.with_states):
            own_names = [*self.model.state_dict()]
            self._match("tensors", own_names, [*dense])
            self._check_something_is_in_common(bool({*own_names} & {*dense}))
            for one, state in states:
                one.load_state_dict(state)
                self.changes.begun = True
            self.changes.begun = True
            given = OrderedDict(dense)
            versions = self.values.get("versions", {})
            vars(given)["_metadata"] = OrderedDict(
                (self.renaming.of_module(n), {"version": v}) for n, v in versions.items()
            )
            self.model.load_state_dict(given, strict=False)

    def _check_something_is_in_common(self, tensors: bool) -> None:
        """`tensors`: whether some are."""
        reported = f"{loading_from(self.folder)} and the model have "
        if not self.tables and not tensors and (self.missing or self.unexpected):
            mine, theirs = (", ".join(n[:3]) or "none" for n in (self.missing, self.unexpected))
            how = hint(self.missing, self.unexpected)
            raise CheckpointError(
                f"{reported}nothing in common. The model has {mine}; the checkpoint has {theirs}.{how}"
            )
        for fault in self.none_in_common:
            warnings.warn(f"{reported}{fault}", stacklevel=4)

    def load_rows(self) -> None:
        as_stored = set(self.with_states)  # tables whose rows come with their states and steps
        for table in self.tables.values():
            table.ready()
        with alone(self.changes.tables), self.changes.of_rows():
            for stem, table in self.tables.items():
                entry = self.manifest["tables"][stem]
                rule = entry["rule"]
                rules = [t.rule for t in {table, *table.place.tables_here(table)} if t.rule]
                if stem in self.with_states and table.follows:
                    for each in rules:
                        forget_steps(each)  # so that no row counts as of one
                table.draw_again(key_in(entry, table))
                if stem in self.with_states:
                    reset_states(table)
                    for each in rules:
                        with self._naming(stem):
                            give_history(each, rule)
                elif self._is_behind(stem):
                    with self._naming(stem):
                        for own in table.place.tables_here(table):
                            self.behind[own] = RowsBehind(own, entry)
                    as_stored.add(stem)
            for table in self.tables.values():
                table.allocate()  # before rows come, as those come with what their rule keeps of them
            columns = {stem: table.spec.columns for stem, table in self.own.items()}
            found = whole_rows(self.folder, self.manifest, columns, as_stored, again=True)
            for path, rows in self.ranks.heartbeat(KIND, found):
                table = self.own[rows.stem]
                try:
                    self._take(table, rows.stem, rows.columns, rows.tensors, rows.stem in as_stored)
                except (KeyError, ValueError, IndexError) as error:
                    if isinstance(error, HotbedError):
                        raise CheckpointError(f"{path}: {error}") from error
                    raise CheckpointError(
                        f"{path} has no rows of {rows.stem!r} as its manifest says: {error}"
                    ) from error
            for table, behind in self.behind.items():
                for others in behind.others():
                    table.write(others)

    @contextlib.contextmanager
    def _naming(self, stem: str) -> Iterator[None]:
        """Lets what is wrong with the rule of a table name the file and the table."""
        try:
            yield
        except ValueError as error:
            path = os.path.join(self.folder, MANIFEST)
            raise CheckpointError(f"{path}: table {stem!r}: {error}.") from error

    def _take(
        self, table: LiveTable, stem: str, saved: slice, tensors: dict[str, Tensor], as_stored: bool
    ) -> None:
        origin, ids = table.spec.origin, tensors["ids"]
        if ids.dtype != torch.int64:
            raise ValueError("its ids are no int64")
        if origin.rows is not None and len(ids):
            least, most = int(ids.min()), int(ids.max())
            if not 0 <= least <= most < origin.rows:
                raise CheckpointError(
                    f"the id {least if least < 0 else most} of table {stem!r} is outside "
                    f"[0, {origin.rows:,}). Give the table more rows, or rows=None for any id."
                )
        ids, here = origin.ids_in_part(ids)
        own, spec = table.spec.columns, table.spec
        columns = slice(own.start - saved.start, own.stop - saved.start)

        def of_table(name: str, dtype: torch.dtype, one_a_row: bool = False) -> Tensor:
            found = tensors[name] if here is None else tensors[name][here]
            found = found if one_a_row else found[:, columns]
            if found.shape[1] != (1 if one_a_row else spec.dim):
                raise ValueError(f"{name} has the shape {tuple(tensors[name].shape)}")
            return found.to(dtype).contiguous()

        behind = self.behind.get(table)
        rule = behind.rule if behind else table.rule
        own_states, steps = None, None
        if as_stored and rule is not None:
            planes, dtype = _core.state_planes(rule.options), (behind or table).compute_dtype
            own_states = [of_table(f"states/{n}", dtype, one) for n, one, _ in planes]
        if rule is not None and rule.exact:
            steps = torch.full_like(ids, rule.steps)
            if as_stored:
                steps = tensors["steps"] if here is None else tensors["steps"][here]
                known = (steps == 0) | ((steps >= rule.history()[0]) & (steps <= rule.steps))
                if steps.shape != ids.shape or steps.dtype != torch.int64 or not bool(known.all()):
                    raise ValueError("its steps are none that the table has taken")
        weights = of_table("weights", behind.dtype if behind else spec.dtype)
        steps = None if steps is None else steps.contiguous()
        records = Records(ids.contiguous(), weights, own_states, steps)
        table.write(behind.current(records) if behind else records)
