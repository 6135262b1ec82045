"""Requests and answers of the Open Inference Protocol, version 2, however they are written: as JSON
(`hotbed.serve.http.open_inference_json`), or as messages of gRPC (`hotbed.serve.grpc.tensors`)."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hotbed.serve.http.errors import RequestError, wrong
from hotbed.serve.http.limits import Limits
from hotbed.serve.http.model import ServedModel
from hotbed.serve.http.parts import Input, InputTensor, Part

__all__ = [
    "DATATYPES",
    "LENGTHS",
    "LENGTH_TYPES",
    "Samples",
    "check_datatype",
    "datatypes_of",
    "kinds_of",
    "metadata_of",
    "outputs_of",
    "samples_of",
    "server_metadata",
    "sizes_of",
]

DATATYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
}
"""By NumPy's names."""
LENGTHS = ".lengths"
"""What follows the name of an input in that of its bags' lengths."""
LENGTH_TYPES = ("INT32", "INT64")
"""Datatypes of lengths."""
SIZES = 64
"""That a shape may have at most, as in NumPy."""


class Samples(NamedTuple):
    """Describes what a request asks with."""

    parts: dict[str, Part]
    samples: int


def samples_of(tensors: Mapping[str, InputTensor], model: ServedModel, limits: Limits) -> Samples:
    """Return the samples of tensors by name, those of lengths among them.

    Raises:
        RequestError: they are not as the signature says.
    """
    parts = {}
    for name, each in model.inputs.items():
        if name not in tensors:
            raise wrong(name, f"is missing. inputs takes {', '.join(model.inputs)}.")
        lengths = None if name + LENGTHS in model.inputs else tensors.get(name + LENGTHS)
        tensor = tensors[name]
        samples = tensor.shape[0] if lengths is None else lengths.size
        if samples > limits.samples:
            raise RequestError(
                413, f"There are {samples} samples, and {limits.samples} may be asked."
            )
        parts[name] = each.of_tensor(tensor, lengths)
    count = next(iter(parts.values())).samples
    for name, part in parts.items():
        if part.samples != count:
            raise wrong(name, f"has {part.samples} samples, and another input {count}.")
    if not count:
        raise RequestError(400, "There are no samples.")
    return Samples(parts, count)


def kinds_of(name: str, model: ServedModel, before: Collection[str]) -> Sequence[str]:
    """Return the datatypes that a tensor takes. `before`: names of tensors before it.

    Raises:
        RequestError: the model takes no tensor of this name, or has it already.
    """
    about = model.inputs.get(name.removesuffix(LENGTHS)) or model.inputs.get(name)
    if about is None:
        known = ", ".join(model.inputs)
        raise wrong(name[:40], f"is not known. inputs takes {known}.")
    if name in before:
        raise wrong(name, "is there twice.")
    return datatypes_of(about) if name in model.inputs else LENGTH_TYPES


def check_datatype(name: str, datatype: object, kinds: Sequence[str]) -> None:
    """Raise RequestError unless a tensor's datatype is one of `kinds`."""
    if datatype not in kinds:
        raise wrong(name, f"takes the datatype {' or '.join(kinds)}.")


def sizes_of(name: str, shape: Sequence[object]) -> tuple[list[int], int]:
    """Return the sizes of a tensor's shape, and how many values it has.

    Raises:
        RequestError: they are none.
    """
    if not shape:
        raise wrong(name, "has a shape: a list of sizes, the samples first.")
    if len(shape) > SIZES:  # before they are multiplied
        raise wrong(name, f"has a shape of {len(shape)} sizes, and may have {SIZES}.")
    sizes, count = [], 1
    for size in shape:
        if type(size) is not int or not 0 <= size < 1 << 31:
            raise wrong(name, "has a shape with a size that is none.")
        sizes.append(size)
        count *= size
    return sizes, count


def datatypes_of(each: Input) -> list[str]:
    """Return which datatypes an input takes."""
    kind = "i" if each.is_ids else np.dtype(each.about["dtype"]).kind
    return sorted({told for name, told in DATATYPES.items() if np.dtype(name).kind in _alike(kind)})


def _alike(kind: str) -> str:
    return "iu" if kind in "iu" else kind


def outputs_of(names: Iterable[object], model: ServedModel) -> list[str]:
    """Return the outputs that a request names, or all where it names none.

    Raises:
        RequestError: there is no such output, or one is named twice.
    """
    known = [each["name"] for each in model.about["outputs"]]
    wanted: list[str] = []
    for name in names:
        if name not in known:
            raise wrong("outputs", f"takes the names {', '.join(known)}.")
        if name in wanted:
            raise wrong("outputs", f"has {name!r} twice.")
        wanted.append(str(name))
    return wanted or known


def server_metadata() -> dict[str, object]:
    """Return what the server tells of itself."""
    return {
        "name": "hotbed",
        "version": importlib.metadata.version("hotbed"),
        "extensions": [],
    }


def metadata_of(name: str, model: ServedModel) -> dict[str, object]:
    """Return what is told of a model."""
    return {
        "name": name,
        "versions": [model.version],
        "platform": "hotbed_bundle",
        "inputs": [
            {
                "name": each.name,
                "datatype": "INT64" if each.is_ids else DATATYPES[each.about["dtype"]],
                "shape": [-1, *each.about["shape"]],
            }
            for each in model.inputs.values()
        ],
        "outputs": [
            {
                "name": each["name"],
                "datatype": DATATYPES[each["dtype"]],
                "shape": [-1, *each["shape"]],
            }
            for each in model.about["outputs"]
        ],
    }
