"""Weights of the dense part: which there are, and other ones in an ONNX model."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableSequence, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from hotbed.checkpoint.entries import Manifest
from hotbed.checkpoint.manifest import dense_file
from hotbed.checkpoint.tensors import read_tensors
from hotbed.checkpoint.values import decoded
from hotbed.modules.owner import tables_left_out
from hotbed.serve.bundles.bundle import BundleError

__all__ = ["dense_in", "dense_of", "shapes_of", "with_weights"]


def dense_of(model: nn.Module) -> Mapping[str, object]:
    """Return the state_dict of a model without its tables."""
    with tables_left_out():
        return model.state_dict()


def dense_in(folder: str, manifest: Manifest) -> Mapping[str, object]:
    """Return the state_dict, without tables, that a checkpoint has.

    Raises:
        DamagedError: its file is missing or damaged.
        BundleError: there is none.
    """
    file = dense_file(manifest)
    tensors = read_tensors(os.path.join(folder, file["name"]), file)
    try:
        found = decoded(manifest["values"]["model"], tensors)
    except (KeyError, ValueError) as error:
        raise BundleError(f"{folder} has no state of dense layers: {error}.") from None
    return cast(Mapping[str, object], found)


def shapes_of(state: Mapping[str, object]) -> dict[str, str]:
    """Return dtype and shape of each tensor, such as "float32 (4, 3)"."""
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        for name, tensor in state.items()
        if isinstance(tensor, Tensor)
    }


class _Initialiser(Protocol):
    name: str
    dims: Sequence[int]
    data_type: int
    raw_data: bytes

    def ClearField(self, name: str) -> None: ...


class _Graph(Protocol):
    initializer: MutableSequence[_Initialiser]


class _Model(Protocol):
    graph: _Graph

    def SerializeToString(self) -> bytes: ...


def with_weights(
    path: str, contents: bytes, parameters: Mapping[str, str], state: Mapping[str, object]
) -> bytes:
    """Return an ONNX model with other weights.

    Args:
        path: of its file, for errors.
        contents: of the file.
        parameters: initialisers to replace → their names in `state`.
        state: of a checkpoint.

    Raises:
        BundleError: one is missing, of another shape or dtype, or has a number that is not finite.
        ImportError: onnx is missing.
    """
    import onnx

    model = cast(_Model, onnx.load_model_from_string(contents))
    there = {each.name: each for each in model.graph.initializer}
    for initialiser, name in parameters.items():
        tensor, own = state.get(name), there.get(initialiser)
        if own is None or not isinstance(tensor, Tensor):
            where = path if own is None else "The checkpoint"
            raise BundleError(f"{where} has no tensor {initialiser if own is None else name!r}.")
        kind = str(onnx.helper.tensor_dtype_to_np_dtype(own.data_type))
        expected, found = f"{kind} {tuple(own.dims)}", shapes_of({name: tensor})[name]
        if expected != found:
            raise BundleError(f"The tensor {name!r} is {found}, and {expected} in {path}.")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise BundleError(f"The tensor {name!r} has a number that is not finite.")
        for field in ("float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
            own.ClearField(field)
        own.raw_data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return model.SerializeToString()
