"""A new checkpoint from its folder to its manifest: what it is to hold is settled while tables are held, and
its files are written then or later."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypedDict

from torch import Tensor, nn
from torch.optim import Optimizer

from hotbed.checkpoint.beside_rows import values_of
from hotbed.checkpoint.deltas import (
    MadeFrom,
    base_in,
    mark,
    mark_since,
    new_uid,
    refuse_unknown,
    remember,
    removed_since,
    same_rows,
    write_removed,
)
from hotbed.checkpoint.entries import LinkedLog, Source, TableEntry
from hotbed.checkpoint.errors import CheckpointError
from hotbed.checkpoint.linked import link_rows
from hotbed.checkpoint.manifest import FORMAT, LINKED_VERSION, VERSION, read_manifest
from hotbed.checkpoint.models import description_of
from hotbed.checkpoint.new import NewCheckpoint, new_folder, sweep
from hotbed.checkpoint.ranks import KIND, beside_signs, entries_of, own_tables, ranks_of
from hotbed.checkpoint.rows import most_bytes, write_rows
from hotbed.checkpoint.stores import store_of
from hotbed.checkpoint.tensors import write_tensors
from hotbed.checkpoint.values import Saveable
from hotbed.modules.owner import tables_of
from hotbed.table.alone import Processes
from hotbed.table.live import LiveTable
from hotbed.table.locks import alone
from hotbed.table.lookups import changed_records_of, records_of
from hotbed.table.records import Records

__all__ = ["Begun", "SaveCall", "Saved", "begin"]


class Saved(NamedTuple):
    """Result of `save`."""

    path: str
    """Folder of the checkpoint."""
    step: int
    rows: int
    """Rows of all tables."""
    bytes: int
    """Bytes of all files but linked ones."""
    seconds: float
    base: str | None = None
    """Folder of the checkpoint since which this one has what has changed; None: it is whole."""


class SaveCall(TypedDict):
    """Arguments of `save`, as ranks tell them each other."""

    path: str
    step: int
    states: bool
    keep: int | None
    delta: bool | int
    base: str | None
    blocking: bool
    snapshot_memory: int | None
    linked: bool


class Begun(NamedTuple):
    """A checkpoint whose folder is there, and whose files are not."""

    call: SaveCall
    folder: str
    new: NewCheckpoint | None
    """None: another rank completes it."""
    about: dict[str, object]
    """Its manifest, but for the files."""
    tensors: dict[str, Tensor]
    """All but rows."""
    own: Mapping[str, LiveTable]
    """Tables, or parts of them, whose rows this process writes."""
    base: MadeFrom | None
    since: Mapping[str, int]
    """By table the core's mark since which rows are to be written; of others all are."""
    removed: Mapping[str, Tensor]
    """By table the ids that went since then."""
    began: float

    def rows(self, linked: Collection[str] = ()) -> Iterator[tuple[LiveTable, Records]]:
        """Stream the rows to be written, while the tables are held; without states, as the last step has
        left them. `linked`: tables of which none are."""
        states = self.call["states"]
        marks = {self.own[stem]: mark for stem, mark in self.since.items()}
        yield from records_of(
            [
                table
                for stem, table in self.own.items()
                if stem not in self.since and stem not in linked
            ],
            states=states,
            current=not states,
        )
        yield from changed_records_of(marks, states=states)

    def finish(
        self,
        ranks: Processes,
        rows: Iterable[tuple[LiveTable, Records]] | None = None,
        marks: Mapping[LiveTable, int] | None = None,
        *,
        beside: bool = False,
    ) -> Saved:
        """Write its files and complete it. All ranks call this.

        Args:
            rows: to be written; None: as they are, while the tables are held.
            marks: of the moment in which the rows were these; None: they are so still.
            beside: whether others work meanwhile, so that files are written one after the other.
        """
        try:
            return self._finished(ranks, rows, marks, beside=beside)
        except BaseException:
            ranks.stopped(KIND)  # before the folder goes
            raise

    def _finished(
        self,
        ranks: Processes,
        rows: Iterable[tuple[LiveTable, Records]] | None,
        marks: Mapping[LiveTable, int] | None,
        *,
        beside: bool,
    ) -> Saved:
        stems = {table: stem for stem, table in self.own.items()}
        with ranks.working(KIND):
            files = write_removed(self.folder, ranks.rank, self.removed)
            logs, linked = self._link(ranks)
            rows = self.rows(linked) if rows is None else rows
            named = ((stems[table], table, some) for table, some in rows)
            files += write_rows(
                self.folder,
                ranks.heartbeat(KIND, named),
                writer=ranks.rank,
                beside=beside,
            )
            if marks is None:
                marks = mark(self.own.values())
            if ranks.rank == 0:
                dense = write_tensors(os.path.join(self.folder, "dense.safetensors"), self.tensors)
                files.insert(0, {"name": "dense.safetensors", **dense, "rows": {}})
        of_ranks = ranks.values_of_all(KIND, (files, logs))
        files = [file for files, _ in of_ranks for file in files]
        logs = [log for _, logs in of_ranks for log in logs]
        folder, about = self.folder, {**self.about, "files": files}
        if logs:
            about |= {"version": LINKED_VERSION, "linked": logs}
        with ranks.working(KIND):
            if self.new is not None:
                if self.is_linked and not logs:
                    raise CheckpointError(_NOTHING_TO_LINK)
                folder = self.new.complete(about, self.call["keep"])
        folder = ranks.values_of_all(KIND, folder)[0]
        with alone(self.own.values()) if beside else contextlib.nullcontext():
            remember(marks, str(self.about["uid"]))
        rows_of: list[Source] = [*files, *logs]
        count = sum(part["count"] for one in rows_of for part in one["rows"].values())
        size = sum(file["bytes"] for file in files)
        base = self.base and self.base.folder
        seconds = time.perf_counter() - self.began
        return Saved(folder, self.call["step"], count, size, seconds, base)

    def _link(self, ranks: Processes) -> tuple[list[LinkedLog], set[str]]:
        """As `link_rows`, if that was asked for."""
        if not self.is_linked:
            return [], set()
        link = functools.partial(link_rows, self.folder, ranks.rank, self.own)
        return beside_signs(ranks, link)

    @property
    def is_linked(self) -> bool:
        """True if rows over an SSD are to be linked: of one that is whole."""
        return self.call["linked"] and self.base is None


_NOTHING_TO_LINK = (
    "linked=True links files of an SSD, and no table lies over one. Make the model with Storage(ssd=...), or "
    "leave linked out."
)


def begin(
    stack: contextlib.ExitStack,
    call: SaveCall,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    scheduler: Saveable | Sequence[Saveable] | None,
    loader: Saveable | Sequence[Saveable] | None,
) -> Begun:
    """Make the folder of a new checkpoint, while the tables are held, and settle what it is to hold. All
    ranks call this.

    Args:
        stack: whoever leaves it with an error takes the folder away.
    """
    began = time.perf_counter()
    root, states = call["path"], call["states"]
    tables = tables_of(model)
    ranks = ranks_of(tables, model)
    values, tensors = values_of(model, optimizer, scheduler, loader, ranks)
    own = own_tables(tables, ranks)
    entries = entries_of(tables, own, ranks, states=states)
    uid = ranks.values_of_all(KIND, new_uid())[0]
    about: dict[str, object] = {"format": FORMAT, "version": VERSION, "uid": uid}
    about |= {"step": call["step"], "base": None}
    about |= {"model": description_of(model), "tables": entries, "files": [], "values": values}

    def most() -> int:
        dense = sum(tensor.nbytes for tensor in tensors.values())
        return dense + most_bytes(own, states=states) + len(json.dumps(about, indent=2))

    base, since, removed = stack.enter_context(_base_of_all(call, own, entries, ranks))
    stack.enter_context(_told_how_much(root, most))
    folder, new = stack.enter_context(_folder_of_all(root, call["step"], ranks))
    about["base"] = base and base.entry
    return Begun(call, folder, new, about, tensors, own, base, since, removed, began)


@contextlib.contextmanager
def _base_of_all(
    call: SaveCall,
    own: Mapping[str, LiveTable],
    entries: Mapping[str, TableEntry],
    ranks: Processes,
) -> Iterator[tuple[MadeFrom | None, dict[str, int], dict[str, Tensor]]]:
    """For a ``with`` statement: the checkpoint that the new one is to hold changes of, which nobody removes
    meanwhile, by table the core's mark since which, and ids that went since then. `entries` tell how many."""
    with contextlib.ExitStack() as stack:
        made_from, since, removed = None, dict[str, int](), dict[str, Tensor]()
        with ranks.reporting(KIND):
            if ranks.rank == 0 and (call["delta"] or call["base"] is not None):
                made_from = stack.enter_context(base_in(call["path"], call["base"], call["delta"]))
        folder = ranks.values_of_all(KIND, made_from and made_from.folder)[0]
        if folder is not None:
            with ranks.reporting(KIND):
                made_from = MadeFrom(folder, read_manifest(folder))
                tables, uid = made_from.manifest["tables"], made_from.entry["uid"]
                since = {
                    stem: mark_since(table, uid)
                    if same_rows(tables.get(stem), entries[stem], table)
                    else 0
                    for stem, table in own.items()
                }
            of_ranks = ranks.values_of_all(KIND, {stem: bool(mark) for stem, mark in since.items()})
            unknown = {
                stem for known in of_ranks for stem, is_known in known.items() if not is_known
            }
            with ranks.reporting(KIND):
                if call["base"] is not None:
                    refuse_unknown(made_from, unknown)
            since = {stem: mark for stem, mark in since.items() if stem not in unknown}
            removed = {stem: removed_since(own[stem], mark) for stem, mark in since.items()}
            for counts in ranks.values_of_all(
                KIND, {stem: len(ids) for stem, ids in removed.items()}
            ):
                for stem, count in counts.items():
                    entries[stem]["removed"] = (entries[stem]["removed"] or 0) + count
            if not {stem for known in of_ranks for stem in known} - unknown:
                made_from = None
        yield made_from, since, removed


@contextlib.contextmanager
def _folder_of_all(
    root: str, step: int, ranks: Processes
) -> Iterator[tuple[str, NewCheckpoint | None]]:
    """For a ``with`` statement: the folder of a new checkpoint, which is the first rank's."""
    with contextlib.ExitStack() as stack:
        new = None
        with ranks.reporting(KIND):
            if ranks.rank == 0:
                sweep(root)
                new = stack.enter_context(new_folder(root, step))
        folder = ranks.values_of_all(KIND, "" if new is None else new.path)[0]
        try:
            with ranks.working(KIND):
                if not store_of(folder).is_folder(folder):
                    raise CheckpointError(
                        f"Rank {ranks.rank} finds no folder {folder!r}, which rank 0 has made. All ranks "
                        "write to a checkpoint, so it must lie where all see it."
                    )
        except BaseException:
            ranks.stopped(KIND)
            raise
        yield folder, new


@contextlib.contextmanager
def _told_how_much(root: str, most: Callable[[], int]) -> Iterator[None]:
    """A disk that is full is told with what is missing to the bytes that a checkpoint takes at most."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free, size = store_of(root).free_bytes(root), most()
        if free is None:
            raise
        missing = f", so {size - free:,} are missing" if size > free else ""
        text = f"a checkpoint takes up to {size:,} bytes, and {free:,} are free{missing}"
        raise OSError(error.errno, f"{os.strerror(error.errno)}: {text}", root) from error
