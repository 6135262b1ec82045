"""Requests and answers of the Open Inference Protocol, version 2: ``/v2/models/NAME/infer``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hotbed.files import Json
from hotbed.serve.http.errors import RequestError, wrong
from hotbed.serve.http.limits import Limits
from hotbed.serve.http.model import ServedModel
from hotbed.serve.http.parts import Answers, Input, Part

__all__ = [
    "LENGTHS",
    "LENGTH_TYPES",
    "Asked",
    "answered",
    "asked_of",
    "datatypes_of",
    "metadata_of",
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


class Asked(NamedTuple):
    """A request as it was understood."""

    parts: dict[str, Part]
    samples: int
    id: str | None
    outputs: list[str]


class _Tensor(NamedTuple):
    shape: list[int]
    flat: list[Json]


def asked_of(body: Json, model: ServedModel, limits: Limits) -> Asked:
    """Return what the body of a request asks with.

    Raises:
        RequestError: it is not as the signature says.
    """
    if not isinstance(body, dict) or not isinstance(body.get("inputs"), list):
        raise RequestError(400, "The body is an object with inputs, a list of tensors.")
    id = body.get("id")
    if id is not None and not isinstance(id, str):
        raise wrong("id", "is a string.")
    tensors = _tensors(body["inputs"], model)
    parts = {}
    for name, each in model.inputs.items():
        if name not in tensors:
            raise wrong(name, f"is missing. inputs takes {', '.join(model.inputs)}.")
        lengths = None if name + LENGTHS in model.inputs else tensors.get(name + LENGTHS)
        tensor = tensors[name]
        samples = tensor.shape[0] if lengths is None else len(lengths.flat)
        if samples > limits.samples:
            raise RequestError(
                413, f"There are {samples} samples, and {limits.samples} may be asked."
            )
        parts[name] = each.of_tensor(*tensor, None if lengths is None else lengths.flat)
    count = next(iter(parts.values())).samples
    for name, part in parts.items():
        if part.samples != count:
            raise wrong(name, f"has {part.samples} samples, and another input {count}.")
    if not count:
        raise RequestError(400, "There are no samples.")
    return Asked(parts, count, id, _outputs(body.get("outputs"), model))


def _tensors(inputs: Json, model: ServedModel) -> dict[str, _Tensor]:
    assert isinstance(inputs, list)
    tensors: dict[str, _Tensor] = {}
    for n, each in enumerate(inputs):
        name = each.get("name") if isinstance(each, dict) else None
        if not isinstance(each, dict) or not isinstance(name, str):
            raise wrong(f"inputs[{n}]", "is an object with name, shape, datatype and data.")
        about = model.inputs.get(name.removesuffix(LENGTHS)) or model.inputs.get(name)
        if about is None:
            known = ", ".join(model.inputs)
            raise wrong(name[:40], f"is not known. inputs takes {known}.")
        if name in tensors:
            raise wrong(name, "is there twice.")
        kinds = datatypes_of(about) if name in model.inputs else LENGTH_TYPES
        tensors[name] = _tensor(name, each, kinds)
    return tensors


def _tensor(name: str, given: dict[str, Json], kinds: Sequence[str]) -> _Tensor:
    shape, flat = given.get("shape"), given.get("data")
    if given.get("datatype") not in kinds:
        raise wrong(name, f"takes the datatype {' or '.join(kinds)}.")
    if not isinstance(shape, list) or not shape:
        raise wrong(name, "has a shape: a list of sizes, the samples first.")
    sizes: list[int] = []
    for size in shape:
        if type(size) is not int or not 0 <= size < 1 << 31:
            raise wrong(name, "has a shape with a size that is none.")
        sizes.append(size)
    if not isinstance(flat, list):
        told = "binary data is not taken" if "parameters" in given else "is missing"
        raise wrong(name, f"data {told}: give a list of values.")
    for size in sizes[1:]:
        if not flat or not isinstance(flat[0], list):
            break
        if not all(isinstance(each, list) and len(each) == size for each in flat):
            raise wrong(name, f"has data whose lists are not all of {size} values.")
        flat = [*itertools.chain.from_iterable(flat)]  # type: ignore[arg-type]
    count = 1
    for size in sizes:
        count *= size
    if len(flat) != count:
        raise wrong(name, f"has {len(flat)} values, and a shape of {count}.")
    return _Tensor(sizes, flat)


def datatypes_of(each: Input) -> list[str]:
    """Return which datatypes an input takes."""
    kind = "i" if each.is_ids else np.dtype(each.about["dtype"]).kind
    return sorted({told for name, told in DATATYPES.items() if np.dtype(name).kind in _alike(kind)})


def _alike(kind: str) -> str:
    return "iu" if kind in "iu" else kind


def _outputs(given: Json, model: ServedModel) -> list[str]:
    known = [each["name"] for each in model.about["outputs"]]
    if given is None:
        return known
    if not isinstance(given, list):
        raise wrong("outputs", "is a list of objects with name.")
    wanted = []
    for each in given:
        name = each.get("name") if isinstance(each, dict) else None
        if name not in known:
            raise wrong("outputs", f"takes the names {', '.join(known)}.")
        if name in wanted:
            raise wrong("outputs", f"has {name!r} twice.")
        wanted.append(str(name))
    return wanted or known


def answered(answers: Answers, asked: Asked, name: str, version: str) -> object:
    """Return the body of an answer, with NumPy's arrays in it."""
    outputs = [
        {
            "name": output,
            "shape": [*answers[output].shape],
            "datatype": DATATYPES[answers[output].dtype.name],
            "data": answers[output].reshape(-1),
        }
        for output in asked.outputs
    ]
    told = {"model_name": name, "model_version": version, "outputs": outputs}
    return told if asked.id is None else {**told, "id": asked.id}


def metadata_of(name: str, model: ServedModel) -> object:
    """Return the body of an answer about a model."""
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
