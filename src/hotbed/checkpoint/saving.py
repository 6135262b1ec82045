"""Writing checkpoints."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from hotbed import _core
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
from hotbed.checkpoint.entries import TableEntry
from hotbed.checkpoint.files import CheckpointError
from hotbed.checkpoint.folder import root_of
from hotbed.checkpoint.manifest import FORMAT, VERSION, read_manifest
from hotbed.checkpoint.models import description_of
from hotbed.checkpoint.new import NewCheckpoint, check_keep, check_step, new_folder, sweep
from hotbed.checkpoint.randomness import random_states
from hotbed.checkpoint.ranks import (
    KIND,
    entries_of,
    own_tables,
    ranks_of,
    refuse_other_arguments,
)
from hotbed.checkpoint.rows import most_bytes, write_rows
from hotbed.checkpoint.tensors import write_tensors
from hotbed.checkpoint.values import Saveable, decoded, encoded
from hotbed.files import Json
from hotbed.modules.owner import tables_left_out, tables_of
from hotbed.optim.base import TableOptimizer
from hotbed.table.alone import Processes
from hotbed.table.live import LiveTable
from hotbed.table.locks import reading

__all__ = ["Saved", "giving_memory_back", "kinds_of", "save", "save_too", "several"]


class Saved(NamedTuple):
    """Result of `save`."""

    path: str
    """Folder of the checkpoint."""
    step: int
    rows: int
    """Rows of all tables."""
    bytes: int
    """Bytes of all files."""
    seconds: float
    base: str | None = None
    """Folder of the checkpoint since which this one has what has changed; None: it is whole."""


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    step: int,
    scheduler: Saveable | Sequence[Saveable] | None = None,
    loader: Saveable | Sequence[Saveable] | None = None,
    states: bool = True,
    keep: int | None = None,
    delta: bool | int = False,
    base: str | os.PathLike[str] | None = None,
) -> Saved:
    """Write a checkpoint to a new folder in `path`, complete or not at all; `load` reads the latest.

    Of a distributed model all ranks call it, and write to one folder that all see: each its rows, rank 0
    the rest, its optimizers and schedulers among it; of loaders and random states each its own.

    Rows are copied some megabytes at a time, wherever they lie. docs/format.md describes the files.

    Args:
        path: a folder of checkpoints; it is made if there is none.
        model: any module, with Hotbed's tables in it or without.
        optimizer: one, or a list of several, of Hotbed or torch.
        step: how many steps were taken, from 0.
        scheduler, loader: one or several each, of whatever has ``state_dict`` and ``load_state_dict``.
        states: whether optimizer states of tables are saved. Without them, rows are saved as the last step
            has left them.
        keep: how many complete checkpoints stay in `path`, this one among them; None: all. Those that
            others hold changes of stay, too.
        delta: whether only rows are written that have changed since the latest checkpoint in `path`. A number
            says of how many checkpoints one is whole nevertheless, as that many are read to load the last.
            Tables of which the changes are not known are written whole: this process must have saved them to
            that checkpoint, or loaded them from it, and their rows lie in memory, or over an SSD.
        base: another checkpoint in `path` to hold changes of; refused where these are not known.

    Raises:
        CheckpointError: something has a type that cannot be saved, a gradient waits for its step, or what
            has changed since `base` is not known.
        TableError: the model is half loaded.
        OSError, StorageError: it cannot be written, or rows not be read. What was there is there. A full
            disk is told with the bytes that are missing.
    """
    tables = tables_of(model)
    ranks = ranks_of(tables, model)
    with ranks.reporting(KIND), reading(tables.values()):
        check_step(step)
        check_keep(keep)
        root = root_of(path)
        _refuse_unsaved(tables)
        kinds = kinds_of("state_dict", optimizer, scheduler, loader)
        if not isinstance(delta, bool):
            check_keep(delta, "delta")
        made_from = None if base is None else root_of(base)
        arguments = {"path": os.path.normpath(root), "step": step, "states": states, "keep": keep}
        arguments |= {"delta": delta, "base": made_from}
        refuse_other_arguments("save", {**arguments, **kinds}, ranks)
        with giving_memory_back():
            call = _SaveCall(
                path=root,
                step=step,
                states=states,
                keep=keep,
                delta=delta,
                base=made_from,
            )
            return _save(call, model, optimizer, scheduler, loader)


@contextlib.contextmanager
def giving_memory_back() -> Iterator[None]:
    """Return to the system, at the end, what work on whole tables has freed, which no step needs."""
    try:
        yield
    finally:
        _core.give_back_freed()


class _SaveCall(TypedDict):
    """Arguments of `save`, as ranks tell them each other."""

    path: str
    step: int
    states: bool
    keep: int | None
    delta: bool | int
    base: str | None


def save_too(model: nn.Module, arguments: Mapping[str, object]) -> None:
    """Write the rows of a memory host, as the other ranks call `save`. `arguments`: as these tell them."""
    call = cast(_SaveCall, arguments)
    tables = tables_of(model)
    with ranks_of(tables, model).reporting(KIND), reading(tables.values()):
        _refuse_unsaved(tables)
        with giving_memory_back():
            _save(call, model, None, None, None)


def _refuse_unsaved(tables: Mapping[str, LiveTable]) -> None:
    for stem, table in tables.items():
        table.refuse_half_loaded()
        if table.owes_step:
            raise CheckpointError(
                f"Table {stem!r}: a gradient waits for its step, which a checkpoint does not keep. Save "
                "after step(), or call zero_grad() to give it up."
            )


def _save(
    call: _SaveCall,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    scheduler: Saveable | Sequence[Saveable] | None,
    loader: Saveable | Sequence[Saveable] | None,
) -> Saved:
    """Do what `save` does once all ranks have called it, and hold the tables to read them."""
    begin = time.perf_counter()
    root, step, states = call["path"], call["step"], call["states"]
    tables = tables_of(model)
    ranks = ranks_of(tables, model)
    values, tensors = _values_of(model, optimizer, scheduler, loader, ranks)
    own = own_tables(tables, ranks)
    entries = entries_of(tables, own, ranks, states=states)
    uid = ranks.values_of_all(KIND, new_uid())[0]
    about = {"format": FORMAT, "version": VERSION, "uid": uid, "step": step, "base": None}
    about |= {"model": description_of(model), "tables": entries, "files": [], "values": values}

    def most() -> int:
        dense = sum(tensor.nbytes for tensor in tensors.values())
        return dense + most_bytes(own, states=states) + len(json.dumps(about, indent=2))

    with (
        _base_of_all(call, own, entries, ranks) as (made_from, since, removed),
        _told_how_much(root, most),
        _folder_of_all(root, step, ranks) as (folder, new),
    ):
        about["base"] = made_from and made_from.entry
        with ranks.working(KIND):
            files = write_removed(folder, ranks.rank, removed)
            files += write_rows(
                folder, own, states=states, since=since, writer=ranks.rank, ranks=ranks
            )
            marks = mark(own.values())
            if ranks.rank == 0:
                dense = write_tensors(os.path.join(folder, "dense.safetensors"), tensors)
                files.insert(0, {"name": "dense.safetensors", **dense, "rows": {}})
        files = [file for of_rank in ranks.values_of_all(KIND, files) for file in of_rank]
        with ranks.working(KIND):
            if new is not None:
                folder = new.complete({**about, "files": files}, call["keep"])
        folder = ranks.values_of_all(KIND, folder)[0]
    remember(marks, uid)
    rows = sum(part["count"] for file in files for part in file["rows"].values())
    size = sum(file["bytes"] for file in files)
    made = made_from and made_from.folder
    return Saved(folder, step, rows, size, time.perf_counter() - begin, made)


@contextlib.contextmanager
def _base_of_all(
    call: _SaveCall,
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
                if not os.path.isdir(folder):
                    raise CheckpointError(
                        f"Rank {ranks.rank} finds no folder {folder!r}, which rank 0 has made. All ranks "
                        "write to a checkpoint, so it must lie where all see it."
                    )
            yield folder, new
        except BaseException:
            ranks.stopped(KIND)
            raise


@contextlib.contextmanager
def _told_how_much(root: str, most: Callable[[], int]) -> Iterator[None]:
    """A disk that is full is told with what is missing to the bytes that a checkpoint takes at most."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        there = os.path.abspath(root)
        while not os.path.isdir(there):
            there = os.path.dirname(there)
        disk, size = os.statvfs(there), most()
        free = disk.f_bavail * disk.f_frsize
        missing = f", so {size - free:,} are missing" if size > free else ""
        text = f"a checkpoint takes up to {size:,} bytes, and {free:,} are free{missing}"
        raise OSError(error.errno, f"{os.strerror(error.errno)}: {text}", root) from error


def several(one_or_more: object, method: str) -> list[Any]:
    """`method`: what each must have."""
    if one_or_more is None:
        return []
    found = [one_or_more]
    if isinstance(one_or_more, (list, tuple)) and type(one_or_more) in (list, tuple):
        found = list(one_or_more)
    for one in found:
        if not callable(getattr(one, method, None)):
            raise CheckpointError(
                f"Optimizers, schedulers and loaders need {method}(), which one of the type "
                f"{type(one).__qualname__} has not. Several go in a list."
            )
    return found


def kinds_of(method: str, *given: object) -> dict[str, list[str]]:
    """Return the types of optimizers, schedulers and loaders, in this order. `method`: of each."""
    found = [[type(one).__name__ for one in several(some, method)] for some in given]
    return dict(zip(("optimizer", "scheduler", "loader"), found, strict=True))


class _OfRank(TypedDict):
    values: Json
    tensors: dict[str, Tensor]


def _values_of(
    model: nn.Module, optimizer: object, scheduler: object, loader: object, ranks: Processes
) -> tuple[dict[str, Json], dict[str, Tensor]]:
    """All but rows: as JSON values, and the tensors in them."""
    with tables_left_out():
        dense = model.state_dict()
    found: dict[str, object] = {
        "model": dict(dense),
        "versions": {
            name: about["version"]
            for name, about in getattr(dense, "_metadata", {}).items()
            if "version" in about
        },
        "optimizers": [_state_of(one) for one in several(optimizer, "state_dict")],
        "schedulers": [one.state_dict() for one in several(scheduler, "state_dict")],
        "loaders": [one.state_dict() for one in several(loader, "state_dict")],
        "random": random_states(),
    }
    of_others = {"loaders": found["loaders"], "random": found["random"]}
    if ranks.size > 1:
        own: dict[str, Tensor] = {}
        said = encoded(of_others, "ranks", own)
        every = ranks.values_of_all(KIND, _OfRank(values=said, tensors=own))
        found["ranks"] = [decoded(one["values"], one["tensors"]) for one in every]
    tensors: dict[str, Tensor] = {}
    values = {name: encoded(value, name, tensors) for name, value in found.items()}
    return values, tensors


def _state_of(optimizer: Optimizer) -> dict[str, object]:
    """Without the states of tables, which lie with their rows."""
    if isinstance(optimizer, TableOptimizer):
        return Optimizer.state_dict(optimizer)
    return optimizer.state_dict()
