"""A trained model as a folder: what it is as JSON, its numbers as safetensors. No pickle.

`hotbed.train.saved_folder` lists the files. One has the parameters and buffers of the dense layers, the
other of each table its rows, their ids (dynamic tables) and its key. The key gives ids that training
never met the first values they would have had.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hotbed import init
from hotbed.collection import EmbeddingCollection
from hotbed.errors import OutOfMemory
from hotbed.models import MODELS
from hotbed.tables import Table
from hotbed.train.saved_files import SavedModelError
from hotbed.train.saved_folder import SavedFolder, read_folder, write_folder

_OF_A_RUN = {"seed", "storage", "device"}
"""Arguments of models that say how one is made, and not what it is."""


def save_model(model: nn.Module, path: str) -> None:
    """Write `model`, one of `hotbed.models`, to the folder `path`, replacing one saved there.

    Whatever ends the process, the model that was there or the new one can be loaded. Files that are
    not the model's stay.

    Raises:
        SavedModelError: the model is none of `hotbed.models`.
        OutputError: it cannot be written; what was there is there.
    """
    manifest = {"model": _name_of(model), "arguments": _encoded(_config_of(model))}
    write_folder(path, manifest, _parts_of(model))


def load_model(path: str) -> nn.Module:
    """The model that `save_model` wrote, in evaluation mode.

    Raises:
        SavedModelError: the folder is not there, is incomplete, damaged or of another version; the
            message names the file. No more memory was taken than its files have bytes.
    """
    saved = read_folder(path)
    at_fault = saved.manifest_path
    try:
        kind, arguments = _described_by(saved)
        _check_sizes(kind, arguments, saved)
        model: nn.Module = kind(**arguments)
        at_fault = saved.paths["tables"]
        model.load_state_dict({**saved.parts["dense"], **saved.parts["tables"]})
    except (SavedModelError, OutOfMemory):
        raise
    except Exception as error:  # whatever a manifest can make a model raise
        raise SavedModelError(f"{at_fault} cannot be loaded: {_sentence(error)}.") from error
    model.eval()
    return model


def _described_by(saved: SavedFolder) -> tuple[Any, dict[str, Any]]:
    """(class, its arguments)"""
    path, manifest = saved.manifest_path, saved.manifest
    match manifest:
        case {"model": str(name), "arguments": dict(arguments)}:
            pass
        case _:
            raise SavedModelError(f"{path} is not what `hotbed train --save` writes.")
    if name not in MODELS:
        raise SavedModelError(f"{path}: the model {name!r} is unknown.")
    known = set(inspect.signature(MODELS[name]).parameters) - _OF_A_RUN
    for argument in set(arguments) - known:
        raise SavedModelError(f"{path}: the argument {argument!r} is unknown.")
    return MODELS[name], _decoded(arguments)


def _check_sizes(kind: Any, arguments: Mapping[str, Any], saved: SavedFolder) -> None:
    """Raises SavedModelError where the model would not be the size of its files."""
    path = saved.manifest_path
    tables = arguments.get("tables")
    if not isinstance(tables, list) or not all(isinstance(table, Table) for table in tables):
        raise SavedModelError(f"{path}: the argument 'tables' is no list of tables.")
    static = sum((t.rows or 0) * t.dim * t.dtype.itemsize for t in tables)
    held = sum(tensor.nbytes for tensor in saved.parts["tables"].values())
    if static > held:
        raise SavedModelError(
            f"{path}: its tables have {static:,} bytes, and {saved.paths['tables']} {held:,}."
        )
    with torch.device("meta"):  # shapes without memory
        empty = [Table(table.name, table.dim) for table in tables]
        model = kind(**{**arguments, "tables": empty}, seed=0)
    wanted = _shapes(_parts_of(model)["dense"])
    found = _shapes(saved.parts["dense"])
    for name in sorted({*wanted, *found}):
        if wanted.get(name) != found.get(name):
            raise SavedModelError(
                f"{saved.paths['dense']}: the tensor {name!r} is {found.get(name, 'missing')}, and "
                f"in the model of {path} {wanted.get(name, 'there is none')}."
            )


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        for name, tensor in tensors.items()
    }


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{text[:300]} ..." if len(text) > 300 else text.rstrip(".")


def stored_rows(model: nn.Module) -> int:
    """The rows that all tables of `model` hold."""
    return sum(m.count() for m in model.modules() if isinstance(m, EmbeddingCollection))


def _name_of(model: nn.Module) -> str:
    for name, kind in MODELS.items():
        if type(model) is kind:
            return name
    raise SavedModelError(
        f"{type(model).__name__} is not one of hotbed.models ({', '.join(MODELS)}); "
        "save its state_dict instead."
    )


def _config_of(model: nn.Module) -> dict[str, Any]:
    config: Any = model.config
    return dict(config)


def _parts_of(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """The state_dict in two: part → tensors."""
    owners = [name for name, m in model.named_modules() if isinstance(m, EmbeddingCollection)]
    dense: dict[str, Tensor] = {}
    tables: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        of_table = any(name.startswith(f"{owner}.") for owner in owners)
        (tables if of_table else dense)[name] = value
    return {"dense": dense, "tables": tables}


def _encoded(value: Any) -> Any:
    """Arguments as JSON: tables as dicts, initializers and dtypes by name."""
    if isinstance(value, dict):
        return {name: _encoded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(item) for item in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    known = isinstance(value, Table) or type(value).__name__ in init.__all__
    if known and dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _encoded(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **fields}
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise SavedModelError(
        f"{value!r} cannot be saved. Use plain numbers and the initializers of hotbed.init."
    )


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    fields = {name: _decoded(item) for name, item in value.items() if name != "kind"}
    if "kind" not in value:
        return fields
    if value["kind"] == "Table":
        return Table(**{**fields, "dtype": getattr(torch, fields["dtype"])})
    if value["kind"] not in init.__all__:
        raise ValueError(f"the initializer {value['kind']!r} is unknown")
    return getattr(init, value["kind"])(**fields)
