"""Description of a model: the name of one of `hotbed.models` and the arguments that make it again."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from hotbed import _core
from hotbed.checkpoint.entries import Manifest, ModelEntry
from hotbed.checkpoint.errors import CheckpointError
from hotbed.checkpoint.folder import MANIFEST
from hotbed.checkpoint.manifest import dense_file
from hotbed.checkpoint.tables import described, table_of
from hotbed.checkpoint.tensors import read_tensors
from hotbed.checkpoint.values import decoded
from hotbed.data import Schema
from hotbed.devices import Device
from hotbed.errors import OutOfMemory, StorageError
from hotbed.models import MODELS
from hotbed.modules.owner import tables_left_out
from hotbed.storage import Storage
from hotbed.tables import Table

__all__ = ["description_of", "made_again", "model_of", "refuse_other_order"]

_OF_A_RUN = {"seed", "storage", "device"}
"""Arguments of models that say how one is made, and not what it is."""


class _Described(Protocol):
    """A model of `hotbed.models`, with the arguments that make it again."""

    config: dict[str, Any]
    schema: Schema | None


def description_of(model: nn.Module) -> ModelEntry | None:
    """As JSON values; None for a model that is none of `hotbed.models`.

    Raises:
        CheckpointError: it has no `config`, or JSON cannot express one of its settings.
    """
    for name, kind in MODELS.items():
        if type(model) is kind:
            if not hasattr(model, "config"):
                raise CheckpointError(
                    f"Model {name!r}: {kind.__name__} has no config, the arguments that make one of the same "
                    "shape. Give it one; a subclass of hotbed.models.ClickModel has it."
                )
            arguments = dict(cast(_Described, model).config)
            for argument, value in arguments.items():
                if argument != "tables":
                    _check_json(name, argument, value)
            arguments["tables"] = [{"name": t.name, **described(t)} for t in arguments["tables"]]
            entry: ModelEntry = {"name": name, "arguments": arguments}
            schema = getattr(model, "schema", None)
            return entry if schema is None else {**entry, "schema": schema.as_json()}
    return None


def _check_json(name: str, argument: str, value: object) -> None:
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"Model {name!r}: no checkpoint can keep its setting {argument}, {value!r} ({error}). Make it "
            "numbers, texts, or lists of them."
        ) from None


def refuse_other_order(folder: str, manifest: Manifest, model: nn.Module, strict: bool) -> None:
    """Raises CheckpointError where a model has features, numbers or labels in another order than was saved,
    or ids made otherwise, which no name or shape tells. Does nothing unless `strict`."""
    saved, own = manifest.get("model"), description_of(model) if strict else None
    if saved is None or own is None or saved["name"] != own["name"]:
        return
    try:
        places = _places_in(saved)
    except Exception as error:  # whatever a manifest can hold
        raise _no_model(os.path.join(folder, MANIFEST), error) from error
    for (what, was), now in zip(places.items(), _places_in(own).values(), strict=True):
        if {*was} == {*now} and [*was.items()] != [*now.items()]:
            first, second = (
                ", ".join(f"{k} {v}".strip() for k, v in p.items()) for p in (was, now)
            )
            raise CheckpointError(
                f"The checkpoint {folder} was saved with the {what} {first}, and the model has {second}. "
                "Make it as it was saved; strict=False loads it nevertheless."
            )


def _places_in(model: ModelEntry) -> dict[str, dict[str, str]]:
    """Return what decides which input is which: order of features, numbers and labels; how ids are made."""
    arguments = model["arguments"]
    features = arguments.get("features") or {t["name"]: t["name"] for t in arguments["tables"]}
    columns = cast(Mapping[str, Any], model.get("schema", {"columns": {}})["columns"])
    return {
        "features": {name: f"(table {table})" for name, table in features.items()},
        "numbers": {name: "" for name, column in columns.items() if column["kind"] == "number"},
        "labels": {name: "" for name, column in columns.items() if column["kind"] == "label"},
        "ids of": {
            name: f"({column.get('of') or column.get('values', 'hash')})"
            for name, column in sorted(columns.items())
            if name in features
        },
    }


def made_again(
    folder: str, manifest: Manifest, storage: Storage | None, device: Device | None
) -> nn.Module:
    """The model of a checkpoint, before anything is read into it.

    Raises:
        CheckpointError: it tells of none, or of one that does not fit its tensors or the machine.
        OutOfMemory, StorageError: tiers have no room.
    """
    named, about = os.path.join(folder, MANIFEST), manifest.get("model")
    kind, tables, arguments = _described_by(named, about)
    _check_sizes(folder, manifest, functools.partial(kind, **arguments), tables, storage)
    return model_of(named, about, storage, device)


def model_of(
    named: str, about: ModelEntry | None, storage: Storage | None, device: Device | None = None
) -> nn.Module:
    """Return the model that `description_of` has described, with first values.

    Args:
        named: who tells of it, for errors, which are those of `made_again`.
    """
    kind, tables, arguments = _described_by(named, about)
    try:
        model: nn.Module = kind(tables=tables, **arguments, storage=storage, device=device)
        if about is not None and (schema := about.get("schema")) is not None:
            cast(_Described, model).schema = Schema.from_json(schema)
    except (OutOfMemory, StorageError):
        raise
    except Exception as error:  # whatever a manifest can make a model raise
        raise _no_model(named, error) from error
    return model


def _no_model(named: str, error: Exception) -> CheckpointError:
    text = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
    return CheckpointError(f"{named} tells of a model that cannot be made: {text}.")


def _described_by(
    named: str, about: ModelEntry | None
) -> tuple[Callable[..., nn.Module], list[Table], dict[str, object]]:
    """(class, its tables, its other arguments)"""
    match about:
        case {"name": str(name), "arguments": {"tables": [*tables], **others}}:
            arguments: dict[str, object] = {str(key): value for key, value in others.items()}
        case None:
            raise CheckpointError(
                f"{named} is of a model that is none of hotbed.models ({', '.join(MODELS)}). Make it "
                "yourself, and read it by hotbed.load."
            )
        case _:
            raise CheckpointError(f"{named} tells of no model.")
    if name not in MODELS:
        raise CheckpointError(
            f"{named}: the model {name!r} is unknown. Import the module that has its class, decorated by "
            f"@hb.models.register({name!r})."
        )
    for argument in {*arguments} - ({*inspect.signature(MODELS[name]).parameters} - _OF_A_RUN):
        raise CheckpointError(f"{named}: the argument {argument!r} is unknown.")
    try:
        made = [table_of(table["name"], table) for table in tables]
    except CheckpointError:
        raise
    except Exception as error:
        raise _no_model(named, error) from error
    return MODELS[name], made, arguments


def _check_sizes(
    folder: str,
    manifest: Manifest,
    kind: Callable[..., nn.Module],
    tables: Sequence[Table],
    storage: Storage | None,
) -> None:
    """Raises CheckpointError where dense layers are not of the sizes that were saved, or tables are to lie in
    memory that is not there: before either takes any."""
    static = sum((t.rows or 0) * t.dim * t.dtype.itemsize for t in tables)
    if storage is None and static > (free := _core.available_memory()):
        raise CheckpointError(
            f"{os.path.join(folder, MANIFEST)}: its tables have {static:,} bytes, and {free:,} are free. "
            "Say how much memory they may take, and where the rest goes: hotbed predict --host SIZE "
            "--ssd DIR, or load_model(storage=...)."
        )
    file = dense_file(manifest)
    path = os.path.join(folder, file["name"])
    tensors = read_tensors(path, file)
    try:
        with torch.device("meta"), tables_left_out():  # shapes without memory
            empty = [
                Table(
                    t.name,
                    t.dim,
                    combiner=t.combiner,
                    padding_idx=None if t.padding_idx is None else -1,
                )
                for t in tables
            ]
            wanted = _shapes(kind(tables=empty, seed=0).state_dict())
        found = _shapes(decoded(manifest["values"]["model"], tensors))
    except Exception as error:
        raise _no_model(os.path.join(folder, MANIFEST), error) from error
    for name in sorted({*wanted, *found}):
        if wanted.get(name) != found.get(name):
            raise CheckpointError(
                f"{path}: the tensor {name!r} is {found.get(name, 'missing')}, and in the model that the "
                f"manifest tells of {wanted.get(name, 'there is none')}."
            )


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        for name, tensor in tensors.items()
    }
