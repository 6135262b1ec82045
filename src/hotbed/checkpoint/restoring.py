"""Brings a checkpoint into a model: tables and their states, tensors, and the rest."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotbed import _core
from hotbed.checkpoint.behind import RowsBehind
from hotbed.checkpoint.chain import chain_of, fault_of_chain
from hotbed.checkpoint.chain_rows import rows_of_chain
from hotbed.checkpoint.deltas import mark, remember
from hotbed.checkpoint.entries import Manifest
from hotbed.checkpoint.errors import CheckpointError, DamagedError
from hotbed.checkpoint.folder import MANIFEST
from hotbed.checkpoint.half_loaded import Changes
from hotbed.checkpoint.linked import adopted
from hotbed.checkpoint.manifest import dense_file
from hotbed.checkpoint.models import refuse_other_order
from hotbed.checkpoint.ranks import KIND, beside_signs, own_tables, ranks_of, tables_here
from hotbed.checkpoint.renaming import Renaming, hint
from hotbed.checkpoint.rules import forget_steps, give_history, refuse_other_rule
from hotbed.checkpoint.tables import differences, key_in
from hotbed.checkpoint.tensors import read_tensors
from hotbed.checkpoint.values import Stateful, decoded
from hotbed.errors import HotbedError, OptimizerError
from hotbed.modules.owner import tables_left_out, tables_of
from hotbed.table.live import LiveTable
from hotbed.table.locks import alone
from hotbed.table.records import Records
from hotbed.table.states import replacing_rows, reset_states

__all__ = ["Loading", "loading_from"]


def loading_from(folder: str) -> str:
    return f"The checkpoint {folder}"


class Loading:
    """A checkpoint on its way into a model."""

    def __init__(
        self,
        folder: str,
        manifest: Manifest,
        model: nn.Module,
        optimizers: Sequence[Optimizer | None],
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
        self.links = chain_of(folder, manifest)
        if fault := fault_of_chain(self.links, self.tables):  # before anything has changed
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
            pairs = zip(own, saved, strict=False)
            states += [(one, state) for one, state in pairs if one is not None]
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
            warnings.warn(f"{reported}{fault}", stacklevel=5)

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
            there = self._adopt()
            columns = {s: table.spec.columns for s, table in self.own.items() if s not in there}
            here = self._has_any if self.ranks.size > 1 else None
            found = rows_of_chain(self.links, columns, as_stored, again=True, any_wanted=here)
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
            self._remember()

    def _has_any(self, stem: str, ids: Tensor) -> bool:
        """Return True if this process keeps some of these ids of a table, or none should have been saved."""
        origin = self.own[stem].spec.origin
        if origin.rows is not None and len(ids):
            if not 0 <= int(ids.min()) <= int(ids.max()) < origin.rows:
                return True
        return len(origin.ids_in_part(ids)[0]) > 0

    def _adopt(self) -> set[str]:
        """Have tables go on from linked files where they can. Returns their names."""
        if len(self.links) > 1:
            return set()
        same = {*self._same()}
        adopt = functools.partial(adopted, self.folder, self.manifest, self.own, same)
        return beside_signs(self.ranks, adopt)

    def _same(self) -> dict[str, LiveTable]:
        """Tables whose rows become as they were saved, with all states that were."""
        return {
            stem: table
            for stem, table in self.tables.items()
            if stem in self.with_states or not (table.rule or self.manifest["tables"][stem]["rule"])
        }

    def _remember(self) -> None:
        """Note, of tables that are as they were saved, that later checkpoints can tell what has changed
        since."""
        if "uid" in self.manifest:
            same = own_tables(self._same(), self.ranks)
            remember(mark(same.values()), self.manifest["uid"])

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
