"""Reading checkpoints."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypedDict, cast

import torch
from torch import nn
from torch.optim import Optimizer

from hotbed.checkpoint.background import giving_memory_back
from hotbed.checkpoint.beside_rows import kinds_of, refuse_other_model, several
from hotbed.checkpoint.errors import CheckpointError
from hotbed.checkpoint.folder import MANIFEST, opened
from hotbed.checkpoint.half_loaded import Changes
from hotbed.checkpoint.manifest import read_manifest
from hotbed.checkpoint.models import made_again
from hotbed.checkpoint.randomness import give_random_states
from hotbed.checkpoint.ranks import KIND, ranks_of, refuse_other_arguments
from hotbed.checkpoint.renaming import Renaming
from hotbed.checkpoint.restoring import Loading, loading_from
from hotbed.checkpoint.values import Stateful
from hotbed.devices import Device
from hotbed.errors import HotbedError, OptimizerError
from hotbed.modules.owner import tables_of
from hotbed.paths import path_text
from hotbed.storage import Storage
from hotbed.table.live import LiveTable

__all__ = ["Restored", "load", "load_model", "load_too"]


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
        path: a checkpoint, or a folder of them, of which the latest is read; or its URL on object storage.
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
        InputError: `path` is no path.
        OutOfMemory, StorageError: rows have no room; likewise.
    """
    refuse_other_model("hotbed.load(path, model, optimizer)", model)
    tables = tables_of(model)
    ranks = ranks_of(tables, model)
    with contextlib.ExitStack() as stack:
        with ranks.reporting(KIND):
            kinds = kinds_of("load_state_dict", optimizer, scheduler, loader)
            if not isinstance(strict, bool):
                raise CheckpointError(f"strict must be True or False, got {strict!r}.")
            renaming, root = Renaming(rename), path_text(path)
            found = stack.enter_context(opened(root)) if ranks.rank == 0 else ""
        arguments = {"path": os.path.normpath(root), "strict": strict, "rename": renaming.given}
        given = [several(one, "load_state_dict") for one in (optimizer, scheduler, loader)]
        stepped = _tables_of_each(given[0], tables)
        refuse_other_arguments(
            "load", {**arguments, **kinds, "tables of optimizers": stepped}, ranks
        )
        with giving_memory_back():
            return _load(found, model, _Given(*given), strict, renaming)


def _tables_of_each(
    optimizers: Sequence[Optimizer], tables: Mapping[str, LiveTable]
) -> list[list[str]]:
    """Return the names of the tables that each optimizer steps."""
    return [[stem for stem, t in tables.items() if t.optimizer is one] for one in optimizers]


_LoadCall = TypedDict(
    "_LoadCall",
    {"strict": bool, "rename": dict[str, str] | None, "tables of optimizers": list[list[str]]},
)
"""Arguments of `load`, as ranks tell them each other."""


def load_too(model: nn.Module, arguments: Mapping[str, object]) -> None:
    """Read the rows of a memory host, as the other ranks call `load`. `arguments`: as these tell them."""
    call = cast(_LoadCall, arguments)
    tables = tables_of(model)
    ranks = ranks_of(tables, model)
    own: list[Optimizer | None] = []
    with ranks.reporting(KIND):
        for stems in call["tables of optimizers"]:
            found = list(
                {id(one): one for stem in stems if (one := tables[stem].optimizer)}.values()
            )
            own.append(found[0] if found else None)
            if stems and _tables_of_each(found, tables) != [stems]:
                raise CheckpointError(
                    f"Rank {ranks.rank}, a memory host, has other optimizers of the tables "
                    f"{', '.join(stems)} than the ranks with batches, which load theirs. Make the same on "
                    "all ranks, and give them to hotbed.dist.serve_rows."
                )
    with giving_memory_back():
        _load("", model, _Given(own, [], []), call["strict"], Renaming(call["rename"]))


class _Given(NamedTuple):
    optimizers: Sequence[Optimizer | None]
    """In the order in which they were saved. None: of no table, so that a memory host has none."""
    schedulers: list[Stateful]
    loaders: list[Stateful]


def _load(
    found: str, model: nn.Module, given: _Given, strict: bool, renaming: Renaming
) -> Restored:
    """Do what `load` does once all ranks have called it. `found`: on rank 0 the folder of the checkpoint,
    which stays open meanwhile."""
    tables = tables_of(model)
    ranks = ranks_of(tables, model)
    with contextlib.ExitStack() as stack:
        # States that are made here are trained with later, where inference tensors could not be.
        stack.enter_context(torch.inference_mode(False))
        folder = ranks.values_of_all(KIND, found)[0]
        changes = Changes(folder, tables.values())
        stack.enter_context(changes.kept_from_use_if_failed(ranks))
        stack.enter_context(ranks.working(KIND))
        # Also where it was opened before: errors inside name other checkpoints, for all ranks.
        stack.enter_context(opened(folder))
        manifest = read_manifest(folder)
        try:
            loading = Loading(folder, manifest, model, given.optimizers, strict, renaming, changes)
            loading.load_values(given.schedulers, given.loaders)
            loading.load_rows()
            if given.optimizers and "random" in loading.values:
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
        InputError: `path` is no path.
        OutOfMemory, StorageError: rows have no room.
    """
    with opened(path) as folder:
        model = made_again(folder, read_manifest(folder), storage, device)
        load(folder, model)
    return model.eval()
