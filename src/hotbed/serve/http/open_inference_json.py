"""Requests and answers of the Open Inference Protocol as JSON: ``/v2/models/NAME/infer``."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.files import Json
from hotbed.serve.http.answering import Answers
from hotbed.serve.http.errors import RequestError, wrong
from hotbed.serve.http.limits import Limits
from hotbed.serve.http.model import ServedModel
from hotbed.serve.http.open_inference import (
    DATATYPES,
    check_datatype,
    kinds_of,
    outputs_of,
    samples_of,
    sizes_of,
)
from hotbed.serve.http.parts import Input, InputTensor, Part

__all__ = ["Asked", "answered", "asked_of"]


class Asked(NamedTuple):
    """A request as it was understood."""

    parts: dict[str, Part]
    samples: int
    id: str | None
    outputs: list[str]


class _Listed(InputTensor):
    """A tensor whose values are a list."""

    def __init__(self, name: str, shape: list[int], flat: list[Json]) -> None:
        super().__init__(name, shape, len(flat))
        self._flat = flat

    def values(self, taken_by: Input) -> NDArray[np.generic]:
        return taken_by.checked(self._flat)

    def integers(self) -> NDArray[np.int64] | None:
        if any(type(each) is not int for each in self._flat):
            return None
        try:
            return np.array(self._flat, np.int64)
        except OverflowError:
            return None


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
    outputs = outputs_of(_names(body.get("outputs")), model)
    return Asked(*samples_of(tensors, model, limits), id, outputs)


def _tensors(inputs: Json, model: ServedModel) -> dict[str, InputTensor]:
    assert isinstance(inputs, list)
    tensors: dict[str, InputTensor] = {}
    for n, each in enumerate(inputs):
        name = each.get("name") if isinstance(each, dict) else None
        if not isinstance(each, dict) or not isinstance(name, str):
            raise wrong(f"inputs[{n}]", "is an object with name, shape, datatype and data.")
        kinds = kinds_of(name, model, tensors)
        check_datatype(name, each.get("datatype"), kinds)
        tensors[name] = _tensor(name, each)
    return tensors


def _tensor(name: str, given: dict[str, Json]) -> _Listed:
    shape, flat = given.get("shape"), given.get("data")
    sizes, count = sizes_of(name, shape if isinstance(shape, list) else [])
    if not isinstance(flat, list):
        told = "binary data is not taken" if "parameters" in given else "is missing"
        raise wrong(name, f"data {told}: give a list of values.")
    for size in sizes[1:]:
        if not flat or not isinstance(flat[0], list):
            break
        if not all(isinstance(each, list) and len(each) == size for each in flat):
            raise wrong(name, f"has data whose lists are not all of {size} values.")
        flat = [*itertools.chain.from_iterable(flat)]  # type: ignore[arg-type]
    if len(flat) != count:
        raise wrong(name, f"has {len(flat)} values, and a shape of {count}.")
    return _Listed(name, sizes, flat)


def _names(outputs: Json) -> list[object]:
    """Return the names of outputs, whatever they are."""
    if outputs is None:
        return []
    if not isinstance(outputs, list):
        raise wrong("outputs", "is a list of objects with name.")
    return [each.get("name") if isinstance(each, dict) else None for each in outputs]


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
