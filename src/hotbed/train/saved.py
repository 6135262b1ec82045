"""A trained model as a folder: what it is as JSON, its numbers as safetensors. No pickle.

`hotbed.train.saved_folder` lists the files. One has the parameters and buffers of the dense layers, the
others rows of tables, with their ids. The key of a table gives ids that training never met the first
values they would have had.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hotbed import _core, init
from hotbed.checkpoint.files import CheckpointError
from hotbed.collection import EmbeddingCollection
from hotbed.errors import OutOfMemory, StorageError
from hotbed.models import MODELS
from hotbed.storage import Storage
from hotbed.table.holds import reading
from hotbed.table.live import LiveTable
from hotbed.table.records import records_of
from hotbed.tables import Table
from hotbed.train.saved_folder import SavedFolder, opened, write_folder

_BYTES_OF_A_FILE = 24 << 20
"""Of rows; twice as much is in memory while one is written."""

_OF_A_RUN = {"seed", "storage", "device"}
"""Arguments of models that say how one is made, and not what it is."""


def save_model(model: nn.Module, path: str) -> None:
    """Write `model`, one of `hotbed.models`, to the folder `path`, replacing one saved there. Rows are
    copied some megabytes at a time, wherever they lie.

    Whatever ends the process, the model that was there or the new one can be loaded. Files that are
    not the model's stay.

    Raises:
        CheckpointError: the model is none of `hotbed.models`.
        OutputError: it cannot be written; what was there is there.
    """
    tables = _tables_of(model)
    with reading(tables.values()):
        manifest = {
            "model": _name_of(model),
            "arguments": _encoded(_config_of(model)),
            "tables": {stem: {"key": table.key} for stem, table in tables.items()},
        }
        most_bytes = sum(len(t) * (t.spec.dim * t.spec.dtype.itemsize + 8) for t in tables.values())
        most_files = most_bytes // _BYTES_OF_A_FILE + 1
        write_folder(path, manifest, _dense_of(model), _files_of_rows(tables), most_files)


def _files_of_rows(tables: Mapping[str, LiveTable]) -> Iterator[dict[str, Tensor]]:
    """All rows as tensors of one file after the other, each but the last of `_BYTES_OF_A_FILE` at least."""
    stems = {table: stem for stem, table in tables.items()}
    chunks: dict[str, list[tuple[Tensor, Tensor]]] = {}
    held = 0
    for table, (ids, weights, *_) in records_of([*stems], states=False):
        assert weights is not None
        chunks.setdefault(stems[table], []).append((ids, weights))
        held += ids.nbytes + weights.nbytes
        if held >= _BYTES_OF_A_FILE:
            yield _joined(chunks)
            chunks, held = {}, 0
    yield _joined(chunks)


def _joined(chunks: Mapping[str, list[tuple[Tensor, Tensor]]]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for stem, parts in chunks.items():
        ids, weights = zip(*parts, strict=True)
        tensors[f"{stem}.ids"], tensors[stem] = torch.cat(ids), torch.cat(weights)
    return tensors


def load_model(path: str, storage: Storage | None = None) -> nn.Module:
    """The model that `save_model` wrote, in evaluation mode.

    Args:
        storage: for the tiers that its rows are to lie in. Default: in memory.

    Raises:
        CheckpointError: the folder is not there, is incomplete, damaged or of another version; the
            message names the file.
        StorageError: the tiers cannot hold the rows.
    """
    with opened(path) as saved:
        at_fault = saved.manifest_path
        try:
            kind, arguments = _described_by(saved)
            _check_sizes(kind, arguments, saved, storage)
            model: nn.Module = kind(**arguments, storage=storage)
            model.load_state_dict(saved.dense, strict=False)  # all of it, and no table
            tables = _tables_of(model)
            _take_keys(tables, saved)
            for file, tensors in saved.tables:
                at_fault = file
                _take_rows(tables, tensors)
        except (CheckpointError, OutOfMemory, StorageError):
            raise
        except Exception as error:  # whatever a manifest can make a model raise
            raise CheckpointError(f"{at_fault} cannot be loaded: {_sentence(error)}.") from error
    model.eval()
    return model


def _take_keys(tables: Mapping[str, LiveTable], saved: SavedFolder) -> None:
    """Rows that are not saved are first values of the table's key."""
    noted = saved.manifest["tables"]
    for stem, table in tables.items():
        match noted.get(stem):
            case {"key": int(key)} if 0 <= key < 1 << 64:
                table.draw_again(key)
            case _:
                raise ValueError(f"the table {stem!r} has no key")


def _take_rows(tables: Mapping[str, LiveTable], tensors: Mapping[str, Tensor]) -> None:
    for name in tensors:
        stem = name.removesuffix(".ids")
        if stem not in tables or not {stem, f"{stem}.ids"} <= {*tensors}:
            raise ValueError(f"the tensor {name!r} is of no table")
        if name == stem:
            tables[stem].assign(tensors[f"{stem}.ids"], tensors[stem])


def _described_by(saved: SavedFolder) -> tuple[Any, dict[str, Any]]:
    """(class, its arguments)"""
    path, manifest = saved.manifest_path, saved.manifest
    match manifest:
        case {"model": str(name), "arguments": dict(arguments)}:
            pass
        case _:
            raise CheckpointError(f"{path} is not what `hotbed train --save` writes.")
    if name not in MODELS:
        raise CheckpointError(f"{path}: the model {name!r} is unknown.")
    known = set(inspect.signature(MODELS[name]).parameters) - _OF_A_RUN
    for argument in set(arguments) - known:
        raise CheckpointError(f"{path}: the argument {argument!r} is unknown.")
    return MODELS[name], _decoded(arguments)


def _check_sizes(
    kind: Any, arguments: Mapping[str, Any], saved: SavedFolder, storage: Storage | None
) -> None:
    """Raises CheckpointError where dense layers are not the size of their file, or tables are to lie in
    memory that is not there."""
    path = saved.manifest_path
    tables = arguments.get("tables")
    if not isinstance(tables, list) or not all(isinstance(table, Table) for table in tables):
        raise CheckpointError(f"{path}: the argument 'tables' is no list of tables.")
    if not isinstance(saved.manifest.get("tables"), dict):
        raise CheckpointError(f"{path} is not what `hotbed train --save` writes.")
    static = sum((t.rows or 0) * t.dim * t.dtype.itemsize for t in tables)
    if storage is None and static > (free := _core.available_memory()):
        raise CheckpointError(
            f"{path}: its tables have {static:,} bytes, and {free:,} are free. Say how much memory they "
            "may take, and where the rest goes: hotbed predict --host SIZE --ssd DIR."
        )
    with torch.device("meta"):  # shapes without memory
        empty = [Table(table.name, table.dim) for table in tables]
        model = kind(**{**arguments, "tables": empty}, seed=0)
    wanted = _shapes(_dense_of(model))
    found = _shapes(saved.dense)
    for name in sorted({*wanted, *found}):
        if wanted.get(name) != found.get(name):
            raise CheckpointError(
                f"{saved.dense_path}: the tensor {name!r} is {found.get(name, 'missing')}, and "
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
    return sum(m.count() for m in _collections_of(model).values())


def _name_of(model: nn.Module) -> str:
    for name, kind in MODELS.items():
        if type(model) is kind:
            return name
    raise CheckpointError(
        f"{type(model).__name__} is not one of hotbed.models ({', '.join(MODELS)}); "
        "save its state_dict instead."
    )


def _config_of(model: nn.Module) -> dict[str, Any]:
    config: Any = model.config
    return dict(config)


def _collections_of(model: nn.Module) -> dict[str, EmbeddingCollection]:
    return {n: m for n, m in model.named_modules() if isinstance(m, EmbeddingCollection)}


def _tables_of(model: nn.Module) -> dict[str, LiveTable]:
    """Name in the state_dict → table."""
    return {
        f"{prefix}.{name}": found.table(name)
        for prefix, found in _collections_of(model).items()
        for name in found.tables
    }


def _dense_of(model: nn.Module) -> dict[str, Tensor]:
    """The state_dict without the tables."""
    handles = {*_tables_of(model)}
    parameters = {n: p for n, p in model.named_parameters() if n not in handles}
    return {**parameters, **dict(model.named_buffers())}


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
    raise CheckpointError(
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
