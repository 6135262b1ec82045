"""A trained model as a folder: what it is as JSON, its numbers as safetensors. No pickle.

::

    model.json             format version, model name, arguments, tables
    dense.safetensors      the dense layers' parameters and buffers
    tables.safetensors     for each table its rows, their ids (dynamic tables) and its key

The key gives ids that training never met the first values they would have had.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import shutil
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hotbed import init
from hotbed.collection import EmbeddingCollection
from hotbed.errors import HotbedError
from hotbed.files import part_of
from hotbed.models import MODELS
from hotbed.tables import Table
from hotbed.train.report import OutputError

_FORMAT = 1
_MANIFEST = "model.json"
_FILES = ("dense.safetensors", "tables.safetensors")


class SavedModelError(HotbedError, ValueError):
    """A folder does not hold a model that can be loaded."""


def check_writable_folder(path: str) -> None:
    """Raise OutputError if a model cannot be saved at `path`, before anything is trained.

    An existing folder must be empty or hold a saved model, which will be replaced.
    """
    if os.path.exists(path):
        if not os.path.isdir(path):
            raise OutputError(f"Cannot save to {path!r}: it is a file.")
        if os.listdir(path) and not os.path.exists(os.path.join(path, _MANIFEST)):
            raise OutputError(
                f"Cannot save to {path!r}: the folder holds other files. Name a new folder."
            )
    part = part_of(path)
    try:
        shutil.rmtree(part, ignore_errors=True)  # what a process that was killed left
        os.makedirs(part)
        os.rmdir(part)
    except OSError as error:
        raise OutputError(f"Cannot save to {path!r}: {error.strerror}.") from None


def save_model(model: nn.Module, path: str) -> None:
    """Write `model`, one of `hotbed.models`, to the folder `path`, replacing one saved there.

    The folder is complete when it appears under its name, and until then a model that was there
    stays: whatever ends the process, one of the two can be loaded.

    Raises:
        OutputError: it cannot be written; what was there is there.
    """
    manifest = {
        "format": _FORMAT,
        "model": _name_of(model),
        "arguments": _encoded(_config_of(model)),
    }
    tensors = dict(zip(_FILES, _halves(model), strict=True))
    part = part_of(path)
    shutil.rmtree(part, ignore_errors=True)
    try:
        os.makedirs(part)
        manifest_path = os.path.join(part, _MANIFEST)
        with open(manifest_path, "w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=2)
            file.write("\n")
        for name, values in tensors.items():
            save_file(values, os.path.join(part, name))
            # safetensors lets nobody but the owner read its files.
            os.chmod(os.path.join(part, name), os.stat(manifest_path).st_mode)
        for name in (*_FILES, _MANIFEST, "."):
            _write_through(os.path.join(part, name))
        _put_in_place(part, os.path.realpath(path))
    except OSError as error:
        raise OutputError(f"Cannot save to {path!r}: {error.strerror}.") from None
    except SafetensorError as error:
        raise OutputError(f"Cannot save to {path!r}: {_sentence(error)}.") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write_through(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(part: str, path: str) -> None:
    """Moves folder `part` to `path`; what was there, if anything, is at `part` or gone then."""
    if not os.path.isdir(path):
        os.rename(part, path)
    elif not _exchange(part, path):
        old = f"{path}.old"
        shutil.rmtree(old, ignore_errors=True)
        os.rename(path, old)
        os.rename(part, path)
        shutil.rmtree(old)


def _exchange(one: str, other: str) -> bool:
    """Swaps two paths at one stroke; False where the system or the file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except AttributeError:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0)


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{text[:300]} ..." if len(text) > 300 else text.rstrip(".")


def load_model(path: str) -> nn.Module:
    """The model that `save_model` wrote, in evaluation mode.

    Raises:
        SavedModelError: the folder is not there, is incomplete, damaged or of another version.
    """
    manifest_path = os.path.join(path, _MANIFEST)
    if not os.path.isdir(path):
        raise SavedModelError(f"There is no folder {path!r}. `hotbed train --save DIR` makes one.")
    try:
        with open(manifest_path, encoding="utf-8") as file:
            manifest = json.load(file)
        if not isinstance(manifest, dict) or not {"format", "model", "arguments"} <= set(manifest):
            raise SavedModelError(f"{manifest_path} is not what `hotbed train --save` writes.")
        version, name = manifest["format"], manifest["model"]
        if version != _FORMAT:
            raise SavedModelError(f"{manifest_path}: format {version}; this version reads 1.")
        if name not in MODELS:
            raise SavedModelError(f"{manifest_path}: the model {name!r} is unknown.")
        model: nn.Module = MODELS[name](**_decoded(manifest["arguments"]))
        state: dict[str, Tensor] = {}
        for file_name in _FILES:
            if not os.path.exists(os.path.join(path, file_name)):
                raise SavedModelError(f"{path!r} is not a saved model: {file_name} is missing.")
            state.update(load_file(os.path.join(path, file_name)))
        model.load_state_dict(state)
    except FileNotFoundError:
        raise SavedModelError(f"{path!r} is not a saved model: {_MANIFEST} is missing.") from None
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        SafetensorError,
    ) as error:
        if isinstance(error, SavedModelError):
            raise
        raise SavedModelError(
            f"{path!r} cannot be loaded: {_sentence(error)}. Save it again."
        ) from error
    model.eval()
    return model


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


def _halves(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(dense, tables): the two parts of the state_dict."""
    owners = [name for name, m in model.named_modules() if isinstance(m, EmbeddingCollection)]
    dense: dict[str, Tensor] = {}
    tables: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        of_table = any(name.startswith(f"{owner}.") for owner in owners)
        (tables if of_table else dense)[name] = value.contiguous()
    return dense, tables


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
