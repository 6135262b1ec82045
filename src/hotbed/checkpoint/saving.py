"""Writing checkpoints."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict, cast, overload

from torch import nn
from torch.optim import Optimizer
from typing_extensions import Required, Unpack

from hotbed.checkpoint.background import (
    Saving,
    giving_memory_back,
    in_background,
    raise_unheard,
    snapshot_of_all,
    turn,
)
from hotbed.checkpoint.begun import Begun, SaveCall, Saved, begin
from hotbed.checkpoint.beside_rows import kinds_of, refuse_other_model
from hotbed.checkpoint.errors import CheckpointError
from hotbed.checkpoint.folder import root_of
from hotbed.checkpoint.new import check_keep, check_step
from hotbed.checkpoint.ranks import KIND, any_under_way, ranks_of, refuse_other_arguments
from hotbed.checkpoint.stores import store_of
from hotbed.checkpoint.values import Saveable
from hotbed.modules.owner import tables_of
from hotbed.storage import parse_bytes
from hotbed.table.alone import Processes
from hotbed.table.live import LiveTable
from hotbed.table.locks import reading
from hotbed.text import brief

__all__ = ["Saved", "Saving", "save", "save_too"]


class _Blocking(TypedDict, total=False):
    blocking: Literal[True]
    skip: bool
    snapshot_memory: int | str | None
    linked: bool


class _InBackground(TypedDict, total=False):
    blocking: Required[Literal[False]]
    skip: bool
    snapshot_memory: int | str | None
    linked: bool


class _How(TypedDict, total=False):
    blocking: bool
    skip: bool
    snapshot_memory: int | str | None
    linked: bool


@overload
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
    **how: Unpack[_Blocking],
) -> Saved: ...
@overload
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
    **how: Unpack[_InBackground],
) -> Saving: ...
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
    **how: Unpack[_How],
) -> Saved | Saving:
    """Write a checkpoint to a new folder in `path`, complete or not at all; `load` reads the latest.

    Of a distributed model all ranks call it, and write to one folder that all see: each its rows, rank 0
    the rest, its optimizers and schedulers among it; of loaders and random states each its own.

    Rows are copied some megabytes at a time, wherever they lie. docs/format.md describes the files.

    Args:
        path: a folder of checkpoints; it is made if there is none. Or a URL of object storage, such as
            ``s3://bucket/run``.
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
        how: ``blocking=False`` returns a `Saving` while rows, as they are now, are written on another thread.
            ``snapshot_memory=`` bytes (or "512MB") are for rows that change meanwhile, else a twentieth of
            all rows and at least 64 MB; a step that finds them full waits. Another save waits for it, or with
            ``skip=True`` is not begun, and what is under way is returned. On a device, and where rows are
            behind that are saved without states, it is complete at once. ``linked=True``: rows over an SSD
            are hard links to its files, and only those that memory alone has are written, to the SSD; for
            one that is whole, which is complete at once. `path` and the SSD share a file system.

    Raises:
        CheckpointError: something has a type that cannot be saved, a gradient waits for its step, what
            has changed since `base` is not known, or the save before has failed in the background.
        InputError: `path` or `base` is no path.
        TableError: the model is half loaded.
        OSError, StorageError: it cannot be written, or rows not be read. What was there is there. A full
            disk is told with the bytes that are missing.
    """
    refuse_other_model("hotbed.save(path, model, optimizer, step=n)", model)
    blocking, skip, memory, linked = _how(**how)
    tables = tables_of(model)
    ranks = ranks_of(tables, model)
    with contextlib.ExitStack() as stack:
        with ranks.reporting(KIND):
            root = root_of(path)
        last = turn.last
        if skip and any_under_way(ranks, turn.saving_to(root) is not None):
            if last is not None and last.root == root:
                return last
        if blocking:
            turn.wait()
        else:
            stack.enter_context(turn.taken())
        with ranks.reporting(KIND):
            raise_unheard()
        with ranks.reporting(KIND), reading(tables.values()):
            check_step(step)
            check_keep(keep)
            _refuse_unsaved(tables)
            kinds = kinds_of("state_dict", optimizer, scheduler, loader)
            if not isinstance(delta, bool):
                check_keep(delta, "delta")
            if linked and not states:
                raise CheckpointError(
                    "linked=True saves rows as they lie, with their states. Leave linked or states=False out."
                )
            if linked:
                store_of(root).refuse_links("linked=True makes hard links", "Leave linked out.")
            made_from = None if base is None else root_of(base, "base")
            call = SaveCall(
                path=root,
                step=step,
                states=states,
                keep=keep,
                delta=delta,
                base=made_from,
                blocking=blocking,
                snapshot_memory=memory,
                linked=linked,
            )
            arguments = {**call, **kinds}
            refuse_other_arguments("save", arguments, ranks)
            begun = begin(stack, call, model, optimizer, scheduler, loader)
            return _write(stack, call, ranks, begun)


def _how(
    blocking: bool = True,
    skip: bool = False,
    snapshot_memory: int | str | None = None,
    linked: bool = False,
) -> tuple[bool, bool, int | None, bool]:
    """Return (blocking, skip, bytes of memory, linked), checked."""
    for name, value in (("blocking", blocking), ("skip", skip), ("linked", linked)):
        if not isinstance(value, bool):
            raise CheckpointError(f"{name} is {brief(value)}; it must be True or False.")
    memory = None if snapshot_memory is None else parse_bytes(snapshot_memory)
    return blocking, skip, memory, linked


def save_too(model: nn.Module, arguments: Mapping[str, object]) -> None:
    """Write the rows of a memory host, as the other ranks call `save`. `arguments`: as these tell them."""
    call = cast(SaveCall, arguments)
    tables = tables_of(model)
    ranks = ranks_of(tables, model)
    with contextlib.ExitStack() as stack:
        if call["blocking"]:
            turn.wait()
        else:
            stack.enter_context(turn.taken())
        with ranks.reporting(KIND), reading(tables.values()):
            _refuse_unsaved(tables)
            _write(stack, call, ranks, begin(stack, call, model, None, None, None))


def _write(
    stack: contextlib.ExitStack, call: SaveCall, ranks: Processes, begun: Begun
) -> Saved | Saving:
    """Write a checkpoint now, or, where it can be done and is asked for, on another thread. All ranks call
    this.

    Args:
        stack: what is left when it is written.
    """
    at_once = call["blocking"] or begun.is_linked
    rows = None if at_once else snapshot_of_all(begun, ranks, call["snapshot_memory"])
    if rows is not None:
        return in_background(begun, ranks, rows, stack.pop_all())
    with giving_memory_back():
        saved = begun.finish(ranks)
    return saved if call["blocking"] else Saving.of(saved)


def _refuse_unsaved(tables: Mapping[str, LiveTable]) -> None:
    for stem, table in tables.items():
        table.refuse_half_loaded()
        if table.owes_step:
            raise CheckpointError(
                f"Table {stem!r}: a gradient waits for its step, which a checkpoint does not keep. Save "
                "after step(), or call zero_grad() to give it up."
            )
